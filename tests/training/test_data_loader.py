"""Rows and batches: packing loses nothing, and a step is the same rows on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.training.data import pack
from toolkit.training.data.loader import IGNORE, Loader
from toolkit.training.data.tokenize import TokenStore

LENGTHS = [5, 3, 8, 2, 2, 7, 4, 6, 1, 8, 3]


def make_store(lengths: list[int]) -> TokenStore:
    """Samples whose tokens say where they come from: 100 x sample + position; all but the first are targets."""
    tokens = np.concatenate([100 * (i + 1) + np.arange(n) for i, n in enumerate(lengths)]).astype(np.int32)
    targets = np.concatenate([np.arange(n) >= 1 for n in lengths])
    return TokenStore(tokens, targets, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def make_loader(rank: int = 0, world: int = 1, *, accumulate: int = 1, micro_batch: int = 1, packed: bool = True,
                **values: Any) -> Loader:
    store = make_store(LENGTHS)
    samples = np.arange(len(store))
    rows = pack.best_fit(samples, store.lengths, 8) if packed else pack.one_per_row(samples)
    return Loader(**{"store": store, "rows": rows, "micro_batch": micro_batch, "accumulate": accumulate, "rank": rank,
                     "world": world, "pad_id": 0, "fixed_length": 8 if packed else None, "seed": 7, "shuffle": True, **values})


@given(st.lists(st.integers(1, 32), min_size=1, max_size=60))
@settings(deadline=None, max_examples=60)
def test_packing_puts_every_sample_into_exactly_one_row_that_holds_it(lengths: list[int]) -> None:
    samples, sizes = np.arange(len(lengths)), np.asarray(lengths)
    for rows in (pack.best_fit(samples, sizes, 32), pack.in_order(samples, sizes, 32)):
        assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
        assert all(sum(lengths[sample] for sample in row) <= 32 for row in rows)
    assert [sample for row in pack.in_order(samples, sizes, 32) for sample in row] == list(range(len(lengths)))


def test_packed_samples_begin_anew_and_are_not_predicted_from_their_neighbour() -> None:
    loader = make_loader(shuffle=False)
    for batch in loader.epoch():
        ids, labels = batch.input_ids[0].numpy(), batch.labels[0].numpy()
        positions = np.arange(8) if batch.position_ids is None else batch.position_ids[0].numpy()
        real = ids > 0
        assert np.array_equal(positions[real], ids[real] % 100)
        assert (labels[positions == 0] == IGNORE).all()
        assert np.array_equal(labels[real & (positions > 0)], ids[real & (positions > 0)])
        assert (labels[~real] == IGNORE).all()


def test_without_packing_a_row_is_as_long_as_the_longest_of_its_micro_batch() -> None:
    loader = make_loader(packed=False, shuffle=False, micro_batch=2)
    shapes = [tuple(batch.input_ids.shape) for batch in loader.epoch()]
    assert shapes == [(2, 5), (2, 8), (2, 7), (2, 6), (2, 8), (2, 3)]
    assert all(batch.position_ids is None for batch in loader.epoch())


@pytest.mark.parametrize(("world", "accumulate", "micro_batch"), [(1, 4, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1), (1, 2, 2)])
@pytest.mark.parametrize(("packed", "bucketed"), [(True, False), (False, False), (False, True)])
def test_a_step_is_the_same_tokens_and_targets_however_it_is_spread(
    world: int, accumulate: int, micro_batch: int, packed: bool, bucketed: bool
) -> None:
    whole = make_loader(micro_batch=4, packed=packed, bucketed=bucketed)
    shape: dict[str, Any] = {"accumulate": accumulate, "micro_batch": micro_batch, "packed": packed, "bucketed": bucketed}
    ranks = [make_loader(rank, world, **shape) for rank in range(world)]

    def tokens(batches: list[Any]) -> list[int]:
        return sorted(int(token) for batch in batches for token in batch.input_ids.flatten() if token > 0)

    for index in range(2 * whole.steps_per_epoch):
        parts = [batch for loader in ranks for batch in loader.step(index)]
        expected = whole.step(index)
        assert tokens(parts) == tokens(expected)
        assert sum(batch.num_targets for batch in parts) == sum(batch.num_targets for batch in expected)
        assert sum(batch.num_tokens for batch in parts) == sum(batch.num_tokens for batch in expected)


def test_an_epoch_holds_every_sample_once_and_the_next_is_in_another_order() -> None:
    loader = make_loader(packed=False, micro_batch=2)

    def epoch(number: int) -> list[int]:
        steps = range(number * loader.steps_per_epoch, (number + 1) * loader.steps_per_epoch)
        return [int(row[0]) // 100 for index in steps for batch in loader.step(index) for row in batch.input_ids if row[0]]

    assert sorted(epoch(0)) == sorted(epoch(1)) == list(range(1, len(LENGTHS) + 1))
    assert epoch(0) != epoch(1) and epoch(0) == epoch(0)


def test_the_last_step_is_filled_up_with_rows_that_weigh_nothing() -> None:
    loaders = [make_loader(rank, 2, packed=False, micro_batch=3, shuffle=False) for rank in range(2)]
    batches = [loader.step(loader.steps_per_epoch - 1)[0] for loader in loaders]
    assert [tuple(batch.input_ids.shape)[0] for batch in batches] == [3, 3]
    assert sum(batch.num_tokens for batch in batches) == sum(LENGTHS[6:])


def test_rows_of_like_length_meet_and_nothing_else_changes() -> None:
    rng = np.random.default_rng(0)
    store = make_store([int(n) for n in rng.integers(2, 60, 400)])
    shared: dict[str, Any] = {"store": store, "rows": pack.one_per_row(np.arange(400)), "packed": False, "micro_batch": 4}

    def padded(loader: Loader) -> int:
        return sum(batch.input_ids.numel() - batch.num_tokens for batch in loader.epoch())

    def samples(loader: Loader) -> list[int]:
        return [int(row[0]) // 100 for batch in loader.epoch() for row in batch.input_ids if row[0]]

    bucketed, plain = make_loader(**shared, bucketed=True), make_loader(**shared)
    assert padded(bucketed) < padded(plain) / 5
    assert sorted(samples(bucketed)) == sorted(samples(plain)) == list(range(1, 401))
    again, other = make_loader(**shared, bucketed=True), make_loader(**shared, bucketed=True, seed=8)
    assert samples(bucketed) == samples(again) != samples(other)
