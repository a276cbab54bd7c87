"""The command line in process: the real `main`, with what it leaves on stdout, on stderr and as exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli.main import main

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class Outcome:
    """What one command left."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The machine output; nothing else may be on stdout."""
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("estimate", "gpt2")`: one command as the console script runs it."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("TOOLKIT_DEBUG", raising=False)

    def start(*words: object) -> Outcome:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capfd.readouterr()
        return Outcome(int(ended.value.code or 0), out, err)

    return start


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """The config of a Llama whose states are some GiB, so that it matters how it is spread."""
    path = tmp_path / "wide"
    path.mkdir()
    changes = {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 3, "vocab_size": 8192}
    (path / "config.json").write_text(json.dumps({**TINY, **changes}), encoding="utf-8")
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A directory with the config of a two-layer Llama, and nothing else: no weights, no tokenizer."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return path
