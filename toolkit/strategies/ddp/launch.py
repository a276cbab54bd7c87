"""torch DistributedDataParallel: Accelerate's distributed type MULTI_GPU.

Accelerate's file has no keys for DDP's own settings; a script passes them as DistributedDataParallelKwargs.
They are read back from a live Accelerator only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import UserError
from toolkit.specs import Cluster, DdpSettings, Plan, Workload
from toolkit.strategies.base import (
    Found,
    LaunchFiles,
    StrategyInfo,
    accelerate_base,
    as_int,
    mixed_precision,
    processes,
    recipe_keys,
)
from toolkit.strategies.parallel import launch as parallel

STRATEGIES = (
    StrategyInfo(
        name="ddp",
        family="ddp",
        engine="MULTI_GPU",
        summary="a full copy on every GPU, gradients averaged in buckets",
        when="it fits on one GPU and more GPUs should make it faster: the least communication of all",
        min_world=2,
        axes=("tp",),
    ),
)
DEFAULTS = DdpSettings(
    bucket_cap_mb=25, gradient_as_bucket_view=False, find_unused_parameters=False, static_graph=False
)
"""torch/nn/parallel/distributed.py, and the same in Accelerate's DistributedDataParallelKwargs. Bucket in
MiB."""


def effective(plan: Plan) -> DdpSettings:
    """DDP's settings with the engine's own where the plan says nothing."""
    stated = {name: value for name, value in vars(plan.ddp).items() if value is not None}
    return DdpSettings(**{**vars(DEFAULTS), **stated})


def check(plan: Plan, workload: Workload, cluster: Cluster) -> None:
    """Nothing besides what the registry's fields and the degrees say."""


def render(plan: Plan, workload: Workload, cluster: Cluster) -> LaunchFiles:
    """An Accelerate file of distributed type MULTI_GPU.

    Raises:
        UserError: the plan changes DDP's own settings, for which Accelerate's file has no key.
    """
    changed = [name for name, value in vars(plan.ddp).items() if value not in (None, getattr(DEFAULTS, name))]
    if changed:
        raise UserError(
            f"ddp {', '.join(changed)} can't be written to an Accelerate file, which has no key for it; pass "
            "DistributedDataParallelKwargs to the Accelerator in the script"
        )
    content = accelerate_base("MULTI_GPU", cluster)
    if section := parallel.render(plan, workload, cluster):
        content["parallelism_config"] = section
    return LaunchFiles(plan=plan, accelerate=content, recipe=recipe_keys(plan), nodes=cluster.nodes)


def read(
    accelerate: Mapping[str, Any], deepspeed: Mapping[str, Any] | None, hidden_size: int | None
) -> Found:
    """The plan of a file of distributed type MULTI_GPU (or its kin for other devices)."""
    return Found(
        plan=parallel.with_degrees(Plan(strategy="ddp"), parallel.read(accelerate)),
        precision=mixed_precision(accelerate),
        processes=processes(accelerate),
        nodes=as_int(accelerate.get("num_machines", 1), "num_machines"),
    )


def observe(accelerator: Any) -> Plan:
    """The plan of a live Accelerator that runs DDP."""
    handler = getattr(accelerator, "ddp_handler", None)
    stated = {name: getattr(handler, name) for name in vars(DEFAULTS) if hasattr(handler, name)}
    changed = {name: value for name, value in stated.items() if value != getattr(DEFAULTS, name)}
    plan = Plan(strategy="ddp", ddp=DdpSettings(**changed))
    return parallel.with_degrees(plan, parallel.observe(accelerator))


def canonical(plan: Plan, cluster: Cluster) -> Plan:
    """Settings that are torch's own are left out."""
    changed = {name: value for name, value in vars(plan.ddp).items() if value != getattr(DEFAULTS, name)}
    return plan.with_(ddp=DdpSettings(**changed))
