"""What one rank writes of one checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from toolkit.training.state.live import Live
from toolkit.training.state.manifest import SHARD
from toolkit.training.state.rng import random_states
from toolkit.training.state.store import Fragment, write_fragments, write_tensors

_ALIGNED = 64
"""Bytes: every tensor of a copy begins at a multiple of this."""


def random_file(rank: int) -> str:
    """The name of a rank's random states."""
    return f"random-{rank:05d}.safetensors"


class HostRoom:
    """Host memory for a copy, kept from one save to the next: to get memory from the system takes longer than to fill it."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors, of one dimension each, in this memory; what it held before is gone."""
        ends = list(accumulate(-(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED for tensor in tensors))
        if ends and ends[-1] > self._bytes.numel():
            self._bytes = torch.empty(0, dtype=torch.uint8)  # Never both at once.
            self._bytes = torch.empty(ends[-1], dtype=torch.uint8)
        copies = []
        for tensor, begin in zip(tensors, [0, *ends], strict=False):
            place = self._bytes[begin : begin + tensor.numel() * tensor.element_size()].view(tensor.dtype)
            copies.append(place.copy_(tensor.detach()))
        return copies


class Share:
    """A rank's part of the state: in live memory, to be written before training goes on, or `copied`."""

    def __init__(self, rank: int, fragments: Iterable[Fragment], random: dict[str, torch.Tensor]) -> None:
        self.rank, self.fragments, self.random = rank, list(fragments), random

    @classmethod
    def of(cls, live: Live, rank: int) -> Share:
        """What this rank writes of an engine's state, as views of live memory. Raises ToolkitError."""
        fragments = [fragment.share() for fragment in live.fragments()]
        fragments += [scalar.fragment() for scalar in live.scalars() if scalar.owner]
        return cls(rank, fragments, random_states())

    def copied(self, room: HostRoom) -> Share:
        """In host memory, which training does not touch; until `room` is used again."""
        copies = room.copy([part.tensor for part in self.fragments])
        fragments = [replace(part, tensor=copy) for part, copy in zip(self.fragments, copies, strict=True)]
        return Share(self.rank, fragments, self.random)

    def write(self, folder: Path) -> tuple[dict[str, Any], str | None]:
        """(file name to {"bytes", "xxh3"}, what went wrong)."""
        try:
            files = write_fragments(folder, f"{SHARD}{self.rank:05d}", self.fragments)
            name = random_file(self.rank)
            files[name] = write_tensors(folder / name, list(self.random.items()), {})
        except Exception as error:  # noqa: BLE001 - whatever a format's writer raises, training goes on without it
            return {}, told(error)
        return files, None


def told(error: Exception) -> str:
    """One line of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
