"""Published rows of each family that must stay within their error, and rows that no file should be able to break it with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from published import evaluate, read_rows, summary  # noqa: E402

from toolkit.estimate.engine import Estimator  # noqa: E402

ROWS = {row["id"]: row for row in read_rows(ROOT / "benchmarks" / "data" / "gpu_rows.csv")}
ESTIMATORS: dict[Any, Estimator] = {}


@pytest.mark.parametrize(
    ("row", "within"),
    [
        ("fms-013", 0.5),  # full, one GPU: the foreach temporary of the optimizer step
        ("fms-041", 0.2),  # LoRA, one GPU: logits of transformers 4.48, whose forward names the hidden states meanwhile
        ("fms-095", 0.3),  # QLoRA, unsloth's kernels
        ("fms-099", 0.1),  # QLoRA of a mixture, expert by expert
        ("fms-208", 0.5),  # FSDP1, fp32 flat parameters
        ("fms-180", 0.1),  # FSDP1 under reentrant checkpointing: no unit is gathered ahead, the recomputed output stays
        ("fms-175", 0.1),  # the same with a frozen base: inputs and their gradients stay
        ("fms-107", 0.1),  # QLoRA of 70B under FSDP1
        ("fms-155", 0.1),  # a Granite: its embeddings' product and its logits' quotient
        ("fms-108", 2.0),  # the driver's figure: what wrapping and 4-bit products leave in the cache
        ("fms-123", 0.1),  # GPTQ with one scale for each output
        ("swift-003", 8.0),  # batches that differ in length, in fixed segments: a third of what is reserved
        ("swift-019", 4.0),  # the same of 34B
        ("qwen-026", 2.0),  # torch 2.0's foreach AdamW
        ("litgpt-014", 1.0),  # LoRA in a fused product, logits in fp32
        ("litgpt-059", 3.0),  # QLoRA: the last batch's inputs of packed layers are there through the next forward
        ("litgpt-034", 2.0),  # FSDP1: frozen and trained in one flat parameter, accumulated whole under no_sync
        ("fms-150", 0.1),  # FSDP1, the loss decides
        ("titan-023", 4.0),  # FSDP2, reserved: streams of their own, every second product saved
        ("titan-034", 3.0),  # FSDP2, reserved, the optimizer step: 0.1% with fixed segments, which its launcher did not use
        ("titan-036", 1.0),  # FSDP2, expandable segments, 13B on 64 GPUs
        ("titan-027", 1.0),  # FSDP2, expandable segments, compiled blocks
    ],
)  # fmt: skip
def test_published_rows_stay_within_their_error(row: str, within: float) -> None:
    found = evaluate(ROWS[row], ESTIMATORS)
    assert abs(found["error"]) <= within, found


def test_outcomes() -> None:
    for row in ("fms-188", "fms-062", "titan-076"):  # the last fits by torchtitan's Triton RMSNorm, which its configs then had
        found = evaluate(ROWS[row], ESTIMATORS)
        assert found["right"], found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strategy": "FSDP2 4 x TP 8"}, "parallel degrees"),
        ({"strategy": "telepathy"}, "is not known"),
        ({"gpu_type": "abacus"}, "not in the catalog"),
        ({"micro_batch": "many"}, "no batch"),
        ({"model": "no/such-model", "hidden": ""}, "sizes"),
        ({"metric_kind": "impression"}, "is not known"),
        ({"value_gib": "n/a"}, "no number"),
        ({"seq_len": "-5"}, "no batch"),
    ],
)
def test_a_row_that_cannot_be_expressed_says_why(changes: dict[str, str], reason: str) -> None:
    found = evaluate({**ROWS["fms-013"], **changes}, ESTIMATORS)
    assert reason in found["reason"]


def test_a_row_without_any_column_is_listed_too() -> None:
    found = evaluate({}, ESTIMATORS)
    assert found["reason"]
    assert summary([found]) == {
        "rows": 1, "expressed": 0, "A_allocated": {"n": 0, "median": None, "p90": None},
        "A_other": {"n": 0, "median": None, "p90": None}, "B": {"n": 0, "median": None, "p90": None},
        "outcomes": {"n": 0, "right": 0},
    }  # fmt: skip
