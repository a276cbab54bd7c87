"""What the recipe is made of, and the part of it that somebody's own Accelerate loop can use (docs/own-script.md).

The names below are the public face; everything else may change. They are loaded when they are first asked for, so that the
command line does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.training.accelerator import verify_engine
    from toolkit.training.checkpoint import Checkpoints
    from toolkit.training.identity import Identity, Progress
    from toolkit.training.loss import attach_loss
    from toolkit.training.metrics import Log, Metrics
    from toolkit.training.own import engage, loss_scale, strategy_of
    from toolkit.training.start import run
    from toolkit.training.step import across_ranks, check_finite, gradient_norm

__all__ = [
    "Checkpoints", "Identity", "Log", "Metrics", "Progress", "across_ranks", "attach_loss", "check_finite", "engage",
    "gradient_norm", "loss_scale", "run", "strategy_of", "verify_engine",
]  # fmt: skip

_HOME = {
    "Checkpoints": "checkpoint", "Identity": "identity", "Progress": "identity", "Log": "metrics", "Metrics": "metrics",
    "across_ranks": "step", "check_finite": "step", "gradient_norm": "step", "attach_loss": "loss", "run": "start",
    "engage": "own", "loss_scale": "own", "strategy_of": "own", "verify_engine": "accelerator",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
