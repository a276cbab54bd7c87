"""The state of a running engine as fragments in its own memory, for saving and for loading alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.fsdp import FSDPModule

from toolkit.errors import ToolkitError, UserError
from toolkit.training.state.loading import Loading, expect_large_pages
from toolkit.training.state.store import Fragment, Reader

if TYPE_CHECKING:
    from accelerate import Accelerator

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@dataclass(frozen=True)
class Scalar:
    """A number that the optimizer keeps for a parameter (the count of its steps), where the optimizer has it."""

    kind: str
    name: str
    holder: dict[str, Any]
    owner: bool
    """Whether this rank writes it."""

    def fragment(self) -> Fragment:
        """As it is written."""
        value = self.holder[self.kind]
        tensor = value.detach().reshape(1) if torch.is_tensor(value) else torch.tensor([value])
        return Fragment(self.kind, self.name, 0, (), tensor)

    def put(self, value: float) -> None:
        """Set it, in the optimizer's own type."""
        held = self.holder[self.kind]
        if torch.is_tensor(held):
            held.fill_(value)
        else:
            self.holder[self.kind] = type(held)(value)


class Live(Protocol):
    """One engine's state. All but `settle` work on this rank alone; `settle` must be called on every rank."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Trained parameter to the shape of the whole."""

    def fragments(self) -> Iterator[Fragment]:
        """Everything that has elements, as views of live memory."""

    def mirrors(self) -> Iterator[Fragment]:
        """Weights that this rank computes with beside those in `fragments`, where they too are best read from the files."""

    def scalars(self) -> Iterator[Scalar]:
        """The optimizer's numbers."""

    def create(self, known: set[str]) -> None:
        """Have the optimizer make the state that it makes in its first step, for the parameters in `known`."""

    def settle(self, step: int, skipped: int) -> None:
        """Bring whatever is derived from the state in line with it."""


def clean_name(name: str) -> str:
    """A parameter's name without what compilers and sharding put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def live_state(accelerator: Accelerator) -> Live:
    """The state of what the accelerator has prepared."""
    model, optimizer = accelerator._models[-1], accelerator._optimizers[-1]
    if any(base.__name__ == "DeepSpeedEngine" for base in type(model).__mro__):
        from toolkit.training.state.zero import zero_state

        return zero_state(model)
    return ParameterState(accelerator.unwrap_model(model, keep_torch_compile=False), optimizer.optimizer,
                          (accelerator.process_index, accelerator.num_processes))


def trained(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(clean name, parameter) of what is trained, a tied parameter once."""
    return ((clean_name(name), p) for name, p in model.named_parameters() if p.requires_grad)


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(clean name, buffer) of those that belong to the model's state."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield clean_name(f"{prefix}.{name}" if prefix else name), buffer


def make_states(optimizer: torch.optim.Optimizer, parameters: list[Any]) -> None:
    """Give an optimizer its state, to be filled from a checkpoint: AdamW's as its `_init_group` does, with moments of any values;
    others by a step without gradients, after which the weights are loaded anyway."""
    held_by_gpu = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    if type(optimizer) is torch.optim.AdamW and not held_by_gpu:
        for p in parameters:
            moments = {kind: torch.empty_like(p.detach()) for kind in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
        expect_large_pages(getattr(value, "_local_tensor", value) for p in parameters for value in optimizer.state[p].values())
        return
    grads = [p.grad for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if torch.is_tensor(group["lr"]) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad


class ParameterState:
    """Engines whose optimizer steps the model's own parameters: one process, ddp, fsdp, fsdp-grad, hsdp."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, place: tuple[int, int]) -> None:
        self.model, self.optimizer, self.place = model, optimizer, place
        for module in model.modules():
            if isinstance(module, FSDPModule):  # After an evaluation some layers still hold what they gathered.
                module.reshard()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in trained(self.model)}

    def fragments(self) -> Iterator[Fragment]:
        for name, buffer in persistent_buffers(self.model):
            if buffer.numel():
                yield self._fragment("buffers", name, buffer)
        for name, p in trained(self.model):
            yield self._fragment("weights", name, p)
            for kind, value in self.optimizer.state.get(p, {}).items():
                if torch.is_tensor(value) and not _is_scalar(value, p):
                    yield self._fragment(kind, name, value)

    def mirrors(self) -> Iterator[Fragment]:
        yield from ()

    def scalars(self) -> Iterator[Scalar]:
        for name, p in trained(self.model):
            state = self.optimizer.state.get(p, {})
            for kind, value in state.items():
                if isinstance(value, (int, float)) or _is_scalar(value, p):
                    yield Scalar(kind, name, state, owner=self.place[0] == 0)

    def create(self, known: set[str]) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        make_states(self.optimizer, parameters)
        for name, p in trained(self.model):
            if name not in known:  # It never had a gradient.
                self.optimizer.state.pop(p, None)

    def settle(self, step: int, skipped: int) -> None:
        """Nothing is derived from the parameters."""

    def _fragment(self, kind: str, name: str, value: Any) -> Fragment:
        shape = tuple(value.shape)
        if not hasattr(value, "device_mesh"):
            return Fragment(kind, name, 0, shape, _flat(value), self.place)
        start, copy = 0, (0, 1)
        for dimension, placement in enumerate(value.placements):
            if placement.is_replicate():
                index, number = copy
                size = value.device_mesh.size(dimension)
                copy = (index * size + value.device_mesh.get_local_rank(dimension), number * size)
            elif not placement.is_shard(0):
                raise ToolkitError(f"{kind} of {name} is sharded as {placement}, which checkpoints do not know")
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        if shape:
            start = offsets[0] * (value.numel() // shape[0])
        return Fragment(kind, name, start, shape, _flat(value.to_local()), copy)


def _is_scalar(value: Any, parameter: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.numel() == 1 and value.shape != parameter.shape


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)


@torch.no_grad()
def fill(live: Live, reader: Reader, held: dict[str, str]) -> str | None:
    """Put the state in `reader` into this rank's memory; `settle` is to follow. Files in `held` are held to these checksums:
    returns None, or which is not as it was written.

    Raises:
        UserError: it is the state of another model or optimizer, or not all of it.
    """
    _same_model(live.shapes(), reader)
    if reader.states_of:
        live.create(set(reader.states_of))
    loading = Loading(reader, held)
    for fragment in chain(live.fragments(), live.mirrors()):
        if fragment.kind in ("weights", "buffers") or fragment.name in reader.states_of:
            if fragment.tensor.numel():
                loading.want(fragment)
        else:
            fragment.tensor.zero_()
    problem = loading.run()
    for scalar in live.scalars():
        if scalar.name in reader.states_of:
            scalar.put(reader.read(scalar.kind, scalar.name, 0, 1).item())
    return problem


def _same_model(shapes: dict[str, tuple[int, ...]], reader: Reader) -> None:
    saved = {name: entry.shape for (kind, name), entry in reader.entries.items() if kind == "weights"}
    problem = difference(shapes, saved)
    if problem:
        raise UserError(f"{reader.folder} is of another model: {problem}; name the model it was made with, or start anew with "
                        "resume=never")


def difference(model: dict[str, tuple[int, ...]], saved: dict[str, tuple[int, ...]]) -> str | None:
    """In what the tensors that were saved are not the model's, or None."""
    missing, foreign = sorted(model.keys() - saved.keys()), sorted(saved.keys() - model.keys())
    differing = [name for name in sorted(model.keys() & saved.keys()) if model[name] != saved[name]]
    said = []
    if differing:
        name = differing[0]
        said.append(f"{name} is {list(saved[name])} there, {list(model[name])} in this model" + _more(differing))
    if missing:
        said.append(f"it lacks {missing[0]}" + _more(missing))
    if foreign:
        said.append(f"this model lacks {foreign[0]}" + _more(foreign))
    return "; ".join(said) or None


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
