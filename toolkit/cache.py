"""Where things that can be made again are kept, and how a folder appears there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from toolkit.errors import UserError


def cache_dir(*parts: str) -> Path:
    """A folder of the user's cache (made if need be): `TOOLKIT_CACHE`, else `XDG_CACHE_HOME`, else `~/.cache`.

    Raises:
        UserError: it can't be made.
    """
    own = os.environ.get("TOOLKIT_CACHE")
    shared = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    base = Path(own) if own else shared / "memory-scaling-toolkit"
    folder = base.joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the cache {str(folder)!r} cannot be made ({error.strerror}); set TOOLKIT_CACHE to a folder that can be "
                        "written") from None
    return folder


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A scratch folder that becomes `folder` when the block ends well, and vanishes when it does not.

    Another process may have finished first; then its folder stays and this one is dropped.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
