"""A model of torch's CUDA caching allocator: what a timeline reserves.

c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of torch 2.13: sizes are rounded to 512 bytes; blocks up
to 1 MiB come from 2 MiB segments, blocks under 10 MiB from 20 MiB segments, larger ones from segments of their own rounded
to 2 MiB; the smallest free block that fits is taken and split; neighbours merge again when they are free. With expandable
segments a pool is one address range whose pages (2 MiB for small, 20 MiB for large blocks) are mapped as needed.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

from toolkit.timeline.lengths import Events
from toolkit.timeline.tape import Tape

ROUND = 512
SMALL_LIMIT = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
OWN_SEGMENT = 10 << 20
LARGE_ROUND = 2 << 20
_RANGE = 1 << 44
"""Addresses of an expandable pool: more than any device has."""
_BELOW_ALL = -(1 << 60)


class OutOfLimit(Exception):
    """The device has no more, and what is cached does not make up for it."""


@dataclass(slots=True)
class Block:
    """A piece of a segment; neighbours are linked in address order."""

    size: int
    address: int
    """Of blocks of one size the one at the lowest address is taken."""
    small: bool
    stream: int = 0
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """Fixed segments, pools per stream. `reserved` and `peak` are bytes."""

    splits_all = False
    """Whether large blocks too are split down to 512 bytes."""

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: bytes that the device grants at most; None for all that are asked for."""
        self.reserved = 0
        self.peak = 0
        self.limit = limit
        self._pools: dict[tuple[int, bool], list[tuple[int, int, Block]]] = defaultdict(list)
        self._mapped = 0
        """The lowest address that was given out. The driver is taken to give later segments lower ones: published figures that
        depend on it say so (PowerLM-3B in full on one A100: 48.9 GiB; 48.8 this way, 39.8 the other way)."""

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        size = max(ROUND, -(-nbytes // ROUND) * ROUND)
        small = size <= SMALL_LIMIT
        pool = self._pools[stream, small]
        at = bisect_left(pool, (size, _BELOW_ALL))
        if at < len(pool):
            block = pool.pop(at)[2]
        else:
            block = self._segment(size, small, stream)
        block.free = False
        rest = block.size - size
        if rest >= ROUND if small or self.splits_all else rest > SMALL_LIMIT:
            self._split(block, size)
        return block

    def _segment(self, size: int, small: bool, stream: int) -> Block:
        if small:
            length = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            length = LARGE_SEGMENT
        else:
            length = -(-size // LARGE_ROUND) * LARGE_ROUND
        if self._is_over(length):
            self._give_back()
        self._grow(length)
        return Block(length, self._addresses(length), small, stream)

    def _is_over(self, more: int) -> bool:
        return self.limit is not None and self.reserved + more > self.limit

    def _grow(self, more: int) -> None:
        if self._is_over(more):
            raise OutOfLimit
        self.reserved += more
        self.peak = max(self.peak, self.reserved)

    def _give_back(self) -> None:
        """What torch does before it gives up (`release_cached_blocks`): segments that are free from end to end go back to the
        driver."""
        for pool in self._pools.values():
            whole = [entry for entry in pool if entry[2].before is None and entry[2].after is None]
            self.reserved -= sum(size for size, _, _ in whole)
            pool[:] = [entry for entry in pool if entry[2].before is not None or entry[2].after is not None]

    def _addresses(self, length: int) -> int:
        self._mapped -= length
        return self._mapped

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.address + size, block.small, block.stream)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._put(rest)

    def _put(self, block: Block) -> None:
        block.free = True
        insort(self._pools[block.stream, block.small], (block.size, block.address, block), key=lambda e: (e[0], e[1]))

    def _take(self, block: Block) -> None:
        pool = self._pools[block.stream, block.small]
        at = bisect_left(pool, (block.size, block.address), key=lambda e: (e[0], e[1]))
        pool.pop(at)

    def release(self, block: Block) -> Block:
        """Free a block and merge it with free neighbours; returns what came of it."""
        left, right = block.before, block.after
        if left is not None and left.free:
            self._take(left)
            left.size += block.size
            left.after = right
            if right is not None:
                right.before = left
            block = left
        if right is not None and right.free:
            self._take(right)
            block.size += right.size
            block.after = right.after
            if right.after is not None:
                right.after.before = block
        self._put(block)
        return block


class ExpandableAllocator(CachingAllocator):
    """expandable_segments:True: one address range per pool and stream, which grows at its end; a free block there grows into the
    new pages (`try_allocate_expandable_block`)."""

    splits_all = True

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(limit)
        self._ends: dict[tuple[int, bool], Block] = {}

    def _segment(self, size: int, small: bool, stream: int) -> Block:
        more = self._missing(size, small, stream)
        if self._is_over(more):
            self._give_back()
            more = self._missing(size, small, stream)
        self._grow(more)
        end = self._ends.get((stream, small))
        at_end = end if end is not None and end.free else None
        if at_end is not None:
            self._take(at_end)
            at_end.size += more
            return at_end
        address = self._addresses(_RANGE) if end is None else end.address + end.size
        block = Block(more, address, small, stream)
        if end is not None:
            end.after, block.before = block, end
        self._ends[stream, small] = block
        return block

    def _missing(self, size: int, small: bool, stream: int) -> int:
        """Bytes of whole pages that the range's end lacks."""
        end = self._ends.get((stream, small))
        page = SMALL_SEGMENT if small else LARGE_SEGMENT
        return -(-(size - (end.size if end is not None and end.free else 0)) // page) * page

    def _give_back(self) -> None:
        """Whole pages inside free blocks are unmapped (`unmap_block`). Where a block lies on its pages is not modelled: one that
        others follow is taken to share its first page."""
        for pool in self._pools.values():
            blocks = [entry[2] for entry in pool]
            pool.clear()
            for block in blocks:
                page = SMALL_SEGMENT if block.small else LARGE_SEGMENT
                pages = block.size // page - (block.after is not None)
                block.size -= max(0, pages) * page
                self.reserved -= max(0, pages) * page
                self._put(block)

    def _split(self, block: Block, size: int) -> None:
        super()._split(block, size)
        self._note_end(block.after)

    def release(self, block: Block) -> Block:
        merged = super().release(block)
        self._note_end(merged)
        return merged

    def _note_end(self, block: Block | None) -> None:
        if block is not None and block.after is None:
            self._ends[block.stream, block.small] = block


IN_FLIGHT = 2
"""Units that FSDP lets wait for the GPU before the CPU stops: `_FreeEventQueue._max_num_inflight_all_gathers`."""


def _dying(live: dict[object, list[tuple[int, Block]]], key: object, nbytes: int) -> list[Block]:
    """The blocks that a free of `nbytes` gives back: all of a name, or the one of that size where a name was born twice."""
    held = live.get(key, [])
    one = next((pair for pair in held if pair[0] == nbytes), None) if len(held) > 1 else None
    if one is not None:
        held.remove(one)
        return [one[1]]
    live.pop(key, None)
    return [block for _, block in held]


class Reserved(NamedTuple):
    """Bytes that the allocator has reserved at most."""

    peak: int
    freely: int
    """On a device that grants all that is asked for."""


def replay_reserved(tape: Tape | Events, expandable: bool = False, limit: int | None = None) -> Reserved:
    """What the allocator has reserved when the tape is played (all steps, the load included).

    Above `limit` bytes the device has no more: then what is cached goes back to it and is asked for anew, as torch does before
    it gives up. When that serves, `peak` is at most `limit`; when it does not, it is what a larger device would have reserved.
    """
    kind = ExpandableAllocator if expandable else CachingAllocator
    peak = _play(tape, kind())
    if limit is None or peak <= limit or max(itertools.accumulate(tape.deltas), default=0) > limit:
        return Reserved(peak, peak)
    try:
        return Reserved(_play(tape, kind(limit)), peak)
    except OutOfLimit:
        return Reserved(peak, peak)


def _play(tape: Tape | Events, allocator: CachingAllocator) -> int:
    """The peak of `reserved`. Raises OutOfLimit.

    The CPU is taken to run ahead of the GPU: what lags comes back only when the next block of its stream is asked for and
    `IN_FLIGHT` others wait, or when memory is short and the CPU waits for the GPU.
    """
    live: dict[object, list[tuple[int, Block]]] = defaultdict(list)
    waiting: deque[list[Block]] = deque()
    streams, lagging = tape.streams, tape.lagging
    for i, (delta, key) in enumerate(zip(tape.deltas, tape.keys, strict=True)):
        if delta > 0:
            stream = streams.get(key, 0) if streams else 0
            while stream and len(waiting) >= IN_FLIGHT:
                _release(allocator, waiting.popleft())
            try:
                block = allocator.malloc(delta, stream)
            except OutOfLimit:
                while waiting:
                    _release(allocator, waiting.popleft())
                block = allocator.malloc(delta, stream)
            live[key].append((delta, block))
            continue
        blocks = _dying(live, key, -delta)
        if i in lagging:
            waiting.append(blocks)
        else:
            _release(allocator, blocks)
    return allocator.peak


def _release(allocator: CachingAllocator, blocks: list[Block]) -> None:
    for block in blocks:
        allocator.release(block)
