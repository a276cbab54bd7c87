"""LoRA and QLoRA on a model that has no weights: which modules get adapters, what is frozen, what is packed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.specs import Workload

BLOCK = 64
"""Weights that share one quantization constant (bitsandbytes' default for 4 bits)."""
NESTED_BLOCK = 256
"""Constants that share one constant of the second quantization."""


class _FourBitMatmul(torch.autograd.Function):
    """Allocates as bitsandbytes' MatMul4Bit: the weight is unpacked for each product, the input is not saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        weight = torch.empty(shape, dtype=x.dtype)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        weight = torch.empty(ctx.shape, dtype=grad.dtype)
        return grad @ weight, None, None


class FourBitLinear(nn.Linear):
    """A linear layer whose weight is packed to 4 bits with doubly quantized constants."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        count = layer.weight.numel()
        packed = torch.empty((count // 2, 1), dtype=torch.uint8, device=layer.weight.device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias
        constants = count // BLOCK + -(-count // (BLOCK * NESTED_BLOCK)) * 4 + 16 * 4 + 256 * 4
        self.register_buffer("constants", torch.empty(constants, dtype=torch.uint8, device=packed.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        out = _FourBitMatmul.apply(x, self.weight, (self.out_features, self.in_features))
        return out if self.bias is None else out + self.bias


def _quantize(model: Any) -> None:
    """Pack every linear layer but the output layer, as `load_in_4bit` does."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(module, name, FourBitLinear(child))


def freeze_and_adapt(model: Any, workload: Workload) -> None:
    """Freeze the model and add the adapters that peft would add (in place); with `full` nothing happens.

    Raises:
        UserError: the targets match no module of the model.
    """
    if workload.method == "full":
        return
    from peft import LoraConfig, inject_adapter_in_model

    if workload.method == "qlora":
        _quantize(model)
    targets: Any = workload.lora_targets
    if targets != "all-linear":
        targets = [t.strip() for t in targets.split(",") if t.strip()]
    config = LoraConfig(r=workload.lora_rank, target_modules=targets, task_type="CAUSAL_LM")
    with torch.device("meta"):
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            first = str(error).splitlines()[0][:200]
            raise UserError(f"lora-targets {workload.lora_targets!r} does not fit the model: {first}") from None
    for name, parameter in model.named_parameters():
        adapter = "lora_" in name
        parameter.requires_grad_(adapter) if parameter.is_floating_point() else None
        if adapter and parameter.dtype in (torch.bfloat16, torch.float16):
            # peft keeps trainable adapters in fp32 (autocast_adapter_dtype)
            parameter.data = parameter.data.float()
