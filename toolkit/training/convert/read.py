"""Any checkpoint that can be read, by the path that somebody gives."""

from __future__ import annotations

from pathlib import Path

from toolkit.training.convert.held import Held, hold_ours
from toolkit.training.convert.kinds import find, needs_reading


def hold(path: Path) -> Held:
    """Open the checkpoint that a path means, whatever wrote it.

    Raises:
        UserError: there is none, or none that can be read; says what can be done.
    """
    kind, folder = find(path)
    needs_reading(kind, folder)
    return hold_ours(folder)
