"""The loss of logits as other programs compute it: whole, in chunks, in one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from toolkit.specs import Variant


def loss_of(box: list[Any], labels: torch.Tensor, variant: Variant) -> torch.Tensor:
    """The loss of the logits in `box`, as the variant's program computes it."""
    if variant.loss_code == "native":
        parts = box[0] if isinstance(box[0], list) else box[0].split(128, dim=1)
        return _in_pieces(tuple(parts), labels.split(128, dim=1), False)
    if variant.loss_code in ("chunks", "pieces"):
        parts = tuple(box[0]) if isinstance(box[0], list) else box[0].chunk(8, dim=1)
        return _in_pieces(parts, labels.chunk(8, dim=1), not variant.compiled_loss, variant.compiled_loss)
    if box[0].dim() == 2:
        return F.cross_entropy(box[0], labels)
    if variant.compiled_loss:
        return _OneKernelCrossEntropy.apply(box[0].reshape(-1, box[0].size(-1)), False).sum()
    if variant.loss_code == "upcast" and variant.upcast_logits:
        box.append(box.pop().float())  # transformers to 4.45 (modeling_llama.py): the 16-bit logits are gone before the loss
    logits = box[0].float() if variant.upcast_logits else box[0]
    shifted = logits
    if variant.loss_code != "current":
        # loss_utils.py to 4.48: a contiguous copy without the last position; `logits` stays named
        shifted, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    rows = shifted.view(-1, logits.size(-1))
    if variant.triton_loss:
        return _OneKernelCrossEntropy.apply(rows, True).sum()
    return F.cross_entropy(rows, labels.reshape(-1))


class _OneKernelCrossEntropy(torch.autograd.Function):
    """unsloth's Fast_CrossEntropyLoss keeps the logits and a log-sum per row and writes the gradient over the logits; what
    torch.compile makes of cross entropy keeps the same and writes the gradient beside them."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, over: bool) -> torch.Tensor:
        ctx.over = over
        sums = torch.empty(logits.shape[0], dtype=torch.float32)
        ctx.save_for_backward(logits, sums)
        return torch.empty(logits.shape[0], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        logits = ctx.saved_tensors[0]
        return logits if ctx.over else torch.empty_like(logits), None


def _in_pieces(parts: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...], upcast: bool, kernel: bool = False
               ) -> torch.Tensor:
    """Cross entropy piece by piece: torchtune's CEWithChunkedOutputLoss in fp32 (compiled: one kernel that keeps the 16-bit
    logits), litgpt's chunked_cross_entropy in 16 bits."""
    total = torch.zeros((), dtype=torch.float32)
    for part, target in zip(parts, targets, strict=False):
        rows = part.reshape(-1, part.size(-1))
        if kernel:
            total = total + _OneKernelCrossEntropy.apply(rows, False).sum()
            continue
        total = total + F.cross_entropy(rows.float() if upcast else rows, target.reshape(-1), reduction="sum")
    return total
