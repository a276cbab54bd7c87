"""A workload holds what can be asked for and nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from toolkit.errors import UserError
from toolkit.specs import Workload


def test_the_defaults_are_the_contracts() -> None:
    work = Workload()
    expected = {"method": "full", "lora_rank": 16, "lora_targets": "all-linear", "seq_len": 2048, "micro_batch": 1,
                "accumulate": 1, "precision": "bf16", "weights_dtype": "auto", "optimizer": "adamw", "optimizer_impl": "default",
                "attention": "sdpa", "loss": "standard", "compile": False}  # fmt: skip
    assert {name: getattr(work, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [({}, "fp32"), ({"precision": "fp32"}, "fp32"), ({"precision": "fp16"}, "fp32"), ({"precision": "bf16-pure"}, "bf16"),
     ({"method": "lora"}, "bf16"), ({"method": "qlora"}, "bf16"), ({"method": "lora", "weights_dtype": "fp32"}, "fp32"),
     ({"weights_dtype": "bf16"}, "bf16")],
)  # fmt: skip
def test_auto_weights_follow_method_and_precision(changes: dict[str, str], dtype: str) -> None:
    assert Workload(**changes).loaded_dtype == dtype  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lora_rank", "seq_len", "micro_batch", "accumulate"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", 10**10])
def test_counts_are_whole_and_at_least_one(name: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        Workload(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{name.replace('_', '-')} is {value!r}")


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [("method", "qlorra", "qlora"), ("precision", "bf17", "bf16"), ("optimizer", "adam", "adamw"), ("attention", "spda", "sdpa"),
     ("loss", "chunk", "chunked"), ("optimizer_impl", "for-each", "foreach"), ("task", "causallm", "causal-lm"),
     ("weights_dtype", "bf-16", "bf16")],
)  # fmt: skip
def test_a_slip_lists_what_is_allowed_and_the_nearest(name: str, value: str, near: str) -> None:
    with pytest.raises(UserError) as caught:
        Workload(**{name: value})  # type: ignore[arg-type]
    text = str(caught.value)
    assert text.startswith(f"{name.replace('_', '-')} {value!r} is not one of ")
    assert f"did you mean {near!r}" in text and "\n" not in text


def test_a_changed_copy_is_checked_again_and_leaves_the_first_alone() -> None:
    work = Workload()
    assert work.with_(seq_len=64).seq_len == 64 and work.seq_len == 2048
    with pytest.raises(UserError, match="micro-batch is 0"):
        work.with_(micro_batch=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        work.seq_len = 1  # type: ignore[misc]
