"""The same seed, data and global batch give the same losses and gradient norms on every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ENGINES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
TOLERANCE = 1e-5


def assert_alike(run: Any, reference: Any) -> None:
    ours, theirs = run.steps(), reference.steps()
    assert len(ours) == len(theirs) == 10
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in ours] == pytest.approx([step[name] for step in theirs], rel=TOLERANCE)
    for name in ("step", "learning_rate", "tokens", "target_tokens"):
        assert [step[name] for step in ours] == [step[name] for step in theirs]


@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_train_as_one_does(engine: str, fp32_run: Callable[[str], Any]) -> None:
    run, single = fp32_run(engine), fp32_run("single")
    assert run.json("plan.json")["label"] == engine and run.json("run.json")["processes"] == 2
    assert single.json("plan.json")["label"] == "single" and single.json("run.json")["processes"] == 1
    assert_alike(run, single)


def test_zero3_trains_as_one_process_does_when_every_parameter_is_sharded(
    sharded_zero3: str, fp32_run: Callable[[str], Any]
) -> None:
    run = fp32_run(sharded_zero3)
    plan = run.json("plan.json")
    assert plan["strategy"] == "zero3" and plan["persist"] == 0
    assert_alike(run, fp32_run("single"))


def test_the_parity_runs_clip_and_learn(fp32_run: Callable[[str], Any]) -> None:
    steps = fp32_run("single").steps()
    assert min(step["grad_norm"] for step in steps) > 0.5
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.2
