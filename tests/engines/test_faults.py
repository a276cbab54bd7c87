"""Whatever happens to a run or its disk: what was saved is whole, goes on to the last bit, and nothing hangs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from toolkit.training.state.manifest import damage, named

pytestmark = pytest.mark.slow
KEYS: dict[str, Any] = {"seq_len": 64, "micro_batch": 2, "max_steps": 6, "learning_rate": 1e-3, "warmup_steps": 2,
                        "precision": "fp32", "tracker": "none", "export": False, "preflight": "off", "profile": False,
                        "checkpoint_every": 2}  # fmt: skip


@pytest.fixture(scope="session")
def start(runs: Any, tiny_model: Path, chat_data: Path) -> Callable[..., Any]:
    def run(strategy: str, folder: Path, *, faults: Any = None, processes: int | None = None, **keys: Any) -> Any:
        return runs.run(strategy, {**KEYS, "model": tiny_model, "data": chat_data, "output": folder, **keys}, faults=faults,
                        processes=processes)  # fmt: skip

    return run


@pytest.fixture(scope="session")
def whole(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an engine's run that nothing happened to."""

    @cache
    def run(strategy: str) -> Path:
        folder = tmp_path_factory.mktemp("whole") / strategy
        done = start(strategy, folder)
        assert set(done["statuses"]) == {0}, done["output"]
        return folder

    return run


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB, which holds the run folder and a few checkpoints."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(folder)], capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def steps(folder: Path) -> list[tuple[float, ...]]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [tuple(record[name] for name in ("step", "loss", "grad_norm", "learning_rate", "tokens")) for record in records]


def checkpoints(folder: Path) -> list[str]:
    """Those that are whole, after every file is held to its checksum; nothing else may bear such a name."""
    found = named(folder / "checkpoints")
    assert [damage(path) for path in found[-2:]] == [None] * len(found[-2:])
    return [path.name for path in found[-2:]]


@pytest.mark.parametrize(("strategy", "mode", "fault", "left"), [
    ("ddp", "sync", {"rank": 1, "only": ["tensor"], "point": 90}, ["step-00000002"]),  # in the middle of a file
    ("ddp", "async", {"rank": 0, "only": ["name"], "point": 9}, ["step-00000002"]),  # before the manifest has its name
    ("fsdp", "async", {"rank": 1, "only": ["sync"], "point": 4}, ["step-00000002"]),
    ("zero2", "sync", {"rank": 0, "only": ["step"], "point": 6}, ["step-00000002", "step-00000004"]),
    ("single", "async", {"rank": 0, "only": ["file"], "point": 2}, []),
])  # fmt: skip
def test_a_killed_rank_costs_no_completed_checkpoint(
    strategy: str, mode: str, fault: dict[str, Any], left: list[str], start: Callable[..., Any],
    whole: Callable[[str], Path], tmp_path: Path
) -> None:  # fmt: skip
    run = tmp_path / "run"
    killed = start(strategy, run, faults=[{**fault, "signal": "SIGKILL"}], checkpoint_mode=mode)
    assert killed["statuses"][fault["rank"]] == -9 and not killed["hung"], killed["output"]
    assert all(status == 1 for rank, status in enumerate(killed["statuses"]) if rank != fault["rank"])
    assert checkpoints(run) == left
    resumed = start(strategy, run, checkpoint_mode=mode)
    assert set(resumed["statuses"]) == {0}, resumed["output"]
    assert ("resumes from" in resumed["output"]) == bool(left)
    assert steps(run) == steps(whole(strategy))
    assert checkpoints(run) == ["step-00000004", "step-00000006"] and not list((run / "checkpoints").glob(".*"))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_is_a_warning_on_every_rank_and_leaves_the_last_good_one(
    mode: str, start: Callable[..., Any], whole: Callable[[str], Path], full_disk: Path
) -> None:
    run, filler = full_disk / "run", full_disk / "filler"
    fault = {"rank": 1, "only": ["file"], "point": 5, "fill": str(filler)}  # When it begins its part of the third save.
    went = start("ddp", run, faults=[fault], checkpoint_mode=mode)
    assert set(went["statuses"]) == {0} and not went["hung"], went["output"]
    assert "warning: no checkpoint at step 6 (" in went["output"] and "; the older ones are kept" in went["output"]
    assert "Traceback" not in went["output"]
    assert checkpoints(run) == ["step-00000002", "step-00000004"] and not list((run / "checkpoints").glob(".*"))
    filler.unlink()
    again = start("ddp", run)
    assert set(again["statuses"]) == {0} and "resumes from" in again["output"], again["output"]
    assert checkpoints(run) == ["step-00000004", "step-00000006"] and steps(run) == steps(whole("ddp"))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_that_shall_stop_when_it_cannot_save_stops_on_all_ranks(
    mode: str, start: Callable[..., Any], tmp_path: Path
) -> None:
    fault = {"rank": 1, "only": ["file"], "point": 3, "errno": errno.EDQUOT}  # Another rank than the one that speaks.
    went = start("fsdp", tmp_path / "run", faults=[fault], checkpoint_mode=mode, on_save_error="stop")
    assert set(went["statuses"]) == {1} and not went["hung"], went["output"]
    [line] = [line for line in went["output"].splitlines() if line.startswith("error: ")]
    assert "no checkpoint at step 4 (OSError: " in line and "on_save_error=stop ends the run" in line
    assert str(tmp_path / "run" / "checkpoints" / "step-00000002") in line
    assert checkpoints(tmp_path / "run") == ["step-00000002"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink])
@pytest.mark.parametrize("file", ["rank-00001-000.safetensors", "state.json", "random-00000.safetensors"])
def test_a_harmed_file_is_named_and_the_checkpoint_before_is_taken(
    harm: Callable[[Path], None], file: str, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(whole("ddp") / "checkpoints", tmp_path / "checkpoints")
    assert damage(tmp_path / "checkpoints" / "step-00000006") is None
    harm(tmp_path / "checkpoints" / "step-00000006" / file)
    problem = damage(tmp_path / "checkpoints" / "step-00000006")
    assert problem is not None and file in problem
    assert checkpoint_before(tmp_path) == "step-00000004"


def checkpoint_before(run: Path) -> str:
    return next(path.name for path in reversed(named(run / "checkpoints")) if damage(path) is None)


def test_a_run_says_what_it_passes_over_and_a_second_run_keeps_out(
    start: Callable[..., Any], whole: Callable[[str], Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole("ddp"), run)
    flip(run / "checkpoints" / "step-00000006" / "rank-00001-000.safetensors")
    went = start("ddp", run)
    assert set(went["statuses"]) == {0}, went["output"]
    assert "warning: step-00000006 is passed over: the contents of " in went["output"]
    assert "resumes from" in went["output"] and steps(run) == steps(whole("ddp"))
    held = os.open(run, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    second = start("ddp", run)
    os.close(held)
    assert set(second["statuses"]) == {2} and "another run is writing to this folder" in second["output"]
    assert checkpoints(run) == ["step-00000004", "step-00000006"]


def test_a_read_only_mount_is_said_and_the_last_good_one_is_named(
    start: Callable[..., Any], whole: Callable[[str], Path], tmp_path: Path
) -> None:
    """Not even the superuser may write to it."""
    run = tmp_path / "run"
    shutil.copytree(whole("ddp"), run)
    for path in sorted((run / "checkpoints").iterdir())[1:]:
        shutil.rmtree(path)
    place = str(run / "checkpoints")
    if subprocess.run(["mount", "--bind", "-o", "ro", place, place], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        went = start("ddp", run)
    finally:
        subprocess.run(["umount", place], check=True)
    assert set(went["statuses"]) == {0} and "resumes from" in went["output"], went["output"]
    assert "no checkpoint at step 6 (" in went["output"] and "Read-only file system" in went["output"]
    assert checkpoints(run) == ["step-00000004"] and steps(run) == steps(whole("ddp"))


def test_a_folder_that_cannot_be_written_is_no_reason_to_lose_the_run(start: Callable[..., Any], tmp_path: Path) -> None:
    """The superuser may write anywhere: a file stands where the folder should be made."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("no folder", encoding="utf-8")
    went = start("ddp", run, checkpoint_mode="async")
    assert set(went["statuses"]) == {0}, went["output"]
    assert went["output"].count("warning: no checkpoint at step ") == 3
