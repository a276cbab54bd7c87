"""A run that goes on from a checkpoint ends as the run that was never stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
KEYS: dict[str, Any] = {"max_steps": 4, "accumulate": 2, "precision": "bf16", "warmup_steps": 1, "checkpoint_every": 2,
                        "eval_every": 2, "export": True, "export_dtype": "fp32"}  # fmt: skip


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero2", "zero3", "zero2-offload-optimizer"])
def test_losses_and_weights_are_the_same_to_the_last_bit(
    strategy: str, bf16_run: Callable[[str], Any], launch: Callable[..., Any], tmp_path: Path
) -> None:
    whole, stopped = bf16_run(strategy), tmp_path / strategy
    shutil.copytree(whole.folder, stopped)
    shutil.rmtree(stopped / "export")
    # As after a crash in step 4: the third step is logged, the fourth is half a line, its checkpoint was being written.
    (stopped / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    text = (stopped / "metrics.jsonl").read_text(encoding="utf-8")
    (stopped / "metrics.jsonl").write_text(text[: text.index('{"step": 4') + 20], encoding="utf-8")
    resumed = launch(strategy, **KEYS)
    assert resumed.status == 0, resumed.output
    assert "resumes from" in resumed.output and "step-00000002" in resumed.output
    for name in ("step", "loss", "grad_norm", "learning_rate", "tokens"):
        assert [step[name] for step in resumed.steps()] == [step[name] for step in whole.steps()]
    assert resumed.evaluations() == whole.evaluations()
    weights = "export/model.safetensors"
    assert (resumed.folder / weights).read_bytes() == (whole.folder / weights).read_bytes()


def test_another_engine_and_world_size_go_on_from_the_same_place(
    bf16_run: Callable[[str], Any], launch: Callable[..., Any]
) -> None:
    ddp = bf16_run("ddp")
    run = launch("single", **{**KEYS, "accumulate": 4, "resume": ddp.folder / "checkpoints" / "step-00000002"})
    assert run.status == 0, run.output
    assert "was made by ddp on 2 processes, this is single on 1" in run.output
    assert "every rank draws anew" in run.output
    assert [step["step"] for step in run.steps()] == [3, 4]
    assert [step["tokens"] for step in run.steps()] == [step["tokens"] for step in ddp.steps()[2:]]
    assert [step["learning_rate"] for step in run.steps()] == [step["learning_rate"] for step in ddp.steps()[2:]]


def test_another_global_batch_is_refused_with_what_would_be_right(
    bf16_run: Callable[[str], Any], launch: Callable[..., Any]
) -> None:
    path = bf16_run("ddp").folder / "checkpoints" / "step-00000002"
    run = launch("fsdp", **{**KEYS, "accumulate": 1, "resume": path})
    assert run.status == 1
    assert "was made with a global batch of 8 rows, this run has 4" in run.output
    assert "Traceback" not in run.output.split("error:")[1].splitlines()[0]
    assert not run.folder.exists()


def test_a_full_disk_later_leaves_the_last_good_checkpoint(launch: Callable[..., Any]) -> None:
    keys = {**KEYS, "precision": "fp32", "eval_every": 0, "export": False}
    before = launch("ddp", **{**keys, "max_steps": 2, "schedule": "constant"})
    assert before.status == 0, before.output
    after = launch("ddp", **{**keys, "schedule": "constant"}, file_limit=300)
    assert after.status == 0, after.output
    assert "warning: no checkpoint at step 4" in after.output
    assert [step["step"] for step in after.steps()] == [1, 2, 3, 4]
    assert [path.name for path in (after.folder / "checkpoints").iterdir()] == ["step-00000002"]
