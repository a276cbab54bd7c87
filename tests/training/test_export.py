"""What is exported is a Hugging Face directory that loads to the trained weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from toolkit.training.config import TrainConfig
from toolkit.training.export import export_dtype, export_model
from toolkit.training.model import Source, build_model

Make = Callable[..., TrainConfig]


def build(config: TrainConfig, folder: Path, tokenizer: Any, accelerator: Any) -> tuple[Any, Any]:
    model_config = AutoConfig.from_pretrained(folder)
    return build_model(config, Source(str(folder), random=False), model_config, tokenizer, accelerator), model_config


def test_it_loads_to_the_same_weights_and_generates(
    make_config: Make, tiny_model: Path, tokenizer: Any, accelerator: Any, tmp_path: Path
) -> None:
    config = make_config(precision="fp32", export_dtype="fp32")
    model, model_config = build(config, tiny_model, tokenizer, accelerator)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    export_model(config, accelerator, model, tokenizer, model_config, tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight and loaded.config.use_cache
    inputs = AutoTokenizer.from_pretrained(tmp_path / "export")("What does len do?", return_tensors="pt")
    assert loaded.generate(input_ids=inputs["input_ids"], max_new_tokens=4).shape[1] > inputs["input_ids"].shape[1]
    assert all(file.stat().st_mode & 0o044 for file in (tmp_path / "export").iterdir())
    assert not list(tmp_path.glob(".export*"))


def test_an_earlier_export_is_replaced_whole(
    make_config: Make, tiny_model: Path, tokenizer: Any, accelerator: Any, tmp_path: Path
) -> None:
    config = make_config(precision="fp32")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "old.safetensors").touch()
    model, model_config = build(config, tiny_model, tokenizer, accelerator)
    export_model(config, accelerator, model, tokenizer, model_config, tmp_path / "export")
    assert not (tmp_path / "export" / "old.safetensors").exists()


def test_an_adapter_is_exported_alone(
    make_config: Make, tiny_model: Path, tokenizer: Any, accelerator: Any, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    config = make_config(method="lora", lora_rank=2, lora_targets="q_proj, v_proj", precision="fp32")
    model, model_config = build(config, tiny_model, tokenizer, accelerator)
    export_model(config, accelerator, model, tokenizer, model_config, tmp_path / "export")
    names = set(load_file(tmp_path / "export" / "adapter_model.safetensors"))
    assert len(names) == 8 and all("q_proj.lora_" in name or "v_proj.lora_" in name for name in names)
    assert (tmp_path / "export" / "adapter_config.json").is_file()
    assert not (tmp_path / "export" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("asked", "stated", "precision", "expected"),
    [
        ("fp16", torch.bfloat16, "bf16", torch.float16),
        ("auto", torch.bfloat16, "fp32", torch.bfloat16),
        ("auto", None, "bf16", torch.bfloat16),
        ("auto", None, "fp32", torch.float32),
    ],
)
def test_the_dtype_is_the_asked_the_stated_or_the_trained(
    asked: str, stated: Any, precision: str, expected: Any, make_config: Make, tiny_model: Path
) -> None:
    model_config = AutoConfig.from_pretrained(tiny_model)
    model_config.dtype = stated
    assert export_dtype(make_config(export_dtype=asked, precision=precision), model_config) == expected
