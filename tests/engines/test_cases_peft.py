"""PEFT and WRAP: adapters with recomputation under engines that once could not. tests/training/cases.yaml lists the reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from safetensors.torch import load_file


@pytest.mark.parametrize("engine", ["ddp", "sharded zero3"])
def test_peft_adapters_are_trained_under_recomputation_and_saved_whole(
    engine: str, launch: Callable[..., Any], sharded_zero3: str
) -> None:
    """https://github.com/huggingface/peft/issues/313 (ddp: variable marked ready twice),
    https://github.com/huggingface/trl/issues/4416 (zero3: an adapter file of 40 bytes)"""
    run = launch("ddp" if engine == "ddp" else sharded_zero3, processes=2, method="lora", lora_rank=4, learning_rate=1e-2,
                 checkpointing="full", export=True)
    assert run.status == 0, run.output
    file = run.folder / "export" / "adapter_model.safetensors"
    weights = load_file(file)
    assert file.stat().st_size > 1000 and all(tensor.numel() for tensor in weights.values())
    assert any(tensor.abs().sum() > 0 for name, tensor in weights.items() if "lora_B" in name)
