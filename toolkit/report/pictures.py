"""The pictures of the page as HTML and SVG: bars that a phone can show, plots whose text stays as large as the page's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from toolkit.report.style import COLOURS, NAMES
from toolkit.units import format_size

WIDEST = 2.5
"""Bars end at this many times the capacity: one hopeless plan must not squeeze the others."""
Series = tuple[str, str, list[tuple[float, float]]]
"""Name, colour, points."""


def parts_of(memory: dict[str, Any]) -> dict[str, int]:
    """The terms of a peak in the order of the legend: categories, then the allocator's rounding, then what is outside it."""
    breakdown = memory["breakdown"]
    parts = {name: int(breakdown.get(name, 0)) for name in COLOURS if name in breakdown}
    if min(parts.values(), default=0) < 0:  # an estimate that ranks plans knows the sum, not the terms
        parts = {"unsplit": memory["peak_allocated"]}
    parts["rounding"] = max(0, memory["peak_reserved"] - memory["peak_allocated"])
    parts["outside"] = memory["outside_allocator"]
    return parts


def legend(names: Sequence[str]) -> str:
    items = "".join(f'<li><i class="{name}"></i>{NAMES[name]}</li>' for name in names)
    return f'<ul class="legend" aria-label="Colours">{items}</ul>'


def bars(plans: list[dict[str, Any]], capacity: int) -> str:
    """A stacked bar per plan against the capacity. A plan has name, note, fits, chosen and memory."""
    totals = [plan["memory"]["peak_total"] for plan in plans]
    scale = min(max([*totals, int(capacity * 1.08)]), int(capacity * WIDEST)) or 1
    used = [name for name in COLOURS if any(parts_of(plan["memory"]).get(name) for plan in plans)]
    rows = []
    for plan, total in zip(plans, totals, strict=True):
        left, pieces = float(scale), []
        parts = {name: size for name, size in parts_of(plan["memory"]).items() if size}
        for name, size in parts.items():
            width = min(float(size), left)
            left -= width
            if width > 0:
                pieces.append(f'<i class="{name}" style="width:{100 * width / scale:.2f}%" '
                              f'title="{NAMES[name]} {format_size(size)}"></i>')
        spoken = ", ".join(f"{NAMES[name]} {format_size(size)}" for name, size in parts.items())
        beyond = " (the bar is cut off)" if total > scale else ""
        label = f"{plan['name']}: {format_size(total)} of {format_size(capacity)}{beyond}. {spoken}"
        rows.append(
            f'<li class="{"chosen" if plan["chosen"] else ""}"><div class="head"><span class="name">'
            f'{"→ " if plan["chosen"] else ""}{escape(plan["name"])}</span><span><span class="dim">{format_size(total)}{beyond}'
            f'</span> <span class="{"good" if plan["fits"] else "bad"}">{escape(plan["note"])}</span></span></div>'
            f'<div class="bar" role="img" aria-label="{escape(label)}">{"".join(pieces)}'
            f'<b style="left:{100 * capacity / scale:.2f}%"></b></div></li>')
    return legend(used) + f'<ul class="plans">{"".join(rows)}</ul>'


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with header cells for rows and columns; it scrolls by itself on a narrow screen."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows)
    return (f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table><caption>{escape(caption)}'
            f"</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>")


def nice_top(value: float) -> float:
    """The next number of binary steps at or above a value: an axis of memory ends at it."""
    if value <= 0:
        return 1.0
    unit = 2.0 ** math.floor(math.log2(value))
    return next(unit * k for k in (1, 1.25, 1.5, 1.75, 2) if unit * k >= value)


def timeline(data: dict[str, Any], limit: int | None) -> str:
    """Stacked areas over the moments of two steps, with the peak, the steps and `limit` (bytes that tensors may take) marked.

    The plot is a slider: arrow keys move a cursor, and what is alive there is read out below it.
    """
    level, peak = data["level"], data["peak"]
    shown = limit if limit is not None and limit < 3 * max(level) else None
    top = nice_top(max([*level, shown or 0]) * 1.02)
    last = max(1, len(level) - 1)
    base: list[int] = [0] * len(level)
    areas: list[str] = []
    for name in COLOURS:
        if name not in data["categories"]:
            continue
        over = [a + int(b) for a, b in zip(base, data["categories"][name], strict=True)]
        front = [f"{i},{1000 - 1000 * v / top:.1f}" for i, v in enumerate(over)]
        back = [f"{i},{1000 - 1000 * base[i] / top:.1f}" for i in range(len(base) - 1, -1, -1)]
        areas.append(f'<polygon class="{name}" points="{" ".join(front + back)}"/>')
        base = over
    ticks = "".join(f'<span class="y" style="bottom:{25 * i}%">{format_size(top * i / 4)}</span>' for i in range(5))
    rules = "".join(f'<span class="rule" style="left:{100 * s / last:.2f}%"></span><span class="x {"first" if not s else ""}" '
                    f'style="left:{100 * s / last:.2f}%">step {n}</span>' for n, s in enumerate(data["steps"], 1))
    dashed = "" if shown is None else f'<b class="level" style="bottom:{100 * shown / top:.2f}%" title="for tensors"></b>'
    where = next((", ".join(filter(None, r[:2])) for r in data["runs"] if r[2] <= peak < r[3]), "")
    alive = sorted(((v[peak], c) for c, v in data["categories"].items() if v[peak] > 0), reverse=True)
    listed = "".join(f'<li><i class="{c}"></i>{NAMES[c]} {format_size(v)}</li>' for v, c in alive)
    said = f"step 2, {where}: {format_size(level[peak])} (the peak)"
    spoken = f"{said}. Alive: " + ", ".join(f"{NAMES[c]} {format_size(v)}" for v, c in alive)
    content = json.dumps({key: data[key] for key in ("level", "categories", "runs", "steps", "peak")}, separators=(",", ":"))
    return (
        f'<figure><div class="plot" id="timeline" tabindex="0" role="slider" aria-label="Moment of the two steps; arrow keys '
        f'move, P goes to the peak" aria-valuemin="0" aria-valuemax="{last}" aria-valuenow="{peak}" '
        f'aria-valuetext="{escape(spoken)}">'
        f'<svg viewBox="0 0 {last} 1000" preserveAspectRatio="none" aria-hidden="true">{"".join(areas)}</svg>'
        f'{ticks}{rules}{dashed}'
        f'<span class="peak" style="left:{100 * peak / last:.2f}%;bottom:{100 * level[peak] / top:.2f}%"></span>'
        f'<span class="cursor" hidden></span></div><figcaption>In the order of allocations, not of seconds. '
        f'{"The dashed line is what the GPU has for tensors. " if shown is not None else ""}'
        f'Point at a moment, or use the arrow keys.</figcaption></figure>'
        f'<div class="readout" id="alive"><p><strong>{escape(said)}</strong></p><ul class="legend">{listed}</ul></div>'
        f'<script type="application/json" id="timeline-data">{content.replace("<", chr(92) + "u003c")}</script>'
    )


def lines(label: str, series: list[Series], *, x: Callable[[float], str], y: Callable[[float], str], top: float,
          logs: bool = False, dashed: Sequence[str] = ()) -> str:
    """Lines over a common axis; `logs` makes both axes powers of two, else the vertical one starts at zero."""
    xs = [p[0] for _, _, points in series for p in points]
    ys = [p[1] for _, _, points in series for p in points]
    scale = math.log2 if logs else float
    low_x, high_x = scale(min(xs)), max(scale(max(xs)), scale(min(xs)) + 1e-9)
    low_y = math.floor(math.log2(min(ys))) if logs else 0.0
    high_y = math.ceil(math.log2(max(ys))) if logs else top
    high_y = max(high_y, low_y + 1e-9)

    def place(p: tuple[float, float]) -> tuple[float, float]:
        return 1000 * (scale(p[0]) - low_x) / (high_x - low_x), 1000 - 1000 * (scale(p[1]) - low_y) / (high_y - low_y)

    drawn, dots = [], []
    for name, colour, points in series:
        spots = [place(p) for p in points]
        dash = ' stroke-dasharray="6 5"' if name in dashed else ""
        drawn.append(f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in spots)}" fill="none" stroke="{colour}" '
                     f'stroke-width="2.5" vector-effect="non-scaling-stroke"{dash}/>')
        if name not in dashed and len(spots) <= 40:
            dots += [f'<ellipse cx="{a:.1f}" cy="{b:.1f}" rx="5" ry="12" fill="{colour}"/>' for a, b in spots]
    steps = range(int(low_y), int(high_y) + 1) if logs else [top * i / 4 for i in range(5)]
    ticks = "".join(f'<span class="y" style="bottom:{100 * (v - low_y) / (high_y - low_y):.1f}%">'
                    f'{y(2.0**v if logs else v)}</span>' for v in steps)
    marks = sorted(set(xs)) if len(set(xs)) <= 12 else [min(xs), max(xs)]
    ends = {min(marks): "first", max(marks): "last"}
    ticks += "".join(f'<span class="x {ends.get(v, "")}" style="left:{place((v, ys[0]))[0] / 10:.1f}%">{x(v)}</span>'
                     for v in marks)
    keys = "".join(f'<li><i style="background:{colour}"></i>{escape(name)}</li>' for name, colour, _ in series)
    return (f'<figure><ul class="legend">{keys}</ul><div class="plot" role="img" aria-label="{escape(label)}">'
            f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{"".join(drawn)}{"".join(dots)}</svg>'
            f"{ticks}</div></figure>")
