"""Processes that are killed can say nothing: they are watched from outside, and what the host had then is kept."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from toolkit.profiling.oom import host_memory
from toolkit.units import format_size

SECONDS = 0.5
"""Between two looks at the memory of the watched processes."""


def exit_signal(pid: int) -> int | None:
    """The signal that ended a process its parent has not asked about yet; 0: none; None: not known (any more)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[-1]) & 0x7F if fields[0] == "Z" else None


def children_of(parent: int) -> list[int]:
    """Processes whose parent is `parent`."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                if int((place / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]) == parent:
                    found.append(int(place.name))
    return found


def resident(pid: int) -> int:
    """Bytes of RAM that a process holds; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed for memory since it started, in this control group and on this machine."""
    total = 0
    for place, key in (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(place).read_text(encoding="ascii").splitlines():
                name, _, value = line.partition(" ")
                if name == key:
                    total += int(value)
    return total


@dataclass
class Watch:
    """The first of some processes to end, and what they all held shortly before."""

    pids: list[int]
    held: dict[int, int] = field(default_factory=dict)
    available: int | None = None
    """Least bytes of RAM that the host had left."""
    kills: int = field(default_factory=out_of_memory_kills)

    def look(self) -> None:
        """Note what everybody holds now."""
        for pid in self.pids:
            size = resident(pid)
            if size:
                self.held[pid] = size
        left = host_memory().get("available")
        if left is not None:
            self.available = left if self.available is None else min(left, self.available)

    def first_end(self) -> dict[int, int | None]:
        """Wait until one of them ends; its signal (see `exit_signal`) by process. Those that are gone already have ended."""
        handles: dict[int, int] = {}
        gone: dict[int, int | None] = {}
        poll = select.poll()
        for pid in self.pids:
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                gone[pid] = None
                continue
            except (OSError, AttributeError):
                continue
            handles[handle] = pid
            poll.register(handle, select.POLLIN)
        try:
            while handles and not gone:
                ended = [handles[handle] for handle, _ in poll.poll(SECONDS * 1000)]
                signals = {pid: exit_signal(pid) for pid in ended}
                if signals:
                    return signals
                self.look()
        finally:
            for handle in handles:
                os.close(handle)
        return gone

    def killed_for_memory(self) -> bool:
        """Whether the kernel has killed a process for memory since the watch began."""
        return out_of_memory_kills() > self.kills

    def explain(self, pid: int, name: str, *, certain: bool = True) -> str:
        """The line about a process that signal 9 ended; `certain`: the signal was seen."""
        total = host_memory().get("total")
        parts = [f"{name} was killed by signal 9" if certain else f"{name} was killed, most likely by signal 9"]
        parts.append("by the kernel: the host is out of memory" if self.killed_for_memory()
                     else "which is what a host or container that is out of memory does")
        if self.held.get(pid):
            parts.append(f"it held {format_size(self.held[pid])}, all {len(self.held)} processes "
                         f"{format_size(sum(self.held.values()))}")
        if total and self.available is not None:
            parts.append(f"{format_size(self.available)} of {format_size(total)} of host memory were left at the least")
        return "; ".join(parts)


def _attempt_folder() -> Path | None:
    """The launcher's folder of this attempt, below which each rank has one."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parent.parent if error_file else None


def leave_note(what: Literal["started", "ended"]) -> None:
    """Say to whoever watches that this process has started, or that it ends by itself."""
    folder = _attempt_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / f"{what}-{os.getpid()}").touch()


def left_no_note(pid: int) -> bool:
    """Whether a process that is gone was ended by something else, as far as that can be known."""
    folder = _attempt_folder()
    return folder is not None and folder.is_dir() and not (folder / f"ended-{pid}").exists()


def _started() -> list[int]:
    """The ranks that have left a note that they have, whether they are still there or not."""
    folder = _attempt_folder()
    return [int(note.name.partition("-")[2]) for note in folder.glob("started-*")] if folder is not None else []


def first_of_node(what: str) -> bool:
    """Whether this process is the first on its node to ask this of its launch: one line is enough for what befalls all ranks."""
    folder = _attempt_folder()
    if folder is None:
        return True
    try:
        (folder / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _claim_report() -> None:
    """Keep the other ranks, which miss this one, from reporting it as well (`toolkit.training.start`)."""
    folder = _attempt_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / "reported").touch()


def main(arguments: list[str]) -> None:
    """Watch the children of a launcher (`pid`, its own pid to be left out) and explain the first that signal 9 ends."""
    launcher, own = int(arguments[0]), os.getpid()
    pids = [int(a) for a in arguments[1:]] or [*{*children_of(launcher), *_started()} - {own}]
    watch = Watch(pids)
    watch.look()
    while watch.pids:
        ends = watch.first_end()
        for pid, signal in ends.items():
            # A launcher that was quicker has asked for the signal already: what is known then is that the process left no note.
            if signal == 9 or (signal is None and (watch.killed_for_memory() or left_no_note(pid))):
                line = watch.explain(pid, f"process {pid} of this run", certain=signal == 9)
                _claim_report()
                print(f"error: {line}; fewer processes per node or no offload need less of it", file=sys.stderr, flush=True)
                return
        ranks = _started()  # none is known without torch's launcher: the watch must not outlive the run for its neighbours' sake
        if not ends or not ranks or not ends.keys().isdisjoint(ranks):
            return
        watch.pids = [pid for pid in watch.pids if pid not in ends]  # helpers of the launcher come and go


if __name__ == "__main__":
    main(sys.argv[1:])
