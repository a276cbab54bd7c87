"""What the run takes, step by step, and what was predicted for it."""

from __future__ import annotations

import gc
import os
from collections import deque
from typing import TYPE_CHECKING, Any

from toolkit.profiling.compare import as_lines, peak_place, terms
from toolkit.profiling.counter import Counter, device_counter
from toolkit.profiling.holdings import resident_by_category
from toolkit.profiling.killed import first_of_node
from toolkit.profiling.oom import host_memory
from toolkit.profiling.record import StepRecord
from toolkit.profiling.snapshot import keep_history
from toolkit.profiling.trend import gap_line, rise_line, rise_per_step
from toolkit.training.heartbeat import write_line
from toolkit.training.metrics import Log
from toolkit.training.run_folder import RunFolder
from toolkit.training.start import rank, world_size
from toolkit.training.step import highest
from toolkit.units import format_size

if TYPE_CHECKING:
    from accelerate import Accelerator

RISING_STEPS = 10
"""So many steps in a row, each of which leaves more behind than the one before, are called a leak."""
WORTH_A_WORD = 100_000
"""A leak that lasts for more steps than this is let be."""
STEADY_FROM = 3
"""Steps before this one still allocate what stays (optimizer state, prefetch plans)."""


class MemoryWatch:
    """Peaks of this rank's tensors, counted from the moment it was made: make it before the model is
    built."""

    def __init__(self, device_type: str) -> None:
        gc.collect()
        self.device = device_type
        self.model: Any = None
        """The prepared model, when `follow` was called."""
        self.counter: Counter = device_counter(device_type)
        self.counter.disregard()
        self.start = self.counter.live()
        self.peaks: list[int] = []
        self.resident = 0
        self.load_peak = 0
        self.phase = "load"
        """forward, backward, optimizer or between: where in a step this process is, when `follow` was called."""
        self.by_phase: dict[str, int] = {}
        """The highest point of each phase over all steps."""
        self.highest = 0
        """Of the running step, up to the last change of phase."""
        self.detail: dict[str, Any] = {}
        """Of the step that was recorded: see `toolkit.profiling.breakdown.Breakdown`."""
        self._record: StepRecord | None = None
        self._recording = False
        self._hooks: list[Any] = []
        self.history = False
        """Whether the allocator's history is kept for a snapshot; a record ends it."""
        self._held: deque[int] = deque(maxlen=RISING_STEPS)
        """Between the last steps."""
        self._warned: set[str] = set()

    def follow(self, model: Any, optimizer: Any) -> None:
        """Tell the phases of a step apart from now on, with four hooks a micro-batch for all modules together, and record
        every allocation of step `STEADY_FROM`."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self.model = model
        if StepRecord.possible(self.counter.kind, model):
            self._record = StepRecord(model, optimizer, self.device)
        self._hooks = [
            model.register_forward_pre_hook(lambda *_: self._enter("forward")),
            model.register_forward_hook(lambda *_: self._enter("backward")),
            register_optimizer_step_pre_hook(lambda *_: self._enter("optimizer")),
            register_optimizer_step_post_hook(lambda *_: self._enter("between")),
        ]

    def leave(self) -> None:
        """Tell no phases apart any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _enter(self, phase: str) -> None:
        self._settle()
        self.phase = phase
        self.counter.reset()
        if self._record is not None:
            self._record.enter(phase)

    def _settle(self) -> None:
        """Keep the highest point since the counter's last reset."""
        peak = self.counter.peak() - self.start
        self.highest = max(self.highest, peak)
        if self.phase != "load":
            self.by_phase[self.phase] = max(self.by_phase.get(self.phase, 0), peak)

    def begin_step(self) -> None:
        """Call at the start of every optimizer step."""
        if not self.peaks:
            self.load_peak = self.counter.peak() - self.start
        self.resident = self.counter.live() - self.start
        if len(self.peaks) >= STEADY_FROM:
            self._held.append(self.resident)
            self._look_for_trends()
        self.phase, self.highest = "between", 0
        self.counter.reset()
        self._recording = self._record is not None and len(self.peaks) == STEADY_FROM - 1
        if self._recording and self._record is not None:
            self._record.begin()

    def _look_for_trends(self) -> None:
        """Say once what will end the run long after this: memory that rises at every step, and an allocator full of holes."""
        who = f"[rank {rank()} of {world_size()}] this process" if world_size() > 1 else "this run"
        rise = rise_per_step(self._held, RISING_STEPS)
        left = room(self.device) if rise else 0
        if rise and left // rise < WORTH_A_WORD:
            self._warn("rise", f"{rise_line(who, rise, left)}; something of every step is kept: a loss with its graph, outputs")
        if self.device == "cuda":
            import torch

            gap = gap_line(who, torch.cuda.memory_reserved(), self.peaks[-1] + self.start)
            if gap:
                self._warn("gap", gap)

    def _warn(self, kind: str, line: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            if first_of_node(f"memory-{kind}"):
                write_line(f"warning: {line}")

    def end_step(self) -> int:
        """The peak of the step in bytes."""
        self._settle()
        self.peaks.append(self.highest)
        if self._recording and self._record is not None:
            found = self._record.end()
            self.detail = {"step": len(self.peaks), "counted": self.highest, **found.to_json()} if found is not None else {}
            self._record, self._recording = None, False
            if self.history:
                keep_history(self.device)
        return self.peaks[-1]

    def measured(self, accelerator: Accelerator, model: Any, optimizer: Any) -> dict[str, Any]:
        """What was measured, over all ranks; `resident_by_category` and
        `peak_by_phase` are of the rank that asks. Every rank must call it."""
        steady = self.peaks[STEADY_FROM - 1 :] or self.peaks[-1:] or [0]
        by_rank = highest(accelerator, max(steady))
        return {
            "counter": self.counter.kind,
            "peak": max(by_rank),
            "peak_by_rank": by_rank,
            "first_step_peak": max(highest(accelerator, self.peaks[0] if self.peaks else 0)),
            "load_peak": max(highest(accelerator, self.load_peak)),
            "resident": max(highest(accelerator, self.resident)),
            "resident_by_category": resident_by_category(model, optimizer, self.resident),
            "peak_by_phase": dict(self.by_phase),
            "steps": len(self.peaks),
            "outside": max(highest(accelerator, outside_allocator())) if self.device == "cuda" else None,
            **self._details(),
        }

    def _details(self) -> dict[str, Any]:
        """The recorded step: of the rank that took the most in it in full, of each rank its split. The whole run's highest may be
        another's: of a step that nothing recorded."""
        from accelerate.utils import gather_object

        found = gather_object([self.detail])
        if not all(found):
            return {}
        worst = max(range(len(found)), key=lambda rank: found[rank]["counted"])
        keys = ("counted", "peak", "breakdown")
        return {"worst": {"rank": worst, **found[worst]}, "ranks": [{key: detail[key] for key in keys} for detail in found]}


def outside_allocator() -> int:
    """Bytes of this process's GPU that are taken and not by torch's allocator: context, communicators, and whatever else runs
    there."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


def room(device: str) -> int:
    """Bytes that this process can still allocate: of its GPU, or its share of the host; 0 where it is not known."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    return host_memory().get("available", 0) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def report_memory(memory: MemoryWatch, predicted: dict[str, Any] | None, folder: RunFolder, log: Log, model: Any,
                  optimizer: Any, *, table: bool) -> None:
    """Measure, write memory.json, and say what came of it: with `table` term by term. Every rank must call it."""
    measured = memory.measured(folder.accelerator, model, optimizer)
    folder.write_memory(predicted, measured)
    rows = terms(predicted, measured) if table else []
    place = peak_place(predicted, measured) if predicted and rows else ""
    for line in [*(as_lines(rows) if rows else [compared(predicted, measured)]), *([f"  {place}"] if place else [])]:
        log.say(line)


def compared(predicted: dict[str, Any] | None, measured: dict[str, Any]) -> str:
    """One line: predicted against measured peak."""
    peak = measured["peak"]
    if predicted is None:
        return f"memory: measured peak {format_size(peak)} ({measured['counter']}); no prediction for this run"
    claim = predicted["peak_allocated"]
    off = (claim - peak) / peak * 100 if peak else 0.0
    return (f"memory: predicted peak {format_size(claim)}, measured {format_size(peak)} "
            f"({measured['counter']}), {off:+.2f}%")
