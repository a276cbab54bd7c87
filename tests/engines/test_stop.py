"""A signal ends a run after its step, on all ranks together, with a checkpoint from which it goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SAVED = 75
KEYS: dict[str, Any] = {"seq_len": 64, "micro_batch": 2, "max_steps": 6, "learning_rate": 1e-3, "warmup_steps": 2,
                        "precision": "fp32", "tracker": "none", "export": False, "preflight": "off",
                        "profile": False}  # fmt: skip


@pytest.fixture
def keys(tiny_model: Path, chat_data: Path) -> dict[str, Any]:
    return {**KEYS, "model": tiny_model, "data": chat_data}


def steps(folder: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [{name: record[name] for name in ("step", "loss", "grad_norm", "learning_rate", "tokens")} for record in records]


def contents(checkpoint: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in checkpoint.glob("*.safetensors")}


@pytest.mark.parametrize(("strategy", "name", "ranks", "mode", "every"), [
    ("single", "SIGTERM", [0], "async", 2), ("ddp", "SIGTERM", [0, 1], "async", 1), ("fsdp", "SIGUSR1", [1], "sync", 4),
    ("zero2", "SIGTERM", [0], "sync", 0),
])  # fmt: skip
def test_the_step_is_finished_and_saved_and_the_run_goes_on_to_the_last_bit(
    strategy: str, name: str, ranks: list[int], mode: str, every: int, runs: Any, keys: dict[str, Any], tmp_path: Path
) -> None:
    keys |= {"checkpoint_mode": mode, "checkpoint_every": every}
    whole = runs.run(strategy, {**keys, "output": tmp_path / "whole", "checkpoint_every": 6})
    assert set(whole["statuses"]) == {0}, whole["output"]
    run = tmp_path / "run"
    faults = [{"rank": rank, "only": ["step"], "point": 3, "signal": name} for rank in ranks]
    stopped = runs.run(strategy, {**keys, "output": run}, faults=faults)
    assert set(stopped["statuses"]) == {SAVED}, stopped["output"]
    checkpoint = run / "checkpoints" / "step-00000003"
    assert stopped["output"].count("stopped: by ") == 1 and f"after step 3; {checkpoint} is written" in stopped["output"]
    assert len(steps(run)) == 3 and not list((run / "checkpoints").glob(".*"))
    resumed = runs.run(strategy, {**keys, "output": run, "checkpoint_every": 6})
    assert set(resumed["statuses"]) == {0} and f"resumes from {checkpoint}" in resumed["output"], resumed["output"]
    assert steps(run) == steps(tmp_path / "whole")
    last = Path("checkpoints", "step-00000006")
    assert contents(run / last) == contents(tmp_path / "whole" / last)


def test_before_the_first_step_there_is_nothing_to_save(runs: Any, keys: dict[str, Any], tmp_path: Path) -> None:
    keys |= {"output": tmp_path / "run", "eval_every": 2}
    fault = {"rank": 0, "only": ["evaluation"], "point": 1, "signal": "SIGTERM"}
    stopped = runs.run("ddp", keys, faults=[fault])
    assert set(stopped["statuses"]) == {SAVED}, stopped["output"]
    assert "after step 0; the same command goes on from there" in stopped["output"]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_state_that_cannot_be_saved_is_said_and_is_no_success(runs: Any, keys: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("a file where the folder should be", encoding="utf-8")
    stopped = runs.run("single", {**keys, "output": run}, faults=[{"rank": 0, "only": ["step"], "point": 2, "signal": "SIGTERM"}])
    assert stopped["statuses"] == [1]
    assert "error: SIGTERM ended the run after step 2, but its state could not be saved" in stopped["output"]


@pytest.mark.parametrize("to", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_ended_does_not_leave_its_ranks_training(
    to: signal.Signals, keys: dict[str, Any], tmp_path: Path
) -> None:
    """SIGTERM is passed on by the launcher; of SIGKILL the ranks hear from the system."""
    run = tmp_path / "run"
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "recipes/accelerate/ddp.yaml",
             "--num_processes", "2", "--main_process_port", "0", "recipes/train.py"]
    words += [f"{key}={value}" for key, value in {**keys, "output": run, "max_steps": 5000}.items()]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
                   "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)
        until(lambda: (run / "metrics.jsonl").exists() and len(steps(run)) > 2)
        ranks = [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
        launcher.send_signal(to)
        launcher.wait(60)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    output = (tmp_path / "log").read_text(encoding="utf-8")
    [checkpoint] = (run / "checkpoints").iterdir()
    assert f"stopped: by SIGTERM after step {len(steps(run))}; {checkpoint} is written" in output


def until(true: Any) -> None:
    """Wait for it, a minute at most."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)
