"""What DeepSpeed ZeRO-1 and ZeRO-2 allocate: flat weights, a master partition, buckets, a flat gradient.

Read from DeepSpeed 0.19.8 `deepspeed/runtime/zero/stage_1_and_2.py` (DeepSpeedZeroOptimizer); the names in quotes are
its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from toolkit.specs import Cluster, Plan, Workload
from toolkit.strategies.lowering import Engine
from toolkit.timeline.optimizers import OptimizerTensor, play_step
from toolkit.timeline.tape import Tape
from toolkit.timeline.trace import Mark, ModelTrace, ParameterInfo
from toolkit.timeline.tracing import Numerics

START_ALIGNMENT = 2
"""`nccl_start_alignment_factor`: the flat group is padded to a multiple of this times the number of ranks."""
SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}


def zero_numerics(workload: Workload, plan: Plan, device: str) -> Numerics:
    """DeepSpeed casts the parameters, leaves buffers as they were loaded (runtime/engine.py, _cast_module_mixed_precision), and
    does not autocast."""
    low = workload.precision in ("bf16", "fp16", "bf16-pure")
    compute = "fp16" if workload.precision == "fp16" else "bf16"
    return Numerics(device="cpu" if device == "cpu" else "cuda", compute_dtype=compute if low else "loaded",  # type: ignore[arg-type]
                    keeps_inputs=plan.strategy == "zero3", checkpointing=plan.checkpointing)


@dataclass
class Slice:
    """Where a parameter lies in the flat group."""

    info: ParameterInfo
    start: int
    partitions: tuple[int, ...]


class ZeroEngine(Engine):
    """What all stages share: the dtypes, the flat group and its partitions."""

    numerics = staticmethod(zero_numerics)

    def __init__(self, trace: ModelTrace, workload: Workload, plan: Plan, cluster: Cluster) -> None:
        super().__init__(trace, workload, plan, cluster)
        from toolkit.strategies.zero.launch import effective

        self.settings = effective(plan, workload)
        self.low = workload.precision in ("bf16", "fp16", "bf16-pure")
        self.bucket_size = int(self.settings.reduce_bucket or 0)
        self.overlap = bool(self.settings.overlap_comm)
        self.offload = plan.offload != "none"

    def size_of(self, p: ParameterInfo) -> int:
        """Bytes per element of the weights that the model computes with."""
        if not p.floating:
            return p.itemsize
        return SIZES["fp16" if self.workload.precision == "fp16" else "bf16"] if self.low else p.itemsize

    @cached_property
    def weight_size(self) -> int:
        """Bytes per element of the trainable weights."""
        trainable = self.trace.trainable
        return self.size_of(trainable[0]) if trainable else 4

    @cached_property
    def accumulation_size(self) -> int:
        """Bytes per element of accumulated gradients (`data_types.grad_accum_dtype`, else the weights' dtype)."""
        return SIZES[self.settings.grad_accum_dtype] if self.settings.grad_accum_dtype else self.weight_size


class Zero12Engine(ZeroEngine):
    """Stages 1 and 2."""

    def __init__(self, trace: ModelTrace, workload: Workload, plan: Plan, cluster: Cluster) -> None:
        super().__init__(trace, workload, plan, cluster)
        self.stage = 2 if plan.strategy == "zero2" else 1
        total = sum(p.numel for p in trace.trainable)
        step = START_ALIGNMENT * self.world
        self.flat_numel = -(-total // step) * step
        self.partition = self.flat_numel // self.world
        self.slices: dict[str, Slice] = {}
        start = 0
        for p in trace.trainable:
            last = max(start, start + p.numel - 1)
            partitions = tuple(range(start // self.partition, last // self.partition + 1))
            self.slices[p.name] = Slice(p, start, partitions)
            start += p.numel
        self.mine = [s for s in self.slices.values() if 0 in s.partitions]
        self.mine_numel = sum(s.info.numel for s in self.mine)
        self.bucket: list[str] = []
        self.elements = 0
        self.in_bucket: set[str] = set()
        self.copied = False
        self.epoch = 0

    # -- before the first step ---------------------------------------------------------------------------------

    def setup(self, tape: Tape) -> None:
        for p in self.trace.parameters:
            if not p.trainable:
                tape.alloc(("parameter", p.name), p.numel * self.size_of(p), "parameters", p.name)
        tape.alloc("flat", self.flat_numel * self.weight_size, "parameters", "flat weights")
        if not self.offload:
            tape.alloc("master", self.partition * 4, "master_weights", "fp32 partition")
        else:
            self._setup_host(tape)
        tape.alloc("buffers", self.trace.buffers, "parameters", "buffers")
        tape.alloc("batch", self.trace.batch, "activations", "inputs")

    def _setup_host(self, tape: Tape) -> None:
        """fp32 partition, its 16-bit copy, the fp32 gradient and the moments live on the host
        ("param_buffer_of_bit16_for_cpu_offload_groups", "temp_grad_buffer_for_cpu_offload")."""
        largest = max((p.numel for p in self.trace.trainable), default=0)
        pinned = [self.partition * 4, self.partition * self.weight_size, self.partition * 4, largest * self.weight_size]
        on_host = sum(pinned) + 8 * self.partition
        if self.settings.pin_memory and self.device != "cpu":
            self.host.pinned += pinned
            self.host.plain += 8 * self.partition
        else:
            self.host.plain += on_host
        tape.alloc("offload-staging", largest * self.weight_size, "communication", "temp_grad_buffer_for_gpu_offload")
        if self.device == "cpu":
            tape.alloc("host-master", self.partition * 4, "master_weights", "fp32 partition (offloaded)")
            tape.alloc("host-buffers", self.partition * (self.weight_size + 4) + largest * self.weight_size,
                       "communication", "offload buffers")

    # -- gradients ---------------------------------------------------------------------------------------------

    def micro_begins(self, tape: Tape, first: bool, last: bool) -> None:
        super().micro_begins(tape, first, last)
        if first or self.stage == 2:
            self.buffered = False

    def gradient(self, tape: Tape, mark: Mark) -> None:
        super().gradient(tape, mark)
        if mark.name not in self.slices:
            return
        if not self.buffered:
            self.buffered = True
            for i in range(2 if self.overlap else 1):
                tape.alloc(("bucket", i), self.bucket_size * self.weight_size, "communication", "reduce bucket")
        if self.stage == 2 or (self.overlap and self.last):
            self._into_bucket(tape, mark.name)

    def _into_bucket(self, tape: Tape, name: str) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads"""
        info = self.slices[name].info
        if self.elements + info.numel > self.bucket_size:
            self._reduce_bucket(tape)
        if info.numel <= self.bucket_size:
            self.in_bucket.add(name)
            if name in self.gradients:
                self.drop_gradient(tape, name)
        self.elements += info.numel
        self.bucket.append(name)

    def _reduce_bucket(self, tape: Tape) -> None:
        """reduce_ipg_grads: average the bucket, then keep what belongs to this rank's partition."""
        if self.bucket:
            runs: list[int] = []
            for name in self.bucket:
                for partition in self.slices[name].partitions:
                    if not runs or runs[-1] != partition:
                        runs.append(partition)
            if len(runs) > 1:
                # slices for different ranks are concatenated before they are reduced
                tape.transient(self.elements * self.weight_size, "communication", "flattened reduce bucket")
        for name in self.bucket:
            own = 0 in self.slices[name].partitions
            if own and not self.copied and not self.offload:
                self.copied = True
                tape.alloc(("partition", self.epoch), self.mine_numel * self.weight_size, "gradients", "gradient partition")
            if name in self.gradients and (own or self.stage == 2):
                self.drop_gradient(tape, name)
        self.bucket.clear()
        self.in_bucket.clear()
        self.elements = 0

    def backward_done(self, tape: Tape) -> None:
        """reduce_gradients of stage 1, then independent_gradient_partition_epilogue."""
        if self.stage == 1 and not self.last:
            return  # gradients wait for the last micro-batch, and so does the bucket
        self._reduce_the_rest(tape)
        if self.epoch and tape.held(("partition", 0)):
            tape.free(("partition", self.epoch))  # added to what earlier micro-batches left
        tape.free(("bucket", 0))
        tape.free(("bucket", 1))
        self.copied = False
        self.epoch += 1
        for name in list(self.gradients):
            self.drop_gradient(tape, name)

    def _reduce_the_rest(self, tape: Tape) -> None:
        """What is in the bucket; in stage 1 without overlap that is every gradient, for none was put there in backward."""
        if self.stage == 1 and not self.overlap:
            for name in self.slices:
                if name in self.gradients:
                    self._into_bucket(tape, name)
        self._reduce_bucket(tape)

    def _free_partition(self, tape: Tape) -> None:
        tape.free(("partition", 0))

    # -- optimizer ---------------------------------------------------------------------------------------------

    def optimizer_tensors(self) -> list[OptimizerTensor]:
        return [OptimizerTensor(self.partition, 4, (self.partition,))] if self.trace.trainable else []

    def step(self, tape: Tape) -> None:
        tensors = self.optimizer_tensors()
        if self.offload:
            if self.device == "cpu":
                self.create_states(tape, tensors)
        else:
            largest = max((p.numel for p in self.trace.trainable), default=0)
            tape.transient(8 * min(self.partition, largest), "temporaries", "a gradient in fp64, for its norm")
            flat = self.partition * self.accumulation_size
            tape.alloc("flat-gradient", flat, "gradients", "flat gradient partition")
            if self.accumulation_size != 4:
                tape.alloc("fp32-gradient", self.partition * 4, "gradients", "fp32 gradient partition")
                tape.free("flat-gradient")
            self._free_partition(tape)
            self.create_states(tape, tensors)
            play_step(tape, tensors, self.workload.optimizer, self.impl)
            tape.free("flat-gradient")
            tape.free("fp32-gradient")
        self._free_partition(tape)
        self.epoch = 0
