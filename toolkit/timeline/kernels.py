"""What single kernels cost and what they allocate inside, where fake tensors can't see it."""

from __future__ import annotations

import math
from typing import Any

import torch

aten = torch.ops.aten

_ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
}
_ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
}
_FREE = {aten.detach.default, aten.view.default, aten.t.default, aten.transpose.int, aten._unsafe_view.default,
         aten.expand.default, aten.slice.Tensor, aten.unsqueeze.default, aten.permute.default, aten.alias.default,
         aten.empty.memory_format, aten.split.Tensor, aten.select.int, aten.as_strided.default}


_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
_LARGE_WORKSPACE = 4096 * 1024 * 8
_LARGE_ON = ("hopper", "blackwell")


def blas_workspaces(architecture: str) -> int:
    """Bytes that cuBLAS takes from torch's allocator for good: one workspace for the thread of the forward and one for that of
    the backward (ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize: per handle and stream)."""
    return 2 * (_LARGE_WORKSPACE if architecture in _LARGE_ON else _WORKSPACE)


def kernel_temporaries(func: Any, args: Any, kwargs: Any, out: Any, cpu: bool) -> tuple[int, ...]:
    """Bytes of each block that a kernel allocates inside one call, beyond its outputs; all die with the call.

    Flash attention's backward accumulates dQ in fp32 and, with grouped keys, makes dK and dV per query head first
    (ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd).
    """
    if cpu or func is not aten._scaled_dot_product_flash_attention_backward.default:
        return ()
    query, key = args[1], args[2]
    blocks = (query.numel() // query.shape[-1] * 4, query.numel() * 4)
    if key.shape[1] == query.shape[1]:
        return blocks
    expanded = key.numel() * (query.shape[1] // key.shape[1]) * key.element_size()
    return (*blocks, expanded, expanded)


_CODE = 537_688
_COPIES_LEFT = 3_936
_BLOCKED = 14_768
_GELU = (11_584, 12_712)
"""Bytes of code of GELU's forward and of its backward."""
_SMALLEST = 16**3


def compiles_products() -> bool:
    """Whether torch hands bf16 products on this CPU to oneDNN (ATen/native/mkldnn/Matmul.cpp)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def compiled_products(func: Any, args: Any, kwargs: Any) -> list[tuple[int, ...]]:
    """The products of a call that oneDNN compiles code for, in bf16: (batch, M, N, K, left is transposed, right is transposed,
    what is added to the result: 0 nothing); and the exact GELU in any dtype: (0, 1 in the backward, *shape).

    A product like an earlier one runs that one's code. Small ones (M x N x K up to 4096) take torch's own loop.
    """
    if func in (aten.gelu.default, aten.gelu_backward.default):
        exact = kwargs.get("approximate", "none") == "none" and args[0].is_contiguous()
        return [(0, int(func is aten.gelu_backward.default), *args[-1].shape)] if exact else []
    if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return _attention_products(args[1], args[2], args[7]) if args[1].dtype == torch.bfloat16 else []
    shape = _matmul(func, args)
    if shape is None or math.prod(shape) <= _SMALLEST:
        return []
    left, right = [a for a in args if isinstance(a, torch.Tensor)][-2:]
    if left.dtype != torch.bfloat16:
        return []
    transposed = (int(t.stride(-1) != 1 and t.stride(-2) == 1) for t in (left, right))
    return [(*shape, *transposed, int(func in (aten.addmm.default, aten.baddbmm.default)))]


def _attention_products(query: torch.Tensor, key: torch.Tensor, causal: bool) -> list[tuple[int, ...]]:
    """The products of flash attention's backward that are summed up in 16 bits, for each pair of block sizes that occurs: dQ, dV
    and dK (ATen/native/cpu/FlashAttentionKernel.cpp, cpu_flash_attention_backward). They have a place of their own in the cache:
    minus the distance of two rows stands where others have their batch."""
    _, heads, length, width = query.shape
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    pairs = {(min(rows, length - first), min(512, key.shape[2] - at))
             for first in range(0, length, rows) for at in range(0, key.shape[2], 512)
             if not causal or at < min(first + rows, length)}
    distance = -heads * width
    return [product for q, k in pairs if q * k * width > _SMALLEST
            for product in ((distance, q, width, k, 0, 0, 1), (distance, k, width, q, 1, 0, 1), (distance, k, width, q, 1, 0, 2))]


def code_size(product: tuple[int, ...]) -> int:
    """Bytes that oneDNN keeps for a compiled product, for as long as its cache of 1024 does: two buffers of 256 KiB for code
    and what describes its kernels, more of them where N or K is not a multiple of the block. Counted with the oneDNN of torch
    2.13 on AVX-512; other processors differ by some KiB."""
    if product[0] == 0:
        return _GELU[product[1]]
    _, _, n, k, left, *_ = product
    kernels = int(n > 64 and n % 64 != 0) + (0 if k <= 512 else 1 if k % (512 if left else 1024) == 0 else 3)
    return _CODE + left * _COPIES_LEFT + kernels * _BLOCKED


def _matmul(func: Any, args: Any) -> tuple[int, int, int, int] | None:
    if func is aten.mm.default:
        (m, k), n = args[0].shape, args[1].shape[1]
        return 1, m, n, k
    if func is aten.addmm.default:
        (m, k), n = args[1].shape, args[2].shape[1]
        return 1, m, n, k
    if func in (aten.bmm.default, aten.baddbmm.default):
        left, right = (args[0], args[1]) if func is aten.bmm.default else (args[1], args[2])
        return left.shape[0], left.shape[1], right.shape[2], left.shape[2]
    return None


def kernel_cost(func: Any, args: Any, kwargs: Any, out: Any, fresh: bool
                ) -> tuple[str, float, float, tuple[int, ...], int] | None:
    """(kind, FLOPs, bytes moved, shape, bytes per element) of one call; None for views and bookkeeping."""
    if func in _FREE:
        return None
    shape = _matmul(func, args)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    outs = [out] if isinstance(out, torch.Tensor) else [o for o in out if isinstance(o, torch.Tensor)] \
        if isinstance(out, (tuple, list)) else []
    if not outs or not (fresh or func._schema.is_mutable):
        return None
    moved = float(sum(t.numel() * t.element_size() for t in (*tensors, *outs)))
    itemsize = outs[0].element_size()
    if shape is not None:
        batch, m, n, k = shape
        return "matmul", 2.0 * batch * m * n * k, moved, shape, itemsize
    if func in _ATTENTION or func in _ATTENTION_BACKWARD:
        first = 0 if func in _ATTENTION else 1
        query, key = args[first], args[first + 1]
        b, h, s, d = query.shape
        flops = 4.0 * b * h * s * key.shape[2] * d
        return "attention", flops * (1.0 if func in _ATTENTION else 2.5), moved, (b * h, s, key.shape[2], d), itemsize
    return "other", float(math.prod(outs[0].shape)), moved, (), itemsize
