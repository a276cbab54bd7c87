"""The loss is a sum over targets inside the forward, the same by either way, and every token weighs alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.errors import UserError
from toolkit.training.loss import attach_loss, summed_loss


def make_model(folder: Path, kind: str, **changes: Any) -> Any:
    config = AutoConfig.from_pretrained(folder, attention_dropout=0.0, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    attach_loss(model, kind)
    return model


def batch(rows: int = 3, length: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 300, (rows, length), generator=generator)
    labels = ids.clone()
    labels[:, ::3] = -100
    return {"input_ids": ids, "labels": labels}


def test_it_is_the_sum_of_what_transformers_averages(tiny_model: Path) -> None:
    model, inputs = make_model(tiny_model, "standard"), batch()
    targets = int((inputs["labels"][:, 1:] != -100).sum())
    mean = model.logits_forward(**inputs).loss
    torch.testing.assert_close(model(**inputs) / targets, mean)


@pytest.mark.parametrize("length", [40, 700])
def test_chunked_gives_the_loss_and_gradients_of_standard(tiny_model: Path, length: int) -> None:
    inputs = batch(length=length)
    models = [make_model(tiny_model, kind, max_position_embeddings=1024) for kind in ("standard", "chunked")]
    losses = [model(**inputs) for model in models]
    torch.testing.assert_close(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_micro_batches_of_unequal_size_add_up_to_the_whole(tiny_model: Path) -> None:
    model, inputs = make_model(tiny_model, "standard"), batch(4)
    inputs["labels"][0, 5:] = -100
    parts = [model(**{k: v[rows] for k, v in inputs.items()}) for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(parts), model(**inputs))


def test_samples_that_share_a_row_do_not_see_each_other(tiny_model: Path) -> None:
    model, inputs = make_model(tiny_model, "standard").eval(), batch(2, 20)
    inputs["labels"][:, 0] = -100
    row = {key: value.reshape(1, -1) for key, value in inputs.items()}
    packed = model(**row, position_ids=torch.arange(20).repeat(2)[None])
    torch.testing.assert_close(packed, model(**inputs))


def test_low_precision_logits_are_summed_in_fp32() -> None:
    logits, labels = torch.randn(1, 50, 16, dtype=torch.bfloat16), torch.randint(0, 16, (1, 50))
    assert summed_loss(logits, labels).dtype == torch.float32


def test_what_is_not_available_is_refused(tiny_model: Path) -> None:
    with pytest.raises(UserError, match="use loss=chunked"):
        make_model(tiny_model, "fused")
    model = make_model(tiny_model, "standard")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(UserError, match="final_logit_softcapping"):
        attach_loss(model, "chunked")
