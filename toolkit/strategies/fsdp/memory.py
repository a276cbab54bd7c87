"""What FSDP2 allocates: shards, gathered units, reduce-scatter buffers.

Read from torch 2.13 `torch/distributed/fsdp/_fully_shard/{_fsdp_param_group,_fsdp_collectives,_fsdp_state}.py` and
Accelerate 1.15 `accelerate/utils/fsdp_utils.py` (`fsdp2_prepare_model`: which modules become units).
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
GATHER_STREAM, REDUCE_STREAM = 1, 2
"""Outputs of all-gathers and reduce-scatters are allocated on streams of their own (`foreach_all_gather`, `foreach_reduce`)."""


@dataclass
class Unit:
    """One group of parameters that is gathered and reduced together."""

    name: str
    parameters: list[ParameterInfo]
    modules: list[str]
    """Its forward begins with the first of them to run and ends with the last."""
    reshard_after_forward: bool
    backward_hook: bool
    """Its inputs need gradients, so its reduce-scatter starts as soon as its backward ends; else at the very end."""
    index: int = -1
    """Place in the order in which forwards ended."""
    unsharded: bool = False
    gathered: bool = False
    """An all-gather was issued and not yet copied out."""
    reduced: bool = False
    seen: set[str] = field(default_factory=set)
    gather_bytes: int = 0
    """The all-gather's output; what is copied out of it takes as much."""
    cast_bytes: int = 0
    """The shards that are cast before they are gathered."""


class FsdpEngine(Engine):
    """FSDP2 over `shard` ranks, copied over the others (hsdp)."""

    def __init__(self, trace: ModelTrace, workload: Workload, plan: Plan, cluster: Cluster) -> None:
        super().__init__(trace, workload, plan, cluster)
        self.mixed = workload.precision if workload.precision in ("bf16", "fp16") else None
        # Context-parallel ranks share the shards, tensor-parallel ranks hold other parameters (Accelerate's dp_shard_cp mesh).
        self.shard = parallel.shard_size(plan, cluster) * plan.cp
        self.offload = plan.offload == "all" and self.device != "cpu"
        self.units = self._carve()
        self.unit_of = {module: unit for unit in self.units for module in unit.modules}
        self.of_parameter = {p.name: unit for unit in self.units for p in unit.parameters}
        self.order: list[Unit] = []
        self.previous: Unit | None = None
        self.reducing = ""
        self.sync_each = bool(plan.fsdp.sync_each_micro_batch)

    @staticmethod
    def numerics(workload: Workload, plan: Plan, device: str) -> Numerics:
        """Parameters are gathered in the low precision; Accelerate does not autocast around FSDP2."""
        compute = workload.precision if workload.precision in ("bf16", "fp16") else "loaded"
        return Numerics(device="cpu" if device == "cpu" else "cuda", compute_dtype=compute, checkpointing=plan.checkpointing)

    @staticmethod
    def wants(trace: ModelTrace) -> Callable[[Mark], bool]:
        """Gradients, and the beginnings and ends of what can be a unit."""
        names = {*trace.layer_paths, trace.input_embedding, trace.output_embedding, trace.final_norm, ""}
        return lambda mark: mark.kind in ("gradient", "backward-done") or mark.name in names

    def notes(self) -> list[str]:
        found = super().notes()
        if self.plan.tp > 1 and not parallel.composes_with_fsdp():
            found.append("the installed Accelerate can't start fsdp with tp: it looks for ReplicateParallel, which the installed "
                         "transformers no longer has; the figure is FSDP2's over the tensor-parallel shards")
        return found

    # -- units -------------------------------------------------------------------------------------------------

    def _carve(self) -> list[Unit]:
        trace, plan = self.trace, self.plan
        reshard = plan.strategy != "fsdp-grad"
        wrapped = list(trace.layer_paths) if plan.fsdp.wrap != "none" else []
        tied = any(len(p.modules) > 1 and trace.input_embedding in p.modules for p in trace.parameters)
        units = [Unit(path, [], [path], reshard, path not in trace.entries_without_gradient) for path in wrapped]
        embedding, head, norm = trace.input_embedding, trace.output_embedding, trace.final_norm
        if embedding and not tied:
            units.insert(0, Unit(embedding, [], [embedding], reshard, False))
        tail = [m for m in ((norm, embedding, head) if tied else (norm, head)) if m]
        if tail:
            # in the tied case the group is entered at the embedding, whose input has no gradient: no hook is placed
            units.append(Unit("tail", [], tail, False, not tied))
        units.insert(0, Unit("root", [], [""], False, False))
        by_module = {module: unit for unit in units for module in unit.modules}
        for p in trace.parameters:
            self._owner(p, by_module).parameters.append(p)
        for unit in units:
            sizes = [(self.shard_numel(p), self.kept_size(p), self.compute_size(p)) for p in unit.parameters]
            unit.gather_bytes = sum(n * compute for n, _, compute in sizes) * self.shard
            unit.cast_bytes = sum(n * compute for n, kept, compute in sizes if self.mixed and kept != compute)
            if self.offload:  # `all_gather_inputs` copies the shards from the host before it casts them
                unit.cast_bytes += sum(n * kept for n, kept, _ in sizes)
        return [u for u in units if u.parameters]

    @staticmethod
    def _owner(parameter: ParameterInfo, by_module: dict[str, Unit]) -> Unit:
        """The innermost unit around one of the modules that hold the parameter; the root otherwise."""
        for module in parameter.modules:
            path = module
            while path:
                if path in by_module:
                    return by_module[path]
                path = path.rpartition(".")[0]
        return by_module[""]

    # -- sizes -------------------------------------------------------------------------------------------------

    def shard_numel(self, p: ParameterInfo) -> int:
        """Elements of one shard, dimension 0 padded to the number of ranks."""
        if not p.shape:
            return 1
        return -(-p.shape[0] // self.shard) * (p.numel // max(p.shape[0], 1))

    def kept_size(self, p: ParameterInfo) -> int:
        """Bytes per element of the shard: Accelerate upcasts trainable parameters under mixed precision."""
        return 4 if p.trainable and self.mixed and p.floating else p.itemsize

    def compute_size(self, p: ParameterInfo) -> int:
        return _SIZES[self.mixed] if self.mixed and p.floating else p.itemsize

    # -- before the first step ---------------------------------------------------------------------------------

    def setup(self, tape: Tape) -> None:
        for unit in self.units:
            for p in unit.parameters:
                size = self.shard_numel(p) * self.kept_size(p)
                if self.offload:
                    self.host.pinned.append(size)  # CPUOffloadPolicy pins by default
                else:
                    tape.alloc(("parameter", p.name), size, "parameters", p.name)
        self.setup_rest(tape)

    # -- gathering ---------------------------------------------------------------------------------------------

    def _all_gather(self, tape: Tape, unit: Unit) -> None:
        if unit.unsharded or unit.gathered:
            return
        unit.gathered = True
        if self.shard == 1:
            return
        tape.alloc(("cast", unit.name), unit.cast_bytes, "communication", f"cast shards of {unit.name}", GATHER_STREAM)
        tape.alloc(("gather", unit.name), unit.gather_bytes, "communication", f"all-gather of {unit.name}", GATHER_STREAM)
        if self.device == "cpu":
            # gloo gathers into a flat copy of the output (ProcessGroupGloo.cpp, `newLikeFlat`)
            tape.transient(unit.gather_bytes, "communication", f"gloo's copy for {unit.name}")
        tape.free(("cast", unit.name))

    def _copy_out(self, tape: Tape, unit: Unit) -> None:
        if not unit.gathered:
            return
        tape.alloc(("full", unit.name), unit.gather_bytes, "parameters", f"gathered {unit.name}")
        unit.gathered, unit.unsharded = False, True

    def _reshard(self, tape: Tape, unit: Unit) -> None:
        tape.free(("full", unit.name))
        unit.unsharded = False

    # -- forward -----------------------------------------------------------------------------------------------

    def micro_begins(self, tape: Tape, first: bool, last: bool) -> None:
        super().micro_begins(tape, first, last)
        self.order.clear()
        for unit in self.units:
            unit.index, unit.reduced = -1, False
            unit.seen.clear()

    def forward_begin(self, tape: Tape, module: str) -> None:
        unit = self.unit_of.get(module)
        if unit is None or tape.phase == "backward":
            return
        self._all_gather(tape, unit)
        if unit.gathered:
            if self.previous is not None:
                tape.free(("gather", self.previous.name))
            self._copy_out(tape, unit)
            self.previous = unit

    def forward_end(self, tape: Tape, module: str) -> None:
        unit = self.unit_of.get(module)
        if unit is not None and tape.phase != "backward":
            unit.seen.add(module)
            if len(unit.seen) == len(unit.modules):
                if unit.reshard_after_forward:
                    self._reshard(tape, unit)
                unit.index = len(self.order)
                self.order.append(unit)
        if module == "" and self.previous is not None and tape.phase != "backward":
            tape.free(("gather", self.previous.name))
            self.previous = None

    # -- backward ----------------------------------------------------------------------------------------------

    def backward_begin(self, tape: Tape, module: str) -> None:
        unit = self.unit_of.get(module)
        if unit is None or unit.index < 0:
            return
        self._all_gather(tape, unit)
        self._copy_out(tape, unit)
        tape.free(("gather", unit.name))
        if unit.index > 0:
            self._all_gather(tape, self.order[unit.index - 1])
        unit.index = -1

    def backward_end(self, tape: Tape, module: str) -> None:
        unit = self.unit_of.get(module)
        if unit is not None and unit.backward_hook and module == unit.modules[0]:
            self._reduce(tape, unit)

    def backward_done(self, tape: Tape) -> None:
        for unit in self.units:
            if not unit.reduced:
                self._reduce(tape, unit)
        tape.free(self.reducing)
        self.reducing = ""
        for unit in self.units:
            tape.free(("scattered", unit.name))
            tape.free(("gather", unit.name))
            unit.gathered = False

    def _reduce(self, tape: Tape, unit: Unit) -> None:
        """post_backward: reshard, copy gradients into the reduce-scatter input, scatter, cast to the shard's dtype."""
        unit.reduced = True
        reduce_now = self.last or self.sync_each
        self._reshard(tape, unit)
        mine = [p for p in unit.parameters if p.name in self.gradients]
        if not reduce_now:
            return
        tape.free(self.reducing)
        self.reducing = ""
        if not mine:
            return
        size = 4 if self.workload.variant.reduce_fp32 else _SIZES[self.mixed] if self.mixed else mine[0].itemsize
        numel = sum(self.shard_numel(p) for p in mine)
        name = ("reduce", unit.name)
        tape.alloc(name, numel * self.shard * size, "communication", f"reduce-scatter of {unit.name}")
        # foreach_reduce's loop variable names the last gradient until it returns (more than one shard only)
        kept_back = mine[-1].name if self.shard > 1 else None
        for p in mine:
            if p.name != kept_back:
                self.drop_gradient(tape, p.name)
        tape.alloc(("scattered", unit.name), numel * size, "gradients", f"gradient shards of {unit.name}", REDUCE_STREAM)
        if self.device == "cpu" and self.shard > 1:
            # gloo reduces a copy of the input and keeps this rank's part of it
            tape.transient(numel * self.shard * size, "communication", f"gloo's copy for {unit.name}")
        self._keep_shards(tape, unit, mine, numel * size)
        if kept_back is not None:
            self.drop_gradient(tape, kept_back)
        self.reducing = name  # type: ignore[assignment]

    def _keep_shards(self, tape: Tape, unit: Unit, mine: list[ParameterInfo], scattered: int) -> None:
        """The reduced shards become the gradients: cast to the shards' dtype, added to earlier ones, or copied to the host."""
        what = f"gradient shards of {unit.name}"
        kept = sum(self.shard_numel(p) * self.kept_size(p) for p in mine) if self.mixed else scattered
        held = tape.held(("shard-gradients", unit.name))
        # Under hsdp a group keeps what was all-reduced between the copies until backward is done (`_all_reduce_state`).
        copies = self.plan.strategy == "hsdp"
        if not self.mixed or self.offload and not copies:
            tape.free(("scattered", unit.name))
        if self.offload:
            return
        if not held:
            tape.alloc(("shard-gradients", unit.name), kept, "gradients", what, REDUCE_STREAM)
        elif self.mixed:
            tape.transient(kept, "gradients", what)
        if not copies:
            tape.free(("scattered", unit.name))

    # -- optimizer ---------------------------------------------------------------------------------------------

    def optimizer_tensors(self) -> list[OptimizerTensor]:
        return [OptimizerTensor(self.shard_numel(p), self.kept_size(p), p.shape) for p in self.trace.trainable]

    def step(self, tape: Tape) -> None:
        if self.offload:
            # the CPU updates: gradients and states lie on the host with the shards
            self.host.plain = sum(t.numel * t.itemsize * 3 for t in self.optimizer_tensors())
        else:
            super().step(tape)
        for unit in self.units:
            tape.free(("shard-gradients", unit.name))
