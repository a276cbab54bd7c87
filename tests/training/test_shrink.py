"""on_oom=shrink: a real failed allocation on one rank, and the run goes on from its checkpoint on all of them with fewer rows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ENVIRONMENT, ROOT, Run, write_jsonl
from toolkit.training.shrink import smaller


@pytest.mark.parametrize(("micro", "accumulate", "next_one"), [
    (16, 1, (8, 2)), (2, 3, (1, 6)), (1, 8, None), (9, 2, (3, 6)), (7, 1, (1, 7)), (6, 1, (3, 2)),
])  # fmt: skip
def test_the_global_batch_stays_whole(micro: int, accumulate: int, next_one: tuple[int, int] | None) -> None:
    assert smaller(micro, accumulate) == next_one
    assert next_one is None or next_one[0] * next_one[1] == micro * accumulate


def train(folder: Path, model: Path, data: Path, strategy: str, kilobytes: int | None, **keys: Any) -> Run:
    """A run of the recipe whose processes may have so much address space each."""
    values = {"model": f"config:{model}", "data": data, "output": folder, "seq_len": 2048, "max_steps": 3, "precision": "fp32",
              "tracker": "none", "export": False, "attention": "eager", "packing": False, "bucketing": False, "shuffle": False,
              "preflight": "off", "checkpoint_every": 1, "train_on": "everything", "profile": False, **keys}
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file",
             str(ROOT / "recipes" / "accelerate" / f"{strategy}.yaml"), "--num_processes", "1" if strategy == "single" else "2",
             "--main_process_port", "0", str(ROOT / "recipes" / "train.py"), *(f"{k}={v}" for k, v in values.items())]
    if kilobytes is not None:
        words = ["bash", "-c", f'ulimit -v {kilobytes}; exec "$@"', "bash", *words]
    done = subprocess.run(words, env={**os.environ, **ENVIRONMENT}, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return Run(folder, done.returncode, done.stdout + done.stderr)


@pytest.mark.slow
def test_all_ranks_begin_anew_until_it_fits_and_the_losses_are_those_of_the_smaller_micro_batch(
        tiny_model: Path, tmp_path: Path) -> None:
    """One long row in the third step pads the micro-batch it is in: too much at 16 and 8 rows, on the rank that has it."""
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {"max_position_embeddings": 2048, "attention_dropout": 0.0}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rows = [{"text": f"The fox number {i} jumps over the dog."} for i in range(96)]
    rows[70] = {"text": " ".join(row["text"] for row in rows)}
    data = write_jsonl(tmp_path / "text.jsonl", rows)

    run = train(tmp_path / "shrunk", model, data, "fsdp", 3_400_000, micro_batch=16, on_oom="shrink")
    assert run.status == 0, run.output
    tries = re.findall(r"on_oom=shrink: try (\d) from step-00000002: micro_batch=(\d+) accumulate=(\d+)", run.output)
    assert tries == [("2", "8", "2"), ("3", "4", "4")], run.output
    assert len(re.findall("warning: out of memory on rank [01] of 2", run.output)) == 2 and "error:" not in run.output
    assert run.output.count("resumes from") == 2
    assert [step["step"] for step in run.steps()] == [1, 2, 3]
    assert "micro_batch: 4" in (run.folder / "config.yaml").read_text(encoding="utf-8")

    plain = train(tmp_path / "plain", model, data, "single", None, micro_batch=4, accumulate=8, checkpoint_every=0)
    assert plain.status == 0, plain.output
    for ours, wanted in zip(run.steps(), plain.steps(), strict=True):
        assert ours["loss"] == pytest.approx(wanted["loss"], rel=1e-5) and ours["target_tokens"] == wanted["target_tokens"]
        assert ours["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
