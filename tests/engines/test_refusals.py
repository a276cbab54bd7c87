"""What is wrong is said in one line before anything is written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def refused(tmp_path: Path, **keys: Any) -> str:
    """The line of a recipe run without a launcher that must end with status 2 and leave no run folder."""
    output = tmp_path / "run"
    words = [f"{key}={value}" for key, value in {"output": output, "max_steps": 1, "precision": "fp32", **keys}.items()]
    done = subprocess.run([sys.executable, str(ROOT / "recipes" / "train.py"), *words], cwd=ROOT, capture_output=True,
                          text=True, timeout=200, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr
    assert not output.exists()
    return lines[0]


def test_bad_data_files(tmp_path: Path, tiny_model: Path) -> None:
    assert "'nowhere.jsonl' does not exist" in refused(tmp_path, model=tiny_model, data="nowhere.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert "is empty" in refused(tmp_path, model=tiny_model, data=empty)


def test_a_broken_line_is_named(tmp_path: Path, tiny_model: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "one"}\n{"text": \n', encoding="utf-8")
    assert "broken.jsonl line 2 is not JSON" in refused(tmp_path, model=tiny_model, data=broken, seq_len=64)


def test_a_model_directory_that_is_not_whole(tmp_path: Path, tiny_model: Path, chat_data: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert "has no config.json" in refused(tmp_path, model=folder, data=chat_data)
    shutil.copy(tiny_model / "config.json", folder)
    assert "has no weights" in refused(tmp_path, model=folder, data=chat_data)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"micro_batch": 0}, "micro_batch=0: it must be at least 1"),
        ({"seq_len": 0}, "seq_len=0: it must be at least 1"),
        ({"mikro_batch": 2}, "did you mean 'micro_batch'"),
        ({"precision": "fp8"}, "precision='fp8' is not one of"),
    ],
    ids=str,
)
def test_bad_values(keys: dict[str, Any], said: str, tmp_path: Path, tiny_model: Path, chat_data: Path) -> None:
    assert said in refused(tmp_path, **{"model": tiny_model, "data": chat_data, **keys})


def test_a_row_longer_than_the_model(tmp_path: Path, tiny_model: Path, chat_data: Path) -> None:
    said = refused(tmp_path, model=tiny_model, data=chat_data, seq_len=257)
    assert "seq_len=257 is above the model's 256 positions" in said


def test_no_space_for_the_checkpoints_is_found_before_training(tmp_path: Path, tiny_model: Path, chat_data: Path) -> None:
    said = refused(tmp_path, model=tiny_model, data=chat_data, seq_len=64, checkpoint_every=1, keep=10**12)
    assert "checkpoints and the export need" in said and "free" in said


def one_line(run: Any) -> str:
    """The refusal of a launched run: said once, whatever the number of ranks."""
    lines = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert run.status == 1 and len(lines) == 1, run.output
    assert not (run.folder / "metrics.jsonl").exists()
    return str(lines[0])


def test_a_launcher_flag_does_not_replace_the_engine_of_the_file(launch: Callable[..., Any]) -> None:
    said = one_line(launch("fsdp", flags=("--multi_gpu",)))
    assert "asks for fsdp but ddp was launched (2 processes)" in said


def test_a_deepspeed_file_that_contradicts_the_recipe_is_refused(launch: Callable[..., Any], tmp_path: Path) -> None:
    settings = json.loads((ROOT / "ds_configs" / "zero2.json").read_text(encoding="utf-8"))
    settings["train_micro_batch_size_per_gpu"] = 8
    (tmp_path / "ds.json").write_text(json.dumps(settings), encoding="utf-8")
    text = (ROOT / "recipes" / "accelerate" / "zero2.yaml").read_text(encoding="utf-8")
    file = tmp_path / "file.yaml"
    file.write_text(text.replace("ds_configs/zero2.json", str(tmp_path / "ds.json")), encoding="utf-8")
    said = one_line(launch(str(file)))
    assert "says train_micro_batch_size_per_gpu=8 but the recipe's micro_batch is 2" in said


def test_two_ranks_refuse_in_one_line(launch: Callable[..., Any], tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "one"}\nno\n', encoding="utf-8")
    assert "broken.jsonl line 2 is not JSON" in one_line(launch("ddp", data=broken))


def test_a_loss_that_is_no_number_stops_and_names_the_last_checkpoint(launch: Callable[..., Any]) -> None:
    run = launch("ddp", learning_rate=1e30, max_steps=8, clip=0, warmup_steps=0, checkpoint_every=1)
    assert run.status == 1
    said = next(line for line in run.output.splitlines() if line.startswith("error: "))
    assert "is nan at step" in said or "is inf at step" in said
    assert "the last good checkpoint is" in said and "step-0000000" in said
    assert not list((run.folder / "checkpoints").glob(".saving-*"))


def test_an_optimizer_that_does_not_step_shards(launch: Callable[..., Any]) -> None:
    said = one_line(launch("fsdp", optimizer="adafactor"))
    assert said.startswith("error: optimizer=adafactor does not step FSDP2's sharded tensors; use adamw or sgd")
