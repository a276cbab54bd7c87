"""Record one training step: every birth and death of a tensor with its place, and whose memory it is.

The allocator is told where the program is by one number: each phase, each module's forward, each module's backward and each
collective has its own. Labels come from what is public under every engine: a module's parameters while it runs, the
gradients that reach a parameter, what an optimizer steps, and what is handed to a process group. All hooks are gone when the
record ends, and none adds a node to the autograd graph or holds a tensor.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from toolkit.profiling.breakdown import Breakdown, Event, Label, Place, before, break_down
from toolkit.profiling.holdings import engine_buffers, is_own_memory, storage_of

_WRAPPERS = re.compile(r"(^|\.)(module|_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")
COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather", "reduce", "reduce_scatter",
    "reduce_scatter_tensor_coalesced", "scatter", "send", "recv", "all_gather_single", "all_gather_single_coalesced",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "all_to_all_single",
)  # fmt: skip
"""Methods of a process group: every collective of Python code comes by here."""


def plain_path(path: str) -> str:
    """A module's path without the names that engines and adapters add."""
    return _WRAPPERS.sub("", path).lstrip(".").removeprefix("base_model.model.")


class StepRecord:
    """Records from `begin` to `end`. Whoever knows the phase tells it (`enter`), from the start on: what was made in an earlier
    step and is still there is told by it."""

    def __init__(self, model: Any, optimizer: Any, device: str) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.places: list[Place] = [Place("between", "", False)]
        self.labels: list[Label] = []
        self._source: _Shim | _Cuda = _Cuda() if device == "cuda" else _Shim()
        self._phase, self._module, self._head, self._collective = "between", "", False, False
        self._held = -1
        self._undo: list[Callable[[], Any]] = []
        self._watched: set[int] = set()
        self._in_backward = self._buffers_seen = False

    @staticmethod
    def possible(counter: str, model: Any) -> bool:
        """Whether births and deaths can be recorded under this counter. Hooks would have a compiled model compiled anew."""
        compiled = any(getattr(module, "_compiled_call_impl", None) or hasattr(module, "_orig_mod") for module in model.modules())
        return counter in ("allocations", "cuda") and not compiled

    def begin(self) -> None:
        """Put the hooks on and start."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._hook_modules()
        self._hook_collectives()
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            self._undo.append(register(lambda optimizer, *_: self._label_optimizer(optimizer)).remove)
        self._held = self._source.begin()
        self._mark()
        self._label_held()

    def end(self) -> Breakdown | None:
        """Take the hooks off; what was alive at the peak, or None when not every event could be kept."""
        self._label_held()
        events = self._source.end()
        self._drop_hooks()
        if events is None:
            return None
        return break_down(events, self._held, self.places, self.labels, bucket_sizes(self.model))

    def abandon(self) -> None:
        """Take the hooks off and forget."""
        self._source.end()
        self._drop_hooks()

    def _drop_hooks(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    # -- places ------------------------------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """Another phase of the step begins."""
        self._phase = phase
        if self._held < 0:
            self._source.place(before(phase))
            return
        if phase == "forward":  # what an earlier micro-batch left
            self._label_held()
        self._go("", False)

    def _go(self, module: str, head: bool) -> None:
        self._module, self._head = module, head
        self._mark()

    def _mark(self) -> int:
        self.places.append(Place(self._phase, self._module, self._head, self._collective))
        number = len(self.places) - 1
        self._source.place(number)
        return number

    # -- labels ------------------------------------------------------------------------------------------------

    def _label(self, category: str, tensors: Iterable[Any]) -> None:
        number = self._mark()
        for tensor in tensors:
            address = storage_of(tensor)[0]
            if address:
                self.labels.append(Label(number, address, category))

    def _label_held(self) -> None:
        for category, tensors in engine_buffers(self.model, self.optimizer).items():
            self._label(category, tensors)

    def _label_optimizer(self, optimizer: Any) -> None:
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        self._label("master_weights", updated)
        self._label("gradients", [p.grad for p in updated if p.grad is not None])
        self._label("optimizer_states", [v for state in optimizer.state.values() if isinstance(state, dict)
                                         for v in state.values() if hasattr(v, "untyped_storage")])

    def _watch_parameters(self, module: Any) -> None:
        """The whole parameters that a module computes with, under sharding engines only now there, and their gradients."""
        mine = [p for p in module._parameters.values() if p is not None]
        if not mine:
            return
        self._label("parameters", mine)
        for parameter in mine:
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                self._undo.append(parameter.register_hook(self._label_gradient).remove)
                self._undo.append(parameter.register_post_accumulate_grad_hook(lambda p: self._gradient_is_there(p.grad)).remove)

    def _label_gradient(self, gradient: Any) -> None:
        if gradient is not None and is_own_memory(gradient):
            self._label("gradients", [gradient])

    def _gradient_is_there(self, gradient: Any) -> None:
        self._label_gradient(gradient)
        if not self._buffers_seen:  # DeepSpeed makes its buckets at the first gradient and drops them after the last
            self._buffers_seen = True
            self._label_held()

    # -- hooks -------------------------------------------------------------------------------------------------

    def _hook_modules(self) -> None:
        head = _head_of(self.model)
        named = dict(self.model.named_modules())
        paths = {id(module): path for path, module in named.items()}
        inner = paths.get(id(head), "") if head is not None else ""
        around = {inner[:at] for at, letter in enumerate(inner + ".") if letter == "."} | {""}
        for path, module in named.items():
            parent = path.rpartition(".")[0]
            here = plain_path(path), path in around
            above = plain_path(parent), parent in around
            self._undo.append(module.register_forward_pre_hook(self._before(here, above), with_kwargs=True).remove)
            self._undo.append(module.register_forward_hook(self._after(here, above)).remove)

    def _before(self, here: tuple[str, bool], above: tuple[str, bool]) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._claim((*args, *kwargs.values()), above, None)
            self._go(*here)
            self._watch_parameters(module)

        return hook

    def _after(self, here: tuple[str, bool], above: tuple[str, bool]) -> Callable[..., None]:
        def hook(module: Any, _: Any, output: Any) -> None:
            self._claim(output, here, module)
            self._go(*above)

        return hook

    def _claim(self, found: Any, where: tuple[str, bool], module: Any) -> None:
        """When the backward pass comes to the operation that made a tensor, it is in this module."""
        for tensor in _tensors(found):
            node = tensor.grad_fn
            if node is not None and "toolkit" not in node.metadata:
                node.metadata["toolkit"] = True
                self._undo.append(node.register_prehook(self._backwards(where, module)).remove)

    def _backwards(self, where: tuple[str, bool], module: Any) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._phase_of_backward()
            self._go(*where)
            if module is not None:
                self._watch_parameters(module)

        return hook

    def _phase_of_backward(self) -> None:
        """The backward pass ends with this callback, long before the optimizer is stepped where norms are taken first."""
        if not self._in_backward:
            import torch

            def done() -> None:
                self._in_backward = self._buffers_seen = False
                self._label_held()
                self.enter("between")

            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(done)

    def _hook_collectives(self) -> None:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return
        for name in COLLECTIVES:
            original = vars(dist.ProcessGroup).get(name)  # getattr would unwrap pybind's method, which can't be put back then
            if original is not None:
                setattr(dist.ProcessGroup, name, self._collectively(getattr(dist.ProcessGroup, name)))
                self._undo.append(partial(setattr, dist.ProcessGroup, name, original))

    def _collectively(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._collective = True
            self._label("communication", _tensors([*args, *kwargs.values()]))
            try:
                return original(*args, **kwargs)
            finally:
                self._collective = False
                self._mark()

        return call


def _tensors(found: Any) -> Iterator[Any]:
    """The tensors of nested lists, tuples and mappings."""
    if hasattr(found, "untyped_storage"):
        yield found
    elif isinstance(found, (list, tuple)):
        for item in found:
            yield from _tensors(item)
    elif hasattr(found, "values") and callable(found.values):
        yield from _tensors(list(found.values()))


def _head_of(model: Any) -> Any:
    """The output layer of a language model, whatever is wrapped around it."""
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        if callable(getter) and getter() is not None:
            return getter()
    return None


def bucket_sizes(model: Any) -> list[int]:
    """Bytes of each gradient bucket of DistributedDataParallel, which lie in C++; empty under other engines."""
    if not hasattr(model, "_get_ddp_logging_data"):
        return []
    facts = model._get_ddp_logging_data()
    text = facts.get("rebuilt_bucket_sizes") or facts.get("bucket_sizes") or ""
    return [int(size) for size in str(text).split(",") if size.strip().isdigit()]


class _Shim:
    """The record of the preloaded counter."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._place = ctypes.c_int32.in_dll(self._library, "toolkit_place")
        self._library.toolkit_record.restype = self._library.toolkit_recorded.restype = ctypes.c_longlong

    def begin(self) -> int:
        return int(self._library.toolkit_record())

    def place(self, number: int) -> None:
        self._place.value = number

    def end(self) -> list[Event] | None:
        import numpy as np

        start = ctypes.c_void_p()
        count = self._library.toolkit_recorded(ctypes.byref(start))
        if count <= 0 or start.value is None:
            return None
        raw = np.frombuffer((ctypes.c_char * (count * 24)).from_address(start.value),
                            np.dtype([("address", "u8"), ("size", "i8"), ("place", "i4"), ("elsewhere", "i4")]))
        events = [Event(address, size, place, bool(elsewhere)) for address, size, place, elsewhere in raw.tolist()]
        del raw
        self._library.toolkit_forget()
        return events


class _Cuda:
    """The history of torch's caching allocator, each entry with the number of the place as its metadata."""

    def __init__(self) -> None:
        self._held: list[tuple[int, int]] | None = None

    def begin(self) -> int:
        import torch

        memory = torch.cuda.memory
        memory._record_memory_history("all", context=None, stacks="python", max_entries=10**7, clear_history=True)
        self._held = [(block["address"], block["requested_size"]) for segment in memory._snapshot()["segments"]
                      for block in segment["blocks"] if block["state"] == "active_allocated"]
        memory._set_memory_metadata("0")
        return len(self._held)

    def place(self, number: int) -> None:
        import torch

        if self._held is not None:  # outside of the history nothing keeps it
            torch.cuda.memory._set_memory_metadata(str(number))

    def end(self) -> list[Event] | None:
        import torch

        memory, device = torch.cuda.memory, torch.cuda.current_device()
        trace = memory._snapshot(device)["device_traces"][device]
        memory._record_memory_history(None)
        memory._set_memory_metadata("")
        return cuda_events(self._held or [], trace)


def cuda_events(held: list[tuple[int, int]], trace: list[dict[str, Any]]) -> list[Event]:
    """(address, bytes) of what was alive before, and the entries of an allocator trace after that, as events."""
    sizes = {address: _rounded(size) for address, size in held}
    events = [Event(address, size, 0) for address, size in sizes.items()]
    place = 0
    for entry in trace:
        text = str(entry.get("user_metadata", ""))
        place = int(text) if text.isdigit() else place
        if entry["action"] == "alloc":
            sizes[entry["addr"]] = _rounded(entry["size"])
            events.append(Event(entry["addr"], sizes[entry["addr"]], place))
        elif entry["action"] == "free_requested" and entry["addr"] in sizes:
            events.append(Event(entry["addr"], -sizes.pop(entry["addr"]), place))
    return events


def _rounded(size: int) -> int:
    """As the allocator counts it (kMinBlockSize, c10/core/AllocatorConfig.h)."""
    return -(-size // 512) * 512
