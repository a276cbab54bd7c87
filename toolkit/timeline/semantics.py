"""What the device and Accelerate add to the model's own code: autocast, attention kernels, outputs in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from toolkit.specs import Workload
    from toolkit.timeline.tracing import Numerics

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def attention_name(attention: str, device: str) -> str:
    """The transformers attention implementation that stands for what the device would run."""
    return attention if attention in ("eager", "sdpa") else "sdpa"


def prepare(model: Any, workload: Workload, numerics: Numerics) -> None:
    """Switch on activation checkpointing as the recipe does it: non-reentrant, whole layers."""
    if numerics.checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})


@contextmanager
def functions(numerics: Numerics) -> Iterator[None]:
    """Context in which torch functions behave as on the device."""
    yield


def forward(model: Any, batch: dict[str, Any], workload: Workload, numerics: Numerics) -> torch.Tensor:
    """Forward and loss; returns the loss, nothing else is kept."""
    if numerics.autocast == "none":
        return model(**batch).loss
    from accelerate.utils.operations import convert_outputs_to_fp32

    autocast = torch.autocast("cpu", dtype=_DTYPES[numerics.autocast])
    run = convert_outputs_to_fp32(autocast(model.__call__))
    return run(**batch).loss
