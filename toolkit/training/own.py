"""What somebody's own Accelerate loop needs beside the library: the engine that the launch file names, and one weight for
every token. docs/own-script.md shows a whole script."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from toolkit.specs.workload import Precision
from toolkit.training.config import TrainConfig

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def engage(*, output: str, precision: Precision = "bf16", micro_batch: int = 1, accumulate: int = 1, clip: float = 1.0,
           tracker: str = "none", timeout_minutes: float = 60.0) -> Accelerator:
    """The Accelerator for the engine that `accelerate launch` was given, on GPUs or on CPU processes.

    Args:
        output: the run folder, where a tracker writes.
        precision: as the recipe's key; under `bf16` and `fp16` load the weights in fp32.
        micro_batch: rows per rank and forward pass; DeepSpeed wants to know.
        accumulate: micro-batches per optimizer step, for `accelerator.accumulate`.
        clip: maximum global gradient norm, 0 for never; DeepSpeed clips by itself.
        tracker: tensorboard, wandb, mlflow, trackio or none.
        timeout_minutes: how long a rank waits for the others in one collective operation.

    Raises:
        UserError: a value out of its range, or a launch file that contradicts them.
    """
    from toolkit.strategies import launch_environment
    from toolkit.training.accelerator import build_accelerator
    from toolkit.training.config import from_mapping
    from toolkit.training.start import check_processes, own_tools_first

    own_tools_first()
    os.environ.update(launch_environment(os.environ))
    check_processes()
    config: TrainConfig = from_mapping({
        "model": "own", "data": "own", "max_steps": 1, "output": output, "precision": precision, "micro_batch": micro_batch,
        "accumulate": accumulate, "clip": clip, "tracker": tracker, "timeout_minutes": timeout_minutes,
    }, "engage")  # fmt: skip
    return build_accelerator(config)


def strategy_of(accelerator: Accelerator, model: torch.nn.Module) -> str:
    """The name of the strategy that runs (`ddp`, `fsdp`, `zero3-offload-all`), read from the prepared model."""
    from toolkit.strategies import observe

    return observe(accelerator, model).label


def loss_scale(accelerator: Accelerator, labels: Iterable[torch.Tensor]) -> tuple[float, int]:
    """(factor, targets) of an optimizer step. Every rank must call it, once a step.

    Give the labels of all micro-batches of this rank ([rows, length], unshifted, -100 where nothing is predicted), and
    multiply each micro-batch's *summed* loss by the factor before `accelerator.backward`. Engines divide by the micro-batches
    and average over ranks; with the factor, the gradient is that of the mean over all `targets` of the global batch, however
    it is cut into rows, micro-batches and ranks. The mean loss is the sum over micro-batches and ranks divided by `targets`.
    A step without any target has factor 0: it changes nothing, and gives no NaN.
    """
    from toolkit.training.data.loader import IGNORE
    from toolkit.training.step import across_ranks

    own = sum(int((part[:, 1:] != IGNORE).sum()) for part in labels)
    targets = int(across_ranks(accelerator, own)[0])
    whole = accelerator.num_processes * accelerator.gradient_accumulation_steps
    return (whole / targets if targets else 0.0), targets
