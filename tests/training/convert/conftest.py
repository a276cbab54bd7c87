"""Checkpoints of models that were never trained: what is written out of them must be what they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from toolkit.training.assets import FOLDER, write_assets
from toolkit.training.checkpoint import Checkpoints, Identity, Progress
from toolkit.training.config import TrainConfig
from toolkit.training.model import Source, build_model

IDENTITY = Identity(strategy="single", processes=1, method="full", optimizer="adamw", data="abc", rows=8)


@dataclasses.dataclass
class Saved:
    """A run folder with one checkpoint, and the model as it was saved."""

    run: Path
    model: Any
    model_config: Any
    tokenizer: Any
    config: TrainConfig

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoints" / "step-00000001"


@pytest.fixture
def save(make_config: Callable[..., TrainConfig], accelerator: Any, tmp_path: Path) -> Callable[..., Saved]:
    """`save(folder, tokenizer, key=value, ...)`: build the model as the recipe does, give it a step, save it."""

    def make(folder: Path, tokenizer: Any, *, compiled: bool = False, name: str = "run", **keys: Any) -> Saved:
        config = make_config(precision="fp32", **keys)
        model_config = AutoConfig.from_pretrained(folder)
        model = build_model(config, Source(str(folder), random=False), model_config, tokenizer, accelerator)
        prepared = torch.compile(model, backend="eager") if compiled else model
        wrapped, optimizer = accelerator.prepare(prepared, torch.optim.AdamW(model.parameters(), lr=1e-2))
        torch.manual_seed(0)
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.randn_like(p)
        optimizer.step()
        run = tmp_path / name
        write_assets(run / FOLDER, accelerator.unwrap_model(wrapped, keep_torch_compile=False), tokenizer, model_config)
        identity = dataclasses.replace(IDENTITY, method=config.method)
        assert Checkpoints(run / "checkpoints", accelerator, identity, 2).save(Progress(step=1, tokens=64)) is None
        return Saved(run, model, model_config, tokenizer, config)

    return make
