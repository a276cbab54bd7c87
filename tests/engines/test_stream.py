"""A streamed run, stopped and taken up again, as one that was never stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_a_streamed_run_goes_on_bit_for_bit_and_leaves_nothing_behind(launch: Callable[..., Any], tmp_path: Path) -> None:
    keys = {"streaming": True, "stream_block": 12, "max_steps": 6, "accumulate": 2, "checkpoint_every": 3, "schedule": "constant",
            "env": {"TOOLKIT_CACHE": str(tmp_path / "cache")}}
    whole = launch("ddp", folder="whole", **keys)
    assert whole.status == 0, whole.output
    assert "streamed, of which the first 12 samples in" in whole.output
    stopped = tmp_path / "stopped"
    (stopped / "checkpoints").mkdir(parents=True)
    shutil.copytree(whole.folder / "checkpoints" / "step-00000003", stopped / "checkpoints" / "step-00000003")
    shutil.copy(whole.folder / "stream.jsonl", stopped)
    resumed = launch("ddp", folder="stopped", **keys)
    assert resumed.status == 0, resumed.output
    assert [step["loss"] for step in resumed.steps()] == [step["loss"] for step in whole.steps()][3:]
    notes = [json.loads(line) for line in (stopped / "stream.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [note["block"] for note in notes] == list(range(len(notes))) and len(notes) >= 4
    assert not list((tmp_path / "cache" / "data" / "streams").iterdir())
