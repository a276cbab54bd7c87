"""Batches that differ in length: what an allocator with fixed segments is given before the longest one.

A batch is padded to the longest of its rows. A block that was freed fits what is as large or smaller, so every batch that is
longer than all before it needs new blocks, while the old ones stay cached: it is the records of a run that count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.timeline.tape import Tape

RECORDS = 3
"""Records before the first batch of full length: when every twentieth batch reaches it, ln 20 = 3 of them are to be expected (n
draws have 1 + 1/2 + ... + 1/n records)."""


def shorter_lengths(seq_len: int, micro_batch: int, multiple: int = 1) -> list[int]:
    """Tokens per row of the batches that set a record, in order, `seq_len` left out.

    Rows are taken to be spread evenly up to `seq_len`, so the longest of `micro_batch` of them is shorter than a share x of it
    with probability x ** micro_batch; a record leaves half of the probability above it. Rounded down to `multiple`.
    """
    shares = [(1 - 0.5**k) ** (1 / micro_batch) for k in range(1, RECORDS + 1)]
    lengths = {int(seq_len * share) // multiple * multiple for share in shares}
    return sorted(lengths - {0, seq_len})


@dataclass
class Events:
    """What an allocator is given: a tape's events, or those of several."""

    deltas: list[int] = field(default_factory=list)
    keys: list[object] = field(default_factory=list)
    streams: dict[object, int] = field(default_factory=dict)
    lagging: set[int] = field(default_factory=set)


def one_after_the_other(tapes: Sequence[Tape], micro_batches: int) -> Events:
    """The load and the first step of the first tape, then the second step of each of the others.

    Args:
        tapes: of one plan, by the length of their batches; each of two steps.
        micro_batches: that a step of each plays.
    """
    out = Events()
    _append(out, tapes[0], 0, tapes[0].boundaries[1], 0)
    for i, tape in enumerate(tapes[1:]):
        _append(out, tape, tape.boundaries[1], len(tape.deltas), i * micro_batches)
    return out


def _append(out: Events, tape: Tape, start: int, end: int, later: int) -> None:
    """Events of a tape, whose micro-batches are numbered `later` ones on: what the model's code names stays apart."""
    first = len(out.deltas) - start
    out.deltas += tape.deltas[start:end]
    out.keys += [_later(key, later) for key in tape.keys[start:end]]
    out.streams.update(tape.streams)
    out.lagging.update(first + i for i in tape.lagging if start <= i < end)


def _later(key: object, micro_batches: int) -> object:
    """What the model's code allocated goes by (micro-batch, storage); what an engine did by a name."""
    return (key[0] + micro_batches, *key[1:]) if isinstance(key, tuple) and isinstance(key[0], int) else key
