"""Degrees across a strategy, as Accelerate's ParallelismConfig takes them: tp, cp, sp and the sharding mesh.

Facts from accelerate 1.15, `accelerate/parallelism_config.py`: the sizes multiply to the number of processes;
context and sequence parallelism exclude each other; tensor and context parallelism do not go with replication
alone (DDP); FSDP2 needs `dp_shard` or `cp` to shard over; sequence parallelism (Ulysses) is DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import UserError
from toolkit.specs import Cluster, Plan, Workload
from toolkit.strategies.base import as_int

PREFIX = "parallelism_config_"
SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")


def data_parallel(plan: Plan, cluster: Cluster) -> int:
    """Ranks that see different samples."""
    return cluster.world_size // (plan.tp * plan.cp * plan.sp)


def shard_size(plan: Plan, cluster: Cluster) -> int:
    """Ranks that share one copy of the parameters along the data-parallel axis.

    Under hsdp without a size of its own that is a node's GPUs, less what the other degrees take of them.
    """
    ranks = data_parallel(plan, cluster)
    if plan.strategy != "hsdp":
        return ranks
    return plan.shard_size or min(ranks, max(1, cluster.gpus_per_node // (plan.tp * plan.cp)))


def composes_with_fsdp() -> bool:
    """Whether the installed transformers has what Accelerate's `_prepare_tp` imports to put FSDP2 around tensor parallelism;
    those that split parameters by DTensors on their own (5.24) have it no more."""
    import transformers.integrations.tensor_parallel as tensor_parallel

    return hasattr(tensor_parallel, "ReplicateParallel")


def check(plan: Plan, workload: Workload, cluster: Cluster, axes: tuple[str, ...]) -> None:
    """Hold the degrees to the number of ranks, the engine and the workload.

    Args:
        plan: the plan.
        workload: the workload.
        cluster: the cluster.
        axes: the degrees that the plan's strategy can be combined with.

    Raises:
        UserError: names the two things that exclude each other.
    """
    world = cluster.world_size
    for axis in ("tp", "cp", "sp"):
        if getattr(plan, axis) > 1 and axis not in axes:
            raise UserError(
                f"{axis} {getattr(plan, axis)} and {plan.strategy} exclude each other; {_HOMES[axis]}"
            )
    if plan.cp > 1 and plan.sp > 1:
        raise UserError(
            f"cp {plan.cp} and sp {plan.sp} exclude each other: both split the sequence; set one of them to 1"
        )
    degrees = plan.tp * plan.cp * plan.sp
    if world % degrees:
        named = " x ".join(f"{axis} {n}" for axis in ("tp", "cp", "sp") if (n := getattr(plan, axis)) > 1)
        raise UserError(
            f"{named} does not divide {world} GPUs; the product of the degrees must be a divisor of {world}"
        )
    if plan.tp > 1 and plan.strategy == "ddp" and plan.tp != world:
        raise UserError(
            f"tp {plan.tp} and ddp over {world} GPUs exclude each other: Accelerate does not replicate a "
            f"tensor-parallel model; use fsdp, or tp {world}"
        )
    if plan.tp > 1 and plan.strategy in ("fsdp", "fsdp-grad", "hsdp") and degrees == world and plan.cp == 1:
        raise UserError(
            f"tp {plan.tp} takes all {world} GPUs and leaves {plan.strategy} none to shard over; use ddp, or "
            "a smaller tp"
        )
    if plan.tp > 1 and workload.method != "full":
        raise UserError(
            f"tp {plan.tp} and method {workload.method} exclude each other: peft can't train adapters on layers that "
            "transformers has split; use fsdp or zero3, or method full"
        )
    _check_sequence(plan, workload, cluster)


_HOMES = {
    "tp": "tensor parallelism goes with fsdp, fsdp-grad or hsdp, or with ddp when it takes all GPUs",
    "cp": "context parallelism goes with fsdp, fsdp-grad or hsdp",
    "sp": "sequence parallelism (Ulysses) goes with zero1, zero2 or zero3",
}


def _check_sequence(plan: Plan, workload: Workload, cluster: Cluster) -> None:
    if plan.cp > 1:
        if workload.attention != "sdpa":
            raise UserError(
                f"cp {plan.cp} and attention {workload.attention} exclude each other: torch splits the "
                "sequence "
                "of its sdpa kernels only; use attention sdpa"
            )
        if cluster.gpu.is_cpu:
            raise UserError(
                f"cp {plan.cp} and gpu cpu exclude each other: the CPU's attention kernel has no rule for "
                "split sequences"
            )
        # Each rank takes one chunk from either end, so that causal attention is shared evenly.
        _check_divides(workload.seq_len, 2 * plan.cp, f"cp {plan.cp}")
    if plan.sp > 1:
        if workload.attention == "eager":
            raise UserError(
                f"sp {plan.sp} and attention eager exclude each other; use attention sdpa or flash"
            )
        _check_divides(workload.seq_len, plan.sp, f"sp {plan.sp}")


def _check_divides(seq_len: int, by: int, axis: str) -> None:
    if seq_len % by:
        near = max(by, seq_len // by * by)
        raise UserError(
            f"seq-len {seq_len} can't be split for {axis}: it must be a multiple of {by}, such as {near}"
        )


def check_shards(plan: Plan, cluster: Cluster) -> None:
    """Hold hsdp's groups to the number of ranks.

    Raises:
        UserError: the data-parallel ranks are no whole number of groups, or groups of one, or one group.
    """
    ranks, size = data_parallel(plan, cluster), shard_size(plan, cluster)
    if size > ranks:
        raise UserError(
            f"shard-size {size} is more than the {ranks} data-parallel ranks; use a divisor of {ranks}"
        )
    if ranks % size:
        raise UserError(
            f"shard-size {size} does not divide {ranks} data-parallel ranks; use a divisor of {ranks}"
        )
    if size == ranks:
        raise UserError(
            f"hsdp with one group of {size} is fsdp; use fsdp, or groups smaller than the {ranks} ranks "
            "(more "
            "nodes, or a shard-size)"
        )
    if size < 2:
        raise UserError(
            f"hsdp with one rank in a group shards nothing; use ddp, or a shard-size above 1 on {ranks} ranks"
        )


def render(plan: Plan, workload: Workload, cluster: Cluster) -> dict[str, Any]:
    """The `parallelism_config` section, or an empty dict when the engine's own ranks are all there is."""
    if plan.tp == plan.cp == plan.sp == 1 and plan.strategy != "hsdp":
        return {}
    ranks, size = data_parallel(plan, cluster), shard_size(plan, cluster)
    if plan.strategy == "ddp":
        size = 1
    section = {
        "dp_replicate_size": ranks // size,
        "dp_shard_size": size,
        "tp_size": plan.tp,
        "cp_size": plan.cp,
        "sp_size": plan.sp,
    }
    content: dict[str, Any] = {PREFIX + key: value for key, value in section.items()}
    if plan.sp > 1:
        kernel = "flash_attention_2" if workload.attention == "flash" else "sdpa"
        content |= {PREFIX + "sp_backend": "deepspeed", PREFIX + "sp_attn_implementation": kernel}
    return content


def read(accelerate: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of an Accelerate file, 1 where it does not say.

    Raises:
        UserError: a size is not a whole number of at least 1.
    """
    section = accelerate.get("parallelism_config") or {}
    sizes = {}
    for name in SIZES:
        sizes[name] = as_int(section.get(PREFIX + name, 1), PREFIX + name)
        if sizes[name] < 1:
            raise UserError(f"{PREFIX + name} is {sizes[name]}; it must be at least 1")
    return sizes


def with_degrees(plan: Plan, sizes: Mapping[str, int]) -> Plan:
    """The plan with the degrees of those sizes."""
    return plan.with_(tp=sizes["tp_size"], cp=sizes["cp_size"], sp=sizes["sp_size"])


def observe(accelerator: Any) -> dict[str, int]:
    """The sizes of a live Accelerator's ParallelismConfig, 1 where there is none."""
    config = getattr(accelerator, "parallelism_config", None)
    return {name: int(getattr(config, name, None) or 1) for name in SIZES}
