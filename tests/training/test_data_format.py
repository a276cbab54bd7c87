"""Kinds of records, and which characters of them are answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import UserError
from toolkit.training.data.chat import Template
from toolkit.training.data.format import messages_of, recognise, renamed, to_sample
from toolkit.training.data.read import check_sources, is_hub_id, read

USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"messages": [USER, ANSWER]}, "messages"),
        ({"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]}, "messages"),
        ({"prompt": [USER], "completion": [ANSWER]}, "messages"),
        ({"prompt": "Why?", "completion": "So."}, "prompt-completion"),
        ({"question": "Why?", "answer": "So."}, "prompt-completion"),
        ({"instruction": "Why?", "output": "So.", "text": "x"}, "prompt-completion"),
        ({"text": "So it is."}, "text"),
        ({"messages": '[{"role": "user", "content": "Why?"}]'}, "messages"),
        ({"input_ids": [1, 2], "text": "x"}, "tokens"),
    ],
)
def test_a_record_is_recognised_by_its_keys(record: dict[str, Any], kind: str) -> None:
    assert recognise(record, "here") == kind


def test_a_record_without_known_keys_is_named_with_its_place() -> None:
    with pytest.raises(UserError, match=r"data\.jsonl line 3 has nothing to train on \(keys: a, b\)"):
        recognise({"b": 1, "a": 2}, "data.jsonl line 3")


def answers_of(kind: Any, record: dict[str, Any], tokenizer: Any) -> list[str]:
    sample = to_sample(kind, record, "here", Template(tokenizer))
    return [sample.text[start:end] for start, end in sample.answers]


def test_every_answer_of_a_conversation_with_its_end_is_a_span(tokenizer: Any) -> None:
    record = {"messages": [USER, ANSWER, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "No."}]}
    assert answers_of("messages", record, tokenizer) == ["So.<|end|>\n", "No.<|end|>\n"]
    shared = {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]}
    assert answers_of("messages", shared, tokenizer) == ["So.<|end|>\n"]


def test_a_completion_and_its_end_is_the_answer(tokenizer: Any) -> None:
    assert answers_of("prompt-completion", {"prompt": "Why?", "completion": "So."}, tokenizer) == ["So.<|end|>"]
    record = {"instruction": "Add", "input": "1 2", "output": "3"}
    sample = to_sample("prompt-completion", record, "here", Template(tokenizer))
    assert sample.text == "Add\n1 2\n3<|end|>"


@pytest.mark.parametrize(
    "turns", [[], ["text"], [{"role": "user"}], [{"content": "x"}], [ANSWER]],
    ids=["none", "text", "empty", "no-role", "answer-first"],
)
def test_a_broken_conversation_is_refused_with_its_place(turns: list[Any], tokenizer: Any) -> None:
    with pytest.raises(UserError, match="chat line 1"):
        to_sample("messages", {"messages": turns}, "chat line 1", Template(tokenizer))


def test_files_are_read_with_their_lines(tmp_path: Path) -> None:
    lines, text = tmp_path / "a.jsonl", tmp_path / "b.txt"
    lines.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n\n{"text": "two"}\n')
    text.write_text("first\nstill first\n\n\nsecond\n", encoding="utf-8")
    found = list(read((str(lines), str(text))))
    assert [record["text"] for _, record in found] == ["one", "two", "first\nstill first", "second"]
    assert found[1][0].endswith("a.jsonl line 3")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1}\n{"a": \n', "line 2 is not JSON"),
        (b"[1]\n", "line 1 is a JSON list"),
        (b'{"a": "\xff"}\n', "line 1 is not UTF-8"),
    ],
)
def test_a_broken_line_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError, match=said):
        list(read((str(file),)))


def test_sources_are_checked_before_they_are_read(tmp_path: Path) -> None:
    empty, other = tmp_path / "a.jsonl", tmp_path / "a.pdf"
    empty.touch()
    other.write_text("x", encoding="utf-8")
    for source, said in ((empty, "is empty"), (other, "are read"), (tmp_path / "no.jsonl", "does not exist")):
        with pytest.raises(UserError, match=said):
            check_sources((str(source),))
    assert is_hub_id("owner/name:train") and not is_hub_id("folder/name.jsonl") and not is_hub_id("./name")


CALL = {"name": "add", "arguments": '{"a": 1}'}
WITH_TOOLS = (
    "{% for tool in tools or [] %}<|system|>\n{{ tool | tojson }}<|end|>\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.a }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
FORGETFUL = (  # Thoughts stay in the last turn alone, as in several models that reason.
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture
def templated(tiny_model: Path) -> Any:
    """`templated(template)`: the tiny tokenizer with another chat template."""
    from transformers import AutoTokenizer

    def make(template: str) -> Any:
        found = AutoTokenizer.from_pretrained(tiny_model)
        found.chat_template = template
        return found

    return make


@pytest.mark.parametrize(
    "turns",
    [
        [USER, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]}],
        [{"from": "human", "value": "Why?"}, {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}],
    ],
    ids=["openai", "sharegpt"],
)
def test_tool_calls_are_answers_and_tools_are_shown(turns: list[Any], templated: Any) -> None:
    record = {"messages": turns, "tools": '[{"type": "function", "function": {"name": "add"}}]', "system": "Be kind."}
    sample = to_sample("messages", record, "here", Template(templated(WITH_TOOLS)))
    assert [sample.text[start:end] for start, end in sample.answers] == ["add 1<|end|>\n"]
    assert '"name": "add"' in sample.text and "<|system|>\nBe kind." in sample.text


def test_tool_calls_that_the_template_leaves_out_are_an_error(tokenizer: Any) -> None:
    record = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]}]}
    with pytest.raises(UserError, match="here: the model's chat template leaves tool calls out"):
        to_sample("messages", record, "here", Template(tokenizer))


def test_a_template_that_marks_its_answers_is_taken_at_its_word(templated: Any) -> None:
    assert answers_of("messages", {"messages": [USER, ANSWER, USER, ANSWER]}, templated(MARKED)) == ["So.<|end|>"] * 2


def test_answers_that_a_template_shows_otherwise_later_are_found_by_their_words(templated: Any) -> None:
    first = {"role": "assistant", "content": "<think>Hm. Why?</think>Why? So."}
    record = {"messages": [USER, first, USER, {"role": "assistant", "content": "<think>x</think>No."}]}
    assert answers_of("messages", record, templated(FORGETFUL)) == ["Why? So.<|end|>", "<think>x</think>No.<|end|>\n"]


def test_what_a_column_format_filled_up_with_null_is_left_out() -> None:
    turns = [{**USER, "tool_calls": None, "name": None}]
    assert messages_of({"messages": turns}, "here") == [USER]


def test_columns_take_the_names_that_the_config_gives() -> None:
    record = {"q": "Why?", "a": "So.", "text": "x"}
    assert renamed(record, {"prompt": "q", "completion": "a"}, "here") == {"prompt": "Why?", "completion": "So.", "text": "x"}
    with pytest.raises(UserError, match=r"here has no column 'b' \(it has a, q, text\)"):
        renamed(record, {"prompt": "b"}, "here")


def test_a_speaker_that_nobody_knows_is_named(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="chat line 1: a message is from 'narrator', which is no role"):
        to_sample("messages", {"conversations": [{"from": "narrator", "value": "x"}]}, "chat line 1", Template(tokenizer))


def test_an_end_token_that_is_there_is_not_added_again(tokenizer: Any) -> None:
    assert to_sample("text", {"text": "So.<|end|>"}, "here", Template(tokenizer)).text == "So.<|end|>"


def test_an_answer_of_weight_0_is_context_and_parts_of_text_are_joined(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "one."}]},
             {"role": "assistant", "content": "wrong", "weight": 0}, {"role": "user", "content": "No."},
             {"role": "assistant", "content": "one", "weight": 1}]
    sample = to_sample("messages", {"messages": turns}, "here", Template(tokenizer))
    assert "Say one." in sample.text and "wrong" in sample.text and "[" not in sample.text
    assert [sample.text[start:end].startswith("one") for start, end in sample.answers] == [True]
    turns[0]["content"] = [{"type": "image_url", "image_url": "x"}]
    with pytest.raises(UserError, match="parts of type image_url; only text can be trained on"):
        to_sample("messages", {"messages": turns}, "here", Template(tokenizer))
