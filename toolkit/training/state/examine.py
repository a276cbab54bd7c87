"""What is in a checkpoint, whoever wrote it, and whether all of it is sound: for people and tools, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.training.assets import FOLDER
from toolkit.training.convert.held import Held
from toolkit.training.convert.kinds import FORMATS, OTHERS, find
from toolkit.training.convert.read import hold
from toolkit.training.state.live import difference
from toolkit.training.state.manifest import read_manifest, read_state
from toolkit.training.state.store import Reader

_SHOWN = ("model", "method", "optimizer", "precision", "learning_rate", "schedule", "seq_len", "micro_batch", "accumulate")
"""Of the recipe's keys, what tells one run from another."""


def inspect(path: Path) -> dict[str, Any]:
    """What is in a checkpoint, as plain data; sizes in bytes. A format that can only be told gives its name and the way round.

    Raises:
        UserError: there is none, or it is broken.
    """
    kind, folder = find(path)
    if kind in OTHERS:
        what, way = OTHERS[kind]
        return {"schema": 1, "path": str(folder), "kind": kind, "what": what, "way": way}
    held = hold(folder, contents=False)
    found = {
        "schema": 1, "path": str(folder), "kind": kind, "what": FORMATS[kind], "step": held.step, "tokens": held.tokens,
        "kinds": _kinds(held), "bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        "model": _model(held), "config": {key: held.config[key] for key in _SHOWN if key in held.config},
        "groups": [{"parameters": len(group.names), "settings": group.settings} for group in held.groups or []],
        "identity": held.identity,
    }  # fmt: skip
    if kind == "toolkit":
        state, manifest = read_state(folder), read_manifest(folder)
        plan = state.get("plan") or (state.get("record") or {}).get("plan") or _json(folder.parent.parent / "plan.json")
        found |= {"format": manifest["version"], "progress": state["progress"], "data": state["data"], "plan": plan,
                  "versions": state["versions"], "source": state.get("source"), "files": manifest["files"],
                  "bytes": sum(facts["bytes"] for facts in manifest["files"].values())}
    return found


def _kinds(held: Held) -> dict[str, dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {}
    for (name, _), tensor in held.tensors.items():
        kind = kinds.setdefault(name, {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": []})
        kind["tensors"] += 1
        kind["elements"] += tensor.numel()
        kind["bytes"] += tensor.numel() * tensor.element_size()
        kind["dtypes"] = sorted({*kind["dtypes"], str(tensor.dtype).removeprefix("torch.")})
    return kinds


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _model(held: Held) -> dict[str, Any]:
    """What the checkpoint says of its model."""
    if held.assets is None:
        return {}
    config = _json(held.assets / "config.json")
    adapter = _json(held.assets / "adapter_config.json")
    return {"architecture": (config.get("architectures") or [None])[0], "vocabulary": config.get("vocab_size"),
            "base": adapter.get("base_model_name_or_path"), "tokenizer": (held.assets / "tokenizer_config.json").is_file()}


def verify(path: Path) -> dict[str, Any]:
    """Hold every file to its checksum (where the format has any), every tensor to its shape, and all of them to the model's
    config where the checkpoint has one; a stretch of one tensor is in memory at a time.

    Raises:
        UserError: names the first file or tensor that is not sound.
    """
    kind, folder = find(path)
    held = hold(folder)
    if kind == "toolkit":
        _check_pieces(folder)
    shapes = {name: tensor.shape for name, tensor in held.of("weights").items()}
    if not shapes:
        raise UserError(f"{folder} holds no weights")
    _check_model(held, shapes)
    for (name, parameter), tensor in held.tensors.items():
        where = f"{folder}: {name} of {parameter}"
        if tensor.numel() == 0:
            raise UserError(f"{where} is empty")
        if name != "buffers" and parameter not in shapes:
            raise UserError(f"{where} belongs to no weights")
        if any(part.is_floating_point() and not part.isfinite().all() for part in tensor.parts()):
            raise UserError(f"{_file_of(folder, name, parameter)}: {name} of {parameter} has values that are NaN or infinite")
    return {"schema": 1, "path": str(folder), "kind": kind, "sound": True, "tensors": len(held.tensors)}


def _reader(folder: Path) -> Reader:
    return Reader(folder, [name for name in read_manifest(folder)["files"] if name.startswith("rank-")])


def _check_pieces(folder: Path) -> None:
    for (kind, name), entry in sorted(_reader(folder).entries.items()):
        gap = entry.gap()
        if gap:
            raise UserError(f"{folder / entry.pieces[0].file}: {kind} of {name}: no file holds elements {gap[0]} to {gap[1]}")


def _file_of(folder: Path, kind: str, name: str) -> Path:
    """The file in which a value of one of our tensors is not finite; of other formats the folder."""
    if not (folder / "manifest.json").is_file():
        return folder
    reader = _reader(folder)
    for piece in reader.entries[kind, name].pieces:
        if not reader.read(kind, name, piece.start, piece.numel).isfinite().all():
            return folder / piece.file
    return folder


def _check_model(held: Held, shapes: dict[str, tuple[int, ...]]) -> None:
    """Hold what was trained whole to the config that the checkpoint carries."""
    if held.assets is None or held.is_adapter:
        return
    from toolkit.training.convert.directory import config_of, fitting_model

    model = {name: tuple(p.shape) for name, p in fitting_model(held, config_of(held.assets), []).named_parameters()}
    problem = difference({name: shape for name, shape in model.items() if name in shapes}, shapes)
    if problem:
        raise UserError(f"{held.path} is of another model than its {FOLDER}/config.json: {problem}")
