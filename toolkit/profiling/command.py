"""Run somebody else's training command with every tensor counted, and read what each of its ranks recorded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.profiling.counter import build_shim, has_gpu
from toolkit.profiling.killed import Watch
from toolkit.profiling.trend import rise_per_step

HOOK = Path(__file__).with_name("hook")
STEADY_FROM = 3
SECONDS = 0.2
"""Between two looks at the running processes."""
PATIENCE = 10.0
"""Seconds; launchers give the other ranks three times as long and more to end before they kill them."""
RISING_STEPS = 5
"""So many steady steps in a row, each holding more than the one before, are called a leak."""


@dataclass
class Rank:
    """What one process recorded. Sizes in bytes."""

    rank: int
    pid: int
    counter: str = "none"
    steps: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False
    """It came to its own end: not killed, and not left by os._exit."""
    signal: int | None = None

    @property
    def peak(self) -> int:
        """Highest point of the third and later steps, of all where there are fewer."""
        peaks = [step["peak"] for step in self.steps]
        return max(peaks[STEADY_FROM - 1 :] or peaks or [0])

    @property
    def resident(self) -> int:
        """Held after the last step."""
        return self.steps[-1]["live"] if self.steps else 0

    @property
    def categories(self) -> dict[str, int]:
        return next((step["categories"] for step in self.steps if "categories" in step), {})

    @property
    def rise(self) -> int:
        """Bytes per step by which what is held rises, when it has risen at every one of the last steady steps; else 0."""
        return rise_per_step([step["live"] for step in self.steps[STEADY_FROM - 1 :]], RISING_STEPS)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"rank": self.rank, "pid": self.pid, "counter": self.counter, "peak": self.peak, "resident": self.resident,
                "first_step_peak": self.steps[0]["peak"] if self.steps else 0, "steps": len(self.steps),
                "resident_by_category": self.categories, "rise_per_step": self.rise, "ended": self.ended, "signal": self.signal,
                "peaks": [step["peak"] for step in self.steps]}


@dataclass
class Profiled:
    """A command that has run."""

    command: list[str]
    folder: Path
    status: int
    """Its exit status; negative: the signal that ended it."""
    ranks: list[Rank]
    """The rank that took the most first."""
    killed: str = ""
    """The line about the rank that signal 9 ended."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the rank that made the most."""
        return max((len(rank.steps) for rank in self.ranks), default=0)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"schema": 1, "command": self.command, "status": self.status, "steps": self.steps, "killed": self.killed,
                "folder": str(self.folder), "ranks": [rank.to_json() for rank in self.ranks]}


def profile_command(command: Sequence[str], folder: Path, *, stdout: int | None = None) -> Profiled:
    """Run `command` to its end, with its records and profile.json in `folder`.

    Args:
        stdout: where its standard output goes, as for subprocess; None: to this process's own.

    Raises:
        UserError: the command can't be started, or the folder can't be written.
    """
    records = folder / "records"
    try:
        records.mkdir(parents=True, exist_ok=True)
        for old in (*records.glob("*.jsonl"), *records.glob("ends")):
            old.unlink()
    except OSError as error:
        raise UserError(f"--output {folder}: {error.strerror or error}") from None
    try:
        process = subprocess.Popen(list(command), env=_environment(records), stdout=stdout)
    except FileNotFoundError:
        raise UserError(f"command {command[0]!r} does not exist; write toolkit profile -- COMMAND...") from None
    except OSError as error:
        raise UserError(f"command {command[0]!r} can't be started: {error.strerror or error}") from None
    watch = Watch([])
    try:
        with _passed_on(process):
            _follow(process, records, watch)
    except KeyboardInterrupt:  # the command has had it too: what it recorded until then is reported
        _finish(process)
    ends = read_ends(records)
    if process.returncode < 0:
        ends.append((process.pid, process.returncode, ends[-1][2] if ends else 0.0))
    signals = {pid: -status for pid, status, _ in ends if status < 0}
    found = Profiled(list(command), folder, process.returncode, read_records(records, signals))
    found.killed = explain_kill(found, ends, watch)
    (folder / "profile.json").write_text(json.dumps(found.to_json(), indent=1), encoding="utf-8")
    return found


def _environment(records: Path) -> dict[str, str]:
    """This environment with the hook on Python's path, and without a GPU the counter before every other library."""
    environment = {**os.environ, "TOOLKIT_PROFILE": str(records.resolve())}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH"))))
    shim = None if has_gpu() else build_shim()
    if shim is not None:
        environment["LD_PRELOAD"] = ":".join(filter(None, (str(shim), os.environ.get("LD_PRELOAD"))))
    return environment


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A scheduler's signals are meant for the command: it may save and end, and what it recorded until then is reported."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: process.send_signal(number)) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _finish(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(15)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def _follow(process: subprocess.Popen[bytes], records: Path, watch: Watch) -> None:
    """Wait for the command, and look at what its ranks hold meanwhile."""
    while True:
        watch.pids = _pids(records)
        watch.look()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS)
            return


def _pids(records: Path) -> list[int]:
    return [int(file.stem) for file in records.glob("*.jsonl")]


def read_ends(folder: Path) -> list[tuple[int, int, float]]:
    """How ranks ended, in the order in which launchers saw it: the process, its status (negative: the signal), seconds."""
    try:
        lines = (folder / "ends").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    ranks = _pids(folder)
    words = [line.split() for line in lines]
    ends = [(int(pid), int(status), float(when)) for pid, status, when in (w for w in words if len(w) == 3)]
    return [end for end in ends if end[0] in ranks]


def explain_kill(found: Profiled, ends: list[tuple[int, int, float]], watch: Watch) -> str:
    """The line about the rank that was killed; empty where none was, or its launcher did it since another one had failed."""
    failed = [when for _, status, when in ends if status]
    for pid, status, when in ends:
        if status == -signal.SIGKILL and when - failed[0] < PATIENCE:
            return watch.explain(pid, next((f"rank {rank.rank}" for rank in found.ranks if rank.pid == pid), f"process {pid}"))
    if found.status == 128 + signal.SIGKILL and not failed:  # what shells and MPI's launchers make of it
        lost = [rank for rank in found.ranks if not rank.ended]
        pid, name = (lost[0].pid, f"rank {lost[0].rank}") if len(lost) == 1 else (0, "a process of the command")
        return watch.explain(pid, name)
    return ""


def read_records(folder: Path, signals: dict[int, int]) -> list[Rank]:
    """The ranks that made a step, the one that took the most first."""
    ranks = []
    for file in folder.glob("*.jsonl"):
        rank = Rank(0, int(file.stem), signal=signals.get(int(file.stem)))
        for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue  # killed while it wrote
            if "start" in line:
                rank.rank = line.get("rank", 0)
            elif "step" in line:
                rank.steps.append(line)
            elif "end" in line:
                rank.ended = True
            rank.counter = line.get("counter", rank.counter)
        if rank.steps:
            ranks.append(rank)
    return sorted(ranks, key=lambda r: (-r.peak, r.rank))


def where_output_goes(json: bool) -> int | None:
    """With --json the command's own output must not mix with it: it goes to stderr."""
    return sys.stderr.fileno() if json else None
