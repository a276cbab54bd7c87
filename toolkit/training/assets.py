"""The small files that make weights a model: config, generation config, tokenizer, an adapter's config.

A run keeps them in `model/`, and every checkpoint carries a copy, so that a checkpoint that was moved can still be
exported and told from that of another model.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from toolkit.training.state.manifest import flush
from toolkit.training.state.store import checksum

FOLDER = "model"
SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")


def write_assets(folder: Path, model: Any, tokenizer: Any, model_config: Any) -> None:
    """Write them for an unwrapped model: its config as it was given (`use_cache`, `dtype`), with the vocabulary that it has
    now. Raises OSError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    adapter = getattr(model, "peft_config", {}).get("default")
    inner = model.get_base_model() if adapter is not None else model
    config = type(inner.config).from_dict(inner.config.to_dict())
    config.use_cache, config.dtype = getattr(model_config, "use_cache", True), model_config.dtype
    config.architectures = [type(inner).__name__.removeprefix("FSDP")]  # FSDP2 gives a model's class another name.
    config.save_pretrained(folder)
    if getattr(inner, "generation_config", None) is not None:
        inner.generation_config.save_pretrained(folder)
    if adapter is not None:
        adapter.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def carry_assets(source: Path, checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Copy the small files of a folder into a checkpoint; returns file name to {"bytes", "xxh3"} for its manifest. Raises
    OSError."""
    found = {}
    for file in sorted(path for pattern in SMALL for path in source.glob(pattern)):
        if file.is_file() and not file.name.endswith(".index.json"):
            target = checkpoint / FOLDER / file.name
            target.parent.mkdir(exist_ok=True)
            shutil.copy(file, target)
            flush(target)
            found[f"{FOLDER}/{file.name}"] = {"bytes": target.stat().st_size, "xxh3": checksum(target)}
    return found
