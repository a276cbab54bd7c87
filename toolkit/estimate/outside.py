"""What lies outside the caching allocator: the device context, communicators. Data with sources and an interval, which a run on
the machine itself replaces."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
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
    context = table["context_eager"] if eager else table["context"].get(cluster.gpu.architecture, table["context"]["default"])
    count = communicators(plan, cluster.world_size)
    joined = cluster.gpu.architecture if cluster.gpu.link in ("nvlink", "nvswitch") else "default"
    world = table["nccl"].get(joined, table["nccl"]["default"])["two_ranks" if cluster.world_size == 2 else "more_ranks"]
    figures = [world, *[table["further_communicator"]] * (count - 1)] if count else []
    fixed = 0
    if cluster.outside_measured is None:
        figures.append(context)
    else:
        # measured with more than one rank it holds the world's communicator already
        fixed, ranks = cluster.outside_measured
        figures = figures[1:] if ranks > 1 else figures
    low, typical, high = (fixed + sum(f[i] for f in figures) * MIB for i in range(3))
    return typical, (low, high)


def read_calibration(path: str | Path) -> tuple[int, int]:
    """(bytes outside the allocator, ranks) as a run on the target machine measured them: its memory.json, or its folder.

    Raises:
        UserError: not such a file, or one of a CPU run, which has nothing outside its tensors to calibrate.
    """
    file = Path(path) / "memory.json" if Path(path).is_dir() else Path(path)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"calibration {str(path)!r} can't be read: {error.strerror or error}") from None
    except ValueError:
        raise UserError(f"calibration {str(path)!r} is not JSON; it must be the memory.json of a run") from None
    measured = content.get("measured") if isinstance(content, dict) else None
    if not isinstance(measured, dict) or not isinstance(measured.get("peak_by_rank"), list) or not measured["peak_by_rank"]:
        raise UserError(f"calibration {str(path)!r} holds no measured run; it must be the memory.json of a run")
    outside = measured.get("outside")
    if outside is None:
        raise UserError(f"calibration {str(path)!r} was measured on a CPU, where nothing lies outside the allocator to calibrate")
    if isinstance(outside, bool) or not isinstance(outside, int) or not 0 <= outside < 1 << 40:
        raise UserError(f"calibration {str(path)!r}: measured.outside is {outside!r}; it must be a number of bytes")
    return outside, len(measured["peak_by_rank"])
