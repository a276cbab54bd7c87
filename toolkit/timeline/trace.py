"""The trace of one micro-batch: what the model's own code allocates and frees, and where the engines hook in.

A trace is a list of items in the order of time:

* `Memory`: bytes that are born (`delta` > 0) or die (`delta` < 0);
* `Mark`: a point at which an engine may act: a module's forward or backward begins or ends, a gradient is ready.

Parameters, buffers and the batch are not in it: they exist before it starts. Gradients are born in it and never die in
it: the engine decides what becomes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

MarkKind = Literal["forward-begin", "forward-end", "backward-begin", "backward-end", "gradient", "backward-done", "loss-done",
                   "graph-dies"]
DRIVER_MARKS = ("loss-done", "graph-dies")
"""Where the loss has its new value, and where the old one's graph would die: marked when the variant's loop keeps it longer."""


class Memory(NamedTuple):
    """One storage is born or dies."""

    delta: int
    """Bytes; negative when the storage dies."""
    category: str
    module: str
    """Path of the module whose code allocated it."""
    phase: str
    """forward, loss or backward: when this event happens."""
    birth: int
    """Ordinal of the layer (over all stacks) in which it was born; -1 outside the layers."""
    ordinal: int
    """Which storage of that layer; (birth, ordinal) names the storage."""


class Mark(NamedTuple):
    kind: MarkKind
    name: str
    """Module path, or parameter name for `gradient`."""
    phase: str
    nbytes: int = 0
    """For `gradient`: bytes of its storage."""
    key: tuple[int, int] = (-1, -1)
    """For `gradient`: (birth, ordinal) of its storage."""


Item: TypeAlias = "Memory | Mark"


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter (tied ones once)."""

    name: str
    numel: int
    shape: tuple[int, ...]
    itemsize: int
    """Bytes per element as it is held by the model that was loaded."""
    trainable: bool
    floating: bool = True
    """False: packed integers (4-bit weights), which no engine casts or shards by itself."""
    modules: tuple[str, ...] = ()
    """Paths of the modules that hold it; more than one when tied."""
    whole: int = 0
    """Elements of all tensor-parallel ranks together; `numel` and `shape` are this rank's."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Operation:
    """What one kernel computes and moves; identical calls are counted, not repeated."""

    phase: str
    kind: Literal["matmul", "attention", "other"]
    flops: float
    bytes_moved: float
    shape: tuple[int, ...]
    """(batch, M, N, K) for matmul; empty otherwise."""
    itemsize: int
    count: int = 1
    layers: int = 0
    """How many of `count` lie in the repeated layers."""


@dataclass(frozen=True)
class ModelTrace:
    """Everything the strategies need to know of a model under a workload."""

    items: Sequence[Item]
    parameters: tuple[ParameterInfo, ...]
    batch: int
    """Bytes of one micro-batch of inputs."""
    layer_paths: tuple[str, ...]
    """Module paths of the transformer layers, in order, all stacks."""
    layer_class: str
    block_classes: tuple[str, ...]
    module_order: tuple[str, ...]
    """Paths of all modules that hold parameters of their own, in the order of `named_modules`."""
    input_embedding: str
    output_embedding: str
    final_norm: str
    hidden_size: int
    vocab_size: int
    kind: str
    architecture: str
    inputs_without_gradient: frozenset[str] = frozenset()
    """Modules none of whose positional inputs needs a gradient: hooks on them never fire in backward."""
    entries_without_gradient: frozenset[str] = frozenset()
    """The same, keyword inputs included."""
    operations: tuple[Operation, ...] = ()
    compiled: int = 0
    """Bytes that a CPU's kernel library keeps for good once it has run the model: code for each distinct bf16 product."""
    compiled_in_backward: int = 0
    """Of them, those that backward needs first."""
    notes: tuple[str, ...] = ()
    buffer_parts: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    """(name, bytes) of each buffer."""

    @cached_property
    def buffers(self) -> int:
        """Bytes of buffers that live on the device."""
        return sum(size for _, size in self.buffer_parts)

    @cached_property
    def trainable(self) -> tuple[ParameterInfo, ...]:
        return tuple(p for p in self.parameters if p.trainable)

    @cached_property
    def by_name(self) -> dict[str, ParameterInfo]:
        return {p.name: p for p in self.parameters}
