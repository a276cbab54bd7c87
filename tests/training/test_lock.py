"""Two runs never write to one folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import UserError
from toolkit.training.lock import hold


def test_a_folder_in_use_is_refused_until_it_is_let_go(accelerator: Any, tmp_path: Path) -> None:
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="another run is writing to this folder"):
        hold(tmp_path, accelerator)
    os.close(other)
    hold(tmp_path, accelerator)
    with pytest.raises(UserError, match="another run"):
        hold(tmp_path, accelerator)
    assert not list(tmp_path.iterdir())
