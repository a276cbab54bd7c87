"""What comes in which block of a data set that is read as it goes, and not kept.

An epoch passes over every file of every entry once (as often as the entry's weight says). The files are opened in an order that
the seed draws, several at a time, and read so that all that are open get on alike; a block is the next `count` records. Where a
block begins is told by a position, which JSON can hold: the same position gives the same block, in any process, so that a resumed
run reads one block again and not all that was before.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from toolkit.errors import UserError
from toolkit.training.data.encode import Encoded, Encoder, Reading
from toolkit.training.data.read import Cursor, Item, read_file, read_hub, read_saved, resolve, size_of
from toolkit.training.data.sources import ARRAYS, Source, suffix_of
from toolkit.training.data.tokenize import FirstRecord, TokenStore, store_of, why_nothing

OPEN_FILES = 8
"""Files that are read side by side where the order is drawn."""
_ORDER_STREAM, _SHARE_STREAM = 0xF11E, 0x5AA3
"""Keep these random numbers apart from others of the same seed."""
_ENDS = 1 << 16
"""Bytes at either end of a file that its digest takes in."""

Position = dict[str, Any]
"""epoch, next (the file of the epoch's order that is opened next), open: [place in that order, Cursor's fields, hub state], and
settled: what the very first record has settled (kind, train_on)."""
BEGINNING: Position = {"epoch": 0, "next": 0, "open": [], "settled": None}


@dataclass(frozen=True)
class Unit:
    """A file, or a data set that is read as one."""

    source: Source
    path: Path | None
    share: float = 1.0
    """The part of its records that is taken."""


def units_of(entries: tuple[str, ...], weights: tuple[float, ...]) -> list[Unit]:
    """What an epoch passes over, in the order of the entries. Raises UserError for what cannot be read a record at a time."""
    units = []
    for entry, weight in zip(entries, weights or (1.0,) * len(entries), strict=True):
        source = resolve(entry)
        own: tuple[Path | None, ...] = source.files or (None,)
        for path in own:
            if path is not None and suffix_of(path) in ARRAYS:
                raise UserError(f"data file {str(path)!r}: an array of JSON is read as a whole and cannot be streamed; "
                                "write it as .jsonl, or use streaming=false")
        share, whole = math.modf(weight)
        for part in [1.0] * int(whole) + ([share] if share else []):
            units += [Unit(source, path, part) for path in own]
    return units


def stream_key(entries: tuple[str, ...], weights: tuple[float, ...], block: int, tokenizer_key: str, order: str) -> str:
    """A name for the stream: names of hub data, sizes and ends of files (what is streamed is too much to be read for a digest),
    and all that decides what comes when."""
    digest = hashlib.sha256(repr((weights, block, tokenizer_key, order)).encode())
    for entry in entries:
        source = resolve(entry)
        digest.update(repr((source.kind, source.name, source.config, source.split, source.revision)).encode())
        for path in source.files:
            size = path.stat().st_size
            with path.open("rb") as file:
                head = file.read(_ENDS)
                file.seek(max(0, size - _ENDS))
                digest.update(repr((suffix_of(path), size)).encode() + head + file.read(_ENDS))
    return digest.hexdigest()[:32]


class _Open:
    """A unit that is being read."""

    def __init__(self, unit: Unit, at: int, cursor: Cursor, state: Any, first: FirstRecord) -> None:
        self.unit, self.at, self.cursor = unit, at, cursor
        self.rows: Any = None
        begun = cursor.number > 0
        self.size = 0
        if unit.path is not None:
            items, self.size = read_file(unit.path, first.bad, cursor), size_of(unit.path)
        elif unit.source.kind == "saved":
            items = read_saved(unit.source, cursor)
        else:
            self.rows = read_hub(unit.source)
            if state:
                self.rows.load_state_dict(state)
            items = self._of_hub()
        self.items: Iterator[Item] = items if begun else first.checked(items)

    def _of_hub(self) -> Iterator[Item]:
        for row in self.rows:
            self.cursor.number += 1
            yield f"{self.unit.source.text} row {self.cursor.number}", dict(row)

    @property
    def done(self) -> float:
        """How much of it is read: a share where that is known, else a figure that grows."""
        return (self.cursor.offset or self.cursor.number) / (self.size or 1e6)

    @property
    def place(self) -> list[Any]:
        """What of a position is its."""
        state = self.rows.state_dict() if self.rows is not None else None
        return [self.at, self.cursor.number, self.cursor.offset, state]


class Drawer:
    """Draws blocks. It goes on with the files that are open when the next block begins where the last one ended."""

    def __init__(self, tokenizer: Any, reading: Reading, entries: tuple[str, ...], weights: tuple[float, ...],
                 seed: int | None) -> None:
        self.tokenizer, self.seed, self.entries = tokenizer, seed, entries
        self.units = units_of(entries, weights)
        self.first = FirstRecord(tokenizer, reading)
        self._open: list[_Open] = []
        self._position: Position | None = None

    def block(self, position: Position, count: int) -> TokenStore:
        """The next `count` records from `position` on as tokens, fewer at the end of an epoch; `facts["after"]` is where the next
        block begins.

        Raises:
            UserError: as `build` does.
        """
        whole, epoch = Encoded(), position["epoch"]
        while not whole.lengths:
            self.first.out = Encoded()
            items, position = self._draw(position, count)
            if items:
                whole.extend(Encoder(self.tokenizer, self.first.reading)(items))
            whole.extend(self.first.out)
            if not whole.lengths and position["epoch"] > epoch + 1:
                reading = self.first.reading if self.first.place else None
                raise UserError(f"data {', '.join(self.entries)}: {why_nothing(whole, reading)}")
        return store_of(whole, {"kind": self.first.reading.kind, "train_on": self.first.reading.train_on, "after": position})

    def _draw(self, position: Position, count: int) -> tuple[list[Item], Position]:
        """(items, position after them): at most `count`, of one epoch."""
        epoch = position["epoch"]
        order = self._order(epoch)
        if position["settled"] and not self.first.place:
            kind, aim = position["settled"]
            self.first.reading, self.first.place = replace(self.first.reading, kind=kind, train_on=aim), "the data before"
        if position != self._position:
            self._open = [_Open(self.units[order[at]], at, Cursor(number, offset), state, self.first)
                          for at, number, offset, state in position["open"]]
        following = position["next"]
        items: list[Item] = []
        while len(items) < count:
            while following < len(order) and len(self._open) < (OPEN_FILES if self.seed is not None else 1):
                self._open.append(_Open(self.units[order[following]], following, Cursor(), None, self.first))
                following += 1
            if not self._open:
                epoch, following = epoch + 1, 0
                break
            now = min(self._open, key=lambda one: (one.done, one.at))
            item = next(now.items, None)
            if item is None:
                self._open.remove(now)
            elif now.unit.share == 1.0 or self._taken(now, epoch):
                items.append(item)
        reading = self.first.reading
        self._position = {"epoch": epoch, "next": following, "open": [one.place for one in self._open],
                          "settled": [reading.kind, reading.train_on] if self.first.place else None}
        return items, self._position

    def _order(self, epoch: int) -> list[int]:
        if self.seed is None:
            return list(range(len(self.units)))
        return [int(at) for at in np.random.default_rng([self.seed, _ORDER_STREAM, epoch]).permutation(len(self.units))]

    def _taken(self, one: _Open, epoch: int) -> bool:
        drawn = xxhash.xxh3_64_intdigest(repr((self.seed, _SHARE_STREAM, epoch, one.at, one.cursor.number)).encode())
        return drawn < one.unit.share * 2.0**64
