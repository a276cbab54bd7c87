"""The rules of torch's caching allocator."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.timeline.cuda_allocator import CachingAllocator, ExpandableAllocator, OutOfLimit, replay_reserved
from toolkit.timeline.tape import LabelTable, Program, Tape

MIB = 1 << 20


def test_small_blocks_share_a_segment_of_2_mib() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(1000) for _ in range(4)]
    assert allocator.reserved == 2 * MIB
    assert {b.size for b in blocks} == {1024}, "rounded to 512 bytes"


def test_middle_blocks_share_a_segment_of_20_mib() -> None:
    allocator = CachingAllocator()
    allocator.malloc(2 * MIB)
    allocator.malloc(9 * MIB)
    assert allocator.reserved == 20 * MIB


def test_large_blocks_have_segments_of_their_own_in_steps_of_2_mib() -> None:
    allocator = CachingAllocator()
    allocator.malloc(10 * MIB + 1)
    assert allocator.reserved == 12 * MIB


def test_a_freed_block_is_taken_again_by_what_fits_best() -> None:
    allocator = CachingAllocator()
    large, small = allocator.malloc(40 * MIB), allocator.malloc(30 * MIB)
    allocator.release(large)
    allocator.release(small)
    allocator.malloc(29 * MIB)
    assert allocator.reserved == 70 * MIB
    allocator.malloc(40 * MIB)
    assert allocator.reserved == 70 * MIB, "the 30 MiB segment was taken, the larger one is still whole"


def test_of_equal_blocks_the_one_at_the_lowest_address_is_taken() -> None:
    """Later segments lie lower; within a segment what is split off lies higher."""
    allocator = CachingAllocator()
    first, second = allocator.malloc(30 * MIB), allocator.malloc(30 * MIB)
    allocator.release(first)
    allocator.release(second)
    left, right = allocator.malloc(15 * MIB), allocator.malloc(15 * MIB)
    assert second.address < first.address
    assert (left.address, right.address) == (second.address, second.address + 15 * MIB)


def test_neighbours_merge_when_they_are_free() -> None:
    allocator = CachingAllocator()
    parts = [allocator.malloc(4 * MIB) for _ in range(5)]
    for part in parts:
        allocator.release(part)
    allocator.malloc(9 * MIB)
    allocator.malloc(9 * MIB)
    assert allocator.reserved == 20 * MIB


def test_reserved_never_falls_below_what_is_live() -> None:
    allocator, rng, live, blocks = CachingAllocator(), random.Random(0), 0, []
    for _ in range(3000):
        if blocks and rng.random() < 0.5:
            block, size = blocks.pop(rng.randrange(len(blocks)))
            allocator.release(block)
            live -= size
        else:
            size = rng.choice([700, 50_000, 3 * MIB, 17 * MIB])
            blocks.append((allocator.malloc(size), size))
            live += size
        assert allocator.reserved >= live

# -- expandable segments ----------------------------------------------------------------------------------------------


def test_a_range_grows_at_its_end_by_pages() -> None:
    allocator = ExpandableAllocator()
    first = allocator.malloc(30 << 20)
    assert allocator.reserved == 40 << 20
    allocator.malloc(15 << 20)  # 10 MiB are left at the end: one page more
    assert allocator.reserved == 60 << 20
    allocator.release(first)
    allocator.malloc(100 << 20)  # the hole is too small; 15 MiB of the end are free
    assert allocator.reserved == 160 << 20


@given(st.lists(st.tuples(st.integers(1, 64 << 20), st.integers(0, 6)), min_size=1, max_size=80))
def test_reserved_covers_what_is_live_and_every_block_stays_in_one_chain(plan: list[tuple[int, int]]) -> None:
    for kind in (CachingAllocator, ExpandableAllocator):
        allocator, live = kind(), []
        for size, victim in plan:
            live.append(allocator.malloc(size))
            assert all(block.size >= 1 and not block.free for block in live)
            assert allocator.reserved >= sum(block.size for block in live)
            if victim < len(live) and victim % 2:
                allocator.release(live.pop(victim))
        for block in live:
            allocator.release(block)
        free = sum(entry[0] for pool in allocator._pools.values() for entry in pool)
        assert free == allocator.reserved
        if kind is ExpandableAllocator:  # all merged into one free block per range
            assert all(len(pool) <= 1 for pool in allocator._pools.values())


# -- a device that grants no more -------------------------------------------------------------------------------------


def test_free_segments_go_back_to_the_driver_before_torch_gives_up() -> None:
    allocator = CachingAllocator(100 * MIB)
    first = allocator.malloc(60 * MIB)
    allocator.malloc(30 * MIB)
    allocator.release(first)
    allocator.malloc(70 * MIB)  # does not fit the free 60 MiB, nor beside them
    assert allocator.reserved == allocator.peak == 100 * MIB
    with pytest.raises(OutOfLimit):
        allocator.malloc(12 * MIB)


def test_a_segment_that_is_half_free_stays() -> None:
    allocator = CachingAllocator(100 * MIB)
    whole = allocator.malloc(60 * MIB)
    allocator.malloc(30 * MIB)
    allocator.release(whole)
    allocator.malloc(20 * MIB)  # is cut from the 60 MiB
    with pytest.raises(OutOfLimit):
        allocator.malloc(50 * MIB)


def test_pages_of_a_free_block_serve_another_stream() -> None:
    allocator = ExpandableAllocator(100 * MIB)
    allocator.release(allocator.malloc(80 * MIB))
    allocator.malloc(60 * MIB, stream=1)
    assert allocator.reserved == 60 * MIB and allocator.peak == 80 * MIB


@given(st.lists(st.tuples(st.integers(1, 64 << 20), st.integers(0, 6)), min_size=1, max_size=80), st.integers(64, 400))
def test_what_is_granted_stays_within_the_limit_and_covers_what_is_live(plan: list[tuple[int, int]], limit: int) -> None:
    for kind in (CachingAllocator, ExpandableAllocator):
        allocator, live = kind(limit * MIB), []
        for size, victim in plan:
            try:
                live.append(allocator.malloc(size, stream=victim % 2))
            except OutOfLimit:
                break
            assert sum(block.size for block in live) <= allocator.reserved <= allocator.peak <= limit * MIB
            if victim < len(live) and victim % 3:
                allocator.release(live.pop(victim))


def test_the_figure_beyond_the_limit_is_that_of_a_larger_device() -> None:
    tape = Tape(Program((), LabelTable(), None, False))  # type: ignore[arg-type] - a tape that is written by hand has no trace
    tape.alloc("a", 60 * MIB, "activations", "")
    tape.alloc("b", 30 * MIB, "activations", "")
    tape.free("a")
    tape.alloc("c", 70 * MIB, "activations", "")
    assert replay_reserved(tape) == (160 * MIB, 160 * MIB)
    assert replay_reserved(tape, limit=110 * MIB) == (100 * MIB, 160 * MIB)
    assert replay_reserved(tape, limit=99 * MIB) == (160 * MIB, 160 * MIB)
