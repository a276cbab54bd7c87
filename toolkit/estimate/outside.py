"""What lies outside the caching allocator: the device context, communicators. Data with sources and an interval."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from typing import Any

from toolkit.specs import Cluster, Plan, Workload
from toolkit.units import MIB


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    import yaml

    return yaml.safe_load((files("toolkit.estimate") / "outside.yaml").read_text())


def communicators(plan: Plan, world: int) -> int:
    """How many NCCL communicators a plan makes: one for the world, one more per mesh dimension."""
    if world == 1:
        return 0
    return 1 + sum(degree > 1 for degree in (plan.tp, plan.cp, plan.sp)) + (2 if plan.strategy == "hsdp" else 0)


def outside_allocator(cluster: Cluster, plan: Plan, workload: Workload | None = None) -> tuple[int, tuple[int, int]]:
    """(typical, (low, high)) bytes of one GPU outside the allocator; zero on a CPU."""
    if cluster.gpu.is_cpu:
        return 0, (0, 0)
    table = _table()
    eager = workload is not None and workload.variant.cuda_modules == "eager"
    figures = [table["context_eager"] if eager else table["context"].get(cluster.gpu.architecture, table["context"]["default"])]
    count = communicators(plan, cluster.world_size)
    if count:
        figures.append(table["nccl"]["two_ranks" if cluster.world_size == 2 else "more_ranks"])
        figures += [table["nccl"]["further_communicator"]] * (count - 1)
    low, typical, high = (sum(f[i] for f in figures) * MIB for i in range(3))
    return typical, (low, high)
