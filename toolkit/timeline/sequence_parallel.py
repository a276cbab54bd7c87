"""Attention over a sequence of which each rank has a part, traced as one rank of ranks that do not exist.

* Ulysses (`sp`, DeepSpeed 0.19.8 `deepspeed/runtime/sequence_parallel/ulysses_sp.py`, UlyssesSPAttentionHF): all-to-all from
  parts of the sequence to parts of the heads before the kernel, and back after it.
* Ring attention (`cp`, torch 2.13 `torch/distributed/tensor/experimental/_context_parallel/_attention.py`): queries stay, keys
  and values are gathered once per layer (Accelerate's default `allgather`); torch's own function runs, on a fake group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from toolkit.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

aten = torch.ops.aten


class _AllToAll(torch.autograd.Function):
    """`deepspeed::dim_zero_all_to_all`: a new tensor of the same size, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(grad.contiguous())


def _to_heads(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """[batch, heads, local length, width] to [batch, heads / ranks, length, width]: `_combine_local_sequences`."""
    batch, heads, length, width = x.shape
    x = x.permute(2, 0, 1, 3)
    if heads < ranks:
        x = x.repeat_interleave(ranks // heads, dim=2)
    x = x.reshape(length, batch, ranks, x.shape[2] // ranks, width).permute(2, 0, 1, 3, 4).contiguous()
    x = _AllToAll.apply(x).reshape(ranks * length, batch, -1, width)
    return x.permute(1, 2, 0, 3).contiguous()


def _to_sequence(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """[batch, length, heads / ranks, width] to [batch, local length, heads * width]: `_partition_global_sequence`."""
    x = x.transpose(0, 1)
    x = x.reshape(*x.shape[:2], -1)
    length, batch, part = x.shape
    x = _AllToAll.apply(x.reshape(ranks, length // ranks, batch, part).contiguous()).permute(1, 2, 0, 3)
    return x.reshape(length // ranks, batch, -1).contiguous().transpose(0, 1)


@contextmanager
def ulysses(attention: str, ranks: int) -> Iterator[None]:
    """Wrap a transformers attention function (`sdpa`) as DeepSpeed's adapter does."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kernel: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[attention]

    def split(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *args: Any, **kwargs: Any
              ) -> Any:
        positions = kwargs.get("position_ids")
        if positions is not None:
            kwargs["position_ids"] = torch.cat([torch.empty_like(positions) for _ in range(ranks)], dim=1)
        heads = module.num_key_value_groups if hasattr(module, "num_key_value_groups") else None
        query, key, value = _to_heads(query, ranks), _to_heads(key, ranks), _to_heads(value, ranks)
        if heads is not None:
            module.num_key_value_groups = query.shape[1] // key.shape[1]
        out, weights = kernel(module, query, key, value, None, *args, **kwargs)
        if heads is not None:
            module.num_key_value_groups = heads
        return _to_sequence(out, ranks), weights

    ALL_ATTENTION_FUNCTIONS[attention] = split
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[attention] = kernel


class _Ring(torch.autograd.Function):
    """torch's ring attention around the flash or, for fp32, the memory-efficient kernel."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mesh: DeviceMesh, dropout: float,
                scale: float | None) -> torch.Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        flash = query.dtype != torch.float32
        run = ring._scaled_dot_product_ring_flash_attention if flash else ring._scaled_dot_product_ring_efficient_attention
        out, sums, *rest = run(mesh, query, key, value, dropout_p=dropout, is_causal=True, scale=scale)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.rest, ctx.mesh, ctx.dropout, ctx.scale, ctx.flash = rest, mesh, dropout, scale, flash
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        query, key, value, out, sums = ctx.saved_tensors
        if ctx.flash:
            lengths_q, lengths_k, longest_q, longest_k, seed, offset, *_ = ctx.rest
            grads = ring._scaled_dot_product_ring_flash_attention_backward(
                ctx.mesh, grad, query, key, value, out, sums, lengths_q, lengths_k, longest_q, longest_k, ctx.dropout, True,
                seed, offset, scale=ctx.scale)
        else:
            grads = ring._scaled_dot_product_ring_efficient_attention_backward(
                ctx.mesh, grad, query, key, value, None, out, sums, ctx.rest[0], ctx.rest[1], ctx.dropout,
                (True, True, True, False), True, scale=ctx.scale)
        return (*grads[:3], None, None, None)


def ring_attention(mesh: DeviceMesh) -> Callable[..., torch.Tensor]:
    """`scaled_dot_product_attention` inside Accelerate's `maybe_context_parallel`; masks are dropped there."""

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
                  dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
                  ) -> torch.Tensor:
        if query.dtype == torch.float32 and key.shape[1] != query.shape[1]:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return _Ring.apply(query, key, value, mesh, dropout_p, scale)

    return attention


def check(name: str, config: Any, cp: int, sp: int) -> None:
    """Hold a model to what its layers must be like for either way.

    Raises:
        UserError: heads that `sp` does not divide, or layers whose attention is not plain causal (`cp`) or none at all (`sp`).
    """
    kinds = getattr(config, "layer_types", None) or (["sliding_attention"] if getattr(config, "sliding_window", None) else [])
    if cp > 1 and (other := sorted({kind for kind in kinds if kind != "full_attention"})):
        # accelerate/big_modeling.py, _attach_context_parallel_hooks
        raise UserError(f"cp {cp} and layers of type {', '.join(other)} of {name} exclude each other: Accelerate splits full "
                        "causal attention only; use sp with zero3")
    if sp == 1:
        return
    recurrent = sorted({kind for kind in kinds if not kind.endswith("attention") or kind == "linear_attention"})
    heads, keys = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if recurrent or heads is None or keys is None or getattr(config, "head_dim", 1) is None:
        what = f"layers of type {', '.join(recurrent)}" if recurrent else "a config without num_key_value_heads or head_dim"
        raise UserError(f"sp {sp} and {what} of {name} exclude each other: DeepSpeed's Ulysses can't split it; use fsdp or "
                        "zero3 alone")
    if heads % sp or (keys % sp and sp % keys):
        raise UserError(f"sp {sp} does not divide the {heads} heads and {keys} key-value heads of {name}; use a divisor "
                        f"of {keys}")
