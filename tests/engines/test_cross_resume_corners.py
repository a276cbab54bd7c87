"""Adapters, other optimizers, offload, more copies and other numbers of ranks: all go on from each other's checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.training.convert.read import hold
from toolkit.training.state import examine

pytestmark = pytest.mark.slow
TOLERANCE, HALF, ROWS = 1e-5, 4, 12
OF_BF16 = 2e-4
"""Engines cast at other places (measured: up to 1.2e-4)."""
KEYS: dict[str, Any] = {"seq_len": 64, "max_steps": HALF + 10, "checkpoint_every": HALF, "keep": 9, "learning_rate": 1e-3,
                        "warmup_steps": 2, "weight_decay": 0.1, "clip": 0.5, "precision": "fp32", "tracker": "none",
                        "export": False, "preflight": "off", "profile": False}  # fmt: skip
RANKS = {"single": 1, "hsdp": 4}
LORA = {"method": "lora", "lora_rank": 4, "weights_dtype": "fp32"}
SGD, ADAFACTOR = {"optimizer": "sgd"}, {"optimizer": "adafactor"}
GROUPS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "lora": (LORA, ("single", "ddp", "fsdp", "zero2", "zero3")),
    "sgd": (SGD, ("single", "fsdp", "zero2")),
    "adafactor": (ADAFACTOR, ("single", "ddp")),
    "bf16": ({"precision": "bf16"}, ("ddp", "fsdp", "zero2")),
    "adamw": ({}, ("ddp", "ddp*3", "fsdp*3", "hsdp", "zero3*3", "zero3-offload-all")),
}
"""Engine or engine*ranks; torch's Adafactor does not train on FSDP2's sharded parameters. In the last group each goes on from
ddp's, and ddp from each."""


def pairs(group: str) -> list[tuple[str, str]]:
    names = GROUPS[group][1]
    if group == "adamw":
        return [("ddp", name) for name in names[1:]] + [(name, "ddp") for name in names[1:]]
    return [(source, target) for source in names for target in names if source != target]


@pytest.fixture(scope="session")
def start(runs: Any, still_model: str, chat_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def run(group: str, engine: str, sources: dict[str, str] | None = None) -> Path:
        strategy, _, ranks = engine.partition("*")
        number = int(ranks or RANKS.get(strategy, 2))
        folder = tmp_path_factory.mktemp(group) / strategy
        keys = {**KEYS, **GROUPS[group][0], "model": still_model, "data": chat_data, "output": folder,
                "micro_batch": ROWS // number}  # fmt: skip
        script = "tests/engines/resume_each.py" if sources else "recipes/train.py"
        done = runs.run(strategy, keys, processes=number, script=script, environment={"RESUME_FROM": json.dumps(sources)})
        assert set(done["statuses"]) == {0}, done["output"]
        return folder

    return run


@pytest.fixture(scope="session")
def trained(start: Callable[..., Path]) -> Callable[[str, str], Path]:
    """The folder of a run that was never stopped."""
    return cache(lambda group, engine: start(group, engine))


@pytest.fixture(scope="session")
def resumed(start: Callable[..., Path], trained: Callable[[str, str], Path]) -> Callable[[str, str], dict[str, Any]]:
    """What an engine's steps give after each other engine's checkpoint."""

    @cache
    def run(group: str, engine: str) -> Any:
        sources = {source: str(trained(group, source) / "checkpoints" / f"step-{HALF:08d}")
                   for source, target in pairs(group) if target == engine}
        return json.loads((start(group, engine, sources) / "resumed.json").read_text(encoding="utf-8"))

    return run


@pytest.mark.parametrize(("group", "source", "target"), [(group, *pair) for group in GROUPS for pair in pairs(group)])
def test_it_goes_on_as_the_run_that_was_never_stopped(
    group: str, source: str, target: str, trained: Callable[..., Path], resumed: Callable[..., Any]
) -> None:
    lines = (trained(group, source) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    expected = [json.loads(line) for line in lines][HALF:]
    found = resumed(group, target)[source]
    assert len(found) == len(expected) == 10
    tolerance = OF_BF16 if group == "bf16" else TOLERANCE
    assert [loss for loss, _ in found] == pytest.approx([step["loss"] for step in expected], rel=tolerance)


@pytest.mark.parametrize("engine", GROUPS["bf16"][1])
def test_masters_are_saved_and_not_what_is_cast_from_them(engine: str, trained: Callable[..., Path]) -> None:
    kinds = examine.inspect(trained("bf16", engine) / "checkpoints" / f"step-{HALF:08d}")["kinds"]
    assert kinds.keys() == {"weights", "exp_avg", "exp_avg_sq", "step"}
    assert all(told["dtypes"] == ["float32"] for told in kinds.values())
    weights = hold(trained("bf16", engine) / "checkpoints" / f"step-{HALF:08d}").of("weights").values()
    assert any(not torch.equal(tensor.whole(), tensor.whole().bfloat16().float()) for tensor in weights)
