"""How long one optimizer step takes: kernels on the roofline, collectives on the topology, overlapped as each engine does it.

The unit of overlap is the layer: while one layer computes, the next one's parameters are gathered and the previous one's
gradients are reduced. What does not fit beside the computation is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolkit.estimate.collectives import Group, Network, group
from toolkit.estimate.result import TimeEstimate
from toolkit.estimate.roofline import Roofline, model_flops, speeds
from toolkit.specs import Cluster, Plan, Workload
from toolkit.timeline.trace import ModelTrace, ParameterInfo

DDP_BUCKET = 25 << 20
"""Bytes of DDP's gradient buckets (torch.nn.parallel.DistributedDataParallel, bucket_cap_mb)."""


@dataclass(frozen=True)
class Software:
    """What other software than Accelerate over today's torch does otherwise with the same plan."""

    attention: str = "attention"
    """Table of speed.yaml for the attention kernels, which differ by year."""
    gathers_root_again: bool = False
    """Embedding and output layer are one FSDP unit that is resharded after forward, so backward waits for it first."""
    reduces_alone: bool = False
    """DDP's accumulated gradients are reduced before the last micro-batch, beside nothing, and its own during its backward."""


@dataclass(frozen=True)
class Sizes:
    """Bytes that the data-parallel collectives of one step carry, unsharded, by place in the model."""

    layer_gather: float
    """Parameters of one layer, in the dtype in which they travel."""
    rest_gather: float
    layer_reduce: float
    """Gradients of one layer."""
    rest_reduce: float
    layers: int
    gathers_per_layer: int
    """How many all-gathers carry one layer: one under FSDP, one per module under ZeRO-3."""
    trainable: float
    """Elements that the optimizer updates."""

    @property
    def reduce(self) -> float:
        return self.layer_reduce * self.layers + self.rest_reduce

    @property
    def gather(self) -> float:
        return self.layer_gather * self.layers + self.rest_gather


@dataclass
class Clock:
    """Seconds of a step so far."""

    compute: float = 0.0
    waiting: float = 0.0
    """For communication and for the host."""

    def beside(self, compute: float, communication: float, slowdown: float, times: float = 1) -> None:
        """Computation with communication at its side: what is longer, and what the kernels lose to it."""
        slowed = compute + slowdown * min(compute, communication)
        self.compute += compute * times
        self.waiting += (max(slowed, communication) - compute) * times

    def wait(self, seconds: float) -> None:
        self.waiting += seconds

    @property
    def total(self) -> float:
        return self.compute + self.waiting


def _sizes(trace: ModelTrace, workload: Workload, plan: Plan) -> Sizes:
    half = workload.precision in ("bf16", "fp16", "bf16-pure")
    sharded = plan.strategy not in ("single", "ddp")
    layers = max(1, len(trace.layer_paths))
    inside = tuple(path + "." for path in trace.layer_paths)

    def travels(p: ParameterInfo) -> float:
        return p.numel * (2 if half and sharded and p.floating else p.itemsize)

    gather, reduce = [0.0, 0.0], [0.0, 0.0]
    wide = sharded and workload.variant.reduce_fp32
    for p in trace.parameters:
        place = 0 if p.name.startswith(inside) else 1
        gather[place] += travels(p)
        if p.trainable:
            reduce[place] += 4.0 * p.numel if wide else travels(p)
    modules = 1
    if plan.strategy == "zero3" and trace.layer_paths:
        modules = max(1, sum(name.startswith(inside[:1]) for name in trace.module_order))
    shard = plan.tp
    return Sizes(gather[0] / layers / shard, gather[1] / shard, reduce[0] / layers / shard, reduce[1] / shard, layers, modules,
                 sum(p.numel for p in trace.trainable) / shard)


class StepClock:
    """Plays one optimizer step of a plan."""

    def __init__(
        self, trace: ModelTrace, workload: Workload, plan: Plan, cluster: Cluster, software: Software | None = None
    ) -> None:
        self.trace, self.workload, self.plan, self.cluster = trace, workload, plan, cluster
        self.software = software or Software()
        self.model_ranks = plan.tp * plan.cp * plan.sp
        self.replicas = max(1, cluster.world_size // self.model_ranks)
        self.network = Network(cluster)
        self.roofline = Roofline(cluster.gpu, workload, self.software.attention, cluster.world_size)
        self.sizes = _sizes(trace, workload, plan)
        self.phases = self.roofline.phases(trace, plan.tp, plan.cp * plan.sp)
        # Context and sequence parallel ranks hold shards too; tensor parallel ranks hold other parameters.
        ranks = max(1, cluster.world_size // plan.tp)
        self.everyone = group(cluster, ranks, plan.tp)
        inner = plan.shard_size or cluster.gpus_per_node
        self.shards = group(cluster, min(inner, ranks), plan.tp) if plan.strategy == "hsdp" else self.everyone
        self.copies = Group(ranks // self.shards.ranks, 1) if plan.strategy == "hsdp" else Group(1, 1)

    def run(self) -> Clock:
        """The whole step."""
        plays: dict[str, Callable[[Clock, bool], None]] = {
            "single": self._plain, "ddp": self._ddp, "zero1": self._zero12, "zero2": self._zero12,
        }  # fmt: skip
        play = plays.get(self.plan.strategy, self._sharded)
        clock = Clock()
        for last in [False] * (self.workload.accumulate > 1) + [True]:
            times = 1 if last else self.workload.accumulate - 1
            one = Clock()
            play(one, last)
            self._inside_layers(one)
            clock.compute += one.compute * times
            clock.waiting += one.waiting * times
        self._optimizer(clock)
        return clock

    # -- micro-batches -----------------------------------------------------------------------------------------

    def _plain(self, clock: Clock, last: bool) -> None:
        clock.compute += self.phases.forward + self.phases.backward

    def _ddp(self, clock: Clock, last: bool) -> None:
        """Buckets are reduced while backward goes on; the last one stands alone."""
        clock.compute += self.phases.forward
        if not last:
            clock.compute += self.phases.backward
            return
        whole = self.network.all_reduce(self.sizes.reduce, self.everyone)
        tail = self.network.all_reduce(min(DDP_BUCKET, self.sizes.reduce), self.everyone)
        clock.beside(self.phases.backward, max(0.0, whole - tail), self.network.slowdown(self.everyone))
        clock.wait(tail + (whole if self.software.reduces_alone else 0.0))

    def _zero12(self, clock: Clock, last: bool) -> None:
        """Gradients go to their owners during backward: under stage 2 in every micro-batch, under stage 1 in the last."""
        clock.compute += self.phases.forward
        if self.plan.strategy == "zero1" and not last:
            clock.compute += self.phases.backward
            return
        bucket = 2.0 * (self.plan.bucket or 5e8)
        whole = self.network.all_reduce(self.sizes.reduce, self.everyone) if self.plan.strategy == "zero1" else \
            self.network.all_gather(self.sizes.reduce, self.everyone)
        tail = min(1.0, bucket / max(1.0, self.sizes.reduce)) * whole
        clock.beside(self.phases.backward, whole - tail, self.network.slowdown(self.everyone))
        clock.wait(tail)

    def _sharded(self, clock: Clock, last: bool) -> None:
        """FSDP and ZeRO-3: gather ahead of each layer in forward and backward, reduce behind it."""
        sizes, net, phases = self.sizes, self.network, self.phases
        slow = net.slowdown(self.shards)
        extra = (sizes.gathers_per_layer - 1) * net.table["fixed"]
        gather = self._from_host(net.all_gather(sizes.layer_gather, self.shards) + extra, sizes.layer_gather)
        rest = self._from_host(net.all_gather(sizes.rest_gather, self.shards), sizes.rest_gather)
        copied_out, copied_in = self._copies()
        forward, backward = phases.forward_layers / sizes.layers + copied_out, phases.backward_layers / sizes.layers
        clock.wait(rest + gather + (rest if self.software.gathers_root_again else 0.0))
        clock.beside(forward, gather, slow, sizes.layers - 1)
        clock.compute += forward + phases.forward_rest
        reduces = last or self.plan.strategy == "zero3" or bool(self.plan.fsdp.sync_each_micro_batch)
        reduce = net.all_gather(sizes.layer_reduce, self.shards) if reduces else 0.0
        reduce += net.all_reduce(sizes.layer_reduce / self.shards.ranks, self.copies) if last else 0.0
        if self.plan.strategy == "fsdp-grad":
            again = copied_out = 0.0
        else:
            again = gather
        backward += copied_out + (copied_in if reduces else 0.0)
        clock.beside(backward, again + reduce, slow, sizes.layers)
        clock.compute += phases.backward_rest
        clock.wait(reduce + (net.all_gather(sizes.rest_reduce, self.shards) if reduces else 0.0))

    def _copies(self) -> tuple[float, float]:
        """Seconds in which a layer's parameters are copied out of what FSDP gathered, and its gradients into what it reduces.

        FSDP2: `all_gather_copy_out` and `reduce_scatter_copy_in` (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py), both
        on the stream that computes. FSDP1's parameters are views of what is gathered; the gradient of those views is a copy.
        """
        if not self.plan.strategy.startswith(("fsdp", "hsdp")) or self.shards.ranks == 1:
            return 0.0, 0.0
        sizes, bandwidth = self.sizes, self.roofline.bandwidth
        out = 2 * sizes.layer_gather / bandwidth if self.plan.fsdp.version == 2 else 0.0
        return out, (min(sizes.layer_gather, sizes.layer_reduce) + sizes.layer_reduce) / bandwidth

    def _from_host(self, seconds: float, nbytes: float) -> float:
        """A gather whose shards come from the host first: over PCIe, or from the disk."""
        if self.plan.offload != "all":
            return seconds
        share = nbytes / self.shards.ranks
        moved = share / self.cluster.gpu.pcie_bandwidth
        if self.plan.offload_to == "nvme":
            moved = max(moved, share * self.cluster.gpus_per_node / speeds()["host"]["nvme_bandwidth"])
        return max(seconds, moved)

    def _inside_layers(self, clock: Clock) -> None:
        """What tensor and context parallel ranks send in every layer, which the layer waits for."""
        plan, work = self.plan, self.workload
        element = 2 if work.precision != "fp32" else 4
        tokens = work.micro_batch * work.seq_len / (plan.cp * plan.sp)
        layers = self.sizes.layers
        if plan.tp > 1:
            ranks = group(self.cluster, plan.tp)
            one = self.network.all_reduce(tokens * self.trace.hidden_size * element, ranks)
            # Two in forward, two in backward, and those of forward again where it is repeated.
            clock.wait((6 if plan.checkpointing == "full" else 4) * layers * one)
        if plan.cp * plan.sp > 1:
            ranks = group(self.cluster, plan.cp * plan.sp, plan.tp)
            states = 2 * work.micro_batch * work.seq_len * self.trace.hidden_size * element / plan.tp
            clock.wait(3 * layers * self.network.all_gather(states, ranks) * 0.5)

    # -- the update --------------------------------------------------------------------------------------------

    def _optimizer(self, clock: Clock) -> None:
        """Clipping, the update of this rank's share, and what follows it."""
        plan, gpu = self.plan, self.cluster.gpu
        sharded = plan.strategy not in ("single", "ddp")
        elements = self.sizes.trainable / (self.shards.ranks if sharded else 1)
        if plan.offload == "none":
            clock.compute += elements * (self._update_bytes() + 12) / self.roofline.bandwidth
        else:
            host = speeds()["host"]
            on_node = elements * self.cluster.gpus_per_node
            clock.wait(elements * 4 / gpu.pcie_bandwidth + elements * 2 / gpu.pcie_bandwidth)
            clock.wait(on_node * speeds()["optimizer"]["fused"] / host["memory_bandwidth"])
            if plan.offload_to == "nvme":
                clock.wait(on_node * 24 / host["nvme_bandwidth"])
        if plan.strategy in ("zero1", "zero2"):
            clock.wait(self.network.all_gather(self.sizes.gather, self.everyone))

    def _update_bytes(self) -> float:
        """Bytes of device memory that the update moves per element."""
        work = self.workload
        table = speeds()["optimizer"]
        impl = work.optimizer_impl
        if impl == "default":
            impl = "fused" if self.plan.strategy.startswith("zero") else "foreach"
        scale = 0.5 if work.precision == "bf16-pure" else 1.0
        share = {"adamw": 1.0, "adamw-8bit": 0.5, "paged-adamw-8bit": 0.5, "lion": 0.7, "sgd": 0.3, "adafactor": 0.8}
        return float(table[impl] * scale * share[work.optimizer])


def step_time(
    trace: ModelTrace, workload: Workload, plan: Plan, cluster: Cluster, *, software: Software | None = None
) -> TimeEstimate:
    """Seconds of one optimizer step of the whole job, tokens per second, MFU, and the share spent waiting.

    Args:
        software: what ran it, where that is not Accelerate over today's torch.

    MFU counts model FLOPs without recomputation over the dense 16-bit peak of all GPUs; None on a CPU.
    """
    step = StepClock(trace, workload, plan, cluster, software)
    clock = step.run()
    seconds = clock.total
    tokens = workload.micro_batch * workload.accumulate * workload.seq_len * step.replicas
    peak = cluster.gpu.bf16_flops or cluster.gpu.fp16_flops
    flops = model_flops(trace) * workload.accumulate * step.replicas
    return TimeEstimate(
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        tokens_per_second_per_gpu=tokens / seconds / cluster.world_size,
        mfu=None if peak is None or cluster.gpu.is_cpu else flops / seconds / (peak * cluster.world_size),
        communication_share=clock.waiting / seconds,
    )
