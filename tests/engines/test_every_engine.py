"""Every shipped launch file trains through `accelerate launch`, keeps the run folder's contract and exports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.strategies import read

pytestmark = pytest.mark.slow
FILES = Path(__file__).parents[2] / "recipes" / "accelerate"
NAMES = sorted(file.stem for file in FILES.glob("*.yaml") if not file.stem.endswith("nvme"))
"""All but those that need a disk at /local_nvme."""
IN_BF16 = [name for name in NAMES if name not in ("zero1-offload-optimizer", "zero3-offload-optimizer")]
"""Those two step as zero2-offload-optimizer and zero3-offload-all do."""
STEP_KEYS = {"step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds", "mfu", "memory_peak"}
RUN_FILES = {"config.yaml", "plan.json", "run.json", "metrics.jsonl", "memory.json", "model", "export"}
CATEGORIES = {"parameters", "gradients", "master_weights", "optimizer_states", "activations", "logits_and_loss",
              "communication", "temporaries"}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_fp32_trains_and_keeps_the_contract(name: str, fp32_run: Callable[[str], Any]) -> None:
    run = fp32_run(name)
    assert {path.name for path in run.folder.iterdir()} == RUN_FILES
    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(1, 11))
    assert all(set(step) >= STEP_KEYS for step in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]
    config = yaml.safe_load((run.folder / "config.yaml").read_text(encoding="utf-8"))
    assert config["max_steps"] == 10 and config["seed"] == 42


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_that_runs_is_the_one_of_the_file(name: str, fp32_run: Callable[[str], Any]) -> None:
    live, asked = fp32_run(name).json("plan.json"), read(FILES / f"{name}.yaml").plan
    assert live["label"] == asked.label == name
    same = ("strategy", "offload", "offload_to", "tp", "cp", "sp", "bucket", "persist", "shard_size")
    assert {key: live[key] for key in same} == {key: getattr(asked, key) for key in same}
    if asked.strategy.startswith("zero"):
        zero = dataclasses.asdict(asked.zero)
        assert {key: live["zero"][key] for key in zero if key != "gradient_clipping"} | {"gradient_clipping": None} == zero
        assert live["zero"]["gradient_clipping"] == 0.5, "the run's own"


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_predicted_and_measured(name: str, fp32_run: Callable[[str], Any]) -> None:
    memory = fp32_run(name).json("memory.json")
    predicted, measured = memory["predicted"], memory["measured"]
    assert set(predicted["breakdown"]) == CATEGORIES
    assert sum(predicted["breakdown"].values()) == predicted["peak_allocated"]
    assert measured["counter"] == "allocations" and measured["steps"] == 10
    assert max(measured["peak_by_rank"]) == measured["peak"] >= measured["resident"] > 0
    by_category = measured["resident_by_category"]
    assert by_category["parameters"] > 0 and by_category["optimizer_states"] > 0
    assert sum(by_category.values()) <= measured["resident"]
    for rank in measured["ranks"]:
        assert set(rank["breakdown"]) == CATEGORIES | {"other"}
        assert sum(rank["breakdown"].values()) == rank["peak"] == rank["counted"]
        assert rank["breakdown"]["other"] < 0.01 * rank["peak"]
    worst = measured["worst"]
    assert worst["step"] == 3 and worst["peak"] == max(rank["peak"] for rank in measured["ranks"])
    assert sum(worst["by_phase"][worst["at_peak"]["phase"]].values()) == worst["peak"]
    assert {"between", "forward", "backward"} <= set(worst["by_phase"]) and worst["by_module"]
    # Recording it has added nothing: another step with rows of the same lengths is as high.
    peaks = [step["memory_peak"] for step in fp32_run(name).steps()]
    assert min(abs(peak - peaks[2]) for peak in peaks[3:]) <= 64
    # Where four processes share the cores of two, gloo's threads let go of their buffers late on some rank: on so small a model
    # one such buffer is 6%. The rank that was least disturbed counts; test_memory_truth holds hsdp to the byte.
    peak = min(measured["peak_by_rank"]) if name == "hsdp" else measured["peak"]
    assert predicted["peak_allocated"] == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_the_export_loads_and_is_what_ddp_exports(name: str, fp32_run: Callable[[str], Any]) -> None:
    ours, reference = fp32_run(name).folder / "export", fp32_run("ddp").folder / "export"
    model = AutoModelForCausalLM.from_pretrained(ours)
    assert AutoTokenizer.from_pretrained(ours).chat_template
    expected = AutoModelForCausalLM.from_pretrained(reference).state_dict()
    found = model.state_dict()
    assert set(found) == set(expected)
    assert set(load_file(ours / "model.safetensors")) == set(load_file(reference / "model.safetensors"))
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", IN_BF16)
def test_bf16_trains_from_a_directory_of_weights(name: str, bf16_run: Callable[[str], Any]) -> None:
    run = bf16_run(name)
    assert run.json("plan.json")["label"] == name
    steps, evaluations = run.steps(), run.evaluations()
    assert len(steps) == 4 and steps[-1]["loss"] < steps[0]["loss"]
    assert [record["step"] for record in evaluations] == [0, 2, 4]
    assert all(record["eval_tokens"] > 0 for record in evaluations)
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    assert {p.name for p in (run.folder / "checkpoints").iterdir()} == {"step-00000002", "step-00000004"}
    assert next(AutoModelForCausalLM.from_pretrained(run.folder / "export").parameters()).isfinite().all()


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero3"])
def test_lora_trains_and_exports_an_adapter(engine: str, launch: Callable[..., Any], tiny_model: Path) -> None:
    from peft import PeftModel

    run = launch(engine, method="lora", lora_rank=4, learning_rate=1e-2, max_steps=4, export=True, seed=1)
    assert run.status == 0, run.output
    assert run.json("plan.json")["label"] == engine
    steps = run.steps()
    assert steps[-1]["loss"] < steps[0]["loss"]
    weights = load_file(run.folder / "export" / "adapter_model.safetensors")
    assert all("lora_" in key for key in weights)
    assert any(tensor.abs().sum() > 0 for key, tensor in weights.items() if "lora_B" in key)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    tuned = PeftModel.from_pretrained(base, run.folder / "export")
    ids = torch.arange(8)[None]
    with torch.no_grad(), tuned.disable_adapter():
        before = tuned(ids).logits
    with torch.no_grad():
        assert not torch.equal(before, tuned(ids).logits)
