"""The loss inside the model's forward: what leaves the model is one number, never the logits.

Accelerate's mixed precision casts everything that a model returns to fp32; logits that are returned would
be held twice, and once more by whoever keeps the outputs. So the forward is replaced by one that returns
the *sum* of the cross entropy over the targets (fp32, scalar). The training step divides by the number of
targets of the whole global batch, which makes every token count alike whatever micro-batch and rank it
falls on.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear, pad
from torch.utils.checkpoint import checkpoint

from toolkit.errors import UserError
from toolkit.training.data.loader import IGNORE

_CHUNK = 1024
"""Rows of the hidden states whose logits exist at one time under the chunked loss."""
_AFTER_HEAD = (
    "final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier",
)  # fmt: skip
"""Config keys of models that change the logits after the output layer; there the chunked loss would be
wrong."""


def attach_loss(model: Any, kind: str) -> None:
    """Replace the forward of a causal LM (or of a PEFT model around one) by one that returns the summed loss.

    Call it before `Accelerator.prepare`. The original forward stays available as `model.logits_forward`.

    Raises:
        UserError: the loss is not available for this model.
    """
    model.logits_forward = model.forward
    if kind == "fused":
        raise UserError("loss=fused needs kernels that the recipe does not bring; "
                        "use loss=chunked, which takes as little memory")
    forward = _chunked(model) if kind == "chunked" else _standard(model)
    model.forward = MethodType(forward, model)


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    """The label of the next token under each position; the last position has none."""
    return pad(labels, (0, 1), value=IGNORE)[..., 1:].contiguous()


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropy in fp32. logits [B, S, V], labels [B, S] unshifted; labels of -100 are left
    out."""
    return cross_entropy(logits.float().view(-1, logits.size(-1)), _shifted(labels).view(-1),
                         ignore_index=IGNORE, reduction="sum")


def _standard(model: Any) -> Callable[..., torch.Tensor]:
    original = model.logits_forward

    def forward(self: Any, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        return summed_loss(original(**inputs, use_cache=False).logits, labels)

    return forward


def _chunked(model: Any) -> Callable[..., torch.Tensor]:
    """The output layer computes the loss itself, a chunk of positions at a time, and recomputes each
    chunk's logits in the backward pass. As it happens inside that layer's forward, sharding engines gather
    its weight as for any layer.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    text = base.config.get_text_config()
    changed = next((key for key in _AFTER_HEAD if getattr(text, key, None) not in (None, 1, 1.0)), None)
    if not isinstance(head, torch.nn.Linear) or changed:
        raise UserError("loss=chunked does not know what this model does to its logits "
                        f"({changed or type(head).__name__}); use loss=standard")
    original = model.logits_forward
    pending: list[torch.Tensor] = []

    def chunk_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = linear(hidden, head.weight, head.bias).float()
        return cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")

    def head_forward(self: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        rows, targets = hidden.reshape(-1, hidden.size(-1)), pending.pop()
        parts = [
            checkpoint(chunk_loss, rows[at : at + _CHUNK], targets[at : at + _CHUNK], use_reentrant=False)
            for at in range(0, len(rows), _CHUNK)
        ]
        return torch.stack(parts).sum()

    head.forward = MethodType(head_forward, head)

    def forward(self: Any, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        pending[:] = [_shifted(labels).view(-1)]
        return original(**inputs, use_cache=False).logits

    return forward
