"""What is known when an allocation fails: what was asked for, what is alive, where it happened."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from toolkit.errors import UserError
from toolkit.profiling.counter import device_counter
from toolkit.profiling.record import plain_path
from toolkit.profiling.trend import gap_line
from toolkit.units import format_size, parse_size

_MESSAGES = ("out of memory", "can't allocate memory", "cannot allocate memory", "unable to allocate")
_CHAIN = 6


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or what it was raised from, is a failed allocation."""
    return _root(error) is not None


def _root(error: BaseException | None) -> BaseException | None:
    for _ in range(_CHAIN):
        if error is None:
            return None
        if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
            return error
        if isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MESSAGES):
            return error
        error = error.__cause__ or error.__context__
    return None


def asked_for(error: BaseException) -> int | None:
    """Bytes of the allocation that failed, where the message names them."""
    text = str(_root(error) or error)
    found = re.search(r"tried to allocate ([\d.]+ ?(?:[KMGT]i?)?B(?:ytes)?)", text, re.IGNORECASE)
    if found is None:
        return None
    try:
        return parse_size(re.sub(r"(?i)bytes$", "B", found[1]))
    except UserError:
        return None


@dataclass
class PostMortem:
    """The state of one process right after an allocation failed. Sizes in bytes; None: not known on this device."""

    device: str
    asked: int | None
    allocated: int
    """By tensors that are alive."""
    reserved: int | None
    """By torch's caching allocator; none on a CPU."""
    outside: int | None
    """On the device and not torch's: the context, NCCL, other processes; on a CPU what the process holds beside tensors."""
    capacity: int | None
    module: str
    groups: list[tuple[str, int]] = field(default_factory=list)
    """Live tensors by what they are, largest first."""
    host: dict[str, int] = field(default_factory=dict)

    @property
    def fragmentation(self) -> int | None:
        return None if self.reserved is None else self.reserved - self.allocated

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "fragmentation": self.fragmentation}

    def lines(self) -> list[str]:
        """For people."""
        rows = [("asked for", self.asked), ("tensors", self.allocated), ("reserved", self.reserved),
                ("of it unused", self.fragmentation), ("outside", self.outside), ("capacity", self.capacity)]
        out = [f"  {name:<13} {format_size(size)}" for name, size in rows if size is not None]
        if self.module:
            out.append(f"  {'module':<13} {self.module}")
        out += [f"  {'alive' if not i else '':<13} {name}: {format_size(size)}" for i, (name, size) in enumerate(self.groups)]
        if self.host:
            out.append(f"  {'host memory':<13} {format_size(self.host['available'])} of {format_size(self.host['total'])} free")
        gap = gap_line("it", self.reserved, self.allocated) if self.reserved else None
        if gap:
            out.append(f"  hint          {gap}")
        return out


def examine(error: BaseException, device: str, model: Any = None) -> PostMortem:
    """Look at this process while the failed call's frames still hold what was alive. Call it before anything is dropped."""
    counter = device_counter(device)
    live = counter.live()
    reserved = outside = capacity = None
    if device == "cuda":
        import torch

        reserved = torch.cuda.memory_reserved()
        free, capacity = torch.cuda.mem_get_info()
        outside = capacity - free - reserved
    else:
        limit = _address_space()
        capacity = limit if limit is not None else host_memory().get("total")
        if counter.kind == "allocations":
            outside = max(0, resident_set() - live)
    return PostMortem(device, asked_for(error), live, reserved, outside, capacity, module_of(error, model),
                      live_groups(live, device), host_memory())


def module_of(error: BaseException, model: Any) -> str:
    """The innermost module whose code was running, by its path in the model; empty in the backward pass of C++."""
    names = {id(module): name for name, module in model.named_modules()} if model is not None else {}
    found = ""
    for frame in _frames(error):
        owner = frame.f_locals.get("self")
        if id(owner) in names:
            found = names[id(owner)] or type(owner).__name__
    return plain_path(found)


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = (_root(error) or error).__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def live_groups(live: int, device: str, most: int = 6) -> list[tuple[str, int]]:
    """Live tensors on the device by what they are. What autograd keeps has no Python object: it is the rest of `live`."""
    import torch

    parameters: dict[int, int] = {}
    gradients: dict[int, int] = {}
    states: dict[int, int] = {}
    others: dict[str, dict[int, int]] = {}
    objects = gc.get_objects()
    optimizers = [o for o in objects if issubclass(type(o), torch.optim.Optimizer)]  # isinstance would wake proxies up

    def place(tensor: Any) -> tuple[int, int] | None:
        try:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            return (storage.data_ptr(), storage.nbytes()) if storage.device.type == device and storage.nbytes() else None
        except (RuntimeError, NotImplementedError, ReferenceError):
            return None  # fake and meta tensors have no memory

    def note(group: dict[int, int], tensor: Any) -> None:
        where = place(tensor)
        if where is not None and not any(where[0] in known for known in (parameters, gradients, states)):
            group[where[0]] = where[1]

    tensors = [o for o in objects if issubclass(type(o), torch.Tensor)]
    for tensor in tensors:
        if isinstance(tensor, torch.nn.Parameter):
            note(parameters, tensor)
    for tensor in tensors:
        if isinstance(tensor, torch.nn.Parameter) and tensor.grad is not None:
            note(gradients, tensor.grad)
    for optimizer in optimizers:
        for state in getattr(optimizer, "state", {}).values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    note(states, value)
    for tensor in tensors:
        where = place(tensor)
        if where is not None and not any(where[0] in known for known in (parameters, gradients, states)):
            what = f"{str(tensor.dtype).removeprefix('torch.')} tensors of {' x '.join(map(str, tensor.shape))}"
            others.setdefault(what, {})[where[0]] = where[1]
    named = [("parameters", sum(parameters.values())), ("gradients", sum(gradients.values())),
             ("optimizer states", sum(states.values())), *((what, sum(found.values())) for what, found in others.items())]
    rest = live - sum(size for _, size in named)
    named.append(("kept for the backward pass, and by the engine", rest))
    return sorted(((name, size) for name, size in named if size > 0), key=lambda g: -g[1])[:most]


def host_memory() -> dict[str, int]:
    """`total` and `available` bytes of RAM of this machine, or of its control group where that is smaller."""
    found: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found[name.removeprefix("Mem").lower()] = int(rest.split()[0]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        if limit.isdigit() and int(limit) < found["total"]:
            found = {"total": int(limit), "available": max(0, int(limit) - used)}
    except (OSError, ValueError, KeyError):
        pass
    return found if {"total", "available"} <= set(found) else {}


def resident_set() -> int:
    """Bytes of RAM that this process holds; 0 where the system does not say."""
    try:
        import os

        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _address_space() -> int | None:
    """The limit on this process's address space (`ulimit -v`), where there is one."""
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        return None if soft == resource.RLIM_INFINITY else soft
    except (ImportError, OSError, ValueError):
        return None
