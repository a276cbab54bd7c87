"""A trace at any micro-batch from two: what the model's code allocates is a constant plus a part per sample."""

from __future__ import annotations

from dataclasses import replace

from toolkit.timeline.trace import ModelTrace


def same_path(one: ModelTrace, two: ModelTrace) -> bool:
    """Whether the model's code did the same at both micro-batches, so that sizes may be extrapolated."""
    if len(one.items) != len(two.items) or len(one.operations) != len(two.operations):
        return False
    if any(type(a) is not type(b) or a.phase != b.phase for a, b in zip(one.items, two.items, strict=True)):
        return False
    return all((x.phase, x.kind, x.count, x.layers) == (y.phase, y.kind, y.count, y.layers)
               for x, y in zip(one.operations, two.operations, strict=True))


def scaled_facts(one: ModelTrace, two: ModelTrace, micro_batch: int) -> ModelTrace:
    """The trace at `micro_batch` without its items (a `CompactSource` holds those): operations and the batch."""
    more = micro_batch - 1
    operations = []
    for x, y in zip(one.operations, two.operations, strict=True):
        shape = tuple(i + more * (j - i) for i, j in zip(x.shape, y.shape, strict=True))
        operations.append(replace(x, flops=x.flops + more * (y.flops - x.flops), shape=shape,
                                  bytes_moved=x.bytes_moved + more * (y.bytes_moved - x.bytes_moved)))
    return replace(one, items=(), operations=tuple(operations), batch=one.batch * micro_batch)
