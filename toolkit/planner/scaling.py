"""How throughput grows with the number of GPUs: strong (the global batch stays) and weak (the work of each GPU stays)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from toolkit.errors import UserError
from toolkit.estimate.engine import Estimator
from toolkit.estimate.result import Estimate
from toolkit.specs import Cluster, ModelSpec, Plan, Workload

Mode = Literal["weak", "strong"]


@dataclass(frozen=True)
class Point:
    """One number of GPUs."""

    gpus: int
    nodes: int
    estimate: Estimate
    efficiency: float
    """Tokens per second and GPU over those of the first point."""
    gain: float | None
    """Tokens per second over those of the point before; None for the first."""

    @property
    def bound(self) -> str:
        """What the step waits for: computation while less than half of it is waiting, else communication."""
        assert self.estimate.time is not None  # noqa: S101 - every estimate of the planner has a time
        return "communication" if self.estimate.time.communication_share > 0.5 else "computation"


@dataclass(frozen=True)
class Curve:
    """One mode's points with what they show."""

    mode: Mode
    points: tuple[Point, ...]
    least_gain: float

    @property
    def overtaken(self) -> int | None:
        """The first number of GPUs at which communication takes more than half of the step."""
        return next((p.gpus for p in self.points if p.bound == "communication"), None)

    @property
    def knee(self) -> int | None:
        """The last number of GPUs before a doubling that gains less than `least_gain`; None: every doubling gains more."""
        for before, after in zip(self.points, self.points[1:], strict=False):
            if after.gain is not None and after.gpus == 2 * before.gpus and after.gain < self.least_gain:
                return before.gpus
        return None

    def to_json(self) -> dict[str, Any]:
        """Plain data: one object per point, with the estimate's own."""
        points = [{"gpus": p.gpus, "nodes": p.nodes, "efficiency": p.efficiency, "gain": p.gain, "bound": p.bound,
                   **p.estimate.to_json()} for p in self.points]
        return {"mode": self.mode, "knee": self.knee, "communication_overtakes_at": self.overtaken, "points": points}


def counts(cluster: Cluster, max_gpus: int) -> list[tuple[int, int]]:
    """(GPUs per node, nodes): one, the powers of two within a node, then doublings of whole nodes.

    Raises:
        UserError: max_gpus is below one, or is not reached by whole nodes.
    """
    if max_gpus < 1:
        raise UserError(f"max-gpus is {max_gpus}; it must be at least 1")
    node = cluster.gpus_per_node
    if max_gpus > node and max_gpus % node:
        raise UserError(f"max-gpus {max_gpus} is not a whole number of nodes of {node} GPUs (--gpus says how many a node has)")
    found, inside = [], 1
    while inside < min(node, max_gpus):
        found.append((inside, 1))
        inside *= 2
    nodes = 1
    found.append((min(node, max_gpus), 1))
    while nodes * 2 * node <= max_gpus:
        nodes *= 2
        found.append((node, nodes))
    if found[-1][0] * found[-1][1] < max_gpus:
        found.append((node, max_gpus // node))
    return found


def _batch(workload: Workload, replicas: int, global_batch: int) -> Workload | None:
    """The workload that spreads a global batch over `replicas`; None when it does not divide."""
    if global_batch % replicas:
        return None
    share = global_batch // replicas
    micro = max(m for m in range(1, min(share, workload.micro_batch) + 1) if share % m == 0)
    return workload.with_(micro_batch=micro, accumulate=share // micro)


def scaling(
    model: ModelSpec,
    workload: Workload,
    plan: Plan,
    cluster: Cluster,
    max_gpus: int,
    *,
    mode: Mode,
    global_batch: int | None = None,
    least_gain: float = 1.5,
) -> Curve:
    """The curve from one GPU to `max_gpus`.

    Args:
        cluster: a node's GPUs and links; its number of nodes has no effect.
        mode: weak keeps the workload of each GPU; strong keeps `global_batch` (samples; None: the workload's own on
            max_gpus) and gives each GPU less as there are more.
        least_gain: what a doubling must gain to count as worth it.

    Raises:
        UserError: counts that don't make whole nodes, or a global batch that nothing divides.
    """
    estimator = Estimator(model)
    parallel = plan.tp * plan.cp * plan.sp
    whole = global_batch or workload.micro_batch * workload.accumulate * max(1, max_gpus // parallel)
    points: list[Point] = []
    for per_node, nodes in counts(cluster, max_gpus):
        ranks = per_node * nodes
        if ranks % parallel:
            continue
        work = workload if mode == "weak" else _batch(workload, ranks // parallel, whole)
        if work is None:
            continue
        part = replace(cluster, gpus_per_node=per_node, nodes=nodes)
        result = estimator.estimate(work, _plan(plan, ranks, parallel), part, detail=False)
        points.append(_point(result, ranks, nodes, points))
    if not points:
        raise UserError(f"no number of GPUs up to {max_gpus} divides a global batch of {whole} samples"
                        if mode == "strong" else f"{parallel} ranks share one copy of the model, more than max-gpus {max_gpus}")
    return Curve(mode, tuple(points), least_gain)


def _plan(plan: Plan, ranks: int, parallel: int) -> Plan:
    """One GPU runs the single strategy with the plan's aids; hsdp within one node is fsdp."""
    if ranks == 1:
        return Plan(strategy="single", checkpointing=plan.checkpointing)
    if plan.strategy == "single" and parallel == 1:
        return plan.with_(strategy="ddp")
    return plan


def _point(result: Estimate, ranks: int, nodes: int, before: list[Point]) -> Point:
    assert result.time is not None  # noqa: S101 - see Point.bound
    speed = result.time.tokens_per_second
    if not before:
        return Point(ranks, nodes, result, 1.0, None)
    first, last = before[0].estimate.time, before[-1].estimate.time
    assert first is not None and last is not None  # noqa: S101
    return Point(ranks, nodes, result, speed / ranks / (first.tokens_per_second / before[0].gpus), speed / last.tokens_per_second)
