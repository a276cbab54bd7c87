"""What optimizers keep and what their step allocates on the way.

Sizes are per parameter tensor as the optimizer sees it (a shard, a flat partition, or the parameter itself). Read from
torch 2.13 `torch/optim/{adamw,adam,sgd,adafactor}.py`; the tests hold each rule to the real optimizer on fake tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from toolkit.timeline.tape import Tape

Impl = Literal["loop", "foreach", "fused"]


@dataclass(frozen=True)
class OptimizerTensor:
    """One tensor that the optimizer updates."""

    numel: int
    itemsize: int
    """Bytes per element of the parameter (torch keeps its moments in that dtype)."""
    shape: tuple[int, ...] = ()


def default_impl(optimizer: str, impl: str, device: str) -> Impl:
    """What torch chooses: foreach on CUDA, a loop on a CPU and, to save memory, for Adafactor."""
    if impl != "default":
        return impl  # type: ignore[return-value]
    return "foreach" if device == "cuda" and optimizer != "adafactor" else "loop"


def state_bytes(optimizer: str, tensor: OptimizerTensor, device: str, impl: Impl) -> tuple[tuple[int, ...], int]:
    """(bytes of each state on the device, bytes on the host) that the optimizer keeps for one tensor.

    adamw keeps two moments in the parameter's dtype and a step counter of 4 bytes, which lies on the host unless the
    implementation is fused; on a CPU run both are the same memory.
    """
    n, size = tensor.numel, tensor.itemsize
    step = (4,) if device == "cpu" or impl == "fused" else ()
    if optimizer == "adamw":
        return (*step, n * size, n * size), 0 if step else 4
    if optimizer in ("adamw-8bit", "paged-adamw-8bit"):
        # bitsandbytes: tensors under 4096 elements keep 32-bit states; others two bytes of codes and, per block of 256
        # elements, two fp32 maxima (bitsandbytes/optim/optimizer.py, Optimizer2State.init_state).
        if n < 4096:
            return (4 * n, 4 * n), 0
        maxima = 4 * -(-n // 256)
        return ((n, n, maxima, maxima), 0) if optimizer == "adamw-8bit" else ((maxima, maxima), 2 * n)
    if optimizer == "lion":
        return (n * size,), 0
    if optimizer == "adafactor":
        if len(tensor.shape) >= 2:
            rows, columns = n // tensor.shape[-1], n // tensor.shape[-2]
            return (*step, rows * size, columns * size), 0
        return (*step, n * size), 0
    return (), 0


def play_step(tape: Tape, tensors: Sequence[OptimizerTensor], optimizer: str, impl: Impl, denominators: bool = False) -> None:
    """Append the temporaries of one step to the tape; the states are the caller's. `denominators`: foreach AdamW makes them
    beside the roots (torch 2.0) and not in their place."""
    sizes = [t.numel * t.itemsize for t in tensors]
    if not sizes:
        return
    if optimizer == "adamw":
        if impl == "foreach":
            # sqrt of all second moments at once; the rest is in place
            tape.transients(sizes * 2 if denominators else sizes, "temporaries", "optimizer step (foreach)")
        elif impl == "loop":
            # sqrt, then its quotient, while the previous tensor's denominator is still named
            previous = 0
            for size in sizes:
                if previous + 2 * size >= max(sizes):
                    tape.transient(previous + 2 * size, "temporaries", "optimizer step (loop)")
                previous = size
    elif optimizer == "adafactor":
        _play_adafactor(tape, tensors)
    elif optimizer == "lion":
        tape.transients([2 * max(sizes)] if impl == "loop" else sizes, "temporaries", "optimizer step")
    elif optimizer in ("adamw-8bit", "paged-adamw-8bit", "sgd"):
        return


def _play_adafactor(tape: Tape, tensors: Sequence[OptimizerTensor]) -> None:
    """`_single_tensor_adafactor`: the estimate of the second moment becomes the update; the means of a matrix, the squared
    gradient of a vector and the last tensor's update stay named until they are replaced."""
    update = square = means = highest = 0
    for t in tensors:
        size = t.numel * t.itemsize
        if len(t.shape) >= 2:
            means = (t.numel // t.shape[-1] + t.numel // t.shape[-2]) * t.itemsize
        else:
            highest = max(highest, update + means + square + size)
            square = size
        highest = max(highest, update + means + square + size)
        update = size
    tape.transient(highest, "temporaries", "optimizer step (update, squares, means)")
