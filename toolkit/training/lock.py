"""One run at a time in a run folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator


def hold(folder: Path, accelerator: Accelerator) -> None:
    """Hold the folder until this process ends, however it ends. Every rank must call it; the main process holds.

    The system's lock on the folder itself: nothing is left behind that a killed run would have to clean up. Where a
    file system cannot lock folders, nothing is held.

    Raises:
        UserError: another run holds it.
    """
    from accelerate.utils import gather_object

    taken = False
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)  # Stays open: closing it would let go.
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            taken = True
        except OSError:
            os.close(handle)
    if any(gather_object([taken])):
        raise UserError(f"output={folder}: another run is writing to this folder; wait for it, end it, or name another output")
