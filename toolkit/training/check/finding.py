"""What a check found, and the model it held the files to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["error", "warning", "note"]
ORDER: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, wasteful or worth knowing."""

    level: Level
    """error: it fails, or something is ignored that decides the run; warning: it runs, at a price; note: a
    fact."""
    file: str
    """The file as it was given, or `environment`."""
    key: str
    """The dotted key, or an empty string."""
    message: str
    """What is wrong and what would be right, one line."""

    def to_json(self) -> dict[str, str]:
        """Plain data."""
        return dict(vars(self))

    @property
    def text(self) -> str:
        """`FILE: KEY: MESSAGE`."""
        return ": ".join(part for part in (self.file, self.key, self.message) if part)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the files are held to when a model is named."""

    name: str
    config: Mapping[str, Any] = field(repr=False)
    parameters: int
    hidden_size: int | None
    """What DeepSpeed's "auto" sizes are made from; None: the config names no width."""
    blocks: tuple[str, ...]
    """Classes of the layers that the model consists of."""
    layers: int
    """Layers of those classes."""
    classes: Mapping[str, int] = field(repr=False)
    """How often each module class occurs."""
    max_positions: int | None = None


class Findings:
    """Collects what the rules find in one file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Finding] = []

    def error(self, key: str, message: str) -> None:
        """It fails, or does something else than what it says."""
        self.found.append(Finding("error", self.file, key, message))

    def warning(self, key: str, message: str) -> None:
        """It runs, at a price."""
        self.found.append(Finding("warning", self.file, key, message))

    def note(self, key: str, message: str) -> None:
        """Worth knowing."""
        self.found.append(Finding("note", self.file, key, message))
