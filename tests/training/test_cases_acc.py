"""ACC, EVAL and MET: what went wrong in public with the divisor of the loss. cases.yaml lists the reports.

One loop, cut into micro-batches in every way: loss, gradient and norm must not follow the cut.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.training import loss_scale
from toolkit.training.data import pack
from toolkit.training.data.loader import IGNORE, Batch, Loader
from toolkit.training.data.tokenize import TokenStore
from toolkit.training.loss import attach_loss
from toolkit.training.step import across_ranks, evaluate, gradient_norm

ROOT = Path(__file__).parents[2]
LENGTHS = [5, 3, 18, 2, 12, 7, 4, 26, 9, 8, 3, 11]


def loader(lengths: list[int] = LENGTHS, *, micro_batch: int = 1, accumulate: int = 1, rank: int = 0, world: int = 1) -> Loader:
    rng = np.random.default_rng(3)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    store = TokenStore(rng.integers(1, 64, offsets[-1]).astype(np.int32), rng.random(offsets[-1]) < 0.7, offsets)
    store.targets[offsets[:-1] + 1] = True
    return Loader(store=store, rows=pack.one_per_row(np.arange(len(lengths))), micro_batch=micro_batch, accumulate=accumulate,
                  rank=rank, world=world, pad_id=0, fixed_length=None, seed=1, shuffle=False)


@pytest.fixture
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64))
    attach_loss(small, "standard")
    return small


def step(model: Any, accelerator: Any, batches: list[Batch]) -> tuple[float, float, torch.Tensor]:
    """(mean loss, gradient norm, gradient) as the recipe takes them, from micro-batches on one process."""
    model.zero_grad()
    scale, targets = loss_scale(accelerator, [batch.labels for batch in batches])
    total = 0.0
    for batch in batches:
        summed = model(**batch.to(torch.device("cpu")))
        total += float(summed.detach())
        (summed * scale / accelerator.gradient_accumulation_steps).backward()
    norm = gradient_norm(accelerator, model, 0.0)
    assert isinstance(norm, float)
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return across_ranks(accelerator, total)[0] / max(targets, 1), norm, gradient


@pytest.fixture
def accumulating(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(steps: int) -> Any:
        accelerator.gradient_accumulation_steps = steps
        return accelerator

    yield make
    accelerator.gradient_accumulation_steps = 1


@pytest.mark.parametrize(("micro_batch", "accumulate"), [(4, 3), (3, 4), (1, 12)])
def test_acc_loss_norm_and_gradient_do_not_follow_the_cut(
    micro_batch: int, accumulate: int, model: Any, accumulating: Any
) -> None:
    """https://github.com/huggingface/transformers/issues/37766, .../issues/35203, .../issues/35204"""
    whole = step(model, accumulating(1), loader(micro_batch=12).step(0))
    cut = step(model, accumulating(accumulate), loader(micro_batch=micro_batch, accumulate=accumulate).step(0))
    assert cut[0] == pytest.approx(whole[0], rel=1e-5) and cut[1] == pytest.approx(whole[1], rel=1e-5)
    assert torch.allclose(cut[2], whole[2], atol=1e-6)


def test_acc_ranks_with_unequal_tokens_average_to_the_gradient_of_the_whole(model: Any, accumulating: Any) -> None:
    """https://github.com/huggingface/transformers/pull/40610, https://github.com/snowflakedb/ArcticTraining/issues/62"""
    loss, _, gradient = step(model, accumulating(1), loader(micro_batch=12).step(0))
    ranks = [loader(micro_batch=6, rank=rank, world=2).step(0)[0] for rank in range(2)]
    counts = [batch.num_targets for batch in ranks]
    assert counts[0] != counts[1]
    parts, total = [], 0.0
    for batch in ranks:  # As an engine does it: each rank's own backward, then the mean over ranks.
        model.zero_grad()
        summed = model(**batch.to(torch.device("cpu")))
        (summed * (2 / sum(counts))).backward()
        total += float(summed.detach())
        parts.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.allclose((parts[0] + parts[1]) / 2, gradient, atol=1e-6)
    assert total / sum(counts) == pytest.approx(loss, rel=1e-5)


def test_acc_the_end_of_an_epoch_makes_no_extra_step_and_has_its_own_divisor() -> None:
    """https://github.com/huggingface/accelerate/issues/1847"""
    seven = loader(LENGTHS[:7], accumulate=3)
    assert seven.steps_per_epoch == 3
    last = seven.step(2)
    assert len(last) == 3 and [batch.num_tokens for batch in last] == [4, 0, 0]
    assert sum(batch.num_targets for batch in last) == last[0].num_targets > 0


def test_acc_a_micro_batch_without_targets_changes_nothing(model: Any, accumulating: Any) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/issues/3796"""
    batches = loader(LENGTHS[:2], accumulate=2).step(0)
    empty = dataclasses.replace(batches[1], labels=torch.full_like(batches[1].labels, IGNORE))
    _, norm, with_empty = step(model, accumulating(2), [batches[0], empty])
    _, alone_norm, alone = step(model, accumulating(1), [batches[0]])
    assert torch.allclose(with_empty, alone, atol=1e-7) and norm == pytest.approx(alone_norm, rel=1e-5)
    loss, norm, gradient = step(model, accumulating(1), [empty])
    assert (loss, norm) == (0.0, 0.0) and torch.isfinite(gradient).all()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_eval_loss_is_the_mean_over_tokens_when_nothing_divides(world: int, model: Any, accelerator: Any) -> None:
    """https://github.com/huggingface/transformers/issues/16716"""
    ten = LENGTHS[:10]
    exact, targets = evaluate(accelerator, model, loader(ten))
    parts = [evaluate(accelerator, model, loader(ten, micro_batch=4, rank=rank, world=world)) for rank in range(world)]
    assert sum(count for _, count in parts) == targets
    assert sum(loss * count for loss, count in parts) / targets == pytest.approx(exact, rel=1e-5)


def test_eval_keeps_no_logits_and_gathers_none(model: Any, accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/huggingface/transformers/issues/12878, https://github.com/huggingface/transformers/issues/22602"""
    shapes = []
    monkeypatch.setattr(type(accelerator), "gather", lambda *_, **__: pytest.fail("evaluation gathers"))
    reduce = type(accelerator).reduce

    def spied(self: Any, tensor: torch.Tensor, **options: Any) -> Any:
        shapes.append(tensor.shape)
        return reduce(self, tensor, **options)

    monkeypatch.setattr(type(accelerator), "reduce", spied)
    model.register_forward_hook(lambda _module, _inputs, output: shapes.append(output.shape))
    evaluate(accelerator, model, loader(micro_batch=4))
    assert set(shapes) == {torch.Size([]), torch.Size([2])}


def test_met_what_is_logged_is_summed_over_ranks_and_the_batch_is_said() -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/7233, https://github.com/snowflakedb/ArcticTraining/issues/62"""
    recipe = (ROOT / "recipes" / "train.py").read_text(encoding="utf-8")
    assert re.search(r"loss = across_ranks\(accelerator, float\(loss_sum\)\)\[0\] / targets", recipe)
    described = (ROOT / "toolkit" / "training" / "run_folder.py").read_text(encoding="utf-8")
    assert "rows = {config.micro_batch} x {config.accumulate} accumulated x {world} processes" in described
