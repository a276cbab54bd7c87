"""What is in a checkpoint, and whether all of it is sound: for people and tools, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.training.state.manifest import damage, is_complete, newest_in, read_manifest, read_state
from toolkit.training.state.store import Reader


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest complete one of a run folder or its `checkpoints`.

    Raises:
        UserError: there is none; a broken one that is named itself is returned, for its damage to be told.
    """
    if not path.is_dir():
        raise UserError(f"{path}: there is no such folder")
    if path.name.startswith("step-") or is_complete(path):
        return path
    for folder in (path, path / "checkpoints"):
        newest = newest_in(folder)
        if newest is not None:
            return newest
    raise UserError(f"{path} holds no complete checkpoint; name a run folder, its checkpoints folder or a step-* folder")


def _reader(path: Path) -> Reader:
    return Reader(path, [name for name in read_manifest(path)["files"] if name.startswith("rank-")])


def inspect(path: Path) -> dict[str, Any]:
    """What is in a checkpoint, as plain data; sizes in bytes.

    Raises:
        UserError: it is broken.
    """
    problem = damage(path, checksums=False)
    if problem:
        raise UserError(problem)
    state, manifest, entries = read_state(path), read_manifest(path), _reader(path).entries.values()
    kinds: dict[str, dict[str, Any]] = {}
    for entry in entries:
        kind = kinds.setdefault(entry.kind, {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": []})
        kind["tensors"] += 1
        kind["elements"] += entry.numel
        kind["bytes"] += entry.bytes
        kind["dtypes"] = sorted({*kind["dtypes"], entry.dtype})
    return {
        "schema": 1, "path": str(path), "format": manifest["version"], "progress": state["progress"],
        "data": state["data"], "identity": state["identity"], "versions": state["versions"], "kinds": kinds,
        "bytes": sum(facts["bytes"] for facts in manifest["files"].values()), "files": manifest["files"],
    }  # fmt: skip


def verify(path: Path) -> dict[str, Any]:
    """Hold every file to its checksum and every tensor to its shape; one tensor is in memory at a time.

    Raises:
        UserError: names the first file or tensor that is not sound.
    """
    problem = damage(path)
    if problem:
        raise UserError(problem)
    reader = _reader(path)
    weights = {name for kind, name in reader.entries if kind == "weights"}
    if not weights:
        raise UserError(f"{path} holds no weights")
    for (kind, name), entry in sorted(reader.entries.items()):
        where = f"{path / entry.pieces[0].file}: {kind} of {name}"
        if entry.numel == 0:
            raise UserError(f"{where} is empty")
        if kind != "buffers" and name not in weights:
            raise UserError(f"{where} belongs to no weights")
        gap = entry.gap()
        if gap:
            raise UserError(f"{where}: no file holds elements {gap[0]} to {gap[1]}")
        for piece in entry.pieces:
            tensor = reader.read(kind, name, piece.start, piece.numel)
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise UserError(f"{path / piece.file}: {kind} of {name} has values that are NaN or infinite")
    reader.close()
    return {"schema": 1, "path": str(path), "sound": True, "tensors": len(reader.entries)}
