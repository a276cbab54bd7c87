"""`toolkit catalog`: the four lists, for people and for programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from toolkit.specs.catalog import gpus, models
from toolkit.specs.workload import Optimizer
from toolkit.strategies import STRATEGIES

Run = Callable[..., Any]
NAMES = {"gpus": list(gpus()), "models": list(models()), "strategies": list(STRATEGIES), "optimizers": list(get_args(Optimizer))}
KEYS = {
    "gpus": {"name", "memory", "bf16_flops", "fp16_flops", "fp32_flops", "bandwidth", "link", "link_bandwidth", "source"},
    "models": {"name", "hub", "parameters", "source"},
    "strategies": {"name", "engine", "shards", "offloads", "summary"},
    "optimizers": {"name", "state_bytes_per_parameter"},
}


@pytest.mark.parametrize("what", NAMES)
def test_the_json_lists_everything_by_name(what: str, run: Run) -> None:
    done = run("catalog", what, "--json")
    assert done.status == 0 and done.err == ""
    assert [row["name"] for row in done.json] == NAMES[what]
    assert all(set(row) >= KEYS[what] for row in done.json)


@pytest.mark.parametrize("what", NAMES)
def test_the_table_names_every_row(what: str, run: Run) -> None:
    done = run("catalog", what)
    assert done.status == 0 and done.err == ""
    assert all(name in done.out for name in NAMES[what])


def test_sizes_and_speeds_are_readable(run: Run) -> None:
    text = run("catalog", "gpus").out
    assert "79.1 GiB" in text and "312 T" in text and "2.25 P" in text and "e+" not in text


def test_states_of_optimizers_are_what_their_sources_keep(run: Run) -> None:
    states = {row["name"]: row["state_bytes_per_parameter"] for row in run("catalog", "optimizers", "--json").json}
    assert states["adamw"] == 8 and states["lion"] == 4 and states["sgd"] in (0, 4)
    assert 2 <= states["adamw-8bit"] < 2.2 and states["adafactor"] < 1
