"""The estimate of a plan: trace the model once, lower the trace as the plan's engine would, replay it on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.errors import UserError
from toolkit.estimate.outside import outside_allocator
from toolkit.estimate.result import CATEGORIES, Estimate, HostMemory, MemoryEstimate, ModelFacts, PeakPoint
from toolkit.estimate.time import step_time
from toolkit.specs import Cluster, ModelSpec, Plan, Workload
from toolkit.timeline.cuda_allocator import replay_reserved
from toolkit.units import format_size

if TYPE_CHECKING:
    from toolkit.strategies.lowering import Engine
    from toolkit.timeline.lengths import Events
    from toolkit.timeline.tape import CompactSource, Program, Tape
    from toolkit.timeline.trace import ModelTrace
    from toolkit.timeline.tracing import Numerics

_TRACED_FIELDS = ("method", "lora_rank", "lora_targets", "seq_len", "micro_batch", "precision", "weights_dtype", "attention",
                  "loss", "compile", "loss_only", "packed", "task", "variant")
"""What of a workload changes the trace; accumulation, the optimizer and clipping do not."""


def engine_class(plan: Plan) -> type[Engine]:
    """The state machine that lowers a plan's strategy."""
    from toolkit.strategies.ddp.memory import DdpEngine
    from toolkit.strategies.fsdp.memory import FsdpEngine
    from toolkit.strategies.fsdp.memory1 import Fsdp1Engine
    from toolkit.strategies.lowering import Engine
    from toolkit.strategies.zero.loose import LooseZero12Engine
    from toolkit.strategies.zero.memory import Zero12Engine
    from toolkit.strategies.zero.memory3 import Zero3Engine

    if plan.strategy == "ddp" and plan.tp > 1:
        return Engine  # Accelerate wraps no tensor-parallel model in DDP (accelerator.py, `prepare_model`)
    table: dict[str, type[Engine]] = {
        "single": Engine, "ddp": DdpEngine, "fsdp": FsdpEngine, "fsdp-grad": FsdpEngine, "hsdp": FsdpEngine,
        "zero1": Zero12Engine, "zero2": Zero12Engine, "zero3": Zero3Engine,
    }  # fmt: skip
    if plan.fsdp.version == 1 and table[plan.strategy] is FsdpEngine:
        return Fsdp1Engine
    if plan.zero.contiguous_gradients is False and plan.offload == "none" and table[plan.strategy] is Zero12Engine:
        return LooseZero12Engine
    return table[plan.strategy]


class Estimator:
    """Estimates of one model; traces are kept, so that many plans of one workload cost one trace."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model
        self._traces: dict[Any, ModelTrace] = {}
        self._programs: dict[Any, Program] = {}
        self._quick: dict[Any, Program] = {}
        self._compact: dict[Any, CompactSource] = {}
        self._memories: dict[Any, MemoryEstimate] = {}

    def trace(self, workload: Workload, plan: Plan, cluster: Cluster) -> ModelTrace:
        """The whole model's trace under the numerics of the plan's engine, as `step_time` takes it."""
        return self._trace(workload, _numerics(workload, plan, cluster).whole())

    def _trace(self, workload: Workload, numerics: Any) -> ModelTrace:
        from toolkit.timeline.tracing import trace_model

        key = _key(workload, numerics)
        if key not in self._traces:
            self._traces[key] = trace_model(self.model, workload, numerics)
        return self._traces[key]

    def _full_program(self, workload: Workload, numerics: Any, kind: type[Engine]) -> Program:
        from toolkit.timeline.tape import compile_trace

        key = (_key(workload, numerics), kind)
        if key not in self._programs:
            trace = self._trace(workload, numerics)
            self._programs[key] = compile_trace(trace, kind.wants(trace))
        return self._programs[key]

    def _quick_program(self, workload: Workload, numerics: Any, kind: type[Engine]) -> Program:
        """The folded program; above micro-batch 2 its sizes follow from those at 1 and 2."""
        from toolkit.timeline.scale import same_path, scaled_facts
        from toolkit.timeline.tape import CompactSource

        key = (_key(workload, numerics), kind)
        if key in self._quick:
            return self._quick[key]
        micro = workload.micro_batch
        if micro > 2 and _key(workload, numerics) not in self._traces:
            one, two = (self._trace(workload.with_(micro_batch=m), numerics) for m in (1, 2))
            pair = (_key(workload.with_(micro_batch=1), numerics), kind)
            if pair not in self._compact and same_path(one, two):
                self._compact[pair] = CompactSource(one, two, kind.wants(one))
            if pair in self._compact:
                return self._compact[pair].program(scaled_facts(one, two, micro), micro)
        trace = self._trace(workload, numerics)
        program = CompactSource(trace, None, kind.wants(trace)).program(trace, micro)
        self._quick[key] = program
        return program

    def estimate(self, workload: Workload, plan: Plan, cluster: Cluster, *, detail: bool = True) -> Estimate:
        """Memory and time of one plan.

        Args:
            detail: True replays every event (reserved memory, what was alive at the peak); False folds what the model's
                code does between the engine's actions, which gives the same peaks faster: enough to rank plans.

        Raises:
            UserError: the model does not trace, or plan and workload exclude each other.
        """
        from toolkit.strategies import check_plan
        from toolkit.strategies.lowering import PLAYED_MICRO_BATCHES, lower

        check_plan(plan, workload, cluster)
        kind = engine_class(plan)
        numerics = _numerics(workload, plan, cluster)
        make = self._full_program if detail else self._quick_program
        program = make(workload, numerics, kind)
        # A sweep over the accumulation plays the same micro-batches again and again: only the time differs.
        key = (workload.with_(accumulate=min(workload.accumulate, PLAYED_MICRO_BATCHES)), plan, cluster, detail)
        if key not in self._memories:
            engine = kind(program.trace, workload, plan, cluster)
            tape = lower(program, engine)
            played = self._after_shorter(tape, workload, plan, cluster) if detail else tape
            self._memories[key] = _memory(tape, engine, cluster, plan, detail, played)
        return Estimate(
            model=_facts(self.model, program.trace),
            workload=workload,
            cluster=cluster,
            plan=plan,
            memory=self._memories[key],
            time=step_time(make(workload, numerics.whole(), kind).trace, workload, plan, cluster),
        )

    def _after_shorter(self, tape: Tape, workload: Workload, plan: Plan, cluster: Cluster) -> Tape | Events:
        """Where lengths vary and that leaves holes (growing segments have none), the batches that a run meets before its longest
        one, and then that one; else its tape alone."""
        from toolkit.strategies.lowering import PLAYED_MICRO_BATCHES, lower
        from toolkit.timeline.lengths import one_after_the_other, shorter_lengths

        if workload.lengths == "equal" or workload.alloc == "expandable" or cluster.gpu.is_cpu:
            return tape
        kind, tapes = engine_class(plan), []
        for length in shorter_lengths(workload.seq_len, workload.micro_batch, plan.cp * plan.sp):
            shorter = workload.with_(seq_len=length)
            program = self._full_program(shorter, _numerics(shorter, plan, cluster), kind)
            tapes.append(lower(program, kind(program.trace, shorter, plan, cluster)))
        return one_after_the_other([*tapes, tape], min(workload.accumulate, PLAYED_MICRO_BATCHES)) if tapes else tape

    def timeline(self, workload: Workload, plan: Plan, cluster: Cluster, *, points: int = 600) -> dict[str, Any]:
        """The level of the first two steps at no more than `points` moments, as plain data: see estimate/timeline.py.

        Raises:
            UserError: as `estimate`.
        """
        from toolkit.estimate.timeline import thinned
        from toolkit.strategies import check_plan
        from toolkit.strategies.lowering import lower

        check_plan(plan, workload, cluster)
        kind = engine_class(plan)
        program = self._full_program(workload, _numerics(workload, plan, cluster), kind)
        return thinned(lower(program, kind(program.trace, workload, plan, cluster)), points)


def _device(cluster: Cluster) -> str:
    return "cpu" if cluster.gpu.is_cpu else "cuda"


def _numerics(workload: Workload, plan: Plan, cluster: Cluster) -> Numerics:
    """How the plan's engine computes, as one of the ranks that share the layers or the sequence."""
    own = engine_class(plan).numerics(workload, plan, _device(cluster))
    return replace(own, tp=plan.tp, cp=plan.cp, sp=plan.sp)


def _key(workload: Workload, numerics: Any) -> Any:
    return tuple(getattr(workload, name) for name in _TRACED_FIELDS), numerics


def estimate(model: ModelSpec, workload: Workload, plan: Plan, cluster: Cluster) -> Estimate:
    """Memory and time of one plan. Raises UserError as `Estimator.estimate`."""
    return Estimator(model).estimate(workload, plan, cluster)


def estimate_many(model: ModelSpec, workload: Workload, plans: Iterable[Plan], cluster: Cluster) -> list[Estimate | UserError]:
    """One entry per plan, in order: its estimate, or why the plan is impossible."""
    estimator = Estimator(model)
    out: list[Estimate | UserError] = []
    for plan in plans:
        try:
            out.append(estimator.estimate(workload, plan, cluster, detail=False))
        except UserError as error:
            out.append(error)
    return out


def _facts(model: ModelSpec, trace: ModelTrace) -> ModelFacts:
    return ModelFacts(
        name=model.name,
        kind=trace.kind,
        architecture=trace.architecture,
        parameters=sum(p.whole if p.floating else 2 * p.whole for p in trace.parameters),  # two packed weights a byte
        trainable_parameters=sum(p.whole for p in trace.trainable),
        layers=len(trace.layer_paths),
        vocab_size=trace.vocab_size,
        hidden_size=trace.hidden_size,
        left_out=model.left_out,
    )


@dataclass(frozen=True)
class _Levels:
    """The level of a tape and its highest points by step."""

    level: Any
    starts: list[int]
    peaks: list[int]
    at: list[int]


def _levels(tape: Tape) -> _Levels:
    level = np.cumsum(np.asarray(tape.deltas, dtype=np.int64))
    ends = [*tape.boundaries[1:], len(level)]
    at = [start + int(level[start:end].argmax()) for start, end in zip(tape.boundaries, ends, strict=True)]
    return _Levels(level, tape.boundaries, [int(level[i]) for i in at], at)


def _memory(tape: Tape, engine: Engine, cluster: Cluster, plan: Plan, detail: bool, played: Tape | Events
            ) -> MemoryEstimate:
    levels = _levels(tape)
    steady = max(range(1, len(levels.peaks)), key=lambda i: levels.peaks[i])
    peak, at = levels.peaks[steady], levels.at[steady]
    label = tape.table.labels[tape.labels[at]]
    deltas = np.asarray(tape.deltas[: at + 1], dtype=np.int64)
    sums = np.bincount(np.asarray(tape.labels[: at + 1]), weights=deltas, minlength=len(tape.table.labels))
    breakdown = dict.fromkeys(CATEGORIES, 0)
    groups: dict[tuple[str, str], int] = {}
    for number, size in enumerate(sums):
        if size:
            category, what, _ = tape.table.labels[number]
            breakdown[category] += int(size)
            groups[category, what] = groups.get((category, what), 0) + int(size)
    if not detail:
        _without_debts(breakdown)
    largest = sorted(((c, w, n) for (c, w), n in groups.items() if n > 0), key=lambda g: -g[2])
    outside, interval = outside_allocator(cluster, plan, engine.workload)
    reserved, notes = peak, engine.notes()
    if not cluster.gpu.is_cpu:
        reserved = _guess_reserved(peak)
        if detail:
            reserved, more = _reserved(tape, played, engine.workload.alloc == "expandable", cluster.gpu.memory - outside)
            notes = [*notes, *more]
    load = int(levels.level[: levels.starts[0]].max()) if levels.starts[0] else 0
    return MemoryEstimate(
        peak_allocated=peak,
        peak_reserved=max(reserved, peak),
        outside_allocator=outside,
        outside_interval=interval,
        capacity=cluster.gpu.memory,
        first_step_peak=levels.peaks[0],
        resident=int(levels.level[levels.starts[-1] - 1]) if levels.starts[-1] else 0,
        at_peak=PeakPoint(phase=label.phase, module=label.what),
        breakdown=breakdown,
        largest=tuple(largest[:12]),
        by_module=_by_module(groups),
        load_peak=load,
        host=_host(engine, cluster),
        nvme=engine.host.nvme * cluster.gpus_per_node,
        notes=tuple(notes),
    )


def _reserved(tape: Tape, played: Tape | Events, expandable: bool, limit: int) -> tuple[int, list[str]]:
    """(bytes that the allocator reserves, what is to be said about it)"""
    reserved, freely = replay_reserved(played, expandable, limit)
    notes = []
    if played is not tape:
        more = reserved - replay_reserved(tape, expandable, limit).peak
        notes += [_VARIED.format(more=format_size(more))] if more > 0 else []
    if freely > reserved:
        notes.append(_GIVES_BACK.format(more=format_size(freely - reserved)))
    return reserved, notes


_VARIED = ("batches of other lengths leave blocks that the longest does not fit in ({more}): expandable segments have none of "
           "them")
_GIVES_BACK = ("it fits only because torch gives cached memory back to the driver and asks for it anew ({more} more would spare "
               "it that): steps take longer than predicted")


def _without_debts(breakdown: dict[str, int]) -> None:
    """Settle negative terms against the largest one.

    The folded program books what the model's code does between two of the engine's actions under one label, so a storage may be
    born under one and die under another; the sum is exact.
    """
    for category, size in list(breakdown.items()):
        if size < 0:
            breakdown[category] = 0
            breakdown[max(breakdown, key=lambda c: breakdown[c])] += size


def _guess_reserved(peak: int) -> int:
    """What the allocator's rounding adds at least; the full replay gives the figure of the chosen plan."""
    return -(-peak // (2 << 20)) * (2 << 20)


def _by_module(groups: dict[tuple[str, str], int]) -> tuple[tuple[str, int], ...]:
    sums: dict[str, int] = {}
    for (_, what), size in groups.items():
        sums[what] = sums.get(what, 0) + size
    return tuple(sorted(((w, n) for w, n in sums.items() if n > 0), key=lambda g: -g[1])[:12])


def _host(engine: Engine, cluster: Cluster) -> HostMemory:
    """Host memory of a node. torch's pinned allocator rounds every block up to a power of two
    (ATen/core/CachingHostAllocator.h)."""
    ranks = cluster.gpus_per_node
    pinned = sum(1 << (size - 1).bit_length() for size in engine.host.pinned if size > 0) + engine.host.locked
    steady = engine.host.plain + pinned
    peak = ranks * max(engine.host.load, steady) if not cluster.gpu.is_cpu else ranks * steady
    capacity = cluster.host_memory
    return HostMemory(peak=peak, pinned=ranks * pinned, capacity=capacity, fits=capacity is None or peak <= capacity)
