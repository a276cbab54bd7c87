"""Any checkpoint that can be read, by the path that somebody gives."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import UserError
from toolkit.training.convert.dcp import hold_dcp, hold_fsdp
from toolkit.training.convert.held import Held, hold_ours
from toolkit.training.convert.kinds import find, needs_reading
from toolkit.training.convert.zero_read import hold_universal, hold_zero
from toolkit.training.state.manifest import damage

_READERS = {
    "toolkit": hold_ours, "deepspeed": hold_zero, "deepspeed-universal": hold_universal, "accelerate-fsdp": hold_fsdp,
    "dcp": hold_dcp,
}  # fmt: skip


def hold(path: Path, *, contents: bool = True) -> Held:
    """Open the checkpoint that a path means, whatever wrote it; one of ours only when its files are what was written (`contents`:
    by their checksums, which reads them all).

    Raises:
        UserError: there is none, or none that can be read; says what can be done.
    """
    kind, folder = find(path)
    needs_reading(kind, folder)
    problem = damage(folder, contents="all" if contents else "none") if kind == "toolkit" else None
    if problem:
        raise UserError(problem)
    return _READERS[kind](folder)
