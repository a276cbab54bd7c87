"""Adapters (LoRA) alone, or added to the weights of their base, a stretch of rows at a time."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import UserError
from toolkit.training.convert.held import Held
from toolkit.training.state.store import Lazy, tensors_in

_ADAPTER_NAME = re.compile(r"\.(modules_to_save\.)?default(?=\.|$)")
_PREFIX = "base_model.model."


def adapter_weights(held: Held) -> dict[str, Lazy]:
    """Name in `adapter_model.safetensors` to tensor."""
    return {_ADAPTER_NAME.sub("", name): tensor for name, tensor in held.of("weights").items()}


def adapter_config(folder: Path) -> dict[str, Any]:
    """Raises UserError: there is none."""
    try:
        return dict(json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        raise UserError(f"{folder} has no adapter_config.json that can be read; name a folder that has by --model") from None


def merged(held: Held, model: Any, settings: dict[str, Any], base: Path) -> dict[str, Lazy]:
    """Name in the files of the base to tensor, with the adapters of a checkpoint in it. `model` is the base's, without memory.

    W + B A x alpha / rank (LoRA, arXiv 2106.09685, section 4.1), alpha / sqrt(rank) for rank-stabilised adapters (arXiv
    2312.03732), in fp32.

    Raises:
        UserError: the base lacks what the adapters belong to, or they are of a kind that is not merged here.
    """
    weights = base_weights(base)
    pairs: dict[str, dict[str, Lazy]] = {}
    for name, tensor in adapter_weights(held).items():
        module, _, part = name.removeprefix(_PREFIX).rpartition(".lora_")
        if part not in ("A.weight", "B.weight"):
            raise UserError(f"{held.path}: {name} is not a plain LoRA matrix, which alone are merged here; export the "
                            "adapter alone and merge it with PEFT's merge_and_unload")
        pairs.setdefault(module, {})[part[0]] = tensor
    for module, pair in pairs.items():
        target = _in_file(model, f"{module}.weight", weights)
        if target is None or pair.keys() != {"A", "B"}:
            lacking = f"{base} has no {module}.weight" if target is None else f"{held.path} has half of an adapter of {module}"
            raise UserError(f"{lacking}; name the folder of the base model by --model")
        transposed = bool(settings.get("fan_in_fan_out"))
        shape = (pair["A"].shape[1], pair["B"].shape[0]) if transposed else (pair["B"].shape[0], pair["A"].shape[1])
        if weights[target].shape != shape:
            raise UserError(f"{base}: {target} is {list(weights[target].shape)}, its adapter is for {list(shape)}; name the "
                            "folder of the base model by --model")
        scale = _scale(settings, module, pair["A"].shape[0])
        weights[target] = _sum(weights[target], pair["A"], pair["B"], scale, transposed=transposed)
    return weights


def base_weights(folder: Path) -> dict[str, Lazy]:
    """Name in the files to tensor. Raises UserError: there are no safetensors."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no model*.safetensors to merge the adapters into; name a folder that has by --model")
    return {name: tensor for file in files for name, tensor in tensors_in(file).items()}


def find_base(settings: dict[str, Any]) -> Path:
    """The folder of the base model that an adapter's config names; a hub id is taken from the cache, or fetched.

    Raises:
        UserError: it names none, or it cannot be had.
    """
    name = str(settings.get("base_model_name_or_path") or "")
    if Path(name).is_dir():
        return Path(name)
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"the base model {name!r} of the adapter is not there; name its folder by --model" if name else
                        "the adapter does not say what its base model is (its weights may have been random); name its folder by "
                        "--model")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=settings.get("revision"), allow_patterns=["*.json", "model*.safetensors"]))
    except Exception as error:  # noqa: BLE001 - whatever the hub's client raises, the base cannot be had
        raise UserError(f"the base model {name} cannot be had ({type(error).__name__}); name its folder by --model") from None


def _in_file(model: Any, name: str, weights: dict[str, Lazy]) -> str | None:
    """How the files name a parameter of the model."""
    from transformers.core_model_loading import revert_weight_conversion

    names = [*revert_weight_conversion(model, {name: torch.empty(1, device="meta")}), name]
    prefix = f"{model.base_model_prefix}."
    names += [name.removeprefix(prefix)]
    return next((found for found in names if found in weights), None)


def _scale(settings: dict[str, Any], module: str, rank: int) -> float:
    patterns = settings.get("alpha_pattern") or {}
    alpha = next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), settings["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _sum(base: Lazy, a: Lazy, b: Lazy, scale: float, *, transposed: bool) -> Lazy:
    """base + scale x b a, in fp32; `transposed` where the base is stored as (in, out)."""
    columns = base.shape[1]
    matrices: list[torch.Tensor] = []

    def read(start: int, numel: int) -> torch.Tensor:
        if not matrices:
            matrices[:] = (a.whole().float().T, b.whole().float().T) if transposed else (b.whole().float(), a.whole().float())
        first, last = start // columns, -(-(start + numel) // columns)
        rows = base.read(first * columns, (last - first) * columns).view(-1, columns).float()
        rows.addmm_(matrices[0][first:last], matrices[1], alpha=scale)
        return rows.view(-1)[start - first * columns :][:numel]

    return Lazy(torch.float32, base.shape, read)
