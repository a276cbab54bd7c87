"""The driver that every strategy shares: walk the model's trace and let the engine act at its marks.

An engine is a small state machine. It says how the model computes under it (`numerics`), what it holds before the first
step (`setup`), what it does at each mark, and what its optimizer step does. The driver plays micro-batches and steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from toolkit.specs import Cluster, Plan, Workload
from toolkit.strategies import exclusions
from toolkit.timeline.kernels import blas_workspaces
from toolkit.timeline.optimizers import Impl, OptimizerTensor, default_impl, play_step, state_bytes
from toolkit.timeline.tape import Chunk, Program, Tape
from toolkit.timeline.trace import Mark, ModelTrace
from toolkit.timeline.tracing import Numerics

STEPS = 2
"""Optimizer steps that are played: the first creates states and records orders, the second is steady under every engine."""
PLAYED_MICRO_BATCHES = 3
"""Of each step: the first, an inner and the last one; the other inner ones are alike."""


@dataclass
class HostUse:
    """Bytes of host memory that one rank takes."""

    plain: int = 0
    pinned: list[int] = field(default_factory=list)
    """Sizes of pinned blocks before rounding."""
    locked: int = 0
    """Page-locked by another allocator than torch's, which does not round."""
    nvme: int = 0
    load: int = 0
    """While the model is loaded."""


class Engine:
    """One process that holds everything: what `single` is, and the base of the others."""

    def __init__(self, trace: ModelTrace, workload: Workload, plan: Plan, cluster: Cluster) -> None:
        self.trace = trace
        self.workload = workload
        self.plan = plan
        self.cluster = cluster
        self.world = cluster.world_size
        self.device = "cpu" if cluster.gpu.is_cpu else "cuda"
        self.impl: Impl = default_impl(workload.optimizer, workload.optimizer_impl, self.device)
        self.by_name = trace.by_name
        self.host = HostUse(load=sum(p.nbytes for p in trace.parameters))
        self.has_states = False
        self.gradients: dict[str, tuple[int, tuple[int, int], int]] = {}
        """Gradients that are alive: bytes, storage, micro-batch in which they were born."""

    @staticmethod
    def numerics(workload: Workload, plan: Plan, device: str) -> Numerics:
        """How the model computes: autocast as Accelerate wraps the forward."""
        autocast = workload.precision if workload.precision in ("bf16", "fp16") else "none"
        return Numerics(device="cpu" if device == "cpu" else "cuda", autocast=autocast, checkpointing=plan.checkpointing)

    @staticmethod
    def wants(trace: ModelTrace) -> Callable[[Mark], bool]:
        """Which marks this engine acts on; the others are not walked."""
        return lambda mark: mark.kind in ("gradient", "backward-done")

    # -- before the first step ---------------------------------------------------------------------------------

    def setup(self, tape: Tape) -> None:
        """Parameters as they were loaded, buffers, the batch."""
        for p in self.trace.parameters:
            tape.alloc(("parameter", p.name), p.nbytes, "parameters", p.name)
        self.setup_rest(tape)

    def setup_rest(self, tape: Tape) -> None:
        for i, nbytes in enumerate(tape.blocks([size for _, size in self.trace.buffer_parts])):
            tape.alloc(("buffer", i), nbytes, "parameters", "buffers")
        tape.alloc("batch", self.trace.batch, "activations", "inputs")

    # -- a micro-batch -----------------------------------------------------------------------------------------

    def micro_begins(self, tape: Tape, first: bool, last: bool) -> None:
        """A micro-batch starts; `first` and `last` of its optimizer step."""
        self.first, self.last = first, last

    def forward_begin(self, tape: Tape, module: str) -> None: ...

    def forward_end(self, tape: Tape, module: str) -> None: ...

    def backward_begin(self, tape: Tape, module: str) -> None: ...

    def backward_end(self, tape: Tape, module: str) -> None: ...

    def gradient(self, tape: Tape, mark: Mark) -> None:
        """A gradient is complete: the first one of a step stays, later ones are added to it and die."""
        if mark.name in self.gradients:
            tape.release(mark.nbytes, "gradients", mark.name, mark.key)
        else:
            self.gradients[mark.name] = (mark.nbytes, mark.key, tape.micro)
            if self.workload.variant.optimizer_in_backward and type(self) is Engine:
                self.drop_gradient(tape, mark.name)

    def backward_done(self, tape: Tape) -> None: ...

    def drop_gradient(self, tape: Tape, name: str) -> None:
        """A gradient that the model's code made dies."""
        nbytes, key, micro = self.gradients.pop(name)
        now, tape.micro = tape.micro, micro
        tape.release(nbytes, "gradients", name, key)
        tape.micro = now

    def notes(self) -> list[str]:
        """What the estimate assumes, one sentence each."""
        return [*self.trace.notes, *exclusions.warnings(self.workload, self.cluster)]

    # -- the optimizer -----------------------------------------------------------------------------------------

    def optimizer_tensors(self) -> list[OptimizerTensor]:
        """What the optimizer updates on this rank."""
        return [OptimizerTensor(p.numel, p.itemsize, p.shape) for p in self.trace.trainable]

    def create_states(self, tape: Tape, tensors: list[OptimizerTensor]) -> None:
        if self.has_states:
            return
        self.has_states = True
        for i, tensor in enumerate(tensors):
            self.create_state(tape, i, tensor)

    def create_state(self, tape: Tape, i: int, tensor: OptimizerTensor) -> None:
        """The states of the tensor with number `i`."""
        on_device, on_host = state_bytes(self.workload.optimizer, tensor, self.device, self.impl)
        for part, nbytes in enumerate(tape.blocks(on_device)):
            tape.alloc(("state", i, part), nbytes, "optimizer_states", "optimizer states")
        self.host.plain += on_host

    def step(self, tape: Tape) -> None:
        """Update, then drop the gradients."""
        tensors = self.optimizer_tensors()
        self.create_states(tape, tensors)
        if not self.workload.variant.optimizer_in_backward:
            play_step(tape, tensors, self.workload.optimizer, self.impl, self.workload.variant.foreach_denominators)
        for name in list(self.gradients):
            self.drop_gradient(tape, name)


def lower(program: Program, engine: Engine) -> Tape:
    """The timeline of one rank over `STEPS` optimizer steps. Of many micro-batches only the first, an inner and the last
    one are played: the inner ones are alike."""
    tape = Tape(program)
    old = _OldGraph()
    engine.setup(tape)
    micro_batches = min(engine.workload.accumulate, PLAYED_MICRO_BATCHES)
    for step in range(STEPS):
        tape.step_begins()
        if step == 0 and engine.device == "cuda":
            tape.alloc("workspaces", blas_workspaces(engine.cluster.gpu.architecture), "temporaries", "cuBLAS workspaces")
        elif step == 0:
            tape.alloc("workspaces", engine.trace.compiled - engine.trace.compiled_in_backward, "temporaries", _CODE)
        for i in range(micro_batches):
            tape.micro += 1
            tape.phase = "forward"
            engine.micro_begins(tape, i == 0, i == micro_batches - 1)
            _walk(program, engine, tape, old)
        tape.phase = "optimizer"
        engine.step(tape)
    return tape


_CODE = "oneDNN's compiled code"


@dataclass
class _OldGraph:
    """What the graph of the last loss still holds: the frees that wait for the next loss, and their micro-batch."""

    frees: list[Chunk] = field(default_factory=list)
    micro: int = 0


def _walk(program: Program, engine: Engine, tape: Tape, old: _OldGraph) -> None:
    dying = False
    actions = {
        "forward-begin": engine.forward_begin,
        "forward-end": engine.forward_end,
        "backward-begin": engine.backward_begin,
        "backward-end": engine.backward_end,
    }
    for step in program.steps:
        if isinstance(step, Chunk):
            if dying:
                old.frees.append(step)
            else:
                tape.play(step)
            continue
        tape.phase = step.phase
        if step.kind == "loss-done":
            for chunk in old.frees:
                tape.play(chunk, old.micro)
            old.frees.clear()
        elif step.kind == "graph-dies":
            dying, old.micro = True, tape.micro
        elif step.kind == "gradient":
            if engine.device == "cpu" and not tape.held("code of backward"):
                tape.alloc("code of backward", engine.trace.compiled_in_backward, "temporaries", _CODE)
            engine.gradient(tape, step)
        elif step.kind == "backward-done":
            dying = False
            engine.backward_done(tape)
        else:
            actions[step.kind](tape, step.name)
