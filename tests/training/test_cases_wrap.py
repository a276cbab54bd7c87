"""WRAP and PEFT: what went wrong in public with recomputation and adapters. cases.yaml lists the reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from toolkit.training.config import TrainConfig
from toolkit.training.model import Source, build_model, count_parameters, load_config
from toolkit.training.optimizer import build_optimizer

Make = Callable[..., TrainConfig]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def built(make_config: Make, tiny_model: Path, tokenizer: Any, accelerator: Any) -> Callable[..., Any]:
    """`built(key=value)`: the tiny model as the recipe builds it."""

    def make(**keys: Any) -> Any:
        config = make_config(model=str(tiny_model), seq_len=64, lora_rank=4, **keys)
        source = Source(str(tiny_model), random=False)
        return build_model(config, source, load_config(config, source), tokenizer, accelerator)

    return make


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_wrap_gradients_reach_adapters_under_recomputation(checkpointing: str, built: Callable[..., Any]) -> None:
    """https://github.com/huggingface/transformers/issues/42489, .../issues/26334, https://github.com/huggingface/peft/issues/313"""
    model = built(method="lora", checkpointing=checkpointing, precision="fp32")
    ids = torch.arange(1, 17)[None]
    model(input_ids=ids, labels=ids).backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert all(parameter.grad is not None for parameter in trained.values())
    assert any(parameter.grad.abs().sum() > 0 for name, parameter in trained.items() if "lora_B" in name)
    assert count_parameters(model)[1] == count_parameters(built(method="lora", precision="fp32"))[1] > 0


def test_wrap_the_cache_is_off_while_training(built: Callable[..., Any]) -> None:
    """https://github.com/huggingface/transformers/issues/34928"""
    model = built(checkpointing="full", precision="fp32")
    assert model.config.use_cache is False
    ids = torch.arange(1, 17)[None]
    model(input_ids=ids, labels=ids).backward()


def test_wrap_whole_blocks_are_recomputed_by_the_model_and_not_by_the_engine() -> None:
    """https://github.com/huggingface/accelerate/issues/3897"""
    for file in (ROOT / "recipes" / "accelerate").glob("fsdp*.yaml"):
        section = yaml.safe_load(file.read_text(encoding="utf-8"))["fsdp_config"]
        assert not section.get("fsdp_activation_checkpointing"), file.name


def test_peft_the_frozen_base_stays_small_and_adapters_are_fp32(built: Callable[..., Any]) -> None:
    """https://github.com/huggingface/accelerate/issues/3844, https://github.com/axolotl-ai-cloud/axolotl/issues/1494"""
    model = built(method="lora", precision="bf16")
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


def test_peft_only_adapters_have_gradients_and_states(built: Callable[..., Any], make_config: Make) -> None:
    """https://github.com/Lightning-AI/litgpt/issues/1417"""
    model = built(method="lora", precision="fp32")
    optimizer = build_optimizer(make_config(method="lora"), model)
    held = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    assert held == count_parameters(model)[1] < count_parameters(model)[0] / 4


def test_peft_new_tokens_that_an_adapter_does_not_train_are_spoken_of(
    make_config: Make, tiny_model: Path, tokenizer: Any, accelerator: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    from copy import deepcopy

    larger = deepcopy(tokenizer)
    source, config = Source(str(tiny_model), random=False), make_config(model=str(tiny_model), seq_len=64, method="lora")
    own = load_config(config, source)
    larger.add_tokens([f"<new{number}>" for number in range(own.vocab_size)])
    assert build_model(config, source, own, larger, accelerator).get_input_embeddings().num_embeddings == len(larger)
    assert f"{len(larger) - own.vocab_size} tokens more than the model; their embeddings are new" in capfd.readouterr().err
