"""The timeline of one rank: every allocation and free, in order, with what it is, where and when.

A strategy writes it (`alloc`, `free`), the model's own code is appended in chunks. Two grains exist: the full one keeps
every event; the compact one folds what the model's code does between two marks of an engine into its highest point and
its net effect, which gives the same peaks from a fraction of the events, for any micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from toolkit.timeline.trace import DRIVER_MARKS, Mark, Memory, ModelTrace


class Label(NamedTuple):
    category: str
    what: str
    """Module path, or what the engine allocates."""
    phase: str


@dataclass(frozen=True)
class Chunk:
    """What the model's code does between two marks."""

    deltas: list[int]
    labels: list[int]
    keys: list[tuple[int, int]]
    """(birth layer, ordinal) of the storage; empty in the compact grain."""


class LabelTable:
    """Labels by number."""

    def __init__(self) -> None:
        self.labels: list[Label] = []
        self._numbers: dict[tuple[str, str, str], int] = {}

    def number(self, category: str, what: str, phase: str) -> int:
        key = (category, what, phase)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.labels)
            self.labels.append(Label(*key))
        return number


@dataclass(frozen=True)
class Program:
    """A trace cut into chunks and marks, ready to be walked by a strategy."""

    steps: Sequence[Chunk | Mark]
    table: LabelTable
    trace: ModelTrace
    compact: bool


def compile_trace(trace: ModelTrace, wanted: Callable[[Mark], bool] = lambda _: True) -> Program:
    """Cut a trace at the marks that an engine wants, every event kept."""
    table = LabelTable()
    steps: list[Chunk | Mark] = []
    run: list[Memory] = []

    def close() -> None:
        if run:
            labels = [table.number(item.category, item.module, item.phase) for item in run]
            steps.append(Chunk([item.delta for item in run], labels, [(item.birth, item.ordinal) for item in run]))
            run.clear()

    for item in trace.items:
        if isinstance(item, Memory):
            run.append(item)
        elif item.kind in DRIVER_MARKS or wanted(item):
            close()
            steps.append(item)
    close()
    return Program(steps, table, trace, False)


class CompactSource:
    """A trace folded between the marks of an engine, for any micro-batch: (highest point, net) per piece.

    `two` is the trace at micro-batch 2 when `one` is that at 1 and both took the same path; None: `one` is for its own
    micro-batch only.
    """

    def __init__(self, one: ModelTrace, two: ModelTrace | None, wanted: Callable[[Mark], bool]) -> None:
        self.table = LabelTable()
        self.plan: list[Mark | int] = []
        """Marks, and numbers of pieces."""
        starts: list[int] = []
        labels: list[int] = []
        first: list[int] = []
        second: list[int] = []
        open_piece = False
        largest = 0
        for i, item in enumerate(one.items):
            if isinstance(item, Memory):
                if not open_piece:
                    open_piece, largest = True, 0
                    self.plan.append(len(starts))
                    starts.append(len(first))
                    labels.append(-1)
                if abs(item.delta) > largest or labels[-1] < 0:  # a piece goes by the name of its largest event
                    largest = abs(item.delta)
                    labels[-1] = self.table.number(item.category, item.module, item.phase)
                first.append(item.delta)
                if two is not None:
                    second.append(two.items[i].delta)  # type: ignore[union-attr]
            elif item.kind in DRIVER_MARKS or wanted(item):
                open_piece = False
                self.plan.append(item)
        self._labels = labels
        self._starts = np.asarray(starts, dtype=np.int64)
        self._first = np.asarray(first, dtype=np.int64)
        self._more = np.asarray(second, dtype=np.int64) - self._first if two is not None else None

    def program(self, trace: ModelTrace, micro_batch: int) -> Program:
        """The folded program at a micro-batch."""
        deltas = self._first if self._more is None else self._first + (micro_batch - 1) * self._more
        if not len(deltas):
            return Program([s for s in self.plan if isinstance(s, Mark)], self.table, trace, True)
        level = np.cumsum(deltas)
        before = np.concatenate(([0], level))[self._starts]
        ends = np.concatenate((self._starts[1:], [len(deltas)])) - 1
        tops = np.maximum(np.maximum.reduceat(level, self._starts) - before, 0).tolist()
        nets = (level[ends] - before).tolist()
        steps: list[Chunk | Mark] = [
            step if isinstance(step, Mark)
            else Chunk([tops[step], nets[step] - tops[step]], [self._labels[step]] * 2, [])
            for step in self.plan
        ]
        return Program(steps, self.table, trace, True)


class Tape:
    """Collects the events of one rank; sizes in bytes."""

    def __init__(self, program: Program) -> None:
        self.table = program.table
        self.compact = program.compact
        self.deltas: list[int] = []
        self.labels: list[int] = []
        self.keys: list[object] = []
        self.boundaries: list[int] = []
        """Index of the first event of each optimizer step."""
        self.phase = "load"
        self.micro = 0
        self.streams: dict[object, int] = {}
        """Names that are allocated on another stream than the default one (0): the allocator keeps a pool per stream."""
        self.lagging: set[int] = set()
        """Indices of frees whose block comes back later: another stream was recorded on it and is not done with it."""
        self._held: dict[object, tuple[int, int]] = {}

    def alloc(self, name: object, nbytes: int, category: str, what: str, stream: int = 0) -> None:
        """Something named `name` is born; a name that is alive already grows."""
        if nbytes <= 0:
            return
        label = self.table.number(category, what, self.phase)
        self.deltas.append(nbytes)
        self.labels.append(label)
        self.keys.append(name)
        if stream:
            self.streams[name] = stream
        held, _ = self._held.get(name, (0, label))
        self._held[name] = (held + nbytes, label)

    def free(self, name: object, lags: bool = False) -> None:
        """What was named `name` dies, whole; nothing happens when it is not alive. `lags`: see `lagging`."""
        held = self._held.pop(name, None)
        if held is not None:
            if lags:
                self.lagging.add(len(self.deltas))
            self.deltas.append(-held[0])
            self.labels.append(held[1])
            self.keys.append(name)

    def blocks(self, sizes: Sequence[int]) -> Sequence[int]:
        """What is born together, as blocks of their own; in the compact grain, which replays no allocator, as one."""
        return [sum(sizes)] if self.compact else sizes

    def transient(self, nbytes: int, category: str, what: str) -> None:
        """Something that is born and dies at once."""
        self.transients([nbytes], category, what)

    def transients(self, sizes: Sequence[int], category: str, what: str) -> None:
        """Blocks that are all born before the first of them dies."""
        first = len(self.deltas)
        for i, nbytes in enumerate(self.blocks(sizes)):
            self.alloc(("transient", first, i), nbytes, category, what)
        for name in self.keys[first:]:
            self.free(name)

    def release(self, nbytes: int, category: str, what: str, key: tuple[int, int]) -> None:
        """Bytes that the model's code allocated (a gradient) die by the engine's hand."""
        self.deltas.append(-nbytes)
        self.labels.append(self.table.number(category, what, self.phase))
        self.keys.append((self.micro, key))

    def held(self, name: object) -> int:
        """Bytes that are alive under a name."""
        return self._held.get(name, (0, 0))[0]

    def play(self, chunk: Chunk, micro: int | None = None) -> None:
        """Append what the model's code does (in micro-batch `micro`, if not in this one)."""
        self.deltas += chunk.deltas
        self.labels += chunk.labels
        if not self.compact:
            micro = self.micro if micro is None else micro
            self.keys += [(micro, key) for key in chunk.keys]
        else:
            self.keys += (None, None)

    def step_begins(self) -> None:
        self.boundaries.append(len(self.deltas))
