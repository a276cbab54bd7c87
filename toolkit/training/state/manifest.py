"""What makes a folder a checkpoint: a manifest, written last, with the size and checksum of every other file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from toolkit.errors import UserError
from toolkit.training.state.store import checksum

MANIFEST, STATE = "manifest.json", "state.json"
SHARD = "rank-"
"""How the names of the files begin that hold weights and optimizer state; all others are small."""
FORMAT = 2
"""Raised when an older reader would misread what is written."""


def named(folder: Path) -> list[Path]:
    """Everything in a `checkpoints` folder that is named as a checkpoint, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def newest_in(folder: Path) -> Path | None:
    """The newest complete checkpoint of a `checkpoints` folder."""
    return next((path for path in reversed(named(folder)) if is_complete(path)), None)


def is_complete(path: Path) -> bool:
    """Whether the manifest is there and every file has the size it states. Contents are not read."""
    return damage(path, contents="none") is None


def read_manifest(path: Path) -> dict[str, Any]:
    """Raises UserError: says what is wrong with it, and what can be done about another format."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} has no {MANIFEST}: it is no checkpoint, or was never finished") from None
    except (OSError, ValueError):
        raise UserError(f"{path / MANIFEST} cannot be read") from None
    version = manifest.get("version") if isinstance(manifest, dict) else None
    if version != FORMAT:
        way = "a newer version of the toolkit made it" if isinstance(version, int) and version > FORMAT else \
            "an older version of the toolkit made it: resume with that version, or start from its export as the model"
        raise UserError(f"{path} is in format {version}, this version reads format {FORMAT}; {way}")
    return manifest


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a complete checkpoint."""
    return dict(json.loads((path / STATE).read_text(encoding="utf-8")))


def damage(path: Path, share: tuple[int, int] = (0, 1), *,
           contents: Literal["all", "small", "none"] = "all") -> str | None:
    """What is wrong with a checkpoint, with the file's name, or None.

    Every file must be there with its size; of those that `contents` names, every `share[1]`-th from `share[0]` on is read and
    held to its checksum, so that ranks can divide the work.
    """
    try:
        manifest = read_manifest(path)
        files = sorted(manifest["files"].items())
        for name, facts in files:
            file = path / name
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return f"{path / MANIFEST} names {name}, which is not in the checkpoint"
            if not file.is_file():
                return f"{file} is missing"
            if file.stat().st_size != facts["bytes"]:
                return f"{file} has {file.stat().st_size} bytes instead of {facts['bytes']}"
        held = [item for item in files if contents == "all" or contents == "small" and not item[0].startswith(SHARD)]
        for name, facts in held[share[0] :: share[1]]:
            if checksum(path / name) != facts["xxh3"]:
                return f"the contents of {path / name} are not what was written"
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or path} cannot be read ({error.strerror})"
    except (KeyError, TypeError, AttributeError):
        return f"{path / MANIFEST} cannot be read"
    return None


def flush(path: Path) -> None:
    """Have the system write a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
