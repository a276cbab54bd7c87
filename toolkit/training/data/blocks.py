"""The batches of a stream: what `Loader` gives of data that is held as a whole, of blocks that come and go.

The main process of each node makes the blocks, one ahead of the run, in a process of its own; all ranks of the node map them
into memory, and take the rows of the global batch that are theirs. So which rows a step has is a function of the data, the seed
and the global batch alone, and there is no end at which ranks could differ: after an epoch comes the next. A file in the run
folder says where each block begins (`stream.jsonl`); without it a resumed run makes the blocks anew from the beginning.
"""

from __future__ import annotations

import atexit
import json
import math
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.cache import cache_dir
from toolkit.errors import UserError
from toolkit.training.data import pack
from toolkit.training.data.encode import Reading
from toolkit.training.data.loader import Batch, FilledRow, batch_of, bucketed_block, row_of
from toolkit.training.data.stream import BEGINNING, Drawer, Position
from toolkit.training.data.tokenize import TokenStore, keep, load
from toolkit.training.data.workers import end_with

if TYPE_CHECKING:
    from accelerate import Accelerator

FAILED = "failed"
"""The file by which the maker of a node tells the others what is wrong."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How blocks are made."""

    tokenizer: Any
    reading: Reading
    entries: tuple[str, ...]
    weights: tuple[float, ...]
    seed: int | None
    count: int
    """Records of a block."""

    def drawer(self) -> Drawer:
        return Drawer(self.tokenizer, self.reading, self.entries, self.weights, self.seed)


class Maker:
    """Makes the blocks of a node as folders of a spool: the first in this process, the others ahead in one of its own."""

    def __init__(self, recipe: Recipe, spool: Path) -> None:
        self.recipe, self.spool = recipe, spool
        self._pool: Any = None
        self._ahead: dict[int, Any] = {}

    def make(self, number: int, position: Position) -> TokenStore:
        """Block `number`, which begins at `position`. Raises UserError, and tells the other ranks of the node."""
        try:
            if number in self._ahead:
                self._ahead.pop(number).get()
            else:
                keep(self.spool / str(number), self.recipe.drawer().block(position, self.recipe.count))
        except UserError as error:
            (self.spool / FAILED).write_text(str(error), encoding="utf-8")
            raise
        store = load(self.spool / str(number))
        if store is None:
            raise UserError(f"the block of data {self.spool / str(number)} cannot be read; is the disk full?")
        return store

    def go_ahead(self, number: int, position: Position) -> None:
        """Have a block made that will be asked for."""
        if number in self._ahead or (self.spool / str(number)).exists():
            return
        if self._pool is None:
            counted = os.environ.pop("LD_PRELOAD", None)  # What counts the run's allocations has nothing to count there.
            self._pool = multiprocessing.get_context("spawn").Pool(1, _begin, (self.recipe, os.getpid()))
            if counted is not None:
                os.environ["LD_PRELOAD"] = counted
        self._ahead[number] = self._pool.apply_async(_make_ahead, (self.spool / str(number), position))


_of_this_process: list[tuple[Drawer, int]] = []


def _begin(recipe: Recipe, parent: int) -> None:
    from toolkit.training.start import quiet

    end_with(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    quiet()
    _of_this_process[:] = [(recipe.drawer(), recipe.count)]


def _make_ahead(folder: Path, position: Position) -> None:
    drawer, count = _of_this_process[0]
    keep(folder, drawer.block(position, count))


def shared_spool(accelerator: Accelerator) -> Path:
    """A folder of this run for the ranks of this node, removed with the process that made it. Every rank must call it."""
    from accelerate.utils import gather_object

    own = ""
    if accelerator.is_local_main_process:
        streams = cache_dir("data", "streams")
        for left in streams.iterdir():
            if not Path(f"/proc/{left.name.partition('-')[0]}").exists():
                shutil.rmtree(left, ignore_errors=True)
        own = tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=streams)
        atexit.register(shutil.rmtree, own, ignore_errors=True)
    told: list[str] = gather_object([own])
    return Path(told[accelerator.process_index - accelerator.local_process_index])


@dataclass(frozen=True)
class Block:
    """A block as rows of the stream."""

    number: int
    position: Position
    begin: int
    """The stream's number of its first row."""
    store: TokenStore
    rows: list[pack.Row]

    @property
    def end(self) -> int:
        return self.begin + len(self.rows)

    @property
    def note(self) -> dict[str, Any]:
        """What the run folder keeps of it."""
        counts = {name: self.store.facts[name] for name in ("samples", "tokens", "truncated", "dropped", "skipped")}
        return {"block": self.number, "row": self.begin, "position": self.position, "rows": len(self.rows), **counts}


class StreamLoader:
    """Batches of one rank; see `Loader`.

    Args:
        key: the stream's name.
        notes: the file that says where blocks begin.
        spool: where the blocks of this node lie.
        maker: makes them; None on ranks that only read them.
        check: told every block's store; raises UserError when it does not fit the model.
        seq_len: tokens of a packed row; None: a row is a sample.
    """

    def __init__(self, *, key: str, notes: Path, spool: Path, maker: Maker | None, accelerator: Accelerator, micro_batch: int,
                 accumulate: int, pad_id: int, seq_len: int | None, seed: int | None, bucketed: bool,
                 check: Callable[[TokenStore], None]) -> None:
        self.key, self.notes, self.spool, self.maker, self.check = key, notes, spool, maker, check
        self.accelerator, self.micro_batch, self.accumulate, self.pad_id = accelerator, micro_batch, accumulate, pad_id
        self.seq_len, self.seed, self.bucketed = seq_len, seed, bucketed
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self._noted = -1
        self._step: int | None = None
        self.block = self._take(0, BEGINNING, 0)
        self._passed: list[Block] = []

    steps_per_epoch = math.inf
    """Nobody knows."""

    @property
    def rows_per_step(self) -> int:
        """Rows of the global batch."""
        return self.world * self.accumulate * self.micro_batch

    def step(self, index: int) -> list[Batch]:
        """The micro-batches of this rank for optimizer step `index`, counted from 0. Every rank must call it, step after step."""
        begin = index * self.rows_per_step
        if index != (self._step if self._step is not None else -1) + 1:
            self._seek(begin)
        self._step = index
        self._settle()
        own = {micro: [begin + (micro * self.world + self.rank) * self.micro_batch + at for at in range(self.micro_batch)]
               for micro in range(self.accumulate)}
        rows: dict[int, FilledRow] = {}
        for row in range(begin, begin + self.rows_per_step):
            while row >= self.block.end:
                self._advance(begin)
            if (row - begin) // self.micro_batch % self.world == self.rank:
                rows[row] = row_of(self.block.store, self.block.rows[row - self.block.begin])
        return [batch_of([rows[row] for row in part], self.micro_batch, self.pad_id, self.seq_len) for part in own.values()]

    def _advance(self, begin: int) -> None:
        """Go on to the next block, and drop those that ended before the step before this one: no rank is further behind."""
        self._passed.append(self.block)
        self.block = self._take(self.block.number + 1, self.block.store.facts["after"], self.block.end)
        self._settle()
        gone = [block for block in self._passed if block.end <= begin - self.rows_per_step]
        self._passed = [block for block in self._passed if block not in gone]
        if self.maker is not None:
            for block in gone:
                shutil.rmtree(self.spool / str(block.number), ignore_errors=True)

    def _take(self, number: int, position: Position, begin: int) -> Block:
        store = self.maker.make(number, position) if self.maker is not None else self._wait_for(number)
        self.check(store)
        samples = np.arange(len(store))
        if self.seq_len is None:
            rows = pack.one_per_row(samples)
        else:
            rows = (pack.best_fit if self.seed is not None else pack.in_order)(samples, store.lengths, self.seq_len)
        if self.seed is not None:
            drawn = np.random.default_rng([self.seed, number])
            lengths = np.asarray([int(store.lengths[row].sum()) for row in rows])
            order = bucketed_block(lengths, -begin % self.rows_per_step, self.rows_per_step, drawn) if self.bucketed \
                else drawn.permutation(len(rows))
            rows = [rows[at] for at in order]
        return Block(number, position, begin, store, rows)

    def _wait_for(self, number: int) -> TokenStore:
        """A block that the node's main process makes. Raises UserError when it can't."""
        while (store := load(self.spool / str(number))) is None:
            if (self.spool / FAILED).exists():
                raise UserError((self.spool / FAILED).read_text(encoding="utf-8"))
            time.sleep(0.02)
        return store

    def _seek(self, row: int) -> None:
        """Go to the last block that is known to begin at `row` or before it. Every rank must call it."""
        from accelerate.utils import broadcast_object_list

        told: list[Any] = [None]
        if self.accelerator.is_main_process:
            known = [note for note in self._read_notes() if note["row"] <= row]
            told = [max(known, key=lambda note: note["row"], default=None)]
        if self.world > 1:
            broadcast_object_list(told)
        note = told[0] or {"block": 0, "row": 0, "position": BEGINNING}
        if note["block"] != self.block.number and (note["row"] > self.block.begin or row < self.block.begin):
            self.block = self._take(note["block"], note["position"], note["row"])

    def _read_notes(self) -> list[dict[str, Any]]:
        """The notes of this very stream."""
        try:
            lines = self.notes.read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        notes = []
        for line in lines:
            try:
                notes.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # A run that was killed can leave half a line.
        return [note for note in notes if note.get("stream") == self.key]

    def _settle(self) -> None:
        """Have the next block made, and note where this one begins."""
        if self.maker is not None:
            self.maker.go_ahead(self.block.number + 1, self.block.store.facts["after"])
        if not self.accelerator.is_main_process or self.block.number <= self._noted:
            return
        if self._noted < 0:
            notes = self._read_notes()
            self._noted = max((note["block"] for note in notes), default=-1)
            self.notes.write_text("".join(json.dumps(note) + "\n" for note in notes), encoding="utf-8")
        if self.block.number > self._noted:
            with self.notes.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"stream": self.key, **self.block.note}) + "\n")
            self._noted = self.block.number
