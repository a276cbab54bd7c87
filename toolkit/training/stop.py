"""A run that is asked to end: the step at hand is finished on all ranks, a checkpoint is written, and the exit status says so.

SIGTERM is what launchers pass on and schedulers send before they kill; SIGUSR1 is what Slurm is often told to send ahead of a
job's end. The ranks agree in the sum that every step begins with, so they end at the same step and nobody waits for anybody.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from accelerate import Accelerator

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1


class Stopped(ToolkitError):
    """The run was asked to end, has saved its state, and goes on when the same command is launched again.

    EX_TEMPFAIL of sysexits.h, "try again later": neither done (0) nor what a shell or scheduler reports for a process that a
    signal ended before it could save (143, 138).
    """

    exit_code = 75


class StopSignals:
    """Within it a signal asks for the end instead of bringing it. Only the main thread may enter."""

    def __init__(self) -> None:
        self.name: str | None = None
        """The signal that this rank got."""
        self._before: dict[signal.Signals, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether this rank was asked to end."""
        return self.name is not None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # Else the process ends with a status of its own; a launcher that ends it as well must not change that.
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def leave(self, accelerator: Accelerator, step: int, checkpoint: Path | None, problem: str | None) -> NoReturn:
        """End the run after `step`, with its checkpoint (None: nothing was trained yet) or with why there is none.

        Raises:
            Stopped: the state is saved.
            ToolkitError: it is not.
        """
        accelerator.end_training()
        by = self.name or "a signal to another rank"
        if problem:
            raise ToolkitError(f"{by} ended the run after step {step}, but its state could not be saved: {problem}")
        saved = f"; {checkpoint} is written" if checkpoint else ""
        raise Stopped(f"by {by} after step {step}{saved}; the same command goes on from there")


def end_with_launcher() -> None:
    """Have the system send SIGTERM when the launcher that started this process dies.

    A launcher that is killed, or that passes no signals on (Accelerate's for a single process), would leave its ranks
    training, and holding their GPUs, with nobody to end them. A process that a shell started is left alone: it may outlive it.
    """
    if sys.platform.startswith("linux") and {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
