"""The "auto" values of a DeepSpeed JSON: what they become, and which of them nothing ever resolves.

Accelerate 1.15 (`accelerator.py`, `_prepare_deepspeed`) fills in the keys below when a model is prepared; any
other "auto" stays a word until DeepSpeed or Accelerate stumbles over it, long after the start.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.errors import UserError
from toolkit.specs.workload import Precision

PERSIST = "stage3_param_persistence_threshold"
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
FILLED = (
    *BATCH_KEYS,
    "gradient_clipping",
    "bf16.enabled",
    "fp16.enabled",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
)
"""Keys whose "auto" the launch or the recipe fills in, besides the sizes."""
OPTIMIZER_KEYS = (
    "optimizer.params.lr",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
)
"""Filled in only when the script brings Accelerate's DummyOptim and DummyScheduler."""


def auto_sizes(hidden_size: int) -> dict[str, int]:
    """What Accelerate puts for "auto" (accelerator.py, `_prepare_deepspeed`), elements by JSON key."""
    square = hidden_size * hidden_size
    return {
        "reduce_bucket_size": square,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        PERSIST: 10 * hidden_size,
    }


def hidden_size_of(config: Mapping[str, Any]) -> int | None:
    """The width that "auto" sizes are made from, out of a model's config.json.

    Multimodal configs keep it under their text model, some vision models have a list of widths: the largest
    counts. T5 calls it `d_model`, GPT-2 `n_embd`. None: the config names no width.
    """
    for key in ("hidden_size", "d_model", "n_embd", "dim"):
        if isinstance(config.get(key), int):
            return int(config[key])
    widths = config.get("hidden_sizes")
    if isinstance(widths, (list, tuple)) and widths:
        return int(max(widths))
    for key in ("text_config", "llm_config", "language_config", "decoder"):
        if isinstance(config.get(key), Mapping):
            return hidden_size_of(config[key])
    return None


def autos(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of every key that is "auto"."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from autos(value, f"{prefix}{key}.")
        elif value == "auto":
            yield f"{prefix}{key}"


def unresolved(deepspeed: Mapping[str, Any]) -> list[str]:
    """The keys whose "auto" nothing resolves when a script brings its own optimizer."""
    sizes = {f"zero_optimization.{key}" for key in auto_sizes(1)}
    return [key for key in autos(deepspeed) if key not in sizes and key not in FILLED]


def resolve(
    deepspeed: Mapping[str, Any],
    *,
    hidden_size: int | None,
    micro_batch: int,
    accumulate: int,
    ranks: int,
    clip: float,
    precision: Precision,
) -> dict[str, Any]:
    """A copy of a DeepSpeed JSON without a single "auto".

    Args:
        deepspeed: the content of the JSON.
        hidden_size: the model's width; None: unknown, then no size may be "auto".
        micro_batch: samples per rank and forward pass.
        accumulate: micro-batches per optimizer step.
        ranks: data-parallel ranks.
        clip: maximum gradient norm; 0: never clip.
        precision: the recipe's.

    Raises:
        UserError: names the keys that are "auto" and that nothing resolves.
    """
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulate,
        "train_batch_size": micro_batch * accumulate * ranks,
        "gradient_clipping": clip,
        "bf16.enabled": precision == "bf16",
        "fp16.enabled": precision == "fp16",
        FILLED[-1]: False,
    }
    if hidden_size is not None:
        values |= {f"zero_optimization.{key}": size for key, size in auto_sizes(hidden_size).items()}
    wrong = [key for key in autos(deepspeed) if key not in values]
    if wrong:
        raise UserError(f'nothing resolves "auto" in {", ".join(wrong)}: write a value, or delete the key')
    resolved = copy.deepcopy(dict(deepspeed))
    for key in autos(deepspeed):
        *path, last = key.split(".")
        section = resolved
        for part in path:
            section = section[part]
        section[last] = values[key]
    return resolved
