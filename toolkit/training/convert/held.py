"""Training state in a folder, whatever wrote it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from toolkit.errors import UserError
from toolkit.training.assets import FOLDER
from toolkit.training.state.live import clean_name
from toolkit.training.state.manifest import read_manifest, read_state
from toolkit.training.state.store import Lazy, Reader


@dataclass(frozen=True)
class Group:
    """Parameters that the optimizer treats alike."""

    names: list[str]
    settings: dict[str, Any]
    """lr, betas, weight_decay, ... as the optimizer has them."""


@dataclass(kw_only=True)
class Held:
    """What is there. `tensors` maps (kind, parameter) to the tensor; kinds are `weights`, `buffers` and the optimizer's own
    names, of which a number per parameter (`step`) has no dimensions."""

    kind: str
    path: Path
    tensors: dict[tuple[str, str], Lazy]
    step: int
    skipped: int = 0
    tokens: int = 0
    assets: Path | None = None
    """A folder with the model's config and tokenizer."""
    config: dict[str, Any] = field(default_factory=dict)
    """The recipe's keys; empty when another program trained it."""
    identity: dict[str, Any] = field(default_factory=dict)
    groups: list[Group] | None = None

    def of(self, kind: str) -> dict[str, Lazy]:
        """Parameter name to tensor, for one kind."""
        return {name: tensor for (other, name), tensor in self.tensors.items() if other == kind}

    def states_of(self, name: str) -> dict[str, Lazy]:
        """Kind to tensor of what the optimizer keeps for a parameter."""
        return {kind: tensor for (kind, other), tensor in self.tensors.items()
                if other == name and kind not in ("weights", "buffers")}

    @property
    def is_adapter(self) -> bool:
        """Whether only adapters were trained."""
        return any(".lora_" in name for kind, name in self.tensors if kind == "weights")


def plain_names(names: list[str]) -> dict[str, str]:
    """Name as a wrapped model gives it to the model's own name.

    Raises:
        UserError: two of them come out alike.
    """
    outer = "module." if names and all(name.startswith("module.") for name in names) else ""
    found = {name: clean_name(name.removeprefix(outer)) for name in names}
    if len(set(found.values())) < len(found):
        twice = next(name for name in found.values() if list(found.values()).count(name) > 1)
        raise UserError(f"two parameters are named {twice} when the wrappers' prefixes are taken off")
    return found


def hold_ours(folder: Path) -> Held:
    """A complete checkpoint of this toolkit. Raises UserError: it is of another format."""
    state, manifest = read_state(folder), read_manifest(folder)
    reader = Reader(folder, [name for name in manifest["files"] if name.startswith("rank-")])
    tensors = {key: reader.lazy(*key) for key in reader.entries}
    progress = state["progress"]
    assets = folder / FOLDER
    return Held(kind="toolkit", path=folder, tensors=tensors, step=progress["step"], skipped=progress.get("skipped", 0),
                tokens=progress.get("tokens", 0), assets=assets if (assets / "config.json").is_file() else None,
                config=_config_of(folder, state), identity=state["identity"],
                groups=[Group(**group) for group in state["groups"]] if state.get("groups") else None)


def _config_of(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """The recipe's keys: as the checkpoint has them, else as the run folder around it does."""
    for place in (state, state.get("record") or {}):
        if isinstance(place.get("config"), dict):
            return dict(place["config"])
    file = folder.parent.parent / "config.yaml"
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def from_tensor(tensor: torch.Tensor) -> Lazy:
    """A tensor that is there already, or mapped from a file."""
    flat = tensor.detach().reshape(-1)
    return Lazy(tensor.dtype, tuple(tensor.shape), lambda start, numel: flat[start : start + numel])


@dataclass(frozen=True)
class Stretch:
    """Consecutive elements of a flattened tensor, as some file has them."""

    start: int
    """Position of the first in the whole."""
    tensor: torch.Tensor
    """One dimension; may be mapped from a file."""


def from_stretches(shape: tuple[int, ...], stretches: list[Stretch], what: str) -> Lazy:
    """A tensor that lies in pieces.

    Raises:
        UserError: `what` is not whole.
    """
    stretches = sorted(stretches, key=lambda stretch: stretch.start)
    reached = 0
    for stretch in stretches:
        if stretch.start > reached:
            break
        reached = max(reached, stretch.start + stretch.tensor.numel())
    if reached < math.prod(shape):
        raise UserError(f"{what} is not whole: elements {reached} to {math.prod(shape)} are in no file")

    def read(start: int, numel: int) -> torch.Tensor:
        parts, reached = [], start
        for stretch in stretches:
            begin, end = reached - stretch.start, min(start + numel - stretch.start, stretch.tensor.numel())
            if 0 <= begin < end:
                parts.append(stretch.tensor[begin:end])
                reached = stretch.start + end
        return torch.cat(parts)

    return Lazy(stretches[0].tensor.dtype, shape, read)
