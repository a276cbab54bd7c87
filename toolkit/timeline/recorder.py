"""Records every storage that is born and dies while real module code runs on fake tensors.

A dispatch mode sees each operator's outputs; a weak reference on the storage tells when it dies, in the order in which
it really happens. Modules are known in forward from hooks, in backward from the sequence numbers of autograd's nodes:
every node made while a module ran belongs to it.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import _get_sequence_nr
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.timeline.kernels import compiled_products, compiles_products, kernel_cost, kernel_temporaries
from toolkit.timeline.shards import local, wrapper_classes
from toolkit.timeline.trace import MarkKind

aten = torch.ops.aten
_BUFFER_AND_CALL = 4
"""References on a tensor that only the input buffer holds, while it goes through a dispatch mode."""
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_CHECKPOINT = "CheckpointFunctionBackward"
"""Reentrant checkpointing: it recomputes a layer and runs a backward of its own, whose nodes tell where that is."""
_DEVICE = torch.ops.prim.device.default


def _accumulates(args: Any, kwargs: Any) -> bool:
    """Whether autograd's input buffer adds a second gradient to a first one that nobody else holds.

    Without a dispatch mode it does so in place (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace); a mode makes it
    take another tensor.
    """
    if kwargs or torch.is_grad_enabled() or torch._C._current_autograd_node() is None:
        return False
    old, new = args
    if not isinstance(new, torch.Tensor) or old.shape != new.shape or old.dtype != new.dtype:
        return False
    storage = old.untyped_storage()
    alone = old._use_count() <= _BUFFER_AND_CALL and torch._C._storage_Use_Count(storage._cdata) <= 2
    return bool(alone and storage.nbytes() == old.numel() * old.element_size())


def _all_true(condition: torch.Tensor) -> torch.Tensor:
    """`nonzero` of a condition that holds everywhere, such as that a label is valid: fake tensors don't tell."""
    return torch.empty((condition.numel(), condition.dim()), dtype=torch.long)


@dataclass(slots=True)
class Born:
    """A storage seen during the trace."""

    number: int
    nbytes: int
    module: str
    phase: str
    segment: int
    """Segment of the raw trace in which it was born."""
    ordinal: int
    dead_phase: str = ""
    gradient: bool = False


@dataclass(slots=True)
class RawMark:
    kind: MarkKind
    name: str
    phase: str
    storage: int = -1


@dataclass(slots=True)
class RawMemory:
    storage: int
    sign: int
    phase: str


@dataclass(slots=True)
class Segment:
    """A run of items that belong to one layer, or to what lies between layers."""

    layer: str
    """Path of the layer (of the cut model), or an empty string."""
    backward: bool
    items: list[RawMark | RawMemory]


class Recorder(TorchDispatchMode):
    """Dispatch mode that fills `segments`; use it around forward and backward of `model`."""

    def __init__(self, model: nn.Module, layers: set[str], known: dict[int, int], device_is_cpu: bool) -> None:
        super().__init__()
        self.layers = layers
        self.known = known
        """Storages that exist before the trace, by address: they are not recorded."""
        self.device_is_cpu = device_is_cpu
        self.phase = "forward"
        self.segments: list[Segment] = [Segment("", False, [])]
        self.storages: list[Born] = []
        self.operations: dict[tuple[Any, ...], int] = {}
        self.compiled: dict[tuple[int, ...], str] = {}
        """Products that oneDNN compiles code for, and the phase in which each comes first."""
        self._compiles = device_is_cpu and compiles_products()
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._counts: list[int] = [0]
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._known_paths = set(self._paths.values())
        self._owns = {path for path, module in model.named_modules() if any(p is not None for p in module._parameters.values())}
        self._stack: list[str] = []
        self._changes_at: list[int] = [0]
        self._changes_to: list[str] = [""]
        self._open: list[str] = []
        self._handles: list[Any] = []
        self._in_backward_of = ""
        self.inputs_without_gradient: set[str] = set()
        self.entries_without_gradient: set[str] = set()
        self.wrappers: tuple[type, ...] = wrapper_classes()

    # -- storages ----------------------------------------------------------------------------------------------

    def _see(self, tensor: torch.Tensor) -> int:
        storage = local(tensor).untyped_storage()
        address = storage._cdata
        if address in self.known:
            return -1
        if address in self._live:
            return self._live[address][1]
        segment = len(self.segments) - 1
        born = Born(len(self.storages), storage.nbytes(), self._module(), self.phase, segment, self._counts[segment])
        self._counts[segment] += 1
        self.storages.append(born)
        self.segments[segment].items.append(RawMemory(born.number, +1, self.phase))

        def dead(_: Any, address: int = address, born: Born = born) -> None:
            if address in self._live and self._live[address][1] == born.number:
                del self._live[address]
            born.dead_phase = self.phase
            self.segments[-1].items.append(RawMemory(born.number, -1, self.phase))

        self._live[address] = (weakref.ref(storage, dead), born.number)
        return born.number

    def _temporaries(self, blocks: tuple[int, ...]) -> None:
        """Blocks that are all born before they die."""
        segment = len(self.segments) - 1
        born = [Born(len(self.storages) + i, nbytes, self._module(), self.phase, segment, self._counts[segment] + i, self.phase)
                for i, nbytes in enumerate(blocks)]
        self._counts[segment] += len(born)
        self.storages += born
        for sign in (+1, -1):
            self.segments[segment].items += [RawMemory(b.number, sign, self.phase) for b in born]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:  # Two calls of three, and no storage among them.
            return func(*args, **kwargs)
        if any(issubclass(kind, self.wrappers) for kind in types):
            return NotImplemented  # a DTensor: it comes back as operators on this rank's shards
        if func is _WAIT:
            return args[0]  # it waits in place; on fake tensors it would make a copy
        if self.phase == "backward":
            self._follow_backward()
            if func is aten.add.Tensor and not self._stack and _accumulates(args, kwargs):
                func = aten.add_.Tensor
        out = _all_true(args[0]) if func is aten.nonzero.default else func(*args, **kwargs)
        fresh = False
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                before = len(self.storages)
                self._see(leaf)
                fresh = fresh or len(self.storages) > before
        blocks = kernel_temporaries(func, args, kwargs, out, self.device_is_cpu)
        if blocks:
            self._temporaries(blocks)
        cost = kernel_cost(func, args, kwargs, out, fresh)
        if cost is not None:
            key = (len(self.segments) - 1, self.phase, *cost)
            self.operations[key] = self.operations.get(key, 0) + 1
        if self._compiles:
            for product in compiled_products(func, args, kwargs):
                self.compiled.setdefault(product, self.phase)
        return out

    # -- where we are ------------------------------------------------------------------------------------------

    def _module(self) -> str:
        if self.phase == "backward" and not self._stack:
            return self._in_backward_of
        return self._stack[-1] if self._stack else ""

    def mark(self, kind: MarkKind, name: str, storage: int = -1) -> None:
        self.segments[-1].items.append(RawMark(kind, name, self.phase, storage))

    def _layer_of(self, path: str) -> str:
        while path:
            if path in self.layers:
                return path
            path = path.rpartition(".")[0]
        return ""

    def _segment(self, layer: str) -> None:
        current = self.segments[-1]
        backward = self.phase == "backward"
        if current.layer != layer or current.backward != backward:
            self.segments.append(Segment(layer, backward, []))
            self._counts.append(0)

    def _note_change(self, path: str) -> None:
        at = _get_sequence_nr()
        if self._changes_at[-1] == at:
            self._changes_to[-1] = path
        else:
            self._changes_at.append(at)
            self._changes_to.append(path)

    def _forward_begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        path = self._paths.get(id(module))
        if path is None:
            return
        if path in self._owns or path in self.layers:
            self._note_inputs(path, args, kwargs)
        self._stack.append(path)
        self._note_change(path)
        if self.phase != "backward":
            layer = self._layer_of(path)
            if layer == path or not layer and self._below_layers_done():
                self._segment(layer)
        self.mark("forward-begin", path)

    def _note_inputs(self, path: str, args: Any, kwargs: Any) -> None:
        """Whether a gradient will reach the module's inputs; what is recomputed under gradients counts, not the first pass."""
        found = [any(isinstance(a, torch.Tensor) and a.requires_grad for a in group) for group in (args, kwargs.values())]
        for names, without in ((self.inputs_without_gradient, not found[0]), (self.entries_without_gradient, not any(found))):
            if not without:
                names.discard(path)
            elif self.phase != "backward":
                names.add(path)

    def _below_layers_done(self) -> bool:
        return bool(self.segments[-1].layer)

    def _forward_end(self, module: nn.Module, args: Any, out: Any) -> None:
        path = self._paths.get(id(module))
        if path is None or not self._stack:
            return
        self.mark("forward-end", path)
        self._stack.pop()
        # what is recomputed outside of modules is the layer's own code
        self._note_change(self._stack[-1] if self._stack else self._layer_of(self._in_backward_of))
        if path == self.head_path and self.phase == "forward":
            self.phase = "loss"
        if isinstance(out, torch.Tensor) and out.requires_grad and out.is_leaf:
            # a frozen embedding's output that was told to take a gradient: no node of backward is the module's, its end is
            out.register_hook(lambda _: self._enter_backward(path))

    head_path = "\0"

    def _follow_backward(self) -> None:
        node = torch._C._current_autograd_node()
        if node is None or node.name() == _ACCUMULATE or self._stack:
            return
        owner = self._changes_to[bisect_right(self._changes_at, node._sequence_nr()) - 1]
        if owner == self._in_backward_of and self._open or node.name() == _CHECKPOINT and owner in self._open:
            return
        self._enter_backward(owner)

    def _enter_backward(self, owner: str) -> None:
        self._in_backward_of = owner
        chain = self._chain(owner)
        self.close_backward(keep=chain)
        self._segment(self._layer_of(owner))
        for path in chain:
            if path not in self._open:
                self._open.append(path)
                self.mark("backward-begin", path)

    def _chain(self, path: str) -> list[str]:
        """The modules that contain `path`, outermost (the model itself) first."""
        chain = [path] if path in self._known_paths else []
        while path:
            path = path.rpartition(".")[0]
            if path in self._known_paths:
                chain.append(path)
        return chain[::-1]

    def close_backward(self, keep: list[str] | None = None) -> None:
        """End the backward of the modules that are not in `keep`, innermost first."""
        for path in reversed(list(self._open)):
            if path not in (keep or ()):
                self._open.remove(path)
                self.mark("backward-end", path)

    def leave_layers(self) -> None:
        """What dies from here on dies outside the layers, wherever it was born."""
        self._segment("")

    # -- hooks -------------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module, names: dict[int, str]) -> None:
        """Hook modules and trainable parameters (`names`: parameter name by id)."""
        for module in model.modules():
            self._handles.append(module.register_forward_pre_hook(self._forward_begin, with_kwargs=True))
            # always: a checkpoint stops its recomputation by an exception, half-way through a module
            self._handles.append(module.register_forward_hook(self._forward_end, always_call=True))
        for parameter in model.parameters():
            if parameter.requires_grad:
                hook = self._gradient_hook(names[id(parameter)])
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _gradient_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is None:
                return
            number = self._see(gradient)
            if number >= 0:
                self.storages[number].gradient = True
            self.mark("gradient", name, number)

        return hook

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._live.clear()
