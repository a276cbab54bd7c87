"""MODEL on the command line: a directory, a config.json, a catalog name, a hub id; only a config is ever read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import UserError
from toolkit.specs import ModelSpec
from toolkit.specs.load import check_length, load_model_spec, max_positions

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "max_position_embeddings": 512}


def folder(path: Path, content: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_a_directory_is_read_by_its_config_and_named_after_itself(tmp_path: Path) -> None:
    spec = load_model_spec(str(folder(tmp_path / "my-model", LLAMA)))
    assert (spec.name, dict(spec.config), spec.published_parameters) == ("my-model", LLAMA, None)
    assert spec.source == str(tmp_path / "my-model")
    assert spec.architecture == "LlamaForCausalLM"


def test_a_relative_directory_has_a_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder(tmp_path / "here", LLAMA))
    assert load_model_spec(".").name == "here"


def test_a_config_file_is_the_directory_it_lies_in(tmp_path: Path) -> None:
    path = folder(tmp_path / "my-model", LLAMA)
    assert load_model_spec(str(path / "config.json")).name == "my-model"
    other = path / "small.json"
    other.write_text(json.dumps(LLAMA), encoding="utf-8")
    assert load_model_spec(str(other)).name == "small"


@pytest.mark.parametrize("name", ["gpt2", "GPT2", "openai-community/gpt2"])
def test_the_catalog_answers_to_name_and_hub_id_without_a_network(name: str) -> None:
    spec = load_model_spec(name)
    assert (spec.name, spec.source, spec.published_parameters) == ("gpt2", "catalog:gpt2", 124439808)
    assert spec.config["model_type"] == "gpt2"


def test_a_file_comes_before_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "gpt2", LLAMA)
    assert load_model_spec("gpt2").config["model_type"] == "llama"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("gpt3", "no name of the catalog; did you mean 'gpt2'"),
        ("llama-3.1-8", "did you mean 'llama-3.1-8b'"),
        ("qqq", "; known: "),
        ("a/b/c", "is no directory, no file and no name of the catalog"),
        ("./gone", "does not exist"),
        ("/gone/config.json", "does not exist"),
        ("gone.gguf", "does not exist"),
        ("", "model is empty"),
        ("  ", "model is empty"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(model: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        load_model_spec(model)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{oops", "is not JSON"),
        ("", "is not JSON"),
        ('{"a":' * 100_000, "is not JSON"),
        ("[1, 2]", "holds a list, not a model's config"),
        ('"llama"', "holds a str"),
        ({"hidden_size": 64}, "has no model_type"),
        ({"text_config": {"hidden_size": 64}}, "has no model_type"),
    ],
)
def test_a_config_that_is_none_is_said_in_one_line(content: Any, says: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "m", content)
    with pytest.raises(UserError) as caught:
        load_model_spec(str(path))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_infinity_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"model_type": "mamba2", "time_step_limit": [0.0, {"__float__": "Infinity"}]})
    assert load_model_spec(str(path)).config["time_step_limit"] == [0.0, math.inf]


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a directory without a config.json"):
        load_model_spec(str(tmp_path))


def test_a_config_that_is_not_text_is_not_json(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", "")
    (path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not JSON"):
        load_model_spec(str(path))


def test_a_gguf_file_that_is_none_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"nothing of that kind")
    with pytest.raises(UserError, match="is not a GGUF file") as caught:
        load_model_spec(str(path))
    assert "\n" not in str(caught.value)


def test_a_nested_config_speaks_through_its_text_model(tmp_path: Path) -> None:
    spec = load_model_spec(str(folder(tmp_path / "m", {"model_type": "seeing", "text_config": LLAMA})))
    assert spec.text_config == LLAMA
    assert max_positions(spec) == 512


def test_remote_code_is_asked_for_by_the_caller_only(tmp_path: Path) -> None:
    path = str(folder(tmp_path / "m", LLAMA))
    assert not load_model_spec(path).trust_remote_code
    assert load_model_spec(path, trust_remote_code=True).trust_remote_code


def test_a_sequence_longer_than_the_positions_is_refused_and_the_limit_named() -> None:
    spec = ModelSpec(name="m", config=LLAMA)
    check_length(spec, 512)
    with pytest.raises(UserError, match="seq-len 513 is above the 512 positions of m; use at most 512"):
        check_length(spec, 513)


@pytest.mark.parametrize(
    ("config", "limit"),
    [({"model_type": "gpt2", "n_positions": 1024}, 1024), ({"model_type": "t5", "n_positions": 512}, None),
     ({"model_type": "mpt", "max_seq_len": 2048}, 2048), ({"model_type": "mamba"}, None)],
)  # fmt: skip
def test_families_state_their_positions_under_several_names(config: dict[str, Any], limit: int | None) -> None:
    spec = ModelSpec(name="m", config=config)
    assert max_positions(spec) == limit
    if limit is None:
        check_length(spec, 10**6)
