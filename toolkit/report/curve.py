"""A scaling curve as a table with bars, and as an SVG picture."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from toolkit.report.terminal import console
from toolkit.units import format_count, format_size

if TYPE_CHECKING:
    from toolkit.planner.scaling import Curve

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 420, 80, 60, 50, 30
NAMES = ("GPUs", "nodes", "plan", "batch", "peak", "fits", "tokens/s", "efficiency", "waiting", "bound by")
COLOURS = {"weak": "#1f77b4", "strong": "#d95f02"}


def show_curves(curves: list[Curve]) -> None:
    """A table per mode, then what it shows in a sentence each."""
    out = console()
    small = out.width < 100  # without bars, so that plans and what bounds them are whole
    left_out = ("nodes", "waiting") if small else ()
    for curve in curves:
        kept = "the work of each GPU stays" if curve.mode == "weak" else "the global batch stays"
        table = Table(box=box.SIMPLE_HEAD, title=f"{curve.mode} scaling: {kept}", title_justify="left", title_style="bold",
                      padding=(0, 1, 0, 0))
        for name in (name for name in NAMES if name not in left_out):
            table.add_column(name, justify="left" if name in ("plan", "efficiency", "bound by", "fits") else "right",
                             no_wrap=name != "plan", overflow="fold", min_width=14 if name == "plan" else None)
        for p in curve.points:
            e = p.estimate
            work, time = e.workload, e.time
            batch = f"{work.micro_batch}" + (f" x {work.accumulate}" if work.accumulate > 1 else "")
            bar = "" if small else f" {'█' * round(10 * min(1.0, p.efficiency))}"
            cells = (str(p.gpus), str(p.nodes), e.plan.label, batch, format_size(e.memory.peak_total),
                     "yes" if e.memory.fits else "no", format_count(time.tokens_per_second) if time else "-",
                     f"{p.efficiency:>4.0%}{bar}", f"{time.communication_share:.0%}" if time else "-", p.bound)
            table.add_row(*(cell for name, cell in zip(NAMES, cells, strict=True) if name not in left_out))
        out.print(table)
        over, knee = curve.overtaken, curve.knee
        out.print(f"Communication takes more than half of the step from {over} GPUs on." if over else
                  "Computation is the larger part of the step everywhere.")
        out.print(f"The knee: after {knee} GPUs another doubling gains less than {curve.least_gain:g} times." if knee else
                  f"Every doubling gains at least {curve.least_gain:g} times.")


def svg(curves: list[Curve], title: str) -> str:
    """Tokens per second over GPUs, both logarithmic, with the ideal line of each curve."""
    points = [(p.gpus, p.estimate.time.tokens_per_second) for c in curves for p in c.points if p.estimate.time]
    gpus = [math.log2(n) for n, _ in points]
    speeds = [math.log2(s) for _, s in points]
    low_x, high_x = min(gpus), max(max(gpus), min(gpus) + 1)
    low_y, high_y = math.floor(min(speeds)), math.ceil(max(max(speeds), min(speeds) + 1))

    def place(n: float, speed: float) -> tuple[float, float]:
        x = LEFT + (math.log2(n) - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (math.log2(speed) - low_y) / (high_y - low_y) * (HEIGHT - BOTTOM - TOP)
        return x, y

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13" '
             f'role="img" aria-label="{escape(title)}"><rect width="100%" height="100%" fill="#fff"/>',
             f'<text x="{LEFT}" y="24" font-size="16" font-weight="bold">{escape(title)}</text>']
    for n in sorted({n for n, _ in points}):
        x, _ = place(n, 2**low_y)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>'
                     f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{n}</text>')
    for power in range(low_y, high_y + 1):
        _, y = place(2**low_x, 2**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
                     f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{format_count(2.0**power)}</text>')
    for number, curve in enumerate(curves):
        found = [(p.gpus, p.estimate.time.tokens_per_second) for p in curve.points if p.estimate.time]
        first, colour = found[0], COLOURS[curve.mode]
        ideal = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(n, min(2.0**high_y, first[1] * n / first[0])) for n, _ in found))
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(n, s) for n, s in found))
        parts.append(f'<polyline points="{ideal}" fill="none" stroke="{colour}" stroke-dasharray="4 4" opacity="0.5"/>'
                     f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in (place(n, s) for n, s in found)]
        parts.append(f'<text x="{WIDTH - RIGHT - 150}" y="{TOP + 18 + 18 * number}" fill="{colour}">{curve.mode} '
                     "(dashed: ideal)</text>")
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 14}" text-anchor="middle">GPUs</text>'
                 f'<text x="{LEFT}" y="{TOP - 8}">tokens per second</text></svg>')
    return "\n".join(parts)
