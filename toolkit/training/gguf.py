"""A GGUF file as a Hugging Face directory, converted once and kept in the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from toolkit.cache import cache_dir, written_whole
from toolkit.errors import UserError


def as_directory(path: Path) -> Path:
    """The directory with the file's weights in bf16, its tokenizer, chat template and generation config.

    Raises:
        UserError: the file is missing or is no GGUF file that transformers loads.
    """
    if not path.is_file():
        raise UserError(f"GGUF file {str(path)!r} does not exist")
    stat = path.stat()
    name = f"{path.name}:{stat.st_size}:{int(stat.st_mtime)}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    folder = cache_dir("models") / f"{path.stem}-{digest}"
    if not (folder / "config.json").is_file():
        _convert(path, folder)
    return folder


def _unpacked() -> dict[str, Any]:
    """Ask for plain weights where transformers would keep the file's blocks; older versions only do the
    former."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _convert(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = str(path.parent)
    unpacked = _unpacked()
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            where, gguf_file=path.name, dtype=torch.bfloat16, **unpacked)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"GGUF file {str(path)!r} cannot be loaded: {reason}") from None
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    with written_whole(folder) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
