"""What the device and Accelerate add to the model's own code: autocast, attention kernels, outputs in fp32, the loss.

The trace runs on fake CPU tensors. For a CUDA target the functions that would behave otherwise there are replaced while
it runs: attention becomes the flash or the memory-efficient kernel, dropout the fused one with a boolean mask, and the
functions that CUDA's autocast runs in fp32 get fp32 inputs (torch/amp: autocast op reference).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.timeline.linear import keeping_input
from toolkit.timeline.losses import loss_of
from toolkit.timeline.sequence_parallel import ring_attention, ulysses

if TYPE_CHECKING:
    from toolkit.specs import Workload
    from toolkit.timeline.tracing import Numerics

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_RNG_STATE = 5056
"""Bytes of the CPU generator's state, which a checkpointed layer saves (ATen/CPUGeneratorImpl.cpp)."""
CHUNK = 1024
"""Rows of hidden states whose logits exist at one time under the chunked loss; the recipe's figure."""

_FP32_ON_CUDA = ("softmax", "log_softmax", "layer_norm", "group_norm", "cross_entropy", "nll_loss", "mse_loss", "softplus",
                 "normalize", "cosine_similarity")
"""The functions of torch.nn.functional on CUDA autocast's fp32 list; CPU autocast leaves them in 16 bits."""


def prepare(model: Any, workload: Workload, numerics: Numerics) -> None:
    """Switch on activation checkpointing as the recipe does it: whole layers, non-reentrant unless the variant says so."""
    if numerics.checkpointing == "full":
        reentrant = workload.variant.reentrant
        if reentrant and workload.method != "full":
            model.enable_input_require_grads()  # a frozen embedding's output; its backward would not reach the layers otherwise
        _enable_checkpointing(model, {"use_reentrant": reentrant})
    elif numerics.checkpointing == "selective":
        _checkpoint_selectively(model, workload.variant.every_second_matmul)
    if workload.variant.kernels != "model":
        _fuse_kernels(model, workload.variant.kernels == "liger")
    if workload.loss != "standard":
        _replace_head(model, workload.loss)
    elif workload.variant.loss_code in ("native", "pieces"):
        _split_head(model, workload.variant.loss_code == "native")


class _FusedNorm(torch.autograd.Function):
    """RMSNorm as unsloth's and Liger's kernels: saves the input and one factor per row; the gradient takes its place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _, weight, _ = ctx.saved_tensors
        return grad, torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class _FusedSwiglu(torch.autograd.Function):
    """Liger's SwiGLU: saves gate and up, whose places their gradients take."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.saved_tensors


def _fuse_kernels(model: Any, swiglu: bool) -> None:
    """Put the fused kernels in place of the model's own code."""
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm") and getattr(module, "weight", None) is not None:
            module.forward = MethodType(lambda self, x: _FusedNorm.apply(x, self.weight), module)
        elif name == "LayerNorm":
            module.forward = MethodType(
                lambda self, x: torch.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias, self.eps), module)
        elif swiglu and all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj")):
            module.forward = MethodType(
                lambda self, x: self.down_proj(_FusedSwiglu.apply(self.gate_proj(x), self.up_proj(x))), module)


def _checkpoint_selectively(model: Any, every_second: bool) -> None:
    """Save the outputs of matrix products and attention, recompute the rest (torch's selective checkpointing)."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    save = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default}

    def contexts() -> Any:
        counts = {False: 0, True: 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            keep = op in save
            if every_second and op is aten.mm.default:
                # torchtitan/models/llama/parallelize_llama.py, _get_custom_policy: every second product is recomputed
                counts[ctx.is_recompute] += 1
                keep = counts[ctx.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    _enable_checkpointing(model, {"use_reentrant": False, "context_fn": partial(contexts)})


def _enable_checkpointing(model: Any, options: dict[str, Any]) -> None:
    import warnings

    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(f"{type(model).__name__} has no activation checkpointing in transformers; checkpointing none is left")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the method's name changes with transformers 6
        model.gradient_checkpointing_enable(options)


def _in_fp32(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its 16-bit tensor arguments cast to fp32 first, while autocast is on."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args = tuple(a.float() if isinstance(a, torch.Tensor) and a.dtype in (torch.bfloat16, torch.float16) else a
                         for a in args)
        return function(*args, **kwargs)

    return wrapped


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0.0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
               dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
               enable_gqa: bool = False, *, pad_values: bool = False, repeats_keys: bool = False) -> torch.Tensor:
    """Flash attention for 16-bit inputs without a mask, the memory-efficient kernel otherwise (ATen sdp_utils.cpp).

    The flash kernel takes one width for all (check_head_dim_size_flash). Where values are narrower (DeepSeek's latent attention),
    transformers pads them when flash attention is asked for (integrations/flash_attention.py), `pad_values`.
    """
    if repeats_keys and key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    width = value.shape[-1]
    if pad_values and width < query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - width))
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)[..., :width]
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    half = query.dtype in (torch.bfloat16, torch.float16)
    if attn_mask is None and half and query.shape[-1] == value.shape[-1] <= 256:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if enable_gqa and key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(bias.logical_not(), -math.inf)
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]


def _without_padding(name: str) -> Callable[..., bool]:
    from transformers import masking_utils

    decide = getattr(masking_utils, name)

    def without(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
        return bool(decide(None, *args, **kwargs))

    return without


@contextmanager
def functions(workload: Workload, numerics: Numerics, mesh: Any = None) -> Iterator[None]:
    """Context in which torch functions behave as on the device, and nothing depends on data."""
    patches: list[tuple[str, str, Any]] = [
        ("transformers.integrations.moe", "_can_use_grouped_mm", lambda *a, **k: False),
    ]
    if not workload.packed or workload.attention == "flash" or numerics.cp * numerics.sp > 1:
        # Positions of a row count up: it is one sequence and needs no mask (flash kernels take the ends of sequences instead).
        # Fake positions can't be looked at, and transformers would make a mask to be safe: another kernel, repeated keys.
        patches.append(("transformers.masking_utils", "find_packed_sequence_indices", lambda *a, **k: None))
    # Nothing is padded, which can't be seen on fake tensors either; flash kernels take a sliding window as a number, not a mask.
    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        ignore = (lambda *a, **k: True) if workload.attention == "flash" else _without_padding(name)
        patches.append(("transformers.masking_utils", name, ignore))
    if numerics.device == "cpu":
        patches += [
            ("torch", "get_rng_state", lambda: torch.empty(_RNG_STATE, dtype=torch.uint8)),
            ("torch", "set_rng_state", lambda state: None),
        ]
    else:
        patches += [("torch.nn.functional", "scaled_dot_product_attention",
                     partial(_attention, pad_values=workload.attention == "flash", repeats_keys=workload.variant.repeats_keys)),
                    ("torch.nn.functional", "dropout", _dropout)]
        patches += [("torch.nn.functional", name, _in_fp32(getattr(F, name))) for name in _FP32_ON_CUDA]
    if numerics.keeps_inputs:
        patches.append(("torch.nn.functional", "linear", keeping_input))
    if numerics.cp > 1:
        patches.append(("torch.nn.functional", "scaled_dot_product_attention", ring_attention(mesh["cp"])))
    with ExitStack() as stack:
        for module, name, value in patches:
            stack.enter_context(_patched(module, name, value))
        if numerics.sp > 1:
            stack.enter_context(ulysses("sdpa", numerics.sp))
        yield


@contextmanager
def _patched(module: str, name: str, value: Any) -> Iterator[None]:
    import importlib

    try:
        target = importlib.import_module(module)
    except ImportError:
        yield
        return
    old = getattr(target, name, None)
    if old is None:
        yield
        return
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, old)


def _replace_head(model: Any, loss: str) -> None:
    """The output layer computes the loss itself: in checkpointed chunks, or as Liger's fused kernel does."""
    head = model.get_output_embeddings()
    if head is None:
        raise UserError(f"loss {loss} needs an output layer over words, which {type(model).__name__} has not: say standard")
    part = _fused_part if loss == "fused" else _chunked_part

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.size(-1))
        labels = torch.zeros(rows.size(0), dtype=torch.long)
        return part(self, rows, labels)

    head.forward = MethodType(forward, head)


def _split_head(model: Any, by_positions: bool) -> None:
    """The output layer gives logits piece by piece: of 128 positions (litgpt's lm_head_chunk_size), or in 8 pieces (torchtune's
    num_output_chunks)."""
    head = model.get_output_embeddings()
    if head is None or getattr(model.config, "final_logit_softcapping", None):
        return  # a model that goes on computing with its logits gets them whole
    whole = head.forward
    head.forward = lambda hidden: [whole(part) for part in (hidden.split(128, dim=1) if by_positions else hidden.chunk(8, dim=1))]


def _chunked_part(head: Any, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    def chunk_loss(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = F.linear(hidden, head.weight, head.bias).float()
        return F.cross_entropy(logits, target, reduction="sum")

    parts = [checkpoint(chunk_loss, rows[at : at + CHUNK], labels[at : at + CHUNK], use_reentrant=False)
             for at in range(0, len(rows), CHUNK)]
    return torch.stack(parts).sum()


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Allocates as Liger's kernel (liger_kernel/ops/fused_linear_cross_entropy.py): the gradients of the hidden states
    and of the weight are made in the forward, chunk by chunk of rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        tokens, hidden, vocab = rows.shape[0], rows.shape[1], weight.shape[0]
        grad_rows = torch.zeros_like(rows)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        loss = torch.zeros(tokens, dtype=torch.float32)
        inc = -(-vocab // hidden)
        chunk = 1 << (max(1, -(-tokens // inc)) - 1).bit_length()
        for at in range(0, tokens, min(chunk, tokens)):
            if at > 2 * chunk:
                break  # every further chunk allocates the same
            logits = rows[at : at + chunk] @ weight.t()
            grad_rows[at : at + chunk] = logits @ weight
            if grad_weight is not None:
                grad_weight += logits.t() @ rows[at : at + chunk]
            del logits
        ctx.save_for_backward(grad_rows, *([grad_weight] if grad_weight is not None else []))
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        return saved[0], saved[1] if len(saved) > 1 else None


def _fused_part(head: Any, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weight = head.weight
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        rows, weight = rows.to(dtype), weight.to(dtype)
    return _FusedLinearCrossEntropy.apply(rows, weight)


def forward(model: Any, batch: dict[str, Any], workload: Workload, numerics: Numerics, keep: list[Any] | None = None
            ) -> torch.Tensor:
    """Forward and loss; returns the loss. Nothing else is kept, unless the variant's loop names the logits: they go to `keep`."""
    run: Callable[..., Any] = model.__call__
    variant = workload.variant
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = batch["labels"]
    if workload.loss != "standard":
        return _wrapped(lambda: run(**inputs).logits, numerics)
    if workload.loss_only:
        return _wrapped(lambda: _summed(run, inputs, batch["labels"]), numerics)
    if variant.loss_code != "current" or variant.keep_logits or variant.triton_loss or variant.compiled_loss:
        head = model.get_output_embeddings()

        def with_loss() -> dict[str, Any]:
            with ExitStack() as names:
                if head is not None and variant.loss_code in ("shifted", "upcast"):
                    names.enter_context(_input_named(head))
                cache = names.enter_context(_projections_named(model)) if variant.keeps_projections else []
                box = [run(**inputs).logits]
                if variant.fp32_output:
                    box[0] = [part.float() for part in box[0]] if isinstance(box[0], list) else box[0].float()
                loss = loss_of(box, batch["labels"], variant)
            return {"loss": loss, "logits": box[0], "cache": cache}

        out = _wrapped(with_loss, numerics)
        if variant.keep_logits and keep is not None:
            keep.append(out["logits"])
        return out["loss"]
    return _wrapped(lambda: run(**batch), numerics).loss


@contextmanager
def _input_named(head: Any) -> Iterator[None]:
    """transformers computes the loss inside the model's forward, which still names the hidden states then."""
    named: list[Any] = []
    handle = head.register_forward_pre_hook(lambda module, args: named.append(args[0]))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _projections_named(model: Any) -> Iterator[list[Any]]:
    """GPT-BigCode's cache, which views each layer's projection, is one of the model's outputs."""
    named: list[Any] = []
    handles = [module.register_forward_hook(lambda module, args, out: named.append(out))
               for name, module in model.named_modules() if name.endswith(".c_attn")]
    try:
        yield named
    finally:
        for handle in handles:
            handle.remove()


def _summed(run: Callable[..., Any], inputs: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
    """The summed cross entropy of the shifted labels, as the recipe's forward computes it."""
    logits = run(**inputs).logits
    if logits.dim() == 2:
        return F.cross_entropy(logits.float(), labels, reduction="sum")
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, logits.size(-1)), shifted.view(-1), reduction="sum")


def _wrapped(run: Callable[[], Any], numerics: Numerics) -> Any:
    """Accelerate's wrapping: autocast around the forward, floating outputs to fp32."""
    if numerics.autocast == "none":
        return run()
    from accelerate.utils.operations import convert_outputs_to_fp32

    return convert_outputs_to_fp32(torch.autocast("cpu", dtype=_DTYPES[numerics.autocast])(run))()
