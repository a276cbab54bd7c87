"""Samples to tokens: which are targets, where long ones are cut, what the cache gives back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.errors import UserError
from toolkit.training.data import tokenize
from toolkit.training.data.encode import Reading
from toolkit.training.data.tokenize import TokenStore, build, get, store_key


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


def test_only_the_last_answer_is_a_target_when_asked_for(tmp_path: Path, tokenizer: Any) -> None:
    turns = [*CHAT["messages"], CHAT["messages"][0], {"role": "assistant", "content": "Bye."}]
    store = stored(tmp_path / "a.jsonl", [{"messages": turns}], tokenizer, train_on="last-answer")
    ids, targets = sample(store, 0)
    assert tokenizer.decode(ids[targets]) == "Bye.<|end|>\n"


@pytest.mark.parametrize(
    ("train_on", "trained"), [("auto", [7, 9]), ("last-answer", [9]), ("everything", [5, 6, 7, 8, 9])])
def test_tokens_are_taken_as_they_are_with_their_labels(
    train_on: str, trained: list[int], tmp_path: Path, tokenizer: Any
) -> None:
    record = {"input_ids": [5, 6, 7, 8, 9, 0], "labels": [-100, -100, 7, -100, 9, -100], "attention_mask": [1] * 5 + [0]}
    ids, targets = sample(stored(tmp_path / "a.jsonl", [record], tokenizer, train_on=train_on), 0)
    assert list(ids) == [5, 6, 7, 8, 9] and list(ids[targets]) == trained


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"input_ids": [1, -2]}, "line 1: input_ids must be a list of whole numbers"),
        ({"input_ids": [1, 2], "labels": [1]}, "line 1: labels must be a list as long as input_ids"),
        ({"input_ids": [1, 2], "labels": [2, 3]}, "line 1: labels must be input_ids, or -100"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "are all labels masked"),
    ],
)
def test_tokens_that_cannot_be_trained_on_are_refused(
    record: dict[str, Any], said: str, tmp_path: Path, tokenizer: Any
) -> None:
    with pytest.raises(UserError, match=said):
        stored(tmp_path / "a.jsonl", [record], tokenizer)


def test_long_samples_are_dropped_or_refused_as_configured(tmp_path: Path, tokenizer: Any) -> None:
    long = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "It returns. " * 40}]}
    store = stored(tmp_path / "a.jsonl", [long, CHAT], tokenizer, seq_len=64, too_long="drop")
    assert (len(store), store.facts["dropped"], store.facts["truncated"]) == (1, 1, 0)
    with pytest.raises(UserError, match=r"line 1 has \d+ tokens, seq_len is 64"):
        stored(tmp_path / "a.jsonl", [long, CHAT], tokenizer, seq_len=64, too_long="stop")


def test_bad_lines_are_left_out_and_counted_only_when_told_to(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{json.dumps(CHAT)}\n{{"messages": \n{{"messages": [{{"role": "user"}}]}}\n', encoding="utf-8")
    with pytest.raises(UserError, match="line 2 is not JSON.*bad_lines=skip"):
        get((str(file),), tokenizer, Reading())
    store = get((str(file),), tokenizer, Reading(bad_lines="skip"))
    assert (len(store), store.facts["skipped"]) == (1, 2)


def test_answers_are_not_looked_for_where_there_are_none(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UserError, match="train_on=answers: data read as text has no answers"):
        stored(tmp_path / "a.jsonl", [{"text": "x"}], tokenizer, train_on="answers")


def test_several_processes_give_what_one_does_and_name_the_line_that_is_wrong(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "AT_ONCE", 8)
    said = [(f"Say {number}.", f"{number}!", "And again.", "no " * (number % 7) + "more") for number in range(120)]
    lines = [json.dumps({"messages": [{"role": role, "content": text}
                                      for role, text in zip(("user", "assistant") * 2, four, strict=True)]}) for four in said]
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    one, two = (build(f"{workers}" * 8, (str(file),), tokenizer, Reading(), workers) for workers in (1, 2))
    assert np.array_equal(one.tokens, two.tokens) and np.array_equal(one.targets, two.targets)
    assert np.array_equal(one.offsets, two.offsets) and len(two) == 120
    lines[100] = "{"
    file.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(UserError, match="line 101 is not JSON"):
        build("x", (str(file),), tokenizer, Reading(), 2)
    skipped = build("y", (str(file),), tokenizer, Reading(bad_lines="skip"), 2)
    assert len(skipped) == 119 and skipped.facts["skipped"] == 1


def test_a_damaged_cache_is_made_anew_and_one_that_cannot_be_written_is_said(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stored(tmp_path / "a.jsonl", [CHAT], tokenizer)
    before, file = np.array(first.tokens), next((tmp_path / "cache" / "data").glob("*/tokens.npy"))
    file.write_bytes(file.read_bytes()[:-8])
    again = stored(tmp_path / "a.jsonl", [CHAT], tokenizer)
    assert np.array_equal(before, again.tokens) and np.array_equal(np.load(file), again.tokens)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="set TOOLKIT_CACHE to a folder"):
        stored(tmp_path / "a.jsonl", [CHAT], tokenizer)
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "full"))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(UserError, match="No space left on device.; make room"):
        stored(tmp_path / "a.jsonl", [CHAT], tokenizer)
    assert not list((tmp_path / "full" / "data").iterdir())
