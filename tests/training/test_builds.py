"""A lock of a build that was killed is named; one of a build at work is waited for."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from toolkit.errors import UserError
from toolkit.training import builds
from toolkit.training.builds import check_builds


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_hang_a_lock_that_a_killed_build_left_is_named_and_not_waited_for(lock: Path) -> None:
    """https://github.com/huggingface/transformers/issues/26015"""
    long_ago = time.time() - 3600
    os.utime(lock, (long_ago, long_ago))
    with pytest.raises(UserError, match=f"{lock} was left 60 minutes ago .* delete it"):
        check_builds()


def test_a_build_at_work_is_waited_for_and_spoken_of(
    lock: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builds, "_QUIET", 0.1)
    threading.Timer(0.5, lock.unlink).start()
    check_builds(poll=0.05)
    assert not lock.exists() and f"waiting for the build of cpu_adam by another process ({lock}" in capfd.readouterr().err


def test_locks_of_others_are_not_looked_at(lock: Path) -> None:
    lock.unlink()
    (lock.parent.parent / "somebodys_kernel").mkdir()
    (lock.parent.parent / "somebodys_kernel" / "lock").touch()
    check_builds()
