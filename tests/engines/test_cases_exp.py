"""EXP: what went wrong in public with vocabularies that were enlarged. training/cases.yaml lists the reports."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.training.convert.directory import export
from toolkit.training.convert.read import hold

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("engine", ["zero3", "fsdp"])
def test_exp_added_tokens_have_rows_and_the_old_rows_stay(
    engine: str, launch: Callable[..., Any], tiny_model: Path, sharded_zero3: str, tmp_path: Path
) -> None:
    """https://github.com/huggingface/transformers/issues/28510; no step is large enough to move a row."""
    folder = tmp_path / "larger"
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    before = len(tokenizer)
    tokenizer.add_tokens(["<a>", "<b>", "<c>"])
    tokenizer.save_pretrained(folder)
    run = launch(sharded_zero3 if engine == "zero3" else engine, model=folder, max_steps=2, checkpoint_every=2, export=True,
                 export_dtype="fp32", learning_rate=1e-12)  # fmt: skip
    assert run.status == 0, run.output
    checkpoint = run.folder / "checkpoints" / "step-00000002"
    assert (checkpoint / "model" / "config.json").is_file()  # A run's checkpoints carry what an export needs.
    export(hold(checkpoint), tmp_path / "out")
    exported, old = load_file(run.folder / "export" / "model.safetensors"), load_file(tiny_model / "model.safetensors")
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == again.keys() and all(torch.equal(again[name], exported[name]) for name in exported)
    rows = exported["model.embed_tokens.weight"]
    assert rows.shape[0] == before + 3
    torch.testing.assert_close(rows[:before], old["model.embed_tokens.weight"].float(), rtol=0, atol=1e-9)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == before + 3
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == before + 3
