"""Every engine goes on from every other engine's checkpoint as if it had trained from the start."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ENGINES = ("single", "ddp", "fsdp", "fsdp-grad", "zero1", "zero2", "zero3")
"""single is one process, the others are two: every pair with single changes the world size."""
TOLERANCE = 1e-5
HALF = 4
KEYS: dict[str, Any] = {"max_steps": 2 * HALF, "accumulate": 2, "clip": 0.5, "warmup_steps": 2, "weight_decay": 0.1}


@pytest.fixture(scope="session")
def start(launch_shared: Callable[..., Any], still_model: str, sharded_zero3: str) -> Callable[..., Any]:
    """Launch an engine on one global batch, whatever its processes; zero3 with even the smallest parameter sharded."""

    def run(engine: str, **options: Any) -> Any:
        number = 1 if engine == "single" else 2
        done = launch_shared(sharded_zero3 if engine == "zero3" else engine, processes=number, model=still_model,
                             micro_batch=4 // number, **KEYS, **options)  # fmt: skip
        assert done.status == 0, done.output
        return done

    return run


@pytest.fixture(scope="session")
def trained(start: Callable[..., Any]) -> Callable[[str], Any]:
    """The run of an engine that was never stopped, with a checkpoint in the middle."""
    return cache(lambda engine: start(engine, checkpoint_every=HALF))


@pytest.fixture(scope="session")
def resumed(start: Callable[..., Any], trained: Callable[[str], Any]) -> Callable[[str], dict[str, list[list[float]]]]:
    """What an engine's steps give after each engine's checkpoint."""

    @cache
    def run(engine: str) -> Any:
        sources = {name: str(trained(name).folder / "checkpoints" / f"step-{HALF:08d}") for name in ENGINES}
        done = start(engine, script=Path(__file__).with_name("resume_each.py"), env={"RESUME_FROM": json.dumps(sources)})
        return done.json("resumed.json")

    return run


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("source", ENGINES)
def test_it_goes_on_as_the_run_that_was_never_stopped(
    source: str, target: str, trained: Callable[[str], Any], resumed: Callable[[str], Any]
) -> None:
    expected = trained(source).steps()[HALF:]
    found = resumed(target)[source]
    assert len(found) == len(expected) == HALF
    assert [loss for loss, _ in found] == pytest.approx([step["loss"] for step in expected], rel=TOLERANCE)
    assert [norm for _, norm in found] == pytest.approx([step["grad_norm"] for step in expected], rel=TOLERANCE)
