"""`toolkit data show`: what a new user sees of good and of bad data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
CHAT = {"messages": [{"role": "user", "content": "What does len do?"}, {"role": "assistant", "content": "It returns a number."}]}


@pytest.fixture(autouse=True)
def offline_with_a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Libraries that are imported already have read the variable: without this they try a network that is not there for a minute.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    path.write_text((json.dumps(CHAT) + "\n") * 3, encoding="utf-8")
    return path


def test_samples_are_printed_with_what_is_trained_on_marked(run: Run, chat: Path, tiny_model: Path) -> None:
    outcome = run("data", "show", chat, "--model", tiny_model, "--count", 2)
    assert outcome.status == 0, outcome.err
    assert outcome.out.count("⟦It returns a number.<|end|>\n⟧") == 2
    assert "read as messages, trained on answers" in outcome.out and "3 samples" in outcome.out


def test_json_has_the_parts_and_the_counts(run: Run, chat: Path, tiny_model: Path) -> None:
    found = run("data", "show", chat, "--model", tiny_model, "--count", 1, "--json").json
    assert found["schema"] == 1 and found["samples"] == 3 and found["kind"] == "messages"
    example: dict[str, Any] = found["examples"][0]
    assert [part["trained"] for part in example["parts"]] == [False, True]
    assert example["parts"][1]["text"] == "It returns a number.<|end|>\n"
    assert example["text"] == "".join(part["text"] for part in example["parts"])
    assert example["tokens"] * 3 == found["tokens"] and example["targets"] * 3 == found["targets"]


def test_characters_whose_bytes_are_spread_over_tokens_are_shown_whole(run: Run, tmp_path: Path, tiny_model: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "日本", "completion": "語 é"}, ensure_ascii=False) + "\n", encoding="utf-8")
    example = run("data", "show", path, "--model", tiny_model, "--json").json["examples"][0]
    assert [part["text"] for part in example["parts"]] == ["日本\n", "語 é<|end|>"]


def test_data_does_not_steer_the_terminal(run: Run, tmp_path: Path, tiny_model: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a\x1b[31mb\x07\r\tc"}) + "\n", encoding="utf-8")
    shown = run("data", "show", path, "--model", tiny_model).out
    assert "\\x1b[31mb\\x07\\x0d" in shown and not {"\x1b", "\x07", "\r"} & set(shown)


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ('{"text": "x y"}\n{"text": \n', (), "line 2 is not JSON"),
        ('{"a": 1}\n', (), "has nothing to train on (keys: a)"),
        ('{"text": null}\n', (), "'text' holds None; it must be a string"),
        ("\n", (), "holds no records"),
        ('{"messages": [{"role": "user", "content": "Why?"}]}\n', (), "no sample has a token to train on"),
        ('{"input_ids": [1, 99999]}\n', (), "tokenised for another model"),
        ('{"text": "x y z a b c"}\n', ("--train-on", "all"), "--train-on 'all' is not one of auto, answers"),
        ('{"text": "x"}\n', ("--columns", "text"), "write known=own"),
        ('{"prompt": "x y z", "completion": "a b c"}\n', ("--seq-len", "3", "--too-long", "stop"), "seq_len is 3"),
    ],
)
def test_bad_data_is_one_line_and_status_two(
    content: str, options: tuple[str, ...], said: str, run: Run, tmp_path: Path, tiny_model: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content, encoding="utf-8")
    outcome = run("data", "show", path, "--model", tiny_model, *options)
    assert (outcome.status, outcome.out) == (2, "")
    assert said in outcome.err and outcome.err.count("\n") == 1, outcome.err


def test_what_cannot_be_reached_is_one_line_and_status_two(run: Run, chat: Path, tiny_model: Path, tmp_path: Path) -> None:
    for data, model, said in (("owner/name", tiny_model, "hub dataset that can be fetched"), (chat, "owner/name", "tokenizer"),
                              ("a.jsonl", tiny_model, "does not exist"), (chat, tmp_path / "no", "neither a directory")):
        outcome = run("data", "show", data, "--model", model)
        assert (outcome.status, outcome.out) == (2, "") and said in outcome.err and outcome.err.count("\n") == 1, outcome.err
