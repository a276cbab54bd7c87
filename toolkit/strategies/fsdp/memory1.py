"""What FSDP1 allocates: flat parameters per unit, gathered whole, one flat gradient per unit. For estimates only.

Read from torch 2.4 `torch/distributed/fsdp/{_flat_param,_runtime_utils,_limiter_utils}.py`:

* a unit (each layer; the root holds the rest) is one flat parameter, padded to the number of ranks; trainable and frozen
  parameters are taken as flat parameters of their own, as peft's and the recipes' wrap policies make them;
* `_unshard` allocates the padded flat parameter on the unshard stream, after a low-precision copy of the shard when mixed
  precision asks for one; there is no copy-out, the modules see views of it;
* `_post_forward_reshard` frees it, but never the root's; with BACKWARD_PRE `_pre_backward_hook` prefetches the next unit, unless
  that has no hooks of its own yet (`_needs_pre_backward_unshard`), as under reentrant checkpointing, whose first pass sets none;
* the gradients of the views meet in the backward of `split`, which concatenates them into one flat gradient;
  `_reduce_grad` pads it when it does not divide and scatters it into a shard, which is cast to the kept dtype;
* under reentrant checkpointing a frozen unit registers its reshard hook in the recomputed forward, on the detached leaf
  inputs (`_register_post_backward_reshard_only_hook`; the first forward runs without gradients and registers none). The
  hook keeps the leaf's AccumulateGrad node and so the layer's input and its gradient, until the end of backward;
* `_FreeEventQueue`: the CPU waits before an all-gather while two freed units are not yet done with on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from toolkit.specs import Cluster, Plan, Workload
from toolkit.strategies.lowering import Engine
from toolkit.strategies.parallel import launch as parallel
from toolkit.timeline.optimizers import OptimizerTensor
from toolkit.timeline.tape import Tape
from toolkit.timeline.trace import Mark, ModelTrace, ParameterInfo
from toolkit.timeline.tracing import Numerics

_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
UNSHARD_STREAM = 1
REDUCE_STREAM = 2
BROADCAST_BUCKET = 250 << 20
"""torch/distributed/fsdp/_init_utils.py, PARAM_BROADCAST_BUCKET_SIZE."""
BROADCASTS = 2
"""Buckets that are under way at a time."""


@dataclass
class FlatUnit:
    """One FSDP1 instance."""

    name: str
    parameters: list[ParameterInfo]
    root: bool = False
    index: int = -1
    """Place in the order of the forward."""
    mixed: bool = False
    """Frozen and trained parameters share the flat parameter, which then takes a gradient as a whole."""
    unsharded: bool = False
    waiting: set[str] = field(default_factory=set)
    """Trainable parameters whose gradient of this micro-batch is not there yet."""

    @property
    def trainable(self) -> list[ParameterInfo]:
        return [p for p in self.parameters if p.trainable]

    @property
    def takes_gradient(self) -> list[ParameterInfo]:
        """What the flat parameter's gradient covers."""
        return self.parameters if self.mixed and self.trainable else self.trainable


class Fsdp1Engine(Engine):
    """FULL_SHARD (fsdp) and SHARD_GRAD_OP (fsdp-grad) with a transformer wrap policy."""

    def __init__(self, trace: ModelTrace, workload: Workload, plan: Plan, cluster: Cluster) -> None:
        super().__init__(trace, workload, plan, cluster)
        self.mixed = workload.precision if workload.precision in ("bf16", "fp16") else None
        # Context-parallel ranks share the shards, tensor-parallel ranks hold other parameters (Accelerate's dp_shard_cp mesh).
        self.shard = parallel.shard_size(plan, cluster) * plan.cp
        self.offload = plan.offload == "all" and self.device != "cpu"
        self.reshard = plan.strategy != "fsdp-grad"
        self.units = self._carve()
        self.unit_of = {unit.name: unit for unit in self.units}
        self.of_parameter = {p.name: unit for unit in self.units for p in unit.parameters}
        self.order: list[FlatUnit] = []
        self.left: FlatUnit | None = None
        self.kept: list[str] = []
        """Units whose inputs are kept, in the order of backward."""
        self.reentrant = workload.variant.reentrant and plan.checkpointing == "full"
        self.input_size = 4 if workload.precision == "fp32" else 2

    @staticmethod
    def numerics(workload: Workload, plan: Plan, device: str) -> Numerics:
        """Units are gathered in the low precision, and Accelerate autocasts around FSDP1 (`native_amp`)."""
        low = workload.precision if workload.precision in ("bf16", "fp16") else None
        return Numerics(device="cpu" if device == "cpu" else "cuda", compute_dtype=low or "loaded", autocast=low or "none",
                        checkpointing=plan.checkpointing)

    @staticmethod
    def wants(trace: ModelTrace) -> Callable[[Mark], bool]:
        names = {*trace.layer_paths, ""}
        return lambda mark: mark.kind in ("gradient", "backward-done") or mark.name in names

    def _carve(self) -> list[FlatUnit]:
        layers = {path: FlatUnit(path, []) for path in self.trace.layer_paths} if self.plan.fsdp.wrap != "none" else {}
        root = FlatUnit("", [], root=True)
        for p in self.trace.parameters:
            path = p.modules[0] if p.modules else ""
            while path and path not in layers:
                path = path.rpartition(".")[0]
            layers.get(path, root).parameters.append(p)
        units = [root, *(u for u in layers.values() if u.parameters)]
        for unit in units:
            unit.mixed = self.workload.variant.mixed_flat
        return units

    # -- sizes -------------------------------------------------------------------------------------------------

    def kept_size(self, p: ParameterInfo) -> int:
        """Accelerate upcasts the flat parameters that are trained under mixed precision."""
        return 4 if p.trainable and self.mixed and p.floating else p.itemsize

    def compute_size(self, p: ParameterInfo) -> int:
        return _SIZES[self.mixed] if self.mixed and p.floating else p.itemsize

    def shard_numel(self, parameters: list[ParameterInfo]) -> int:
        return -(-sum(p.numel for p in parameters) // self.shard)

    def shard_bytes(self, parameters: list[ParameterInfo], size: Callable[[ParameterInfo], int]) -> int:
        return -(-sum(p.numel * size(p) for p in parameters) // self.shard)

    # -- before the first step ---------------------------------------------------------------------------------

    def setup(self, tape: Tape) -> None:
        for unit in [*self.units[1:], self.units[0]]:  # the root is wrapped last
            what = f"flat parameter of {unit.name or 'the root'}"
            kept = self.shard_bytes(unit.parameters, self.kept_size)
            # FlatParamHandle: the unit's parameters come to the device, are concatenated, and a copy of the shard stays
            for p in unit.parameters:
                tape.alloc(("loaded", p.name), p.nbytes, "parameters", p.name)
            self._broadcast(tape, unit)
            whole = self.shard_bytes(unit.parameters, lambda p: p.itemsize) * self.shard
            tape.alloc(("whole", unit.name), whole, "parameters", what)
            for p in unit.parameters:
                tape.free(("loaded", p.name))
            if self.offload:
                self.host.pinned.append(kept)
            else:
                tape.alloc(("flat", unit.name), kept, "parameters", what)
            tape.free(("whole", unit.name))
        self.setup_rest(tape)

    def _broadcast(self, tape: Tape, unit: FlatUnit) -> None:
        """sync_module_states: tensors go flat from rank 0 to the others, in buckets of which two are in flight
        (torch/csrc/distributed/c10d/comm.cpp, broadcast_coalesced)."""
        buckets, size = [], 0
        for p in unit.parameters:
            size += p.nbytes
            if size >= BROADCAST_BUCKET:
                buckets.append(size)
                size = 0
        for i, nbytes in enumerate([*buckets, size] if self.shard > 1 else []):
            tape.free(("bucket", i - BROADCASTS))
            tape.alloc(("bucket", i), nbytes, "communication", f"broadcast of {unit.name or 'the root'}")
        for i in range(len(buckets) + 1):
            tape.free(("bucket", i))

    # -- gathering ---------------------------------------------------------------------------------------------

    def _unshard(self, tape: Tape, unit: FlatUnit) -> None:
        if unit.unsharded or self.shard == 1:
            return
        unit.unsharded = True
        what = unit.name or "the root"
        cast = sum(p.numel * self.compute_size(p) for p in unit.parameters
                   if self.offload or self.compute_size(p) != self.kept_size(p))
        tape.alloc(("cast", unit.name), -(-cast // self.shard), "communication", f"low-precision shard of {what}", UNSHARD_STREAM)
        whole = self.shard_bytes(unit.parameters, self.compute_size) * self.shard
        tape.alloc(("unsharded", unit.name), whole, "parameters", f"gathered {what}", UNSHARD_STREAM)
        tape.free(("cast", unit.name))

    def _reshard(self, tape: Tape, unit: FlatUnit) -> None:
        unit.unsharded = False
        tape.free(("unsharded", unit.name), lags=True)

    def forward_begin(self, tape: Tape, module: str) -> None:
        unit = self.unit_of.get(module)
        if unit is not None and tape.phase != "backward":
            self._unshard(tape, unit)

    def forward_end(self, tape: Tape, module: str) -> None:
        unit = self.unit_of.get(module)
        if unit is None or tape.phase == "backward":
            return
        unit.index = len(self.order)
        self.order.append(unit)
        unit.waiting = {p.name for p in unit.trainable}
        if self.reshard and not unit.root:
            self._reshard(tape, unit)

    def backward_begin(self, tape: Tape, module: str) -> None:
        unit = self.unit_of.get(module)
        if unit is None or unit.index < 0:
            return
        self._keep_inputs(tape)
        self._unshard(tape, unit)
        if self.reentrant:
            # the recomputed forward frees the unit as any forward does, and only it tells that a backward will want it
            if not unit.root:
                self._reshard(tape, unit)
                self._unshard(tape, unit)
        elif unit.index > 0:
            self._unshard(tape, self.order[unit.index - 1])
        unit.index = -1

    def backward_end(self, tape: Tape, module: str) -> None:
        unit = self.unit_of.get(module)
        if unit is not None and not unit.root and any(not p.trainable for p in unit.parameters):
            if not self.workload.variant.frozen_stays:
                self._reshard(tape, unit)  # a frozen unit: _register_post_backward_reshard_only_hook
            self.left = unit

    def _keep_inputs(self, tape: Tape) -> None:
        """The layer that backward has left keeps its input, the one before it that input's gradient as well: until then the
        gradient was that of the left layer's output."""
        unit, self.left = self.left, None
        if unit is None or not self.reentrant:
            return
        work = self.workload
        size = work.micro_batch * work.seq_len * self.trace.hidden_size * self.input_size
        what = "inputs of frozen units and their gradients"
        tape.alloc(("kept-input", unit.name), size, "activations", what)
        if self.kept:
            tape.alloc(("kept-gradient", self.kept[-1]), size, "activations", what)
        self.kept.append(unit.name)

    # -- gradients ---------------------------------------------------------------------------------------------

    def gradient(self, tape: Tape, mark: Mark) -> None:
        super().gradient(tape, mark)
        unit = self.of_parameter.get(mark.name)
        if unit is None or not unit.waiting:
            return
        unit.waiting.discard(mark.name)
        if not unit.waiting:
            self._reduce(tape, unit)

    def _reduce(self, tape: Tape, unit: FlatUnit) -> None:
        """The backward of `split`, then _post_backward_hook."""
        mine = [p for p in unit.trainable if p.name in self.gradients]
        if not mine:
            return
        what = unit.name or "the root"
        size = self.compute_size(mine[0])
        flat = unit.takes_gradient
        numel = sum(p.numel for p in flat)
        if len(flat) > 1:
            # views of frozen parameters in a mixed flat parameter require gradients too: they are made and concatenated
            frozen = sum(p.numel for p in flat if not p.trainable) * size
            tape.alloc(("frozen-gradients", unit.name), frozen, "gradients", f"gradients of frozen parameters of {what}")
            again = bool(tape.held(("flat-gradient", unit.name)))  # a later micro-batch's is added to the first one
            name = ("new-gradient" if again else "flat-gradient", unit.name)
            tape.alloc(name, numel * size, "gradients", f"flat gradient of {what}")
            for p in mine:
                self.drop_gradient(tape, p.name)
            tape.free(("frozen-gradients", unit.name))
            tape.free(("new-gradient", unit.name))
        if not (self.workload.variant.frozen_stays and len(unit.trainable) < len(unit.parameters)):
            self._reshard(tape, unit)
        if not self.last and not self.plan.fsdp.sync_each_micro_batch:
            return  # no_sync keeps the unsharded gradient; a later one is added to it
        shard = self.shard_numel(flat)
        if numel % self.shard:
            tape.alloc(("padded", unit.name), shard * self.shard * size, "communication", f"padded gradient of {what}")
        kept = shard * self.kept_size(mine[0])
        tape.alloc(("scattered", unit.name), shard * size, "gradients", f"gradient shard of {what}", REDUCE_STREAM)
        if not self.offload and not tape.held(("shard-gradient", unit.name)):
            tape.alloc(("shard-gradient", unit.name), kept, "gradients", f"gradient shard of {what}", REDUCE_STREAM)
        tape.free(("scattered", unit.name))
        tape.free(("padded", unit.name))
        tape.free(("flat-gradient", unit.name))
        for p in mine:
            if p.name in self.gradients:
                self.drop_gradient(tape, p.name)

    def backward_done(self, tape: Tape) -> None:
        self._keep_inputs(tape)
        for unit in self.units:
            self._reduce(tape, unit)
            self._reshard(tape, unit)
            unit.index = -1
        for name in self.kept:
            tape.free(("kept-input", name))
            tape.free(("kept-gradient", name))
        self.kept.clear()
        self.order.clear()

    # -- optimizer ---------------------------------------------------------------------------------------------

    def optimizer_tensors(self) -> list[OptimizerTensor]:
        tensors = [(u, u.trainable) for u in self.units if u.trainable]
        return [OptimizerTensor(n := self.shard_numel(ps), self.kept_size(ps[0]), (n,)) for _, ps in tensors]

    def step(self, tape: Tape) -> None:
        if self.offload:
            self.host.plain = sum(t.numel * t.itemsize * 3 for t in self.optimizer_tensors())
        else:
            super().step(tape)
        for unit in self.units:
            tape.free(("shard-gradient", unit.name))
