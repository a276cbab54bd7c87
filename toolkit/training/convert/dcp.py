"""torch's distributed checkpoints: plain ones (a model's and an optimizer's state dict), and the two that Accelerate writes for
FSDP. Read and written in one process, a tensor at a time."""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import UserError
from toolkit.training.convert.held import Group, Held, plain_names
from toolkit.training.convert.unpickle import load_metadata
from toolkit.training.state.store import Lazy

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
Path_ = tuple[str | int, ...]


class Folder:
    """One distributed checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.metadata = folder, load_metadata(folder / ".metadata")
        self.paths: dict[str, Path_] = {key: tuple((self.metadata.planner_data or {}).get(key, (key,)))
                                        for key in self.metadata.state_dict_metadata}
        missing = sorted({info.relative_path for info in self.metadata.storage_data.values()
                          if not (folder / info.relative_path).is_file()})
        if missing:
            raise UserError(f"{folder} lacks {missing[0]}" + (f" (and {len(missing) - 1} more files)" if len(missing) > 1 else "")
                            + ": it may be on another node")

    def is_tensor(self, key: str) -> bool:
        """Whether it is one, and not a pickled object."""
        return hasattr(self.metadata.state_dict_metadata[key], "chunks")

    def tensor(self, key: str) -> Lazy:
        """By the key that it has in the checkpoint."""
        facts = self.metadata.state_dict_metadata[key]
        shape = tuple(facts.size)

        def read(start: int, numel: int) -> torch.Tensor:
            whole = torch.empty(shape, dtype=facts.properties.dtype)
            for chunk in facts.chunks:
                place = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
                whole[place] = self._stored(key, chunk.offsets)
            return whole.view(-1)[start : start + numel]

        covered = sum(math.prod(chunk.sizes) for chunk in facts.chunks)
        if covered < math.prod(shape):
            raise UserError(f"{self.folder}: {key} is not whole: {covered} of {math.prod(shape)} elements are there")
        return Lazy(facts.properties.dtype, shape, read, at_once=True)

    def value(self, key: str) -> Any:
        """A plain object."""
        return self._stored(key, None)

    @cached_property
    def _stored_at(self) -> dict[tuple[str, tuple[int, ...] | None], Any]:
        return {(index.fqn, None if index.offset is None else tuple(index.offset)): info
                for index, info in self.metadata.storage_data.items()}

    def _stored(self, key: str, offset: Any) -> Any:
        info = self._stored_at.get((key, None if offset is None else tuple(offset)))
        if info is None:
            raise UserError(f"{self.folder}: {key} is in no file")
        file = (self.folder / info.relative_path).resolve()
        if getattr(info, "transform_descriptors", None) or not file.is_relative_to(self.folder.resolve()):
            raise UserError(f"{self.folder}: {key} was stored through an extension or outside the folder, which is not read")
        with file.open("rb") as stream:
            stream.seek(info.offset)
            content = io.BytesIO(stream.read(info.length))
        try:
            return torch.load(content, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise UserError(f"{file}: {key} cannot be read: {' '.join(str(error).split())[:120]}") from None


def hold_dcp(folder: Path) -> Held:
    """A distributed checkpoint with a model's state dict and (if there is one) an optimizer's, as torch's `get_state_dict` gives
    them, under any name. Raises UserError."""
    return _held("dcp", folder, [Folder(folder)])


def hold_fsdp(folder: Path) -> Held:
    """What `accelerator.save_state` writes under FSDP with SHARDED_STATE_DICT. Raises UserError."""
    if (folder / f"{MODEL[:-1]}1").exists():
        raise UserError(f"{folder} holds several models, which is not read; convert {MODEL} by itself")
    parts = [Folder(folder / name) for name in (MODEL, OPTIMIZER) if (folder / name).is_dir()]
    return _held("accelerate-fsdp", folder, parts)


def _held(kind: str, folder: Path, parts: list[Folder]) -> Held:
    states: dict[tuple[str, str], Lazy] = {}
    others: dict[str, Lazy] = {}
    settings: dict[tuple[int | str, str], Any] = {}
    for part in parts:
        for key, path in part.paths.items():
            where, name = _meaning(path)
            if where == "state" and part.is_tensor(key):
                states[name[1], name[0]] = part.tensor(key)
            elif where == "group" and not part.is_tensor(key):
                settings[name] = part.value(key)
            elif where == "model" and part.is_tensor(key):
                others[name[0]] = part.tensor(key)
    if not others:
        raise UserError(f"{folder} holds no model")
    trained = _trained(states, settings)
    names = plain_names(list(others))
    tensors: dict[tuple[str, str], Lazy] = {}
    for name, tensor in others.items():
        if trained is None or name in trained:
            tensors["weights", names[name]] = tensor
        elif not name.endswith((".weight", ".bias")) and tensor.numel():  # The rest is frozen, or tied to what is there.
            tensors["buffers", names[name]] = tensor
    tensors |= {(kind, names[name]): tensor for (kind, name), tensor in states.items() if name in names}
    if trained is None:
        tensors = _without_copies(tensors)
    steps = [tensor.whole().item() for (kind, _), tensor in tensors.items() if kind == "step"]
    return Held(kind=kind, path=folder, tensors=tensors, step=int(max(steps, default=0)), groups=_groups(settings, names))


def _meaning(path: Path_) -> tuple[str, Any]:
    """What an entry is: ("state", (parameter, kind)), ("group", (number or parameter, setting)) or ("model", (name,))."""
    for at, part in enumerate(path):
        if part == "state" and len(path) == at + 3:
            return "state", (str(path[at + 1]), str(path[at + 2]))
        if part == "param_groups" and len(path) >= at + 3:
            return "group", (path[at + 1], str(path[at + 2]))
    last = str(path[-1])
    if last.startswith("state."):  # As torch flattens an optimizer's state dict.
        name, _, kind = last.removeprefix("state.").rpartition(".")
        return "state", (name, kind)
    if last.startswith("param_groups."):
        name, _, setting = last.removeprefix("param_groups.").rpartition(".")
        return "group", (name, setting)
    return "model", (last,)


def _trained(states: dict[tuple[str, str], Lazy], settings: dict[tuple[int | str, str], Any]) -> set[str] | None:
    """The names of what the optimizer knows; None without an optimizer."""
    listed = {str(name) for (_, setting), names in settings.items() if setting == "params" for name in names}
    flattened = {name for name, _ in settings if isinstance(name, str)}
    known = listed | flattened | {name for _, name in states}
    return known or None


def _without_copies(tensors: dict[tuple[str, str], Lazy]) -> dict[tuple[str, str], Lazy]:
    """Tied weights once, under their first name: without an optimizer's list only equal contents tell."""
    large = [key for key, tensor in tensors.items() if key[1].endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight"))]
    for first in large:
        for other in large:
            one, two = tensors.get(first), tensors.get(other)
            if first != other and one and two and one.shape == two.shape and torch.equal(one.whole(), two.whole()):
                tensors = {key: tensor for key, tensor in tensors.items() if key != other}
    return tensors


def _groups(settings: dict[tuple[int | str, str], Any], names: dict[str, str]) -> list[Group] | None:
    found: dict[Any, dict[str, Any]] = {}
    for (number, setting), value in settings.items():
        found.setdefault(number, {})[setting] = value
    if all(isinstance(number, int) for number in found):
        return [Group([names[name] for name in found[number].pop("params", []) if name in names], found[number])
                for number in sorted(found)] or None
    alike: dict[str, Group] = {}
    for name, values in found.items():
        if name in names:
            alike.setdefault(repr(sorted(values.items())), Group([], values)).names.append(names[name])
    return list(alike.values()) or None


def write_folder(folder: Path, content: dict[str, Any], real: Callable[[str], torch.Tensor | None]) -> None:
    """Save a nested dict whose tensors are on meta; `real` gives the contents of one by its key when it is written."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class Planner(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            found = real(index.fqn)
            return super().lookup_object(index) if found is None else found

    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That there is one process is meant.
        dcp.save(content, storage_writer=writer, planner=Planner(), no_dist=True)
