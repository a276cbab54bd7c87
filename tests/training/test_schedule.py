"""The learning rate as a function of the step, and what is decayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from toolkit.errors import UserError
from toolkit.training.config import TrainConfig
from toolkit.training.optimizer import build_optimizer, parameter_groups, peak_rate, rate_at, set_rate

Make = Callable[..., TrainConfig]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_it_rises_to_the_peak_and_falls_as_named(schedule: str, expected: list[float], make_config: Make) -> None:
    config = make_config(learning_rate=1.0, warmup_steps=2, schedule=schedule)
    assert [rate_at(step, 6, config, 1) for step in range(1, 7)] == pytest.approx(expected)


def test_no_step_is_wasted_on_a_rate_of_zero(make_config: Make) -> None:
    for warmup in (0, 1, 5, 9):
        config = make_config(learning_rate=1.0, warmup_steps=warmup)
        assert all(0 < rate_at(step, 5, config, 1) <= 1 for step in range(1, 6))


def test_the_rate_follows_the_global_batch_when_asked(make_config: Make) -> None:
    keys = {"learning_rate": 1e-4, "micro_batch": 4, "accumulate": 2, "base_batch": 8}
    assert peak_rate(make_config(**keys, scale_lr="linear"), 4) == pytest.approx(4e-4)
    assert peak_rate(make_config(**keys, scale_lr="sqrt"), 4) == pytest.approx(2e-4)
    assert peak_rate(make_config(**keys), 4) == 1e-4


def test_norms_and_biases_are_not_decayed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    decayed, others = parameter_groups(model, 0.1)
    assert [p.ndim for p in decayed["params"]] == [2] and [p.ndim for p in others["params"]] == [1, 1, 1]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert len(parameter_groups(model, 0.0)) == 1


def test_nothing_to_train_is_said() -> None:
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UserError, match="no parameter is trainable"):
        parameter_groups(model, 0.0)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_an_optimizer_steps_with_the_rate_it_is_set_to(name: str, make_config: Make, tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    optimizer = build_optimizer(make_config(optimizer=name, weight_decay=0.1), model)
    set_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    before = model.lm_head.weight.detach().clone()
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    assert not torch.equal(before, model.lm_head.weight)
