"""Predicted against measured, term by term."""

from __future__ import annotations

from typing import Any

from toolkit.units import format_size

RESIDENT = ("parameters", "master_weights", "optimizer_states", "gradients")
"""What is held between steps and can be told apart in a live process."""
Term = tuple[str, int, int]
"""Name, predicted bytes, measured bytes."""


def terms(predicted: dict[str, Any] | None, measured: dict[str, Any] | None) -> list[Term]:
    """The terms that a run's prediction and its measurement both have; the last one is the peak.

    Args:
        predicted: `memory` of an estimate's JSON, with its `timeline` where there is one.
        measured: `measured` of memory.json, of the rank that took the most.
    """
    if not predicted or not measured:
        return []
    rows: list[Term] = []
    between = (predicted.get("timeline") or {}).get("between") or {}
    held = measured.get("resident_by_category") or {}
    if between and held:
        # Gradients that an engine keeps in buffers of its own hang on no parameter: they count as other, on both sides.
        told = [name for name in RESIDENT if held.get(name) or (between.get(name) and name != "gradients")]
        rows = [(f"{name.replace('_', ' ')}, between steps", between.get(name, 0), held.get(name, 0)) for name in told]
        rest = sum(size for name, size in between.items() if name not in told)
        rows.append(("other, between steps", rest, held.get("other", 0)))
    if "resident" in measured:
        rows.append(("all, between steps", predicted["resident"], measured["resident"]))
    rows.append(("first step, at its peak", predicted["first_step_peak"], measured.get("first_step_peak", 0)))
    if "resident" in measured:
        rows.append(("added during a step", predicted["peak_allocated"] - predicted["resident"],
                     measured["peak"] - measured["resident"]))
    rows.append(("peak", predicted["peak_allocated"], measured["peak"]))
    return rows


def difference(term: Term) -> str:
    """How far the prediction is off, as a share of what was measured."""
    _, claim, truth = term
    if claim == truth:
        return "exact"
    if abs(claim - truth) > 10 * truth:
        return ("+" if claim > truth else "") + format_size(claim - truth)
    return f"{(claim - truth) / truth * 100:+.2f}%"


def as_lines(rows: list[Term]) -> list[str]:
    """The table as lines of text, for a log."""
    width = max((len(name) for name, _, _ in rows), default=0)
    head = f"  {'memory':<{width}}  {'predicted':>10}  {'measured':>10}  difference"
    return [head, *(f"  {name:<{width}}  {format_size(claim):>10}  {format_size(truth):>10}  {difference((name, claim, truth))}"
                    for name, claim, truth in rows)]
