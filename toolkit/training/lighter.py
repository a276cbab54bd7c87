"""Lighter plans for a run that does not fit, as the commands that start them."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.specs import Cluster, ModelSpec, Plan, Workload
from toolkit.units import format_size


@dataclass(frozen=True)
class Lighter:
    """One way to go on with less memory per device."""

    name: str
    peak: int
    """Bytes of the device, everything included."""
    fits: bool
    command: str

    def __str__(self) -> str:
        return f"{self.name} ({format_size(self.peak)}{'' if self.fits else ', still too much'}): {self.command}"


def lighter_plans(spec: ModelSpec, workload: Workload, plan: Plan, cluster: Cluster, *, launch: Path | None,
                  below: int | None = None) -> list[Lighter]:
    """A smaller micro-batch with the same global batch where that is enough, then the next two plans of the ladder.

    Args:
        launch: the launch file of the run; None: unknown.
        below: bytes that a plan must stay under; None: what the device has, less the planner's margin.
    """
    from toolkit.planner.search import Request, Search

    search = Search(Request(spec, workload, cluster, allow_offload="cpu", fixed_micro_batch=True))
    limit = int(cluster.gpu.memory * (1 - search.request.kept_free))
    limit = min(limit, below) if below is not None else limit
    found: list[Lighter] = []
    micro, accumulate = workload.micro_batch, workload.accumulate
    while micro % 2 == 0:
        micro, accumulate = micro // 2, accumulate * 2
        work = workload.with_(micro_batch=micro, accumulate=accumulate)
        memory = search.estimator.estimate(work, plan, cluster, detail=False).memory
        if memory.peak_total <= limit and memory.host.fits:
            keys = {"micro_batch": micro, "accumulate": accumulate}
            found.append(Lighter(f"micro-batch {micro}, the same global batch", memory.peak_total, True, _command(launch, keys)))
            break
    others = [r for r in search.run() if r.estimate is not None and r.candidate.cluster.world_size == cluster.world_size
              and _file_of(plan, r.candidate.plan, launch) is not None]
    fitting = [r for r in others if r.estimate and r.estimate.memory.peak_total <= limit and r.estimate.memory.host.fits]
    if not fitting and not found:
        fitting = sorted(others, key=lambda r: r.estimate.memory.peak_total if r.estimate else 0)
    for result in fitting[:2]:
        candidate, memory = result.candidate, result.estimate.memory  # type: ignore[union-attr]
        keys = _changed(workload, plan, candidate.workload, candidate.plan)
        command = _command(_file_of(plan, candidate.plan, launch), keys, cluster.world_size)
        found.append(Lighter(candidate.name, memory.peak_total, memory.peak_total <= limit, command))
    return found


def _changed(workload: Workload, plan: Plan, other: Workload, other_plan: Plan) -> dict[str, Any]:
    """The recipe's keys that differ."""
    keys: dict[str, Any] = {name: getattr(other, name) for name in ("loss", "micro_batch", "accumulate")
                            if getattr(other, name) != getattr(workload, name)}
    if other_plan.checkpointing != plan.checkpointing:
        keys["checkpointing"] = other_plan.checkpointing
    return keys


def _file_of(plan: Plan, other: Plan, launch: Path | None) -> Path | None:
    """The launch file of another plan: the run's own, or the one of the recipes with its name."""
    if other.label == plan.label and launch is not None:
        return launch
    shipped = Path(sys.argv[0]).parent / "accelerate" / f"{other.label}.yaml"
    return shipped if shipped.is_file() else None


def _command(launch: Path | None, keys: dict[str, Any], processes: int | None = None) -> str:
    """This process's own command with another launch file, and keys that win over what was given."""
    start = ["accelerate", "launch"]
    if launch is not None:
        start += ["--config_file", str(launch)]
    if processes is not None and processes > 1:
        start += ["--num_processes", str(processes)]
    return shlex.join([*start, *sys.argv, *(f"{key}={value}" for key, value in keys.items())])


def lighter_or_none(spec: ModelSpec, workload: Workload, plan: Plan, cluster: Cluster, launch: Path | None,
                    below: int | None = None) -> list[Lighter]:
    """As `lighter_plans`, and empty when the planner can't answer: the run's own trouble is what must be told."""
    try:
        return lighter_plans(spec, workload, plan, cluster, launch=launch, below=below)
    except (UserError, ValueError, RuntimeError, MemoryError):
        return []
