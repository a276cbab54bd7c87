"""What one rank writes of one checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from toolkit.training.state.live import Live
from toolkit.training.state.rng import random_states
from toolkit.training.state.store import Fragment, write_fragments, write_tensors


def random_file(rank: int) -> str:
    """The name of a rank's random states."""
    return f"random-{rank:05d}.safetensors"


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

    def copied(self) -> Share:
        """In host memory of its own, which training does not touch."""
        copies = (replace(part, tensor=part.tensor.detach().to("cpu", copy=True)) for part in self.fragments)
        return Share(self.rank, copies, self.random)

    def write(self, folder: Path) -> tuple[dict[str, Any], str | None]:
        """(file name to {"bytes", "xxh3"}, what went wrong)."""
        try:
            files = write_fragments(folder, f"rank-{self.rank:05d}", self.fragments)
            name = random_file(self.rank)
            files[name] = write_tensors(folder / name, list(self.random.items()), {})
        except Exception as error:  # noqa: BLE001 - whatever a format's writer raises, training goes on without it
            return {}, told(error)
        return files, None


def told(error: Exception) -> str:
    """One line of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
