"""A checkpoint of this toolkit becomes one that another program's engine goes on from, and the other way round."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
TOLERANCE = 1e-5
KEYS: dict[str, Any] = {"max_steps": 8, "accumulate": 2, "micro_batch": 2, "clip": 0.5, "warmup_steps": 2, "weight_decay": 0.1,
                        "schedule": "constant"}  # fmt: skip
START = [["train", "first"], ["save_ours", "ours"], ["save_theirs", "theirs"]]
NATIVE = [["convert", "ours", "native", "deepspeed"], ["load_theirs", "native"], ["train", "ours to DeepSpeed"]]
UNIVERSAL = [["convert", "ours", "universal", "deepspeed-universal"], ["load_theirs", "universal"],
             ["train", "ours to universal"]]  # fmt: skip
BACK = [["convert", "theirs", "back"], ["load_ours", "back"], ["train", "theirs to ours"]]
THEIR_UNIVERSAL = [["to_universal", "theirs", "made"], ["convert", "made", "back-again"], ["load_ours", "back-again"],
                   ["train", "their universal to ours"]]  # fmt: skip
SHARDED = [["convert", "ours", "fsdp", "accelerate-fsdp"], ["load_theirs", "fsdp"], ["train", "ours to Accelerate"]]
DCP = [["convert", "ours", "to-dcp", "dcp"], ["load_dcp", "to-dcp"], ["train", "ours to DCP"],
       ["convert", "dcp", "from-dcp"], ["load_ours", "from-dcp"], ["train", "DCP to ours"]]  # fmt: skip
GO_ON = ["train", "expected"]


@pytest.mark.parametrize(("engine", "actions", "keys"), [
    pytest.param("zero1", [*START, GO_ON, *UNIVERSAL, *BACK], {"method": "lora", "lora_rank": 2}, id="zero1-lora"),
    pytest.param("zero2", [*START, GO_ON, *NATIVE, *UNIVERSAL, *BACK, *THEIR_UNIVERSAL], {}, id="zero2"),
    # Stage 3 shares one step counter among its groups after it has loaded a universal checkpoint: here is one group.
    pytest.param("zero3", [*START, GO_ON, *NATIVE, *BACK], {}, id="zero3"),
    pytest.param("zero3", [*START, GO_ON, *UNIVERSAL], {"weight_decay": 0.0}, id="zero3-universal"),
    pytest.param("fsdp", [*START, ["save_dcp", "dcp"], GO_ON, *SHARDED, *BACK, *DCP], {}, id="fsdp"),
])  # fmt: skip
def test_it_goes_on_with_the_same_losses(
    engine: str, actions: list[list[str]], keys: dict[str, Any], launch: Callable[..., Any], still_model: str, sharded_zero3: str
) -> None:
    run = launch(sharded_zero3 if engine == "zero3" else engine, model=still_model, env={"ACTIONS": json.dumps(actions)},
                 script=Path(__file__).with_name("foreign_each.py"), **{**KEYS, **keys})  # fmt: skip
    assert run.status == 0, run.output
    told = run.json("told.json")
    assert len(told["expected"]) == 4 and told["expected"][0] != told["first"][0]
    for way in told.keys() - {"first", "expected"}:
        assert told[way] == pytest.approx(told["expected"], rel=TOLERANCE), way
