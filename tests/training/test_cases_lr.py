"""LR, PREC and PAR: what went wrong in public with schedules, number formats and random streams. cases.yaml lists the
reports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.training.checkpoint import Progress
from toolkit.training.config import TrainConfig
from toolkit.training.model import Source, build_model, load_config
from toolkit.training.optimizer import rate_at

Make = Callable[..., TrainConfig]


def test_lr_of_a_step_does_not_follow_the_number_of_ranks(make_config: Make) -> None:
    """https://github.com/huggingface/accelerate/issues/2926"""
    config = make_config(warmup_steps=3)
    assert all(rate_at(step, 20, config, 1) == rate_at(step, 20, config, 8) for step in range(1, 21))


def test_lr_of_the_first_step_is_that_of_warm_up(make_config: Make) -> None:
    """https://github.com/huggingface/accelerate/issues/2124"""
    assert rate_at(1, 100, make_config(warmup_steps=10, learning_rate=1.0), 1) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_lr_ends_with_the_last_step_and_never_beyond(schedule: str, make_config: Make) -> None:
    """https://github.com/huggingface/accelerate/issues/843, https://github.com/huggingface/diffusers/issues/8236"""
    config = make_config(schedule=schedule, learning_rate=1.0, warmup_steps=2)
    rates = [rate_at(step, 9, config, 1) for step in range(1, 10)]
    assert max(rates) == 1.0 and rates[-1] == min(rates[2:]) and all(0 < rate <= 1 for rate in rates)


def test_prec_steps_that_an_overflow_undid_do_not_advance_the_schedule() -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/697 (that a run of them ends: test_metrics.py)"""
    done = Progress(step=0).after(10, skipped=True).after(10, skipped=False)
    assert (done.step, done.skipped) == (2, 1)
    recipe = (Path(__file__).parents[2] / "recipes" / "train.py").read_text(encoding="utf-8")
    assert "rate_at(step - done.skipped" in recipe


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.float32), ("fp16", torch.float32), ("bf16-pure", torch.bfloat16)])
def test_prec_trained_weights_are_fp32_unless_pure_is_asked_for(
    precision: str, dtype: torch.dtype, make_config: Make, tiny_model: Path, tokenizer: Any, accelerator: Any
) -> None:
    """https://github.com/huggingface/accelerate/issues/1778, https://github.com/huggingface/accelerate/issues/2624"""
    config = make_config(model=str(tiny_model), precision=precision, seq_len=64)
    source = Source(str(tiny_model), random=False)
    model = build_model(config, source, load_config(config, source), tokenizer, accelerator)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_par_dropout_differs_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/huggingface/accelerate/issues/114, https://github.com/huggingface/transformers/issues/31412"""
    from accelerate.utils import set_seed

    recipe = (Path(__file__).parents[2] / "recipes" / "train.py").read_text(encoding="utf-8")
    assert "set_seed(config.seed, device_specific=True)" in recipe
    masks = []
    for rank in range(2):
        monkeypatch.setattr("accelerate.utils.random.AcceleratorState", partial(SimpleNamespace, process_index=rank))
        set_seed(42, device_specific=True)
        masks.append(torch.nn.functional.dropout(torch.ones(64), 0.5))
    assert not torch.equal(*masks)
