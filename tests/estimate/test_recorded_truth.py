"""Estimates against what real engines took (benchmarks/data/engine_cpu.jsonl)."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.estimate.engine import Estimator
from toolkit.estimate.result import Estimate
from toolkit.specs import ModelSpec, Plan, Workload
from toolkit.specs.detect import make_cluster
from toolkit.specs.plan import DdpSettings, ZeroSettings
from toolkit.timeline.kernels import compiles_products

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS = [json.loads(line) for line in (BENCHMARKS / "data" / "engine_cpu.jsonl").read_text().splitlines()]
CORNERS = [json.loads(line) for line in (BENCHMARKS / "data" / "engine_corners.jsonl").read_text().splitlines()]
DEEPSPEEDS_NAMES = {"reduce_bucket_size": "reduce_bucket", "allgather_bucket_size": "allgather_bucket",
                    "stage3_prefetch_bucket_size": "prefetch_bucket"}  # fmt: skip
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


def _corner(row: dict[str, Any]) -> Estimate:
    """The estimate of a row of engine_corners.jsonl."""
    zero = {DEEPSPEEDS_NAMES.get(key, key): value for key, value in row["zero"].items()}
    persist = zero.pop("stage3_param_persistence_threshold", None)
    plan = Plan(strategy=row["strategy"], checkpointing=row["checkpointing"], persist=persist, zero=ZeroSettings(**zero),
                ddp=DdpSettings(**row["ddp"]), shard_size=row["shard_size"] if row["strategy"] == "hsdp" else None)
    workload = Workload(method="lora" if row["lora"] else "full", lora_rank=row["lora"] or 16, seq_len=row["seq"],
                        micro_batch=row["micro"], accumulate=row["accumulate"], precision="fp32", weights_dtype="fp32",
                        optimizer=row["optimizer"], optimizer_impl=row["impl"], attention=row["attention"], clip=row["clip"])
    spec = ModelSpec(name=row["family"], config={"model_type": row["family"], **row["config"]})
    return Estimator(spec).estimate(workload, plan, make_cluster(gpu="cpu", gpus=row["world"]))


@pytest.mark.parametrize("row", CORNERS, ids=lambda r: f"{r['family']}-{r['strategy']}-{r['world']}")
def test_tiny_models_peaks_stand_elsewhere_and_are_the_engines(row: dict[str, Any]) -> None:
    """Where a gather or a flattened bucket is larger than what the model's code needs: gloo's copies, loose gradients."""
    memory = _corner(row).memory
    assert abs(memory.peak_allocated - row["steady_peak"]) <= 1024
    assert abs(memory.resident - row["resident"]) <= 1024
