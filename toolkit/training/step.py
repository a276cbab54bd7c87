"""What a training step needs beside the flat loop of a recipe: sums over ranks, the gradient norm,
evaluation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.errors import ToolkitError
from toolkit.training.data.loader import Batch, Loader

if TYPE_CHECKING:
    from accelerate import Accelerator


class Diverged(ToolkitError):
    """The loss or the gradients are no numbers any more; nothing after that step is worth anything."""


def across_ranks(accelerator: Accelerator, *values: float) -> list[float]:
    """The sum of each value over all ranks, in fp64. Every rank must call it with as many values."""
    total = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    return [float(value) for value in accelerator.reduce(total, reduction="sum")]


def highest(accelerator: Accelerator, value: int) -> list[int]:
    """The value of every rank, by rank."""
    gathered = accelerator.gather(torch.tensor([value], dtype=torch.int64, device=accelerator.device))
    return [int(item) for item in gathered]


def count_batch(accelerator: Accelerator, batches: list[Batch], *flags: bool) -> list[int]:
    """[targets, tokens, ...]: of the whole global batch, all micro-batches of all ranks; then for each flag, on how many ranks
    it is set."""
    return [int(total) for total in across_ranks(
        accelerator, sum(batch.num_targets for batch in batches), sum(batch.num_tokens for batch in batches), *flags)]


def gradient_norm(accelerator: Accelerator, model: torch.nn.Module, clip: float) -> float:
    """Clip the gradients to `clip` (0: do not) and return their global norm before clipping.

    DeepSpeed has clipped inside its own backward and step, and hands out the norm of that step.
    """
    norm: Any = accelerator.clip_grad_norm_(model.parameters(), clip or math.inf)
    if norm is None:
        return math.nan
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def check_finite(name: str, value: float, step: int, last_good: Path | None) -> None:
    """Raises Diverged when `value` is NaN or infinite; `last_good` is the newest checkpoint's path."""
    if math.isfinite(value):
        return
    kept = f"the last good checkpoint is {last_good}" if last_good else "there is no checkpoint yet"
    raise Diverged(f"{name} is {value} at step {step}; {kept}; try a lower learning_rate, more warmup_steps, "
                   "clip=1.0, or look at the data of this step")


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: Loader) -> tuple[float, int]:
    """(mean loss over all target tokens, their number). Every token weighs alike; no logits leave the
    model."""
    was_training = model.training
    model.eval()
    summed = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    targets = 0
    for batch in loader.epoch():
        summed += model(**batch.to(accelerator.device)).double()
        targets += batch.num_targets
    model.train(was_training)
    loss, count = across_ranks(accelerator, float(summed), targets)
    return loss / max(count, 1), int(count)
