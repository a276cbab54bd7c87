"""Estimates and recommendations as a person reads them in a terminal."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.estimate.result import CATEGORIES, Estimate
from toolkit.planner.recommendation import Recommendation
from toolkit.planner.search import Evaluated
from toolkit.units import format_count, format_size

BAR = 24
NARROWEST = 40
SMALL = 80
"""Up to so many characters, a usual terminal's, a table leaves out what its other columns or --json tell as well."""


def console() -> Console:
    """Standard output; colours only on a terminal, a fixed width elsewhere so that files read well.

    Names of models and folders are shown as they are: no markup is read in them.
    """
    given = os.environ.get("COLUMNS", "")
    width = max(NARROWEST, int(given) if given.isdecimal() and int(given) else 110)
    return Console(width=None if sys.stdout.isatty() else width, highlight=False, soft_wrap=False, markup=False, emoji=False)


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """A status line on stderr while something runs; silent when that is not a terminal."""
    screen = Console(stderr=True)
    if not screen.is_terminal:
        yield lambda _: None
        return
    with screen.status(title) as status:
        yield lambda what: status.update(f"{title}: {what}")


def _bar(part: int, whole: int) -> str:
    filled = round(BAR * part / whole) if whole else 0
    return "█" * filled + "·" * (BAR - filled)


def _title(e: Estimate) -> str:
    w, c = e.workload, e.cluster
    unit = "CPU process" if c.gpu.is_cpu else c.gpu.name
    trainable = "" if e.model.parameters == e.model.trainable_parameters else \
        f", {format_count(e.model.trainable_parameters)} trainable"
    return (f"{e.model.name} ({format_count(e.model.parameters)} parameters{trainable}) · {w.method}, {w.precision}, "
            f"{w.optimizer}, {w.micro_batch} x {w.seq_len} tokens{f' x {w.accumulate}' if w.accumulate > 1 else ''} · "
            f"{e.plan.label} on {c.world_size} x {unit}")


def _say_left_out(out: Console, e: Estimate) -> None:
    if e.model.left_out:
        out.print(f"note: its text model alone is counted, without what its config calls {' and '.join(e.model.left_out)}",
                  style="dim")


def show_estimate(e: Estimate, margin: float | None) -> None:
    """The estimate of one plan: what is alive at the peak, what is around it, whether it fits."""
    out, m = console(), e.memory
    out.print(_title(e), style="bold")
    _say_left_out(out, e)
    table = Table(box=box.SIMPLE_HEAD, title=f"Alive at the peak: {m.at_peak.phase}, {m.at_peak.module or 'the model itself'}",
                  title_justify="left", title_style="")
    table.add_column("what")
    table.add_column("size", justify="right")
    table.add_column("share", justify="left")
    for category in CATEGORIES:
        size = m.breakdown[category]
        table.add_row(category.replace("_", " "), format_size(size), _bar(size, m.peak_allocated) if size else "")
    table.add_section()
    table.add_row("peak allocated", format_size(m.peak_allocated), "steady state, the second and later steps")
    out.print(table)
    rows = Table(box=None, show_header=False, padding=(0, 2))
    rows.add_row("first step", format_size(m.first_step_peak))
    rows.add_row("between steps", format_size(m.resident))
    rows.add_row("while loading", format_size(m.load_peak))
    if not e.cluster.gpu.is_cpu:
        low, high = m.outside_interval
        rows.add_row("reserved by the allocator", format_size(m.peak_reserved))
        rows.add_row("outside it (context, NCCL)",
                     f"{format_size(m.outside_allocator)}  ({format_size(low)} to {format_size(high)})")
    host = f"{format_size(m.host.peak)}" + (f" of {format_size(m.host.capacity)}" if m.host.capacity else "")
    if m.host.peak:
        rows.add_row("host memory of a node", host + (f", {format_size(m.host.pinned)} of it pinned" if m.host.pinned else ""))
    if m.nvme:
        rows.add_row("NVMe of a node", format_size(m.nvme))
    if e.time is not None:
        mfu = f", MFU {e.time.mfu:.0%}" if e.time.mfu is not None else ""
        rows.add_row("step", f"{e.time.step_seconds:.3g} s, {format_count(e.time.tokens_per_second)} tokens/s{mfu}, "
                             f"{e.time.communication_share:.0%} waiting for communication")
    out.print(rows)
    if len(m.largest) > 1:
        out.print("\nLargest:", ", ".join(f"{what or category.replace('_', ' ')} {format_size(size)}"
                                          for category, what, size in m.largest[:5]), style="dim")
    for note in m.notes:
        out.print("note:", note, style="dim")
    limit = int(m.capacity * (1 - (margin or 0)))
    fits = m.fits and m.peak_total <= limit
    kept = f" with {margin:.0%} kept free" if margin else ""
    verdict = (f"It fits: {format_size(m.peak_total)} of {format_size(m.capacity)}{kept}, "
               f"{format_size(limit - m.peak_total)} to spare."
               if fits else
               f"It does not fit: {format_size(m.peak_total)} of {format_size(m.capacity)}{kept}, "
               + (f"{format_size(m.peak_total - limit)} too much." if m.peak_total > limit else
                  f"the host needs {format_size(m.host.peak)}."))
    out.print(Text(verdict, style="bold green" if fits else "bold red"))


HEADROOM = 4
"""Its place in a row."""


def _row(result: Evaluated, chosen: bool) -> list[str | Text]:
    c, e = result.candidate, result.estimate
    mark = "→ " if chosen else "  "
    if e is None:
        return [mark + c.name, str(c.cluster.world_size), "", "", "", "", Text(result.why, style="dim")]
    speed = format_count(e.time.tokens_per_second) if e.time else "-"
    batch = f"{c.workload.micro_batch}" + (f" x {c.workload.accumulate}" if c.workload.accumulate > 1 else "")
    style = "green" if result.fits else "red"
    return [mark + c.name, str(c.cluster.world_size), batch, format_size(e.memory.peak_total),
            format_size(e.memory.headroom), speed, Text(result.why, style=style)]


def _plans(shown: list[Evaluated], chosen: Evaluated | None, *, small: bool) -> Table:
    """A row per plan; on a small screen without the headroom, which the verdict tells too. Nothing is cut off."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0) if small else (0, 1))
    left_out = [HEADROOM] if small else []
    for number, name in enumerate(("plan, lightest first", "GPUs", "batch", "peak", "headroom", "tokens/s", "verdict")):
        if number not in left_out:
            justify: Any = "left" if number in (0, 6) else "right"
            table.add_column(name, justify=justify, overflow="fold", min_width=11 if number == 0 else None)
    for result in shown:
        cells = _row(result, chosen is not None and result.candidate == chosen.candidate)
        table.add_row(*(cell for number, cell in enumerate(cells) if number not in left_out))
    return table


def show_recommendation(r: Recommendation, *, every: bool, base_batch: int | None = None, learning_rate: float = 2e-5) -> None:
    """One GPU or not first, then the candidates, the choice, its neighbours, the commands."""
    out = console()
    out.print(r.one_gpu, style="bold")
    results = r.results
    if results and results[0].estimate:
        e = results[0].estimate
        unit = "a process" if e.cluster.gpu.is_cpu else e.cluster.gpu.name
        out.print(f"{e.model.name}: {format_count(e.model.parameters)} parameters, {r.request.workload.method}, "
                  f"{r.request.workload.precision}, {r.request.workload.seq_len} tokens; {format_size(e.memory.capacity)} on "
                  f"{unit}, {r.request.kept_free:.0%} of it kept free")
        _say_left_out(out, e)
    shown = results if every else _worth_showing(results, r.chosen or r.closest)
    out.print(_plans(shown, r.chosen, small=out.width <= SMALL))
    if len(shown) < len(results):
        out.print(f"({len(results) - len(shown)} more plans were tried; --all shows them)", style="dim")
    for why, count in r.pruned.items():
        out.print(f"({count} not tried: {why})", style="dim")
    if r.chosen is None:
        out.print(Text(r.reason[0].upper() + r.reason[1:] + ".", style="bold red"))
        for change in r.changes:
            verdict = "fits" if change.fits else f"still {format_size(change.short)} short"
            out.print(f"  {change.what:<26} {change.option:<30} {verdict}", style="green" if change.fits else "dim")
        return
    out.print(Text(f"Chosen: {r.reason}.", style="bold green"))
    for other, trade in r.alternatives:
        out.print(f"  instead: {other.candidate.name}: {trade}", style="dim")
    _rate(out, r, base_batch, learning_rate)
    if r.files:
        out.print("\nWritten:", ", ".join(r.files), soft_wrap=True)
        folder = Path(r.files[0]).parent
        launch, train = (shlex.quote(str(folder / name)) for name in ("accelerate.yaml", "train.yaml"))
        out.print(f"Launch:  accelerate launch --config_file {launch} recipes/train.py --config {train}", soft_wrap=True)
    else:
        out.print("\nAdd --write DIR for the files that launch it.", style="dim")


def _rate(out: Console, r: Recommendation, base_batch: int | None, learning_rate: float) -> None:
    if base_batch is None or r.chosen is None:
        return
    from toolkit.planner.files import scaled_rate

    rate, how = scaled_rate(r.chosen, base_batch, learning_rate)
    out.print(f"Learning rate: {learning_rate:g} was tuned for {base_batch} samples; {rate:.3g} is proposed ({how}).")


def _worth_showing(results: list[Evaluated], chosen: Evaluated | None) -> list[Evaluated]:
    """Per strategy its lightest plan and the first that fits, and the chosen (or closest) one."""
    keep: list[Evaluated] = []
    seen: dict[str, set[bool]] = {}
    for result in results:
        key = f"{result.candidate.plan.label}/{result.candidate.cluster.world_size}"
        state = seen.setdefault(key, set())
        is_chosen = chosen is not None and result.candidate == chosen.candidate
        if is_chosen or not state or (result.fits and True not in state):
            keep.append(result)
            state.add(result.fits)
    return keep


_COLUMNS = {
    "gpus": ("name", "memory", "bf16_flops", "fp32_flops", "bandwidth", "link", "source"),
    "models": ("name", "hub", "parameters"),
    "strategies": ("name", "engine", "shards", "offloads", "summary", "when"),
    "optimizers": ("name", "state_bytes_per_parameter"),
}


_SPARED = ("source", "engine", "offloads")
_UNITS = {"bf16_flops": "bf16 FLOP/s", "fp32_flops": "fp32 FLOP/s"}


def _cell(column: str, value: object) -> str:
    if value is None:
        return "-"
    if column == "memory" and isinstance(value, int):
        return format_size(value)
    if column == "bandwidth" and isinstance(value, (int, float)):
        return f"{value / 1e9:,.0f} GB/s"
    if column in ("bf16_flops", "fp32_flops", "parameters") and isinstance(value, (int, float)):
        return format_count(value)
    return ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def show_rows(what: str, rows: list[dict[str, Any]]) -> None:
    """One list of the catalog."""
    out = console()
    small = out.width <= SMALL
    left_out = [column for column in _COLUMNS[what] if small and column in _SPARED]
    columns = [column for column in _COLUMNS[what] if column not in left_out]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0) if small else (0, 1))
    for column in columns:
        table.add_column(_UNITS.get(column, column.replace("_", " ")), overflow="fold", no_wrap=column == "name")
    for row in rows:
        table.add_row(*(_cell(column, row[column]) for column in columns))
    out.print(table)
    if left_out:
        out.print(f"--json and a wider terminal have more: {', '.join(left_out)}", style="dim")


def show_doctor(facts: dict[str, Any], optional: dict[str, str]) -> None:
    """What the machine has and lacks."""
    out = console()
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_row("toolkit", str(facts["toolkit"]))
    table.add_row("python", str(facts["python"]))
    ram, disk = format_size(facts["host_memory"]), format_size(facts["free_disk"])
    table.add_row("machine", f"{facts['cores']} cores, {ram} of RAM, {disk} of disk free here")
    gpus = ", ".join(f"{g['name']} ({format_size(g['memory'])})" for g in facts["gpus"]) or "none: runs use the CPU (gloo)"
    table.add_row("GPUs", gpus)
    table.add_row("compiler", str(facts["compiler"] or "none: exact CPU memory and DeepSpeed's offload need one"))
    for name, version in facts["packages"].items():
        table.add_row(name, version or f"missing: {optional.get(name, 'needed')}")
    out.print(table)
