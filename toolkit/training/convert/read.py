"""Any checkpoint that can be read, by the path that somebody gives."""

from __future__ import annotations

from pathlib import Path

from toolkit.training.convert.dcp import hold_dcp, hold_fsdp
from toolkit.training.convert.held import Held, hold_ours
from toolkit.training.convert.kinds import find, needs_reading
from toolkit.training.convert.zero_read import hold_universal, hold_zero

_READERS = {
    "toolkit": hold_ours, "deepspeed": hold_zero, "deepspeed-universal": hold_universal, "accelerate-fsdp": hold_fsdp,
    "dcp": hold_dcp,
}  # fmt: skip


def hold(path: Path) -> Held:
    """Open the checkpoint that a path means, whatever wrote it.

    Raises:
        UserError: there is none, or none that can be read; says what can be done.
    """
    kind, folder = find(path)
    needs_reading(kind, folder)
    return _READERS[kind](folder)
