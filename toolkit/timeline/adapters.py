"""LoRA and QLoRA on a model that has no weights: which modules get adapters, what is frozen, what is packed."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.specs import Variant, Workload
from toolkit.timeline.fused import fuse_projections

BLOCK = 64
"""Weights that share one quantization constant (bitsandbytes' default for 4 bits)."""
NESTED_BLOCK = 256
"""Constants that share one constant of the second quantization."""


class _PackedMatmul(torch.autograd.Function):
    """Allocates as bitsandbytes' MatMul4Bit: the weight is unpacked for each product, the input is not saved. With
    `copies` 0 as GPTQ's triton kernels (auto_gptq QuantLinearFunction): they unpack inside the product; 2: the unpacked weight
    is cast once more."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, shape: tuple[int, int], copies: int, keeps: bool
                ) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.tensors = x if keeps else None  # an attribute, as there: it lives as long as the graph
        ctx.shape, ctx.copies = shape, copies
        if not copies:
            return x.new_empty((*x.shape[:-1], shape[0]))
        return F.linear(x, _unpacked(shape, x.dtype, copies))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if not ctx.copies:
            return grad.new_empty((*grad.shape[:-1], ctx.shape[1])), None, None, None, None
        return grad @ _unpacked(ctx.shape, grad.dtype, ctx.copies), None, None, None, None


def _unpacked(shape: tuple[int, int], dtype: torch.dtype, copies: int) -> torch.Tensor:
    first = torch.empty(shape, dtype=dtype)
    return first if copies == 1 else first.clone()


class _TorchUnpack(torch.autograd.Function):
    """Unpacks a GPTQ weight as auto_gptq's qlinear_cuda_old does in torch's operators (what optimum chooses when triton and
    exllama are off): shifted to int32, then int8, less the zeros, times the scales."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        wide = torch.empty(shape, dtype=torch.int32)
        weight = wide.to(torch.int8)
        del wide
        return (weight - torch.empty((1,), dtype=torch.int8)).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, None


class _EightBitMatmul(torch.autograd.Function):
    """Allocates as bitsandbytes' MatMul8bitLt with int8 weights: the input is quantized for the product, the weight is
    unpacked to the input's dtype in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, shape: tuple[int, int], *_: bool) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        quantized = torch.empty(x.shape, dtype=torch.int8)
        product = torch.empty((*x.shape[:-1], shape[0]), dtype=torch.int32)
        out = product.to(x.dtype)
        del quantized, product
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        weight = torch.empty(ctx.shape, dtype=grad.dtype)
        return grad @ weight, None, None, None, None


class PackedLinear(nn.Linear):
    """A linear layer whose weight is packed, with the constants that its quantization keeps."""

    def __init__(self, layer: nn.Linear, variant: Variant) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.quantization, self.keeps_input = variant.quantization, variant.saves_packed_inputs
        self.unpacks_twice, self.group = variant.unpacks_twice, variant.gptq_group or layer.in_features
        count = layer.weight.numel()
        size = count if self.quantization == "int8" else count // 2
        packed = torch.empty((size, 1), dtype=torch.uint8, device=layer.weight.device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias
        self.register_buffer("constants", torch.empty(self._constants(count), dtype=torch.uint8, device=packed.device))

    def _constants(self, count: int) -> int:
        """nf4-dq: one byte per block, an fp32 scale per 256 of them, two code tables. nf4: an fp32 maximum per block.
        gptq: a 16-bit scale and 4-bit zero per group of inputs and output, an int32 group index per input.
        int8: a scale per output."""
        if self.quantization == "nf4":
            return count // BLOCK * 4 + 16 * 4
        if self.quantization.startswith("gptq"):
            return count // self.group * 2 + count // self.group // 2 + self.in_features * 4
        if self.quantization == "int8":
            return self.out_features * 4
        return count // BLOCK + -(-count // (BLOCK * NESTED_BLOCK)) * 4 + 16 * 4 + 256 * 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.dtype
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        shape = (self.out_features, self.in_features)
        if self.quantization == "gptq-torch":  # the product is torch's own, which keeps the unpacked weight for the backward
            out = F.linear(x, _TorchUnpack.apply(self.weight, shape, x.dtype))
        else:
            product = _EightBitMatmul if self.quantization == "int8" else _PackedMatmul
            unpacked = 0 if self.quantization == "gptq" else 2 if self.unpacks_twice else 1
            out = product.apply(x, self.weight, shape, unpacked, self.keeps_input)
        out = out if self.bias is None else out + self.bias
        # bitsandbytes' Linear4bit gives back the dtype it was given (nn/modules.py)
        return out.to(given) if self.quantization.startswith("nf4") else out


def _quantize(model: Any, variant: Variant) -> None:
    """Pack every linear layer but the output layer, as `load_in_4bit` does."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") and not variant.packs_head else None
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(child, PackedLinear) and child is not head:
                setattr(module, name, PackedLinear(child, variant))


class _LoopedExperts(nn.Module):
    """A mixture's experts as separate linear layers, each over an equal share of the tokens (transformers 4's Mixtral)."""

    def __init__(self, experts: Any, packed: Variant | None) -> None:
        super().__init__()
        self.act_fn = experts.act_fn
        self.count, width, hidden = experts.gate_up_proj.shape
        first = experts.gate_up_proj

        def linear(inputs: int, outputs: int) -> nn.Linear:
            layer = nn.Linear(inputs, outputs, bias=False, device=first.device, dtype=first.dtype)
            return layer if packed is None else PackedLinear(layer, packed)

        sizes = ((hidden, width // 2), (width // 2, hidden), (hidden, width // 2))
        self.experts = nn.ModuleList(nn.ModuleList(linear(*size) for size in sizes) for _ in range(self.count))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        share = max(1, index.numel() // self.count)
        for w1, w2, w3 in self.experts:
            rows = torch.zeros(share, dtype=torch.long)
            state = hidden[rows]
            state = w2(self.act_fn(w1(state)) * w3(state)) * weights.reshape(-1, 1)[rows]
            out.index_add_(0, rows, state.to(out.dtype))
        return out


def _loop_experts(model: Any, packed: Variant | None) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if all(getattr(getattr(child, part, None), "ndim", 0) == 3 for part in ("gate_up_proj", "down_proj")):
                setattr(module, name, _LoopedExperts(child, packed))


def _keep_originals(model: Any, names: str) -> None:
    """peft's ModulesToSaveWrapper trains a copy of each named module and keeps the original beside it."""
    for path, module in list(model.named_modules()):
        if names and path.rpartition(".")[2] in [n.strip() for n in names.split(",")]:
            module.register_buffer("original_weight", torch.empty_like(module.weight), persistent=False)


def _upcast_rest(model: Any) -> None:
    """peft.utils.other.prepare_model_for_kbit_training: 16-bit parameters that are not packed become fp32."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()


def _inject(model: Any, workload: Workload) -> None:
    """The adapters that peft would add. Raises UserError when the targets match no module."""
    from peft import LoraConfig, inject_adapter_in_model

    targets: Any = workload.lora_targets
    if targets != "all-linear":
        fused = ("q_proj", "k_proj", "v_proj", "query_key_value", "qkv_proj") if workload.variant.fused_qkv else ()
        targets = [name for t in targets.split(",") if (name := t.strip()) and name not in fused]
        if not targets and fused:
            return
    config = LoraConfig(r=workload.lora_rank, target_modules=targets, task_type="CAUSAL_LM",
                        lora_dropout=workload.variant.adapter_dropout)
    linear = {name.rpartition(".")[2]: None for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    with torch.device("meta"):
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            first = str(error).splitlines()[0].removeprefix("[PEFT:PeftType.LORA] ").partition(". ")[0][:200]
            others = [name for name in linear if f"'{name}'" not in first][:12]
            raise UserError(f"lora-targets {workload.lora_targets!r} does not fit the model: {first.rstrip('.')}; "
                            f"name some of {', '.join(others)}") from None


def _adapted_packed(self: Any, x: torch.Tensor) -> torch.Tensor:
    """peft's forward of an adapter on a quantized layer (tuners/lora/{bnb,gptq}.py): a 4-bit product is cloned first, GPTQ's is
    added to in place; without autocast the adapter's output is cast back."""
    quantization = self.base_layer.quantization
    result = self.base_layer(x)
    if quantization.startswith("nf4"):
        result = result.clone()
    for name in self.active_adapters:
        first, second = self.lora_A[name], self.lora_B[name]
        convert = not torch.is_autocast_enabled("cpu")
        if convert:
            x = x.to(first.weight.dtype)
        output = second(first(self.lora_dropout[name](x))) * self.scaling[name]
        if convert:
            output = output.to(result.dtype)
        if quantization.startswith("gptq"):
            result += output
        else:
            result = result + output
    return result


def _keep_rotary_tables(model: Any, positions: int) -> None:
    for module in model.modules():
        width = getattr(module, "head_dim", None)
        if isinstance(width, int) and hasattr(module, "q_proj"):
            for name in ("cos_cached", "sin_cached"):
                table = torch.empty(positions, width, dtype=model.dtype, device=module.q_proj.weight.device)
                module.register_buffer(name, table, persistent=False)


def freeze_and_adapt(model: Any, workload: Workload) -> None:
    """Freeze the model and add its adapters (in place); with `full` only what the variant's model code does its own way.

    Raises:
        UserError: the targets match no module of the model.
    """
    variant = workload.variant
    if variant.rotary_tables:
        _keep_rotary_tables(model, variant.rotary_tables)
    if variant.expert_loop:
        _loop_experts(model, variant if workload.method == "qlora" else None)
    if variant.fused_qkv:
        parts = () if workload.method == "full" else tuple(variant.fused_qkv.split(","))
        fuse_projections(model, parts, workload.lora_rank, variant.adapter_dropout)
    if workload.method == "full":
        return
    if workload.method == "qlora":
        _quantize(model, variant)
        if variant.upcast_rest:
            _upcast_rest(model)
    _inject(model, workload)
    for module in model.modules():
        if isinstance(getattr(module, "base_layer", None), PackedLinear):
            module.forward = MethodType(_adapted_packed, module)
    _keep_originals(model, variant.trainable_modules)
    whole = tuple(m.strip() for m in variant.trainable_modules.split(",") if m.strip())
    dtype = torch.float32 if variant.adapter_dtype == "fp32" or workload.loaded_dtype == "fp32" else torch.bfloat16
    for name, parameter in model.named_parameters():
        adapter = "lora_" in name
        kept = any(f".{module}." in f".{name}." for module in whole)
        parameter.requires_grad_(adapter or kept) if parameter.is_floating_point() else None
        if adapter and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)  # peft keeps trainable adapters in fp32 (autocast_adapter_dtype)
