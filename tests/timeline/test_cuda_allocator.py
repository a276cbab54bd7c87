"""The rules of torch's caching allocator."""

from __future__ import annotations

import random

from toolkit.timeline.cuda_allocator import CachingAllocator

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
