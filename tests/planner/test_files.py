"""What --write writes is read back to the same plan, and says what it was made for."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from toolkit.errors import UserError
from toolkit.estimate.result import Estimate
from toolkit.planner.candidates import Candidate, candidates
from toolkit.planner.files import recipe_config, scaled_rate, write_files
from toolkit.planner.recommendation import Recommendation
from toolkit.planner.search import Evaluated, Request, Search
from toolkit.specs import Workload
from toolkit.strategies import canonical, read

Ask = Callable[..., Request]
LABELS = ["single", "ddp", "zero1", "zero2", "fsdp-grad", "fsdp", "zero3", "zero2-offload-optimizer", "zero3-offload-all",
          "fsdp-offload-all"]  # fmt: skip
WORK = Workload(seq_len=64, loss_only=True)


def candidate(label: str, ask: Ask, aids: int = 0, work: Workload = WORK) -> Candidate:
    """The first candidate of that label with at least so many aids."""
    found = candidates(work, ask(80, 2).cluster, allow_offload="cpu")
    return next(c for c in found if c.plan.label == label and len(c.aids) >= aids)


def recommended(chosen: Candidate, request: Request, estimate: Estimate | None = None) -> Recommendation:
    return Recommendation(request, Evaluated(chosen, estimate, True, "1 GiB to spare"), [], "One GPU is enough.", "because")


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("aids", [0, 2])
def test_what_is_written_is_read_back_to_the_same_plan(label: str, aids: int, ask: Ask, tmp_path: Path) -> None:
    chosen = candidate(label, ask, aids)
    write_files(recommended(chosen, ask(80, 2)), tmp_path / "out", "gpt2")
    recipe = yaml.safe_load((tmp_path / "out" / "train.yaml").read_text(encoding="utf-8"))
    found = read(tmp_path / "out" / "accelerate.yaml", recipe=recipe)
    assert found.plan == canonical(chosen.plan, chosen.cluster)
    assert found.plan.label == label
    assert found.processes == chosen.cluster.world_size


def test_every_file_that_is_named_is_there_and_no_other(ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    result = write_files(recommended(candidate("zero2", ask), ask(80, 2)), folder, "gpt2")
    assert {Path(name) for name in result.files} == set(folder.iterdir())
    names = {path.name for path in folder.iterdir()}
    assert names >= {"accelerate.yaml", "train.yaml", "launch.sh", "README.md", "recommendation.json"}
    assert json.loads((folder / "recommendation.json").read_text(encoding="utf-8")) == result.to_json()


def test_the_script_is_a_script_and_starts_the_recipe(ask: Ask, tmp_path: Path) -> None:
    write_files(recommended(candidate("fsdp", ask), ask(80, 2)), tmp_path / "out", "gpt2")
    script = tmp_path / "out" / "launch.sh"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["sh", "-n", str(script)], timeout=30).returncode == 0
    text = script.read_text(encoding="utf-8")
    assert "accelerate launch" in text and "recipes/train.py" in text and str(tmp_path / "out" / "accelerate.yaml") in text


def test_what_is_trained_is_the_workload(ask: Ask, tmp_path: Path) -> None:
    work = WORK.with_(method="lora", lora_rank=4, lora_targets="q_proj,v_proj", micro_batch=2, accumulate=3, precision="bf16",
                      optimizer="sgd", attention="eager")  # fmt: skip
    chosen = candidate("ddp", ask, 2, work)
    config = recipe_config(Evaluated(chosen, None, True, ""), "gpt2", tmp_path, 1e-4)
    for key in ("method", "lora_rank", "lora_targets", "micro_batch", "accumulate", "precision", "optimizer", "attention"):
        assert config[key] == getattr(work, key), key
    assert config["loss"] == chosen.workload.loss and config["checkpointing"] == chosen.plan.checkpointing
    assert config["learning_rate"] == 1e-4 and config["model"] == "gpt2"
    full = recipe_config(Evaluated(candidate("ddp", ask), None, True, ""), "gpt2", tmp_path, 1e-4)
    assert "lora_rank" not in full


def test_the_recipe_takes_the_keys(ask: Ask, tmp_path: Path) -> None:
    from toolkit.training.config import parse_arguments

    write_files(recommended(candidate("zero3-offload-all", ask), ask(80, 2)), tmp_path / "out", "gpt2")
    config = parse_arguments(["--config", str(tmp_path / "out" / "train.yaml")])
    assert (config.model, config.seq_len, config.micro_batch) == ("gpt2", 64, 1)


def test_a_model_in_a_folder_is_found_from_any_place(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    write_files(recommended(candidate("single", ask), ask(80, 2)), Path("out"), "model")
    assert yaml.safe_load((tmp_path / "out" / "train.yaml").read_text(encoding="utf-8"))["model"] == str(tmp_path / "model")


@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", 2e-5 * 2), ("adafactor", 2e-5 * 2), ("sgd", 2e-5 * 4)])
def test_the_rate_follows_the_global_batch(optimizer: str, rate: float, ask: Ask, tmp_path: Path) -> None:
    chosen = candidate("ddp", ask, 0, WORK.with_(micro_batch=4, accumulate=4, optimizer=optimizer))
    assert scaled_rate(Evaluated(chosen, None, True, ""), 8, 2e-5)[0] == pytest.approx(rate)
    write_files(recommended(chosen, ask(80, 2)), tmp_path / "out", "gpt2", base_batch=8, learning_rate=2e-5)
    text = (tmp_path / "out" / "train.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text)["learning_rate"] == pytest.approx(rate)
    assert "tuned for 8 samples" in text and "global batch of 32" in text


def test_the_page_says_why_and_how_much(ask: Ask, tmp_path: Path) -> None:
    request = ask(80, 2)
    chosen = candidate("ddp", ask)
    estimate = Search(request).evaluate(chosen).estimate
    assert estimate is not None
    write_files(recommended(chosen, request, estimate), tmp_path / "out", "gpt2")
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert text.startswith("# ddp\n") and "because." in text
    assert f"{estimate.memory.peak_total:,} bytes of {estimate.memory.capacity:,}" in text
    assert f"sh {tmp_path / 'out'}/launch.sh" in text


def test_a_file_in_the_way_is_named_and_kept(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine", encoding="utf-8")
    for place in (tmp_path / "out", tmp_path / "out" / "inside"):
        with pytest.raises(UserError, match="--write"):
            write_files(recommended(candidate("ddp", ask), ask(80, 2)), place, "gpt2")
    assert (tmp_path / "out").read_text(encoding="utf-8") == "mine"


def test_without_a_choice_nothing_is_written(ask: Ask, tmp_path: Path) -> None:
    nothing = Recommendation(ask(80, 2), None, [], "", "nothing fits")
    assert write_files(nothing, tmp_path / "out", "gpt2") is nothing
    assert not (tmp_path / "out").exists()


def test_several_nodes_get_a_slurm_job_that_starts_one_launcher_a_node(ask: Ask, tmp_path: Path) -> None:
    chosen = candidate("fsdp", ask)
    chosen = replace(chosen, cluster=replace(chosen.cluster, nodes=2))
    result = write_files(recommended(chosen, ask(80, 2)), tmp_path / "my run", "gpt2")
    job = tmp_path / "my run" / "launch.sbatch"
    assert str(job) in result.files
    subprocess.run(["bash", "-n", job], check=True)
    text = job.read_text(encoding="utf-8")
    assert "#SBATCH --nodes=2\n" in text and "#SBATCH --gpus-per-node=2\n" in text
    assert "--ntasks-per-node=1" in text and "MACHINE_RANK" in text and "MAIN_PROCESS_IP" in text
    ahead = int(re.search(r"#SBATCH --signal=TERM@(\d+)\n", text)[1])
    wait = int(re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-(\d+)}", text)[1])
    assert 30 < wait < ahead
