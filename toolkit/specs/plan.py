"""How a workload is spread: the strategy and its knobs, with the engine's own settings spelled out.

A setting that is None was not written by the user: the engine's default holds, and the strategy fills it in
(`toolkit/strategies/<family>`). Nothing else in the toolkit knows those defaults.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from toolkit.specs.check import check_choices, check_positive

StrategyName = Literal["single", "ddp", "fsdp", "fsdp-grad", "hsdp", "zero1", "zero2", "zero3"]
Checkpointing = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "all"]
OffloadTo = Literal["cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class DdpSettings:
    """torch DistributedDataParallel as Accelerate's DistributedDataParallelKwargs sets it."""

    bucket_cap_mb: int | None = None
    gradient_as_bucket_view: bool | None = None
    find_unused_parameters: bool | None = None
    static_graph: bool | None = None


@dataclass(frozen=True, kw_only=True)
class FsdpSettings:
    """FSDP2 as Accelerate's FullyShardedDataParallelPlugin sets it (version 1 only for estimates)."""

    version: Literal[1, 2] = 2
    wrap: Literal["transformer", "size", "none"] = "transformer"
    wrap_classes: tuple[str, ...] = ()
    """Layer classes that are units; empty: the model's own `_no_split_modules`."""
    min_num_params: int | None = None
    sync_each_micro_batch: bool | None = None
    """True: reduce gradients after each micro-batch instead of keeping them unsharded in between."""
    ram_efficient_loading: bool | None = None
    state_dict: Literal["sharded", "full"] | None = None


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """DeepSpeed's `zero_optimization` and neighbours; sizes in elements."""

    reduce_bucket: int | None = None
    allgather_bucket: int | None = None
    prefetch_bucket: int | None = None
    max_live_parameters: int | None = None
    max_reuse_distance: int | None = None
    sub_group_size: int | None = None
    overlap_comm: bool | None = None
    contiguous_gradients: bool | None = None
    round_robin_gradients: bool | None = None
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    gradient_clipping: float | None = None
    pin_memory: bool | None = None
    gather_16bit_on_save: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to run a workload on a cluster."""

    strategy: StrategyName = "single"
    checkpointing: Checkpointing = "none"
    offload: Offload = "none"
    offload_to: OffloadTo = "cpu"
    tp: int = 1
    cp: int = 1
    sp: int = 1
    shard_size: int | None = None
    """Ranks that share one copy of the model under hsdp; None: the GPUs of a node."""
    bucket: int | None = None
    """Elements of DeepSpeed's reduce and allgather buckets and stage-3 prefetch bucket; None: DeepSpeed's defaults."""
    persist: int | None = None
    """Stage-3 persistence threshold in elements; None: DeepSpeed's default."""
    ddp: DdpSettings = field(default_factory=DdpSettings)
    fsdp: FsdpSettings = field(default_factory=FsdpSettings)
    zero: ZeroSettings = field(default_factory=ZeroSettings)

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "tp", "cp", "sp", limit=100_000)
        for name in ("bucket", "shard_size"):
            if getattr(self, name) is not None:
                check_positive(self, name, limit=10**13)

    def with_(self, **changes: object) -> Plan:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @property
    def label(self) -> str:
        """The strategy with its aids, as tables and file names show it: `zero3-offload-all`."""
        parts: list[str] = [self.strategy]
        if self.offload != "none":
            parts.append(f"offload-{self.offload}" + ("-nvme" if self.offload_to == "nvme" else ""))
        parts += [f"{axis}{degree}" for axis in ("tp", "cp", "sp") if (degree := getattr(self, axis)) > 1]
        return "-".join(parts)
