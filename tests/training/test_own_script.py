"""The public face of `toolkit.training`: its names, its weights for tokens, and the script of the docs, run for real."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit.training
from toolkit.errors import UserError
from toolkit.training import engage, loss_scale

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own-script.md").read_text(encoding="utf-8")


def test_the_face_has_under_fifteen_names_and_the_page_explains_each() -> None:
    names = toolkit.training.__all__
    assert len(names) < 15 and dir(toolkit.training) == sorted(names)
    for name in names:
        assert getattr(toolkit.training, name).__doc__, name
        assert f"`{name}" in PAGE, name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = toolkit.training.nothing


def test_tokens_weigh_alike_and_none_gives_no_nan(accelerator: Any) -> None:
    labels = [torch.tensor([[1, 2, -100, 3]]), torch.tensor([[-100, -100, 4, -100]])]
    assert loss_scale(accelerator, labels) == (pytest.approx(1 / 3), 3)  # The first token of a row is not predicted.
    assert loss_scale(accelerator, [torch.full((2, 4), -100)]) == (0.0, 0)


def test_what_cannot_be_engaged_is_said() -> None:
    with pytest.raises(UserError, match="micro_batch=0"):
        engage(output="x", micro_batch=0)


@pytest.mark.slow
def test_the_script_of_the_page_runs_on_two_processes_and_resumes(
    tiny_model: Path, tmp_path: Path, free_port: int
) -> None:
    script, run = tmp_path / "own.py", tmp_path / "run"
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None

    def launch(strategy: str, steps: int) -> list[dict[str, Any]]:
        script.write_text(code[1].replace("CLIP = 4,", f"CLIP = {steps},"), encoding="utf-8")
        file = ROOT / "recipes" / "accelerate" / f"{strategy}.yaml"
        words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), "--num_processes", "2",
                 "--main_process_port", str(free_port), str(script), str(tiny_model), str(run)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                       "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    first = launch("fsdp", 2)
    assert [record["step"] for record in first] == [1, 2]
    both = launch("ddp", 4)  # From the checkpoint of the other engine.
    assert [record["step"] for record in both] == [1, 2, 3, 4] and both[:2] == first
    assert both[-1]["loss"] < both[0]["loss"]


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
