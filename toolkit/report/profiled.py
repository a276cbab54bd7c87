"""What `toolkit profile` found, as a person reads it in a terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from toolkit.profiling.command import Profiled, Rank
from toolkit.profiling.oom import host_memory
from toolkit.profiling.trend import gap_line, rise_line
from toolkit.report.terminal import console
from toolkit.units import format_size

COUNTERS = {"cuda": "the CUDA allocator's count", "allocations": "every CPU tensor counted",
            "rss": "the resident set of the process, libraries included"}


def show_profile(found: Profiled) -> None:
    """A row per rank, the worst first; what that one holds; what to look at."""
    out = console()
    if not found.ranks:
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("rank", "steps", "peak", "first step", "after a step", "ended"):
        table.add_column(name, justify="left" if name == "ended" else "right")
    for rank in found.ranks:
        ended = "yes" if rank.ended else f"signal {rank.signal}" if rank.signal else "no"
        table.add_row(str(rank.rank), str(len(rank.steps)), format_size(rank.peak), format_size(rank.steps[0]["peak"]),
                      format_size(rank.resident), ended)
    out.print(table)
    worst = found.ranks[0]
    if worst.categories:
        held = ", ".join(f"{name.replace('_', ' ')} {format_size(size)}" for name, size in worst.categories.items() if size)
        out.print(f"Rank {worst.rank} after its third step: {held}.")
    out.print(f"Measured: {COUNTERS.get(worst.counter, 'nothing')}. Records: {found.folder}", style="dim")
    for rank in found.ranks:
        for line in warnings_of(rank):
            out.print(Text(line, style="yellow"))


def warnings_of(rank: Rank) -> list[str]:
    """Memory that rises step after step, and memory that is reserved without being used."""
    out = []
    if rank.rise:
        left = next((s["capacity"] for s in rank.steps if "capacity" in s), host_memory().get("available", 0) + rank.peak)
        out.append(rise_line(f"Rank {rank.rank}", rank.rise, left - rank.peak if left else 0) + ".")
    last = rank.steps[-1]
    gap = gap_line(f"Rank {rank.rank}", last["reserved"], last["peak"]) if last.get("reserved") else None
    if gap:
        out.append(gap + ".")
    return out
