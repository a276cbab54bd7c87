"""A run keeps the small files of its model, and every checkpoint carries them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from toolkit.training.assets import FOLDER, carry_assets, write_assets
from toolkit.training.config import TrainConfig
from toolkit.training.model import Source, build_model


@pytest.mark.parametrize("method", ["full", "lora"])
def test_they_say_what_the_model_is_and_travel_with_a_checkpoint(
    method: str, make_config: Callable[..., TrainConfig], tiny_model: Path, accelerator: Any, tmp_path: Path
) -> None:
    config, model_config = make_config(method=method, lora_rank=2), AutoConfig.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens(["<a>", "<b>", "<c>"])
    model = build_model(config, Source(str(tiny_model), random=False), model_config, tokenizer, accelerator)
    write_assets(tmp_path / FOLDER, model, tokenizer, model_config)
    (tmp_path / "checkpoint").mkdir()
    files = carry_assets(tmp_path / FOLDER, tmp_path / "checkpoint")
    carried = tmp_path / "checkpoint" / FOLDER
    assert set(files) == {f"{FOLDER}/{file.name}" for file in carried.iterdir()}
    kept = json.loads((carried / "config.json").read_text(encoding="utf-8"))
    assert kept["use_cache"] is True and kept["architectures"] == ["LlamaForCausalLM"]
    assert kept["vocab_size"] == len(tokenizer) == len(AutoTokenizer.from_pretrained(carried))
    assert (carried / "adapter_config.json").is_file() == (method == "lora")
    assert model.config.use_cache is False


def test_a_run_without_them_carries_none(tmp_path: Path) -> None:
    assert carry_assets(tmp_path / FOLDER, tmp_path / "checkpoint") == {}
