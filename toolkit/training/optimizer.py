"""The optimizer, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch

from toolkit.errors import UserError
from toolkit.training.config import TrainConfig


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters, split into decayed and not decayed when there is any decay.

    Norms and biases are the parameters of one dimension. Without decay there is one group: engines that
    flatten parameters make one buffer per group.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise UserError("no parameter is trainable; check method and lora_targets")
    if not weight_decay:
        return [{"params": trainable, "weight_decay": 0.0}]
    shape_of = [getattr(p, "ds_shape", p.shape) for p in trainable]  # ZeRO-3 keeps the true shape there.
    decayed = [p for p, shape in zip(trainable, shape_of, strict=True) if len(shape) > 1]
    others = [p for p, shape in zip(trainable, shape_of, strict=True) if len(shape) <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(config: TrainConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the config names.

    Raises:
        UserError: it is not installed, or has no such implementation.
    """
    groups = parameter_groups(model, config.weight_decay)
    rate = peak_rate(config, 1)
    switches = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}
    if config.optimizer in ("adamw", "sgd"):
        kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.SGD
        return kind(groups, lr=rate, **switches.get(config.optimizer_impl, {}))
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=rate)
    if find_spec("bitsandbytes") is None:
        raise UserError(f"optimizer={config.optimizer} needs bitsandbytes, which is not installed; "
                        "use adamw, sgd or adafactor")
    from bitsandbytes import optim

    kinds = {"adamw-8bit": "AdamW8bit", "paged-adamw-8bit": "PagedAdamW8bit", "lion": "Lion"}
    return getattr(optim, kinds[config.optimizer])(groups, lr=rate)


def peak_rate(config: TrainConfig, world: int) -> float:
    """The peak learning rate for this global batch, by `scale_lr`."""
    if config.scale_lr == "none" or config.base_batch is None:
        return config.learning_rate
    ratio = config.micro_batch * config.accumulate * world / config.base_batch
    return config.learning_rate * (ratio if config.scale_lr == "linear" else math.sqrt(ratio))


def rate_at(step: int, total: int, config: TrainConfig, world: int) -> float:
    """The learning rate of optimizer step `step` (1 to `total`).

    The first step of warm-up already moves (peak / warmup), and the decay would reach zero one step after
    the last.
    """
    peak, warmup = peak_rate(config, world), config.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if config.schedule == "constant":
        return peak
    progress = (step - 1 - warmup) / max(1, total - warmup)
    return peak * (1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress)))


def set_rate(optimizer: Any, rate: float) -> None:
    """Set the rate of every group; the engines' wrappers hand through the groups of the optimizer they
    wrap."""
    groups: Iterable[dict[str, Any]] = optimizer.param_groups
    for group in groups:
        group["lr"] = rate
