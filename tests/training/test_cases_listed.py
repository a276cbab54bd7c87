"""The list of public reports: each is held by tests that exist, has a reason why it does not apply, or is named as open."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

TESTS = Path(__file__).parents[1]
CASES = yaml.safe_load((TESTS / "training" / "cases.yaml").read_text(encoding="utf-8"))


def test_every_report_is_settled_in_one_way_and_its_test_exists() -> None:
    assert {kind: len(rows) for kind, rows in CASES.items()} == {
        "ACC": 6, "LR": 4, "PREC": 5, "PAR": 6, "DATA": 7, "HANG": 6, "WRAP": 11, "INIT": 3, "PEFT": 5, "NDP": 5, "EVAL": 3,
        "MET": 5, "CKPT": 13, "EXP": 8}  # fmt: skip
    for row in (row for rows in CASES.values() for row in rows):
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", row["report"]), row
        assert len(row.keys() & {"test", "reason", "open"}) == 1, row
        if "test" in row:
            file, _, name = row["test"].partition("::")
            assert f"def {name}(" in (TESTS / file).read_text(encoding="utf-8"), row
