"""Which format a folder holds, and which folder a path means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from toolkit.errors import UserError
from toolkit.training.state.manifest import MANIFEST, damage, is_complete, named, newest_in

FORMATS = {
    "toolkit": "a checkpoint of this toolkit",
    "deepspeed": "a DeepSpeed ZeRO checkpoint",
    "deepspeed-universal": "a DeepSpeed universal checkpoint",
    "accelerate-fsdp": "a sharded FSDP checkpoint of Accelerate",
    "dcp": "a torch distributed checkpoint",
}
"""What can be read, and how it is called."""
OTHERS = {
    "accelerate-fsdp-full": ("a full FSDP checkpoint of Accelerate", "save it with fsdp_state_dict_type: SHARDED_STATE_DICT"),
    "accelerate": ("an Accelerate checkpoint of one whole model", "its optimizer state names no parameters: load it with the "
                   "script that saved it and save from there, or give the model as model=... to start from its weights"),
    "trainer": ("a checkpoint of the transformers Trainer", "its optimizer state names no parameters: give the folder as "
                "model=... to start from its weights"),
    "adapter": ("a PEFT adapter without training state", "it is already what export writes"),
    "model": ("a model without training state", "it is already what export writes"),
}  # fmt: skip
"""What can be told but not read: how it is called, and the way round."""


def kind_of(folder: Path) -> str | None:
    """The format of what lies in a folder itself, by its files' names."""
    if (folder / MANIFEST).is_file() or (folder.name.startswith("step-") and any(folder.glob("rank-*.safetensors"))):
        return "toolkit"
    if (folder / "zero" / "optimizer_state.pt").is_file():
        return "deepspeed-universal"
    if any(folder.glob("*_optim_states.pt")) or any(folder.glob("*mp_rank_*_model_states.pt")):
        return "deepspeed"
    if any(folder.glob("pytorch_model_fsdp_0/.metadata")) or any(folder.glob("pytorch_model_fsdp_0/*.distcp")):
        return "accelerate-fsdp"
    if (folder / ".metadata").is_file() or any(folder.glob("*.distcp")):
        return "dcp"
    if (folder / "trainer_state.json").is_file():
        return "trainer"
    if any(folder.glob("pytorch_model_fsdp*.bin")):
        return "accelerate-fsdp-full"
    if (folder / "optimizer.bin").is_file():
        return "accelerate"
    if (folder / "adapter_config.json").is_file():
        return "adapter"
    return "model" if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")) else None


def find(path: Path) -> tuple[str, Path]:
    """(format, folder) of the checkpoint that a path means: itself, a file or folder in it, or the newest of a run folder, of its
    `checkpoints`, or of a DeepSpeed folder with its `latest`.

    Raises:
        UserError: there is none, or there are several to choose from, which are listed.
    """
    if not path.exists():
        raise UserError(f"{path}: there is no such folder")
    start = path if path.is_dir() else path.parent
    for folder in (start.absolute().parent, start):  # A folder in a checkpoint (model, optimizer_0) means the checkpoint.
        kind = kind_of(folder)
        if kind in FORMATS:
            return kind, folder
    newest = newest_in(start) or newest_in(start / "checkpoints")
    if newest is not None:
        return "toolkit", newest
    if latest := _latest(start):
        return latest
    return (kind, start) if kind is not None else _only(start)


def _latest(path: Path) -> tuple[str, Path] | None:
    """What DeepSpeed's `latest` or `latest_universal` names."""
    for name in ("latest", "latest_universal"):
        file = path / name
        if file.is_file() and file.stat().st_size < 1024:
            tag = file.read_text(encoding="utf-8", errors="replace").strip()
            folder = path / tag
            if tag and folder.parent == path and (kind := kind_of(folder)):
                return kind, folder
    return None


def _only(path: Path) -> tuple[str, Path]:
    """The one checkpoint somewhere below a folder."""
    found = list(_below(path, 3))
    whole = [(kind, folder) for kind, folder in found if kind != "toolkit" or is_complete(folder)]
    if len(whole) == 1:
        return whole[0]
    if whole:
        listed = ", ".join(str(folder) for _, folder in whole[:6]) + (", ..." if len(whole) > 6 else "")
        raise UserError(f"{path} holds several checkpoints; name one of {listed}")
    if found:
        raise UserError(f"{path} holds no complete checkpoint: {damage(found[0][1], contents='none')}")
    raise UserError(f"{path} holds no complete checkpoint; name a run folder, its checkpoints folder or a step-* folder (or a "
                    "folder that DeepSpeed, Accelerate's FSDP or torch's distributed checkpoint wrote)")


def _below(path: Path, depth: int) -> Iterator[tuple[str, Path]]:
    """Checkpoints in folders below; of one run, the newest complete."""
    newest = newest_in(path) or next(reversed(named(path)), None)
    if newest is not None:
        yield "toolkit", newest
        return
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.is_symlink()):
        kind = kind_of(folder)
        if kind in FORMATS:
            yield kind, folder
        elif latest := _latest(folder):
            yield latest
        elif depth > 1:
            yield from _below(folder, depth - 1)


def needs_reading(kind: str, folder: Path) -> None:
    """Raises UserError for a format that can be told but not read, with the way round."""
    if kind in OTHERS:
        what, way = OTHERS[kind]
        raise UserError(f"{folder} is {what}, which is not converted: {way}")
