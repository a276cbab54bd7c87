"""The same count for a loop of one's own: `with MemoryProfile() as profile: ...`, and what it found in `profile.rank`."""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Any

from toolkit.profiling.command import Rank
from toolkit.profiling.counter import Counter, device_counter


class MemoryProfile:
    """Notes peak and live bytes after every step of every torch optimizer, while it is entered.

    On a CPU the count is exact when the script's first act was `toolkit.profiling.counter.preload()`; else the process's
    resident set stands in, and `rank.counter` says `rss`. On CUDA the peak statistics are reset at every step.
    """

    def __init__(self, device_type: str | None = None) -> None:
        """`device_type`: cuda or cpu; None: cuda where there is one."""
        self.device_type = device_type
        self.rank = Rank(int(os.environ.get("RANK", "0")), os.getpid())
        self._hooks: list[Any] = []
        self._depth = 0

    def __enter__(self) -> MemoryProfile:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        kind = self.device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        self.counter: Counter = device_counter(kind)
        self.rank.counter = self.counter.kind
        self._hooks = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]
        self.counter.reset()
        return self

    def _before(self, *_: Any) -> None:
        self._depth += 1

    def _after(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:  # an optimizer that steps another one inside counts once
            self.rank.steps.append({"step": len(self.rank.steps) + 1, "peak": self.counter.peak(), "live": self.counter.live(),
                                    "time": time.time(), "counter": self.counter.kind})
            self.counter.reset()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self.rank.ended = kind is None
