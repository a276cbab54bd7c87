"""What ZeRO-3's offload to NVMe keeps where: files, page-locked staging on the host, and what stays in pinned host memory.

Read from DeepSpeed 0.19.8 `deepspeed/runtime/swap_tensor/{optimizer_utils,partitioned_optimizer_swapper,
partitioned_param_swapper,utils}.py`, `deepspeed/runtime/zero/{stage3,offload_config}.py`; the names in quotes are its own. aio
tensors are locked by DeepSpeed's own handle (`new_cpu_locked_tensor`): exact, without the rounding of torch's pinned allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.strategies.lowering import HostUse

MIN_SWAP = 1 << 20
"""Bytes from which a tensor is swapped ("MIN_AIO_BYTES", and aio's default "block_size")."""
ALIGNED = 1024
"""Bytes to which a file's tensor is padded ("AIO_ALIGNED_BYTES" with one thread)."""
OPTIMIZER_BUFFERS = 4
"""Default "buffer_count" of offload_optimizer: one for each of Adam's parameter, gradient and two moments."""
PARAMETER_BUFFERS, BUFFER_ELEMENTS = 5, 100_000_000
"""Default "buffer_count" and "buffer_size" (elements) of offload_param."""
MAX_IN_CPU = 1_000_000_000
"""Default "max_in_cpu", elements: as many of a rank's partitions stay in host memory."""


@dataclass(frozen=True)
class Partition:
    """One parameter as DeepSpeed stores it."""

    whole: int
    """Elements of the parameter."""
    part: int
    """Elements of this rank's partition."""
    itemsize: int
    trainable: bool


def aligned(nbytes: int) -> int:
    """Bytes of a swapped tensor with its padding."""
    return -(-nbytes // ALIGNED) * ALIGNED


def place_optimizer(host: HostUse, sub_groups: Sequence[int], states: int) -> None:
    """fp32 weights, their gradients and the optimizer's states: swapped sub-group by sub-group.

    Args:
        host: where the bytes are added.
        sub_groups: elements of each sub-group on this rank.
        states: fp32 states per element, 2 for Adam.
    """
    swapped = [numel for numel in sub_groups if numel * 4 >= MIN_SWAP]
    tensors = 2 + states  # the weights and the gradient besides
    host.nvme += sum(tensors * aligned(numel * 4) for numel in swapped)
    if swapped:
        host.locked += OPTIMIZER_BUFFERS * aligned(max(sub_groups) * 4)  # "swap_buffer_manager"
    for numel in sub_groups:
        if numel * 4 < MIN_SWAP:
            host.plain += tensors * numel * 4


def place_parameters(host: HostUse, partitions: Sequence[Partition], largest_sub_group: Sequence[Partition]) -> None:
    """The weights that are computed with: what "max_in_cpu" allows in pinned memory, the rest swapped.

    Args:
        host: where the bytes are added.
        partitions: all parameters.
        largest_sub_group: those of the sub-group that holds most.
    """
    size = max((p.itemsize for p in partitions), default=2)
    trainable = sum(p.part for p in partitions if p.trainable)
    in_cpu = min(trainable, MAX_IN_CPU)
    host.pinned.append(in_cpu * size)  # "param_groups_fp16_flat_cpu_memory"
    host.nvme += aligned((trainable - in_cpu) * size)
    for p in partitions:
        if p.trainable:
            continue
        if p.part * p.itemsize >= MIN_SWAP:
            host.nvme += aligned(p.part * p.itemsize)
        else:
            host.plain += p.part * p.itemsize
    host.locked += PARAMETER_BUFFERS * aligned(BUFFER_ELEMENTS * size)
    if trainable > in_cpu:
        host.locked += sum(aligned(p.whole * size) for p in largest_sub_group)  # "partitioned_swap_buffer"
