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
    rows = _at_the_peak(predicted, measured) or _between_steps(predicted, measured)
    if "resident" in measured:
        rows.append(("all, between steps", predicted["resident"], measured["resident"]))
    rows.append(("first step, at its peak", predicted["first_step_peak"], measured.get("first_step_peak", 0)))
    if "resident" in measured:
        rows.append(("added during a step", predicted["peak_allocated"] - predicted["resident"],
                     measured["peak"] - measured["resident"]))
    rows.append(("peak", predicted["peak_allocated"], measured["peak"]))
    return rows


def _at_the_peak(predicted: dict[str, Any], measured: dict[str, Any]) -> list[Term]:
    """Where a step of the rank that took the most was recorded: every category at the highest point."""
    claim, truth = predicted.get("breakdown") or {}, (measured.get("worst") or {}).get("breakdown") or {}
    if not claim or not truth:
        return []
    names = [name for name in truth if truth[name] or claim.get(name)]
    return [(f"{name.replace('_', ' ')}, at the peak", claim.get(name, 0), truth[name]) for name in names]


def _between_steps(predicted: dict[str, Any], measured: dict[str, Any]) -> list[Term]:
    """What hangs on the model and the optimizer."""
    between = (predicted.get("timeline") or {}).get("between") or {}
    held = measured.get("resident_by_category") or {}
    if not between or not held:
        return []
    # Gradients that an engine keeps in buffers of its own hang on no parameter: they count as other, on both sides.
    told = [name for name in RESIDENT if held.get(name) or (between.get(name) and name != "gradients")]
    rows = [(f"{name.replace('_', ' ')}, between steps", between.get(name, 0), held.get(name, 0)) for name in told]
    rest = sum(size for name, size in between.items() if name not in told)
    return [*rows, ("other, between steps", rest, held.get("other", 0))]


def peak_place(predicted: dict[str, Any], measured: dict[str, Any]) -> str:
    """A line on which rank took the most and where; empty where no step was recorded."""
    worst = measured.get("worst") or {}
    if "at_peak" not in worst:
        return ""

    def where(point: dict[str, str]) -> str:
        return point["phase"] + (f" ({point['module']})" if point["module"] else "")

    ranks = measured.get("peak_by_rank") or [0]
    rank = f" on rank {worst['rank']} of {len(ranks)}" if len(ranks) > 1 else ""
    claim = f", predicted in {where(predicted['at_peak'])}" if predicted.get("at_peak") else ""
    return f"the peak of step {worst['step']}{rank} stood in {where(worst['at_peak'])}{claim}"


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
