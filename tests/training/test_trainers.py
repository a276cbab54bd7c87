"""The launch files with scripts of others: Hugging Face's Trainer and TRL's SFTTrainer, run for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("script_of_trainers.py")


def rehearse(strategy: str, port: int, *words: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file",
              str(ROOT / "recipes" / "accelerate" / f"{strategy}.yaml"), "--num_processes", "2", "--main_process_port", str(port),
              "-m", "toolkit.training.rehearse", *words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                   "PYTHONPATH": str(ROOT)}
    # Relative paths in a launch file are those of the repository's root.
    return subprocess.run(launch, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The output of the script under each engine."""
    import socket

    folders = {}
    for strategy in ("fsdp", "zero2"):
        folders[strategy] = tmp_path_factory.mktemp(strategy)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        done = rehearse(strategy, port, str(SCRIPT), str(tiny_model), str(folders[strategy]))
        assert done.returncode == 0, done.stdout + done.stderr
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("which", ["trainer", "sft"])
def test_trainers_of_others_train_and_save_under_both_engines(runs: dict[str, Path], which: str, tiny_model: Path) -> None:
    if which == "sft" and not find_spec("trl"):
        pytest.skip("trl is not installed (it needs Python 3.11)")
    records: dict[str, Any] = {name: json.loads((folder / which / "record.json").read_text(encoding="utf-8"))
                               for name, folder in runs.items()}
    assert {name: record["engine"] for name, record in records.items()} == {
        "fsdp": "FSDPLlamaForCausalLM", "zero2": "DeepSpeedEngine"}
    assert all(record["processes"] == 2 for record in records.values())
    assert records["fsdp"]["losses"] == pytest.approx(records["zero2"]["losses"], rel=1e-5)
    assert records["fsdp"]["losses"][-1] < records["fsdp"]["losses"][0]
    before = load_file(tiny_model / "model.safetensors")
    saved = [load_file(folder / which / "model.safetensors") for folder in runs.values()]
    for name, tensor in before.items():
        assert (saved[0][name] - saved[1][name]).abs().max() < 1e-5 and (saved[0][name] - tensor).abs().max() > 0, name


@pytest.mark.slow
def test_a_script_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "toolkit.training.rehearse", "nothing.py"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=100, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and "'nothing.py' is no file" in done.stderr and "Traceback" not in done.stderr
