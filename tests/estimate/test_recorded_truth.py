"""Estimates against what real engines took (benchmarks/data/engine_cpu.jsonl)."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.timeline.kernels import compiles_products

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS = [json.loads(line) for line in (BENCHMARKS / "data" / "engine_cpu.jsonl").read_text().splitlines()]
ONEDNN = 10_348_600
"""Bytes that oneDNN kept for the products of the bf16 rows; a processor without its bf16 kernels predicts none of them."""


@pytest.fixture(scope="module")
def accuracy() -> Any:
    location = importlib.util.spec_from_file_location("accuracy", BENCHMARKS / "accuracy.py")
    assert location is not None and location.loader is not None
    module = importlib.util.module_from_spec(location)
    sys.modules["accuracy"] = module
    location.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def estimators() -> dict[str, Any]:
    return {}


def name(row: dict[str, Any]) -> str:
    parts = ("strategy", "model", "world", "precision", "checkpointing", "bucket", "lora_rank", "accumulate")
    return "-".join(str(row[part]) for part in parts)


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_the_peak_is_the_engines(row: dict[str, Any], accuracy: Any, estimators: dict[str, Any]) -> None:
    estimator = estimators.setdefault(row["model"], accuracy.Estimator(accuracy.model_spec(row["model"])))
    estimate = estimator.estimate(*accuracy.request(row))
    held = accuracy.held_by_the_script(row, estimate)
    memory = estimate.memory
    missing = row["steady_peak"] - memory.peak_allocated - held
    allowed = ONEDNN if row["precision"] == "bf16" and not compiles_products() else 0
    assert abs(missing) <= max(4096, 0.005 * row["steady_peak"]) + allowed
    assert abs(memory.resident + held - row["resident"]) <= 0.002 * row["resident"] + allowed
    assert sum(memory.breakdown.values()) == memory.peak_allocated


def test_more_than_half_of_the_rows_are_exact_to_a_page(accuracy: Any) -> None:
    result = accuracy.compare(False)
    assert result["toolkit"]["within_4_KiB"] > len(ROWS) / 2
    assert result["toolkit"]["median"] <= 0.0002
    assert all(figures["median"] > 0.1 for figures in result["others"].values()), "the rules of thumb are far off"
