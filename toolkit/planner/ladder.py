"""The ladder of strategies and aids, lightest first, as data (`ladder.yaml`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal


@dataclass(frozen=True)
class Rung:
    """One strategy and why it stands where it stands."""

    strategy: str
    scope: Literal["device", "all", "node", "nodes"]
    """device: it runs on one GPU; all: on all GPUs given; node, nodes: on all, when they are in one node, or in several."""
    reason: str


@dataclass(frozen=True)
class Aid:
    """One thing that saves memory and costs something else."""

    name: str
    reason: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)
    offload: Literal["none", "cpu", "nvme"] = "none"
    """What must be allowed for it."""


@dataclass(frozen=True)
class Split:
    """A way to share one sample among GPUs, for what fits in no other way."""

    name: str
    axis: Literal["tp", "cp", "sp"]
    scope: Literal["node", "all"]
    """node: only the GPUs of one node share a sample; all: any."""
    reason: str


@dataclass(frozen=True)
class Ladder:
    rungs: tuple[Rung, ...]
    aids: tuple[Aid, ...]
    splits: tuple[Split, ...]
    margin_gpu: float
    margin_cpu: float


@lru_cache(maxsize=1)
def ladder() -> Ladder:
    """The ladder as shipped."""
    import yaml

    data = yaml.safe_load((files("toolkit.planner") / "ladder.yaml").read_text())
    return Ladder(
        rungs=tuple(Rung(**rung) for rung in data["rungs"]),
        aids=tuple(Aid(**aid) for aid in data["aids"]),
        splits=tuple(Split(**split) for split in data["splits"]),
        margin_gpu=data["margin"]["gpu"],
        margin_cpu=data["margin"]["cpu"],
    )
