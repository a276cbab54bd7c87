"""The linear function that DeepSpeed puts in place of torch's when it partitions parameters."""

from __future__ import annotations

from typing import Any

import torch


class _KeepingInput(torch.autograd.Function):
    """Allocates as DeepSpeed's LinearFunctionForZeroStage3 (runtime/zero/linear.py): the input is saved for the backward even
    where the weight is frozen and nothing will use it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        if x.dim() == 2 and bias is not None:
            return torch.addmm(bias, x, weight.t())
        out = x.matmul(weight.t())
        if bias is not None:
            out += bias
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        of_x = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            of_weight = grad.reshape(-1, grad.shape[-1]).t().matmul(x.reshape(-1, x.shape[-1]))
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = grad.sum(list(range(grad.dim() - 1)))
        return of_x, of_weight, of_bias


def keeping_input(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` under ZeRO-3: x of shape (..., inputs), weight (outputs, inputs), bias (outputs)."""
    return _KeepingInput.apply(x, weight, bias)
