"""The timeline of one rank: every allocation and free, in order, with what it is, where and when.

A strategy writes it (`alloc`, `free`), the model's own code is appended in chunks. Two grains exist: the full one keeps
every event; the compact one folds what the model's code does between two marks of an engine into its highest point and
its net effect, which gives the same peaks from a fraction of the events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from toolkit.timeline.trace import Mark, Memory, ModelTrace


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
        self._numbers: dict[Label, int] = {}

    def number(self, category: str, what: str, phase: str) -> int:
        label = Label(category, what, phase)
        if label not in self._numbers:
            self._numbers[label] = len(self.labels)
            self.labels.append(label)
        return self._numbers[label]


@dataclass(frozen=True)
class Program:
    """A trace cut into chunks and marks, ready to be walked by a strategy."""

    steps: Sequence[Chunk | Mark]
    table: LabelTable
    trace: ModelTrace
    compact: bool


def compile_trace(trace: ModelTrace, compact: bool, wanted: Callable[[Mark], bool] = lambda _: True) -> Program:
    """Cut a trace at the marks that an engine wants. `compact` folds each chunk to (highest point, net)."""
    table = LabelTable()
    steps: list[Chunk | Mark] = []
    run: list[Memory] = []

    def close() -> None:
        if not run:
            return
        deltas = [item.delta for item in run]
        if compact:
            level = np.cumsum(deltas)
            top, net = max(0, int(level.max())), int(level[-1])
            at = int(level.argmax())
            label = table.number(run[at].category, run[at].module, run[at].phase)
            steps.append(Chunk([top, net - top], [label, label], []))
        else:
            labels = [table.number(item.category, item.module, item.phase) for item in run]
            steps.append(Chunk(deltas, labels, [(item.birth, item.ordinal) for item in run]))
        run.clear()

    for item in trace.items:
        if isinstance(item, Memory):
            run.append(item)
        elif wanted(item):
            close()
            steps.append(item)
    close()
    return Program(steps, table, trace, compact)


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
        self._held: dict[object, tuple[int, int]] = {}

    def alloc(self, name: object, nbytes: int, category: str, what: str) -> None:
        """Something named `name` is born; a name that is alive already grows."""
        if nbytes <= 0:
            return
        label = self.table.number(category, what, self.phase)
        self.deltas.append(nbytes)
        self.labels.append(label)
        self.keys.append(name)
        held, _ = self._held.get(name, (0, label))
        self._held[name] = (held + nbytes, label)

    def free(self, name: object) -> None:
        """What was named `name` dies, whole; nothing happens when it is not alive."""
        held = self._held.pop(name, None)
        if held is not None:
            self.deltas.append(-held[0])
            self.labels.append(held[1])
            self.keys.append(name)

    def transient(self, nbytes: int, category: str, what: str) -> None:
        """Something that is born and dies at once."""
        if nbytes > 0:
            self.alloc(("transient", len(self.deltas)), nbytes, category, what)
            name = self.keys[-1]
            self.free(name)

    def release(self, nbytes: int, category: str, what: str, key: tuple[int, int]) -> None:
        """Bytes that the model's code allocated (a gradient) die by the engine's hand."""
        self.deltas.append(-nbytes)
        self.labels.append(self.table.number(category, what, self.phase))
        self.keys.append((self.micro, key))

    def held(self, name: object) -> int:
        """Bytes that are alive under a name."""
        return self._held.get(name, (0, 0))[0]

    def play(self, chunk: Chunk) -> None:
        """Append what the model's code does."""
        self.deltas += chunk.deltas
        self.labels += chunk.labels
        if not self.compact:
            micro = self.micro
            self.keys += [(micro, key) for key in chunk.keys]
        else:
            self.keys += (None, None)

    def step_begins(self) -> None:
        self.boundaries.append(len(self.deltas))
