"""Predicted against measured: the terms add up, and what cannot be told apart counts as other on both sides."""

from __future__ import annotations

from toolkit.profiling.compare import as_lines, difference, terms

PREDICTED = {"peak_allocated": 1000, "first_step_peak": 900, "resident": 400,
             "timeline": {"between": {"parameters": 200, "optimizer_states": 100, "gradients": 60, "communication": 40}}}
MEASURED = {"peak": 1010, "first_step_peak": 900, "resident": 410,
            "resident_by_category": {"parameters": 200, "master_weights": 0, "optimizer_states": 100, "gradients": 0,
                                     "other": 110}}


def test_the_terms_add_up_on_both_sides() -> None:
    rows = {name: (claim, truth) for name, claim, truth in terms(PREDICTED, MEASURED)}
    held = [pair for name, pair in rows.items() if name.endswith("between steps") and not name.startswith("all")]
    assert tuple(map(sum, zip(*held, strict=True))) == rows["all, between steps"] == (400, 410)
    assert rows["other, between steps"] == (100, 110)  # the gradients are in an engine's buffer
    assert rows["added during a step"] == (600, 600) and rows["peak"] == (1000, 1010)
    assert "gradients, between steps" not in rows and "master weights, between steps" not in rows


def test_gradients_that_hang_on_parameters_are_a_term() -> None:
    measured = {**MEASURED, "resident_by_category": {**MEASURED["resident_by_category"], "gradients": 60, "other": 50}}
    rows = {name: (claim, truth) for name, claim, truth in terms(PREDICTED, measured)}
    assert rows["gradients, between steps"] == (60, 60) and rows["other, between steps"] == (40, 50)


def test_an_older_record_has_fewer_terms() -> None:
    assert [row[0] for row in terms({k: v for k, v in PREDICTED.items() if k != "timeline"}, MEASURED)][-1] == "peak"
    assert terms(None, MEASURED) == [] and terms(PREDICTED, None) == []


def test_differences_read_well() -> None:
    assert difference(("x", 10, 10)) == "exact" and difference(("x", 0, 0)) == "exact"
    assert difference(("x", 101, 100)) == "+1.00%" and difference(("x", 90, 100)) == "-10.00%"
    assert difference(("x", 2048, 32)) == "+1.97 KiB" and difference(("x", 2048, 0)) == "+2 KiB"
    lines = as_lines(terms(PREDICTED, MEASURED))
    assert lines[-1].split() == ["peak", "1000", "B", "1010", "B", "-0.99%"]
    assert len({line.index(text) + len(text) for line, text in zip(lines[-2:], ("600 B", "1000 B"), strict=True)}) == 1
