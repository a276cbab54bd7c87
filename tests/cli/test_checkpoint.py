"""`toolkit checkpoint` tells what is in a checkpoint and names the file that is not sound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from toolkit.errors import UserError
from toolkit.training.checkpoint import Checkpoints, Identity, Progress
from toolkit.training.state import examine
from toolkit.training.state.manifest import MANIFEST

SHARD = "rank-00000-000.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with one checkpoint."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    identity = Identity(strategy="single", processes=1, method="full", optimizer="adamw", data="abc", rows=8)
    assert Checkpoints(tmp_path / "checkpoints", accelerator, identity, 2).save(Progress(step=3, tokens=100)) is None
    return tmp_path


def toolkit(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolkit", "checkpoint", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_inspect_of_a_run_folder_tells_of_its_newest(run: Path) -> None:
    done = toolkit("inspect", run, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["progress"]["step"] == 3 and found["identity"]["rows"] == 8
    assert {name: kind["elements"] for name, kind in found["kinds"].items()} == {
        "weights": 20, "exp_avg": 20, "exp_avg_sq": 20, "step": 2}  # fmt: skip
    assert "exp_avg_sq" in toolkit("inspect", run).stdout


def test_verify_names_the_file_that_was_changed(run: Path) -> None:
    assert toolkit("verify", run).returncode == 0
    path = run / "checkpoints" / "step-00000003"
    content = bytearray((path / SHARD).read_bytes())
    content[-1] ^= 1
    (path / SHARD).write_bytes(content)
    done = toolkit("verify", path)
    assert done.returncode == 2 and SHARD in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("damage", ["shard", "manifest", "nan"])
def test_what_is_not_sound_is_named(damage: str, run: Path) -> None:
    path = run / "checkpoints" / "step-00000003"
    if damage == "nan":
        from safetensors import safe_open

        from toolkit.training.state.store import write_tensors

        with safe_open(path / SHARD, framework="pt") as file:
            tensors, metadata = {key: file.get_tensor(key).clone() for key in file.keys()}, file.metadata()  # noqa: SIM118
        tensors["exp_avg/weight"][3] = float("nan")
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        manifest["files"][SHARD] = write_tensors(path / SHARD, list(tensors.items()), metadata)
        (path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    else:
        (path / (SHARD if damage == "shard" else MANIFEST)).unlink()
    said = {"shard": f"{SHARD} is missing", "manifest": "has no manifest.json", "nan": "exp_avg of weight has values"}
    with pytest.raises(UserError, match=said[damage]):
        examine.verify(path)


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    assert "holds no complete checkpoint" in toolkit("inspect", tmp_path).stderr


def test_a_run_without_a_sound_checkpoint_says_what_is_wrong(run: Path) -> None:
    for step in (run / "checkpoints").iterdir():
        (step / "state.json").write_text("{", encoding="utf-8")
    assert "state.json has 1 bytes instead of" in toolkit("inspect", run).stderr


def test_convert_and_export_end_with_one_line(run: Path, tmp_path: Path) -> None:
    done = toolkit("convert", run, tmp_path / "dcp", "--to", "dcp", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kinds"] == ["exp_avg", "exp_avg_sq", "step", "weights"]
    told = toolkit("inspect", tmp_path / "dcp")
    assert told.returncode == 0 and "a torch distributed checkpoint, step 1" in told.stdout
    again = toolkit("convert", run, tmp_path / "dcp", "--to", "dcp")
    assert again.returncode == 2 and again.stderr.strip().endswith("is there already; name a new folder")
    lacking = toolkit("export", run, tmp_path / "out")
    assert lacking.returncode == 2 and "does not say of what model it is" in lacking.stderr
    assert len(lacking.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()
