"""One process and no engine: Accelerate's distributed type NO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import UserError
from toolkit.specs import Cluster, Plan, Workload
from toolkit.strategies.base import (
    Found,
    LaunchFiles,
    StrategyInfo,
    accelerate_base,
    mixed_precision,
    recipe_keys,
)

STRATEGIES = (
    StrategyInfo(
        name="single",
        family="single",
        engine="NO",
        summary="one process on one GPU: everything is held once",
        when="the model, its gradients and the optimizer fit on one GPU: nothing is lighter or simpler",
    ),
)


def check(plan: Plan, workload: Workload, cluster: Cluster) -> None:
    """One process has no use for other GPUs. Raises UserError."""
    if cluster.world_size > 1:
        raise UserError(
            f"single and {cluster.world_size} GPUs exclude each other: single is one process; use ddp or "
            "another strategy, or one GPU"
        )


def render(plan: Plan, workload: Workload, cluster: Cluster) -> LaunchFiles:
    """An Accelerate file of distributed type NO."""
    return LaunchFiles(plan=plan, accelerate=accelerate_base("NO", cluster), recipe=recipe_keys(plan))


def read(
    accelerate: Mapping[str, Any], deepspeed: Mapping[str, Any] | None, hidden_size: int | None
) -> Found:
    """The plan of a file of distributed type NO, or with one CPU process."""
    return Found(plan=Plan(strategy="single"), precision=mixed_precision(accelerate), processes=1)


def observe(accelerator: Any) -> Plan:
    """A live Accelerator without an engine."""
    return Plan(strategy="single")


def canonical(plan: Plan, cluster: Cluster) -> Plan:
    """Nothing of it has two spellings."""
    return plan
