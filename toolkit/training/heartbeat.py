"""A thread that speaks up when a step takes far longer than steps do, and names the rank and what it is doing.

A run that hangs looks alike on every rank, but one rank is the reason. The loop needs no marks for this: the thread looks at
the main thread's stack, which says in whose function it stands. A rank that waits in a collective operation says so, the rank
that the others wait for is the one that does not.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_PHASES = {
    ("prepare", "prepare_data"): "preparing the data", ("model", "build_model"): "loading the model",
    ("accelerator", "prepare"): "setting up the engine", ("checkpoint", "load"): "resume",
    ("loader", "step"): "data", ("loader", "epoch"): "data", ("step", "count_batch"): "counting the batch",
    ("step", "evaluate"): "evaluation", ("step", "gradient_norm"): "gradient norm", ("step", "across_ranks"): "summing the loss",
    ("checkpoint", "save"): "checkpoint", ("accelerator", "save_state"): "checkpoint", ("export", "export_model"): "export",
    ("accelerator", "backward"): "backward", ("_tensor", "backward"): "backward", ("optimizer", "step"): "optimizer",
    ("memory", "report_memory"): "memory report", ("module", "_call_impl"): "forward", ("engine", "forward"): "forward",
    ("data_loader", "__iter__"): "data", ("dataloader", "__next__"): "data", ("metrics", "step"): "metrics",
}  # fmt: skip
"""(file, function) to the phase of a step. The outermost one on the stack counts."""
_COLLECTIVES = ("distributed_c10d", "comm", "torch_backend", "_functional_collectives")
_MEMORY = 100
"""Steps that the median is taken from."""


def write_line(text: str) -> None:
    """To standard error, from any rank: the launcher passes it on."""
    print(text, file=sys.stderr, flush=True)


class Heartbeat:
    """Watches the thread that enters it. `beat` after every step; between beats it may speak.

    Args:
        rank, world: which process this is, and of how many.
        factor: how many times the median step counts as far longer; later lines come at twice the time each.
        least: seconds below which nothing is said, so that quick steps do not make noise.
        first: seconds after which the first step, of which no median is known yet, is spoken of.
        poll: seconds between two looks.
        say: takes a line.
    """

    def __init__(self, rank: int = 0, world: int = 1, *, factor: float = 10.0, least: float = 30.0, first: float = 300.0,
                 poll: float = 1.0, say: Callable[[str], None] = write_line) -> None:
        self.rank, self.world, self.factor, self.least, self.first = rank, world, factor, least, first
        self.poll, self.say = poll, say
        self.seconds: deque[float] = deque(maxlen=_MEMORY)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._watched = 0
        self._step, self._since, self._told = 0, 0.0, 0.0

    def beat(self, step: int | None = None, seconds: float | None = None) -> None:
        """A step has ended (`step`, and the seconds it took), or, without arguments, something between two steps has."""
        with self._lock:
            self._since, self._told = time.monotonic(), 0.0
            if step is not None:
                self._step = step
            if seconds is not None:
                self.seconds.append(seconds)

    def __enter__(self) -> Heartbeat:
        self._watched = threading.get_ident()
        self._ended.clear()
        self.beat()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _watch(self) -> None:
        while not self._ended.wait(self.poll):
            text = self.look(time.monotonic())
            if text:
                self.say(text)

    def look(self, now: float) -> str | None:
        """The line that is due at `now` (seconds of the monotonic clock), or None."""
        with self._lock:
            elapsed, median = now - self._since, statistics.median(self.seconds) if self.seconds else None
            limit = self.first if median is None else max(self.least, self.factor * median)
            if elapsed < max(limit, 2 * self._told):
                return None
            self._told = elapsed
            step = self._step + 1
        than = f"{elapsed / median:,.0f} times the median" if median else "no step has ended yet"
        return f"[rank {self.rank} of {self.world}] step {step} has taken {elapsed:,.0f} s ({than}): {self._doing()}"

    def _doing(self) -> str:
        frames = stack_of(self._watched)
        return str(place_of(frames)) if frames else "its thread has ended"


@dataclass(frozen=True)
class Place:
    """Where a thread stands."""

    phase: str
    collective: str
    """The function in which it waits for other ranks; empty when it does not."""
    line: str
    """`file.py:12` of the innermost frame."""

    def __str__(self) -> str:
        waiting = f", waiting for the other ranks in {self.collective}" if self.collective else ""
        return f"in {self.phase}{waiting} ({self.line})"


def place_of(frames: list[FrameType]) -> Place:
    """The phase that a stack (outermost frame first) is in, whether it waits for other ranks, and the innermost line."""
    names = [(Path(frame.f_code.co_filename).stem, frame.f_code.co_name) for frame in frames]
    phase = next((_PHASES[name] for name in names if name in _PHASES), f"{names[-1][1]}()")
    collective = next((name for file, name in names if file in _COLLECTIVES), "")
    return Place(phase, collective, f"{Path(frames[-1].f_code.co_filename).name}:{frames[-1].f_lineno}")


def footprint(frames: list[FrameType]) -> int:
    """A number that stays the same while the thread of this stack does not get on."""
    return hash(tuple((id(frame), frame.f_lasti) for frame in frames))


def stack_of(thread: int) -> list[FrameType]:
    """The frames of a thread, outermost first; none when it has ended."""
    frames, frame = [], sys._current_frames().get(thread)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]
