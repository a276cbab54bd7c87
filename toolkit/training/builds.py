"""A lock that a killed build of an extension left behind: every later start waits for it, for ever and without a word."""

from __future__ import annotations

import os
import time
from pathlib import Path

from toolkit.errors import UserError
from toolkit.training.heartbeat import write_line

STALE = 900.0
"""Seconds after which no build can be at work any more; DeepSpeed's CPU optimizer takes one or two minutes."""
_QUIET = 5.0
"""Seconds that a build of another rank may take before it is spoken of."""


_BUILT = ("cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lion", "fused_lamb", "async_io", "gds", "utils")
"""What DeepSpeed builds for training. Extensions of others are none of a run's business."""


def locks() -> list[Path]:
    """The locks in the folder where torch builds extensions (torch/utils/cpp_extension.py, `_get_build_directory`)."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return sorted(lock for name in _BUILT for pattern in (f"{name}/lock", f"*/{name}/lock") for lock in root.glob(pattern))


def check_builds(stale: float = STALE, poll: float = 1.0) -> None:
    """Wait for builds that are at work, and say so; refuse to wait for one that is not.

    Raises:
        UserError: names a lock older than `stale` seconds, which nobody will remove.
    """
    begun, told = time.time(), False
    while found := [(lock, age) for lock in locks() if (age := _age(lock)) is not None]:
        lock, age = max(found, key=lambda pair: pair[1])
        if age > stale:
            raise UserError(f"{lock} was left {age / 60:,.0f} minutes ago by a build of DeepSpeed's that was killed, and every "
                            f"start waits for it: delete it (rm {lock})")
        if not told and time.time() - begun >= _QUIET and os.environ.get("LOCAL_RANK", "0") == "0":
            told = True
            write_line(f"waiting for the build of {lock.parent.name} by another process ({lock}, {age:,.0f} s old); if there is "
                       "none, delete that file")
        time.sleep(poll)


def _age(lock: Path) -> float | None:
    """Seconds since the lock was made; None when it has gone meanwhile."""
    try:
        return time.time() - lock.stat().st_mtime
    except OSError:
        return None
