"""A checkpoint of this toolkit becomes one that another program's engine goes on from, and the other way round.

The runs also hold public reports of the kinds CKPT and EXP to the right behaviour; training/cases.yaml lists them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from toolkit.training.convert.directory import export
from toolkit.training.convert.read import hold
from toolkit.training.state import examine

pytestmark = pytest.mark.slow
TOLERANCE = 1e-5
KEYS: dict[str, Any] = {"max_steps": 8, "accumulate": 2, "micro_batch": 2, "clip": 0.5, "warmup_steps": 2, "weight_decay": 0.1,
                        "schedule": "constant"}  # fmt: skip
START = [["train", "first"], ["save_ours", "ours"], ["save_theirs", "theirs"]]
GO_ON = ["train", "expected"]
NATIVE = [["convert", "ours", "native", "deepspeed"], ["load_theirs", "native"], ["train", "ours to DeepSpeed"]]
UNIVERSAL = [["convert", "ours", "universal", "deepspeed-universal"], ["load_theirs", "universal"],
             ["train", "ours to universal"]]  # fmt: skip
BACK = [["convert", "theirs", "back"], ["load_ours", "back"], ["train", "theirs to ours"]]
THEIR_UNIVERSAL = [["to_universal", "theirs", "made"], ["convert", "made", "back-again"], ["load_ours", "back-again"],
                   ["train", "their universal to ours"]]  # fmt: skip
SHARDED = [["convert", "ours", "fsdp", "accelerate-fsdp"], ["load_theirs", "fsdp"], ["train", "ours to Accelerate"]]
DCP = [["convert", "ours", "to-dcp", "dcp"], ["load_dcp", "to-dcp"], ["train", "ours to DCP"],
       ["convert", "dcp", "from-dcp"], ["load_ours", "from-dcp"], ["train", "DCP to ours"]]  # fmt: skip
AT_ONCE = [["load_ours", "ours"], ["save_ours", "again"], ["load_ours", "again"], ["train", "saved at once after loading"]]
RUNS: dict[str, tuple[str, list[list[str]], dict[str, Any]]] = {
    "zero2": ("zero2", [*START, GO_ON, *NATIVE, *UNIVERSAL, *BACK, *THEIR_UNIVERSAL], {}),
    "zero3": ("zero3", [*START, ["gather"], GO_ON, *NATIVE, *BACK, *AT_ONCE], {}),
    # Stage 3 shares one step counter among its groups after it has loaded a universal checkpoint: adapters are one group.
    "zero3-lora": ("zero3", [*START, GO_ON, *UNIVERSAL, *BACK], {"method": "lora", "lora_rank": 2}),
    "fsdp": ("fsdp", [*START, ["save_dcp", "dcp"], ["gather"], GO_ON, *SHARDED, *BACK, *DCP, *AT_ONCE], {}),
    "fsdp-lora-compiled": ("fsdp", [*START[:2], GO_ON, *AT_ONCE],
                           {"method": "lora", "lora_rank": 2, "env": {"COMPILE": "eager"}}),
}  # fmt: skip


@pytest.fixture(scope="session")
def done(launch_shared: Callable[..., Any], still_model: str, sharded_zero3: str) -> Callable[[str], Any]:
    """`done(name)`: one of RUNS."""

    @cache
    def run(name: str) -> Any:
        engine, actions, keys = RUNS[name]
        environment = {"ACTIONS": json.dumps(actions), **keys.get("env", {})}
        found = launch_shared(sharded_zero3 if engine == "zero3" else engine, model=still_model, env=environment,
                              script=Path(__file__).with_name("foreign_each.py"),
                              **{**KEYS, **{key: value for key, value in keys.items() if key != "env"}})  # fmt: skip
        assert found.status == 0, found.output
        return found

    return run


@pytest.mark.parametrize("name", RUNS)
def test_it_goes_on_with_the_same_losses(name: str, done: Callable[[str], Any]) -> None:
    losses = done(name).json("told.json")["losses"]
    assert len(losses["expected"]) == 4 and losses["expected"][0] != losses["first"][0]
    for way in losses.keys() - {"first", "expected"}:
        assert losses[way] == pytest.approx(losses["expected"], rel=TOLERANCE), way


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("*model.safetensors")))


@pytest.mark.parametrize("name", ["zero2", "zero3", "fsdp"])
def test_exp_of_every_engine_theirs_and_ours_are_the_same_whole_model(
    name: str, done: Callable[[str], Any], tmp_path: Path
) -> None:
    """https://github.com/huggingface/accelerate/issues/2155, https://github.com/huggingface/transformers/issues/20082,
    https://github.com/huggingface/transformers/pull/25817 and https://github.com/meta-pytorch/torchtune/issues/616"""
    run = done(name).folder
    export(hold(run / "ours"), tmp_path / "ours", dtype="fp32")
    export(hold(run / "theirs"), tmp_path / "theirs", dtype="fp32", source=run / "model")
    ours, theirs = weights_in(tmp_path / "ours"), weights_in(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() and "lm_head.weight" not in ours
    assert all(torch.equal(tensor, theirs[name]) and tensor.numel() for name, tensor in ours.items())
    loaded, told = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("name", ["zero3-lora", "fsdp-lora-compiled"])
def test_ckpt_of_adapters_only_they_and_their_states_are_saved(name: str, done: Callable[[str], Any], tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/pull/28297, https://github.com/huggingface/transformers/issues/28320 and
    https://github.com/huggingface/transformers/issues/25205: no names of wrappers, compiled or sharded."""
    run = done(name).folder
    assert done(name).json("told.json")["facts"]["compiled"] == ("compiled" in name)
    held = hold(run / "ours")
    assert all(".lora_" in parameter and parameter.startswith("base_model.model.model.layers.") for _, parameter in held.tensors)
    assert examine.inspect(run / "ours")["kinds"].keys() == {"weights", "exp_avg", "exp_avg_sq", "step"}
    export(held, tmp_path / "adapter")
    assert {name.rpartition(".lora_")[2] for name in weights_in(tmp_path / "adapter")} == {"A.weight", "B.weight"}


@pytest.mark.parametrize("name", ["zero3", "fsdp"])
def test_ckpt_saving_gathers_nothing_and_a_rank_reads_its_own_part(name: str, done: Callable[[str], Any]) -> None:
    """https://github.com/huggingface/accelerate/issues/3633 and https://github.com/huggingface/lerobot/issues/4009"""
    run = done(name)
    facts, kinds = run.json("told.json")["facts"], examine.inspect(run.folder / "ours")["kinds"]
    assert facts["bytes moved by gathering"] > kinds["weights"]["bytes"]
    assert facts["bytes moved by saving"] < kinds["weights"]["bytes"] / 4  # What ranks tell each other of their files.
    assert facts["bytes read by loading"] < 0.6 * sum(kind["bytes"] for kind in kinds.values())


@pytest.mark.parametrize("name", ["zero2", "zero3", "fsdp"])
def test_ckpt_the_optimizer_stays_of_its_class(name: str, done: Callable[[str], Any]) -> None:
    """https://github.com/huggingface/accelerate/issues/1902"""
    assert done(name).json("told.json")["facts"]["optimizer"] == "OwnAdamW"
