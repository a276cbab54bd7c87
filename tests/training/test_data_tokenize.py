"""Samples to tokens: which are targets, where long ones are cut, what the cache gives back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.errors import UserError
from toolkit.training.data.tokenize import Reading, TokenStore, get, store_key


def stored(path: Path, records: list[dict[str, Any]], tokenizer: Any, **reading: Any) -> TokenStore:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return get((str(path),), tokenizer, Reading(**{"seq_len": 128, **reading}))


def sample(store: TokenStore, index: int) -> tuple[Any, Any]:
    part = slice(store.offsets[index], store.offsets[index + 1])
    return np.asarray(store.tokens[part]), np.asarray(store.targets[part])


CHAT = {"messages": [{"role": "user", "content": "What does len do?"},
                     {"role": "assistant", "content": "It returns the number."}]}


def test_only_the_answer_of_a_conversation_is_a_target(tmp_path: Path, tokenizer: Any) -> None:
    ids, targets = sample(stored(tmp_path / "a.jsonl", [CHAT], tokenizer), 0)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(CHAT["messages"], tokenize=False)
    assert tokenizer.decode(ids[targets]) == "It returns the number.<|end|>\n"


def test_everything_is_a_target_when_asked_for(tmp_path: Path, tokenizer: Any) -> None:
    store = stored(tmp_path / "a.jsonl", [CHAT], tokenizer, train_on="everything")
    assert store.targets.all() and store.facts["train_on"] == "everything"


def test_a_completion_is_a_target_up_to_its_end_token(tmp_path: Path, tokenizer: Any) -> None:
    ids, targets = sample(stored(tmp_path / "a.jsonl", [{"prompt": "What?", "completion": "It is."}], tokenizer), 0)
    assert tokenizer.decode(ids[targets]) == "It is.<|end|>"
    assert ids[-1] == tokenizer.eos_token_id


def test_plain_text_is_cut_into_windows_and_nothing_of_it_is_lost(tmp_path: Path, tokenizer: Any) -> None:
    text = "It returns the number of items of a container. " * 20
    store = stored(tmp_path / "a.jsonl", [{"text": text}], tokenizer, seq_len=16)
    assert store.facts["kind"] == "text" and store.targets.all()
    assert max(store.lengths) == 16 and len(store) > 1
    assert tokenizer.decode(np.asarray(store.tokens)) == text + "<|end|>"


def test_a_long_conversation_is_cut_at_its_end_and_dropped_when_no_target_is_left(tmp_path: Path, tokenizer: Any) -> None:
    long = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "It returns. " * 40}]}
    lost = {"messages": [{"role": "user", "content": "What? " * 100}, CHAT["messages"][1]]}
    store = stored(tmp_path / "a.jsonl", [long, lost], tokenizer, seq_len=64)
    assert len(store) == 1 and store.lengths[0] == 64
    assert (store.facts["truncated"], store.facts["dropped"]) == (2, 1)


def test_nothing_to_train_on_is_said(tmp_path: Path, tokenizer: Any) -> None:
    lost = {"messages": [{"role": "user", "content": "What?"}]}
    with pytest.raises(UserError, match="no sample has a token to train on"):
        stored(tmp_path / "a.jsonl", [lost], tokenizer)


def test_conversations_need_a_chat_template(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    bare = AutoTokenizer.from_pretrained(tiny_model)
    bare.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        stored(tmp_path / "a.jsonl", [CHAT], bare)


def test_the_key_follows_the_content_and_not_the_place(tmp_path: Path, tokenizer: Any) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "x"}\n', encoding="utf-8")

    def key(name: str, seq_len: int = 64) -> str:
        return store_key((str(tmp_path / f"{name}.jsonl"),), tokenizer, Reading(seq_len=seq_len))

    first = key("a")
    assert first == key("b") != key("a", 32)
    (tmp_path / "a.jsonl").write_text('{"text": "y"}\n', encoding="utf-8")
    assert key("a") != first


def test_a_cached_store_is_the_one_that_was_built(tmp_path: Path, tokenizer: Any) -> None:
    built, again = (stored(tmp_path / "a.jsonl", [CHAT] * 3, tokenizer) for _ in range(2))
    assert isinstance(again.tokens, np.memmap)
    assert np.array_equal(built.tokens, again.tokens) and built.facts == again.facts
