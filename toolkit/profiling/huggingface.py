"""A callback for Hugging Face's Trainer and TRL's trainers: `Trainer(..., callbacks=[MemoryCallback()])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from toolkit.profiling.loop import MemoryProfile
from toolkit.units import format_size


class MemoryCallback(TrainerCallback):
    """Counts memory from the beginning of a training to its end; `profile.rank` has every step."""

    def __init__(self) -> None:
        self.profile = MemoryProfile()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin."""
        self.profile = MemoryProfile()
        self.profile.__enter__()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End, with a line on the main process."""
        self.profile.__exit__(None, None, None)
        rank = self.profile.rank
        if state.is_world_process_zero:
            print(f"memory: peak {format_size(rank.peak)}, {format_size(rank.resident)} after a step ({rank.counter})")
