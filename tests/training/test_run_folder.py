"""What a run says of itself, and outputs that can't be written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import UserError
from toolkit.training.config import TrainConfig
from toolkit.training.run_folder import RunFolder, check_output, git_commit, versions, write_json

Make = Callable[..., TrainConfig]


def test_a_file_is_no_run_folder(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="it is a file"):
        check_output(make_config(output=str(tmp_path / "file")))
    with pytest.raises(UserError):
        check_output(make_config(output=str(tmp_path / "file" / "below")))


def test_checking_creates_nothing(make_config: Make, tmp_path: Path) -> None:
    check_output(make_config(output=str(tmp_path / "a" / "b" / "c")))
    assert not (tmp_path / "a").exists()


def test_a_json_file_is_replaced_and_leaves_no_scratch(tmp_path: Path) -> None:
    for content in ({"a": 1}, {"a": Path("x")}):
        write_json(tmp_path / "f.json", content)
    assert json.loads((tmp_path / "f.json").read_text(encoding="utf-8")) == {"a": "x"}
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["f.json"]


def test_versions_name_what_a_run_depends_on() -> None:
    assert {"python", "platform", "torch", "accelerate", "deepspeed", "transformers"} <= set(versions())


def test_outside_a_repository_there_is_no_commit(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None


def test_a_tracker_that_cannot_start_is_one_line(make_config: Make, accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no\naccount")

    monkeypatch.setattr(accelerator, "init_trackers", refuse, raising=False)
    with pytest.raises(UserError, match="tracker=tensorboard cannot be started: no account"):
        RunFolder(make_config(), accelerator)._start_tracker()
