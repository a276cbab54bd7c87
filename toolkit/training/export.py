"""The trained model as a Hugging Face directory, whatever the engine.

Parameters are made whole one at a time, and only the main process keeps them (on the host, in the dtype of
the export), so no other rank ever holds the model. They are then written by transformers itself from an
empty model of the same config: names, sharding, tied weights and the generation config are as everywhere
else.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.errors import ToolkitError
from toolkit.training.accelerator import without_sharded_init
from toolkit.training.config import TrainConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_dtype(config: TrainConfig, model_config: Any) -> torch.dtype:
    """The dtype of the export: as configured, else as the model's config names it, else as it was trained."""
    if config.export_dtype != "auto":
        return DTYPES[config.export_dtype]
    stated = NAMES.get(str(getattr(model_config, "dtype", "")).removeprefix("torch."))
    trained = {"fp32": "fp32", "fp16": "fp16"}.get(config.precision, "bf16")
    return DTYPES[stated or trained]


def whole_parameters(accelerator: Accelerator, model: torch.nn.Module, dtype: torch.dtype, *,
                     trainable_only: bool) -> dict[str, torch.Tensor]:
    """Name to whole tensor on the host, on the main process; an empty dict on the others. Every rank must
    call it.

    A tied parameter appears once, under its first name.
    """
    kept: dict[str, torch.Tensor] = {}
    for name, parameter in accelerator.unwrap_model(model).named_parameters():
        if trainable_only and not parameter.requires_grad:
            continue
        whole = _whole(parameter, dtype)
        if accelerator.is_main_process:
            kept[name] = whole.detach().to("cpu", dtype, copy=True)
        del whole
    return kept


def _whole(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole value of a parameter that may be a shard. A collective operation under FSDP2 and ZeRO-3."""
    if hasattr(parameter, "full_tensor"):
        return parameter.full_tensor()
    if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
        # DeepSpeed trains in 16 bits with fp32 masters: an fp32 export comes from the masters.
        from deepspeed.utils import safe_get_full_fp32_param

        if dtype == torch.float32 and parameter.requires_grad:
            master = safe_get_full_fp32_param(parameter)
            if master is not None:
                return master
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter


def export_model(config: TrainConfig, accelerator: Accelerator, model: torch.nn.Module, tokenizer: Any,
                 model_config: Any, folder: Path) -> None:
    """Write `folder` with weights (safetensors, sharded above 5 GB), config, generation config, tokenizer
    and chat template; for an adapter, the adapter with its config and the tokenizer. Every rank must call
    it.

    Raises:
        ToolkitError: a parameter came out empty, which must never be written.
    """
    adapter = config.method != "full"
    dtype = export_dtype(config, model_config)
    weights = whole_parameters(accelerator, model, dtype, trainable_only=adapter)
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
        return
    empty = [name for name, tensor in weights.items() if tensor.numel() == 0]
    if empty:
        raise ToolkitError(f"export stopped: {empty[0]} and {len(empty) - 1} more parameters came out empty")
    inner = accelerator.unwrap_model(model)
    scratch = folder.with_name(f".{folder.name}-writing")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    if adapter:
        inner.save_pretrained(scratch, state_dict=weights)
    else:
        with without_sharded_init(accelerator):
            _save_full(inner, weights, dtype, scratch, bool(getattr(model_config, "use_cache", True)))
    tokenizer.save_pretrained(scratch)
    for file in scratch.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner reads.
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)
    accelerator.wait_for_everyone()


def _save_full(model: Any, weights: dict[str, torch.Tensor], dtype: torch.dtype, folder: Path,
               use_cache: bool) -> None:
    from transformers import AutoModelForCausalLM

    config = type(model.config).from_dict(model.config.to_dict())
    config.use_cache = use_cache
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if hasattr(model, "_weight_conversions"):
        empty._weight_conversions = model._weight_conversions  # How the names in the files differ from the model's.
    if getattr(model, "generation_config", None) is not None:
        empty.generation_config = model.generation_config
    buffers = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()
               if name not in weights and name in dict(model.named_buffers())}
    empty.save_pretrained(folder, state_dict={**weights, **buffers})
