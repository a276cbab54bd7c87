"""One product makes query, key and value, with an adapter of its own, as litgpt's `LoRAQKVLinear` does.

litgpt/lora.py and litgpt/model.py: the adapter's output is copied to the places of the parts that have one, and
`index_copy` keeps that output for its backward; query and key get rotary positions and so storages of their own, while
value stays a view and keeps the whole product. With grouped keys all three are copied out, keys and values once per query
head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_SEPARATE = ("q_proj", "k_proj", "v_proj")
_JOINT = ("query_key_value", "qkv_proj")


class FusedProjection(nn.Module):
    """The product of all three parts; called in the place of the query's projection it returns the query."""

    def __init__(self, base: nn.Linear, sizes: tuple[int, int, int], parts: tuple[str, ...], rank: int, dropout: float,
                 heads: tuple[int, int] | None) -> None:
        super().__init__()
        self.base, self.sizes, self.dropout, self.heads = base, sizes, dropout, heads
        self.shapes = [size for name, size in zip("qkv", sizes, strict=True) if name in parts]
        if self.shapes:
            like = {"device": base.weight.device, "dtype": base.weight.dtype}
            self.lora_A = nn.Parameter(torch.empty(rank * len(self.shapes), base.in_features, **like))
            self.lora_B = nn.Parameter(torch.empty(sum(self.shapes), rank, **like))
        self.taken: list[torch.Tensor] = []

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """All parts of `x` (..., hidden), side by side."""
        out: torch.Tensor = self.base(x)
        if not self.shapes:
            return out
        lows = F.linear(F.dropout(x, self.dropout, self.training), self.lora_A).chunk(len(self.shapes), dim=-1)
        pieces = [F.linear(low, part) for low, part in zip(lows, self.lora_B.split(self.shapes), strict=True)]
        update = torch.cat(pieces, dim=-1)
        del pieces
        if len(self.shapes) < 3:
            places = torch.zeros(update.shape[-1], dtype=torch.long)
            update = update.new_zeros(out.shape).index_copy_(-1, places, update)
        return out + update * 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.whole(x)
        if self.heads is None:
            return out
        query, *self.taken = out.split(self.sizes, dim=-1)
        groups, size = self.heads
        if groups > 1:
            self.taken = [t.unflatten(-1, (-1, 1, size)).expand(*t.shape[:-1], -1, groups, size).flatten(-3) for t in self.taken]
            query = query.clone()
        return query


class _Taken(nn.Module):
    """Hands out the next part that the fused product made."""

    def __init__(self, source: FusedProjection) -> None:
        super().__init__()
        self._source = [source]  # in a list, so that it is no submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._source[0].taken.pop(0)


def fuse_projections(model: Any, parts: tuple[str, ...], rank: int, dropout: float) -> None:
    """Give every attention of the model one fused product in place; `parts` of "q", "k", "v" get adapters of `rank`."""
    for module in list(model.modules()):
        layers = [getattr(module, name, None) for name in _SEPARATE]
        if all(isinstance(layer, nn.Linear) for layer in layers):
            _fuse_separate(module, layers, parts, rank, dropout)
            continue
        for name in _JOINT:
            layer = getattr(module, name, None)
            if isinstance(layer, nn.Linear):
                query = min(layer.in_features, layer.out_features)
                rest = (layer.out_features - query) // 2
                setattr(module, name, FusedProjection(layer, (query, rest, rest), parts, rank, dropout, None))


def _fuse_separate(module: Any, layers: list[Any], parts: tuple[str, ...], rank: int, dropout: float) -> None:
    first = layers[0]
    sizes = tuple(layer.out_features for layer in layers)
    base = nn.Linear(first.in_features, sum(sizes), bias=first.bias is not None, device=first.weight.device,
                     dtype=first.weight.dtype)
    size = int(module.head_dim)
    fused = FusedProjection(base, sizes, parts, rank, dropout, (sizes[0] // sizes[1], size))
    module.q_proj, module.k_proj, module.v_proj = fused, _Taken(fused), _Taken(fused)
    module.num_key_value_groups = 1
