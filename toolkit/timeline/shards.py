"""What this rank holds of a tensor that several ranks share (a DTensor)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def wrapper_classes() -> tuple[type, ...]:
    """Tensor classes that only wrap what this rank holds; none before somebody imported them."""
    tensors = sys.modules.get("torch.distributed.tensor")
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if tensors is None or collectives is None:
        return ()
    return tensors.DTensor, collectives.AsyncCollectiveTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def like(tensor: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """A DTensor of the layout of `tensor` over another shard; the shard itself when `tensor` is none."""
    if local(tensor) is tensor:
        return shard
    from torch.distributed.tensor import DTensor

    spec: Any = tensor
    return DTensor.from_local(shard, spec.device_mesh, spec.placements, run_check=False, shape=tensor.shape,
                              stride=tensor.stride())
