"""What was alive at the highest point of a recorded step: every byte by category, module and phase.

A record (`toolkit.profiling.record`) is the list of all births and deaths of one step in their order, each with the number of
the place where the program was, and of labels that the program put on addresses. Nothing here needs torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

IDENTIFIED = ("parameters", "master_weights", "optimizer_states", "gradients", "communication")
"""Categories that are told by what hangs on an object or was handed to a collective; an earlier one wins."""
CATEGORIES = (*IDENTIFIED, "activations", "logits_and_loss", "temporaries", "other")
"""Those of an estimate, and `other`: what no rule tells."""
PHASES = ("between", "forward", "backward", "optimizer")
MODULES = 12
"""So many modules are kept, the largest first."""


class Event(NamedTuple):
    """A birth (size above zero) or a death (below)."""

    address: int
    size: int
    place: int
    """By number; of what was held before: below zero, see `before`."""
    elsewhere: bool = False
    """On another thread than the loop's: a communication backend's."""


class Place(NamedTuple):
    """Where the program is."""

    phase: str
    module: str
    head: bool
    """In the output layer, or in the code around it that computes the loss."""
    collective: bool = False


class Label(NamedTuple):
    """What lies at an address from some place on."""

    place: int
    address: int
    category: str


@dataclass
class Block:
    """One allocation. Indices are those of events; `death` is past the last where it outlived the record."""

    size: int
    birth: int
    death: int
    born: int
    died: int
    """Places."""
    held_before: bool
    elsewhere: bool
    category: str = ""


@dataclass
class Breakdown:
    """A step at its highest point. Sizes in bytes."""

    peak: int
    phase: str
    module: str
    categories: dict[str, int]
    """Sums to `peak`."""
    by_module: list[tuple[str, int]]
    """What the modules' own code made, by where it was made."""
    by_phase: dict[str, dict[str, int]] = field(default_factory=dict)
    """The same split at the highest point of each phase."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"peak": self.peak, "at_peak": {"phase": self.phase, "module": self.module}, "breakdown": self.categories,
                "by_module": [{"module": name, "bytes": size} for name, size in self.by_module], "by_phase": self.by_phase}


def before(phase: str) -> int:
    """The place of a phase outside of the record."""
    return -1 - PHASES.index(phase)


def break_down(events: Sequence[Event], held: int, places: Sequence[Place], labels: Sequence[Label],
               buckets: Sequence[int] = ()) -> Breakdown:
    """Tell what was alive at the peak.

    Args:
        events: of one step, beginning with the births of what was held before it.
        held: how many those are.
        places: by number.
        labels: in the order in which they were put.
        buckets: sizes of gradient buckets that a C++ engine holds out of Python's sight.
    """
    blocks, levels = _blocks(events, held, len(places))
    _identify(blocks, events, labels, buckets)
    forwards = _forwards_before(places)
    for block in blocks:
        block.category = block.category or _by_life(block, places, forwards, len(events))
    tops: dict[str, int] = {}
    for i in range(held, len(events)):
        phase = places[events[i].place].phase
        if phase not in tops or levels[i] > levels[tops[phase]]:
            tops[phase] = i
    top = max([held - 1, *tops.values()], key=lambda i: (levels[i] if levels else 0, -i))
    where = places[events[top].place] if top >= held else places[0]
    by_module: dict[str, int] = defaultdict(int)
    for block in blocks:
        if block.birth <= top < block.death and not block.held_before and block.category not in IDENTIFIED:
            by_module[places[block.born].module] += block.size
    return Breakdown(levels[top] if levels else 0, where.phase, where.module, _split(blocks, top),
                     sorted(by_module.items(), key=lambda item: -item[1])[:MODULES],
                     {phase: _split(blocks, tops[phase]) for phase in PHASES if phase in tops})


def _split(blocks: Sequence[Block], at: int) -> dict[str, int]:
    """Bytes by category that are alive after event `at`."""
    found = dict.fromkeys(CATEGORIES, 0)
    for block in blocks:
        if block.birth <= at < block.death:
            found[block.category] += block.size
    return found


def _blocks(events: Sequence[Event], held: int, last: int) -> tuple[list[Block], list[int]]:
    """The allocations, and the bytes that are alive after each event."""
    alive: dict[int, Block] = {}
    blocks: list[Block] = []
    levels: list[int] = []
    level = 0
    for i, event in enumerate(events):
        level += event.size
        levels.append(level)
        if event.size > 0:
            block = Block(event.size, i, len(events), event.place, last, i < held, event.elsewhere)
            alive[event.address] = block
            blocks.append(block)
        elif event.address in alive:
            block = alive.pop(event.address)
            block.death, block.died = i, event.place
    return blocks, levels


def _identify(blocks: Sequence[Block], events: Sequence[Event], labels: Sequence[Label], buckets: Sequence[int]) -> None:
    """Give blocks the categories of the labels on them."""
    at: dict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        at[events[block.birth].address].append(block)
    rank = {name: i for i, name in enumerate(IDENTIFIED)}
    for label in labels:
        here = at.get(label.address, [])
        # The last one that was born before the label was put, if it was still alive: a label has a place number of its own.
        number = bisect_left(here, label.place, key=lambda block: block.born) - 1
        if number >= 0 and here[number].died >= label.place:
            block = here[number]
            if not block.category or rank[label.category] < rank[block.category]:
                block.category = label.category
    wanted = list(buckets)
    for block in blocks:
        if block.held_before and not block.category and block.size in wanted:
            wanted.remove(block.size)
            block.category = "communication"


def _forwards_before(places: Sequence[Place]) -> list[int]:
    counts = [0]
    for place in places:
        counts.append(counts[-1] + (place.phase == "forward"))
    return counts


def _by_life(block: Block, places: Sequence[Place], forwards: Sequence[int], end: int) -> str:
    """What nobody holds is told by where it was born and when it died; the rules of the estimate's timeline."""
    if block.held_before:  # kernels' libraries keep what they work in
        return "temporaries" if block.born in (before("forward"), before("backward")) else "other"
    born = places[block.born]
    if born.collective or block.elsewhere:
        return "communication"
    if born.phase == "between":  # the inputs live through the forward pass; norms and sums do not
        seen = forwards[min(block.died, len(forwards) - 1)] - forwards[block.born]
        return "activations" if seen else "temporaries"
    if born.phase == "optimizer":
        return "temporaries"
    if born.head:
        return "logits_and_loss"
    if born.phase == "forward" and block.death == end:
        return "other"  # kept beyond the step: no activation is
    if born.phase == "forward" and places[block.died].phase == "backward":
        return "activations"
    return "temporaries"
