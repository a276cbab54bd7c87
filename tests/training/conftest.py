"""The tiny model's tokenizer, and a place of their own for cached tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.training.config import TrainConfig, from_mapping


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., TrainConfig]:
    """A config with the required keys filled in."""

    def make(**values: Any) -> TrainConfig:
        return from_mapping({"model": "m", "data": "d.jsonl", "output": str(tmp_path / "run"), "max_steps": 4, **values})

    return make


@pytest.fixture
def accelerator() -> Any:
    """A single process on the CPU."""
    from accelerate import Accelerator

    return Accelerator(cpu=True)
