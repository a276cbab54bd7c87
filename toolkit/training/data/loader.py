"""The batches of any optimizer step as a pure function of the step, so that a resumed run sees what it
would have seen.

The order is drawn from the seed and the epoch alone. An optimizer step takes the next `world x accumulate x
micro_batch` rows of it whatever their spread over ranks, so every engine and every number of processes
trains on the same rows in the same step. The last step of an epoch is filled up with rows without targets,
which weigh nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from toolkit.training.data.pack import Row
from toolkit.training.data.tokenize import TokenStore

IGNORE = -100
"""The label that the loss leaves out."""


@lru_cache(maxsize=2)
def _order(rows: int, seed: int | None, epoch: int) -> np.ndarray:
    """The order of the rows in an epoch; without a seed, as they stand."""
    return np.arange(rows) if seed is None else np.random.default_rng([seed, epoch]).permutation(rows)


_POOL = 50
"""Steps whose rows are sorted by length together: enough for like lengths to meet, few enough to leave chance its part."""


@lru_cache(maxsize=2)
def _bucketed(lengths: bytes, rows_per_step: int, seed: int, epoch: int) -> np.ndarray:
    """As `_order`, with rows of like length (int64 bytes, one number a row) in the same step and beside each other in it.

    The shuffled rows are sorted within pools of 50 steps and cut into steps, whose order is then drawn; the incomplete step
    stays last. So which rows share a step depends on the global batch alone, not on how it is spread.
    """
    sizes = np.frombuffer(lengths, dtype=np.int64)
    order = _order(len(sizes), seed, epoch)
    pool = _POOL * rows_per_step
    sorted_pools = [part[np.argsort(sizes[part], kind="stable")] for part in np.split(order, range(pool, len(order), pool))]
    whole = len(order) // rows_per_step * rows_per_step
    mixed = np.concatenate(sorted_pools)
    steps = mixed[:whole].reshape(-1, rows_per_step)
    drawn = np.random.default_rng([seed, epoch, rows_per_step]).permutation(len(steps))
    return np.concatenate([steps[drawn].reshape(-1), mixed[whole:]])


def bucketed_block(lengths: np.ndarray, lead: int, rows_per_step: int, drawn: np.random.Generator) -> np.ndarray:
    """An order of the rows of one block of a stream, of these lengths in tokens: rows of like length in the same step, after
    `lead` rows that fill up a step which an earlier block began."""
    order = drawn.permutation(len(lengths))
    lead = min(lead, len(order))
    rest = order[lead:][np.argsort(lengths[order[lead:]], kind="stable")]
    whole = len(rest) // rows_per_step * rows_per_step
    steps = rest[:whole].reshape(-1, rows_per_step)
    return np.concatenate([order[:lead], steps[drawn.permutation(len(steps))].reshape(-1), rest[whole:]])


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank: int64 [micro_batch, length] each. Labels stand under their own token,
    unshifted."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    """Given when a row holds several samples: positions begin anew with each, and attention does not cross."""
    num_tokens: int
    """Tokens of samples; padding is left out."""

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted: the first of a row has nothing before it."""
        return int((self.labels[:, 1:] != IGNORE).sum())

    def to(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The model's arguments, on the device."""
        named = {"input_ids": self.input_ids, "labels": self.labels, "position_ids": self.position_ids}
        return {name: tensor.to(device, non_blocking=True)
                for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Batches of one rank."""

    store: TokenStore
    rows: list[Row]
    micro_batch: int
    accumulate: int
    rank: int
    world: int
    pad_id: int
    fixed_length: int | None
    """Pad every row to this length; None: to the longest of its micro-batch."""
    seed: int
    shuffle: bool
    bucketed: bool = False
    """Rows of like length share a step; needs shuffle."""

    @cached_property
    def _row_lengths(self) -> bytes:
        """Tokens of every row, as int64 bytes."""
        lengths = self.store.lengths
        return np.asarray([int(lengths[row].sum()) for row in self.rows], dtype=np.int64).tobytes()

    def _order_of(self, epoch: int) -> np.ndarray:
        if self.bucketed and self.shuffle:
            return _bucketed(self._row_lengths, self.rows_per_step, self.seed, epoch)
        return _order(len(self.rows), self.seed if self.shuffle else None, epoch)

    @property
    def rows_per_step(self) -> int:
        """Rows of the global batch."""
        return self.world * self.accumulate * self.micro_batch

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.rows) / self.rows_per_step)

    def step(self, index: int) -> list[Batch]:
        """The micro-batches of this rank for optimizer step `index`, counted from 0."""
        epoch, within = divmod(index, self.steps_per_epoch)
        chosen = self._order_of(epoch)[within * self.rows_per_step : (within + 1) * self.rows_per_step]
        return [
            self._batch(chosen[(micro * self.world + self.rank) * self.micro_batch :][: self.micro_batch])
            for micro in range(self.accumulate)
        ]

    def epoch(self) -> Iterator[Batch]:
        """Every row once, in order: the same number of batches on every rank."""
        for index in range(self.steps_per_epoch):
            yield from self.step(index)

    def _batch(self, chosen: np.ndarray) -> Batch:
        filled = [row_of(self.store, self.rows[index]) for index in chosen]
        return batch_of(filled, self.micro_batch, self.pad_id, self.fixed_length)


FilledRow = tuple[np.ndarray, np.ndarray, list[int]]
"""(ids, labels, start of each sample) of one row."""


def batch_of(filled: list[FilledRow], micro_batch: int, pad_id: int, fixed_length: int | None) -> Batch:
    """A micro-batch of these rows, filled up with rows without targets."""
    length = fixed_length or max((len(ids) for ids, _, _ in filled), default=1)
    shape = (micro_batch, length)
    input_ids: np.ndarray = np.full(shape, pad_id, dtype=np.int64)
    labels: np.ndarray = np.full(shape, IGNORE, dtype=np.int64)
    positions = np.tile(np.arange(length, dtype=np.int64), (micro_batch, 1))
    several = False
    for at, (ids, marks, starts) in enumerate(filled):
        input_ids[at, : len(ids)] = ids
        labels[at, : len(ids)] = marks
        for start in starts[1:]:
            several = True
            positions[at, start:] = np.arange(length - start)
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels),
                 torch.from_numpy(positions) if several else None, sum(len(ids) for ids, _, _ in filled))


def row_of(store: TokenStore, row: Row) -> FilledRow:
    """A row's samples end to end. No sample's first token is predicted from the one before."""
    ids, labels, starts, length = [], [], [], 0
    for sample in row:
        begin, end = store.offsets[sample], store.offsets[sample + 1]
        tokens = np.asarray(store.tokens[begin:end], dtype=np.int64)
        marks = np.where(store.targets[begin:end], tokens, IGNORE)
        marks[0] = IGNORE
        ids.append(tokens)
        labels.append(marks)
        starts.append(length)
        length += len(tokens)
    return np.concatenate(ids), np.concatenate(labels), starts
