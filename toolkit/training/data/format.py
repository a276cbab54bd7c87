"""What kind of sample a record is, and its text with the spans of it that are answers.

Kinds: `messages` (a conversation), `prompt-completion`, `text`, `tokens` (already tokenised). A record is recognised by its
keys; the whole of a data set has one kind. Spans are (start, end) in characters of the text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.errors import UserError
from toolkit.training.data.chat import Template, answers_of
from toolkit.training.data.read import Record

Kind = Literal["messages", "prompt-completion", "text", "tokens"]
TrainOn = Literal["auto", "answers", "last-answer", "everything"]
Span = tuple[int, int]

_CONVERSATION = ("messages", "conversations", "conversation")
_PAIRS = (
    ("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("instruction", "output"),
    ("instruction", "response"), ("query", "response"), ("problem", "solution"), ("input", "output"),
)  # fmt: skip
_TEXT = ("text", "content")
_SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant",
}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One text and the spans of it that are answers; `special` says that the text holds its special tokens
    itself."""

    text: str
    answers: tuple[Span, ...]
    special: bool


def renamed(record: Record, columns: dict[str, str], where: str) -> Record:
    """The record with the columns that the config names under the names that are known here. Raises UserError."""
    if not columns:
        return record
    for name in columns.values():
        if name not in record:
            raise UserError(f"{where} has no column {name!r} (it has {_keys(record)}); check columns")
    taken = set(columns.values())
    return {**{key: value for key, value in record.items() if key not in taken and key not in columns},
            **{key: record[name] for key, name in columns.items()}}


def recognise(record: Record, where: str) -> Kind:
    """The kind of a data set from its first record. Raises UserError when no key is known."""
    if isinstance(record.get("input_ids"), list):
        return "tokens"
    if any(_turns(record, key) is not None for key in (*_CONVERSATION, "prompt")):
        return "messages"
    if _pair(record) is not None:
        return "prompt-completion"
    if any(isinstance(record.get(key), str) for key in _TEXT):
        return "text"
    for keys, kind in ((_CONVERSATION, "a list of messages with role and content"), (("input_ids",), "a list of token ids"),
                       (_TEXT, "a string")):
        for key in keys:
            if key in record:
                raise UserError(f"{where}: {key!r} holds {record[key]!r:.40}; it must be {kind}")
    raise UserError(f"{where} has nothing to train on (keys: {_keys(record)}); give messages, prompt and completion, text or "
                    "input_ids, or say which column is which: columns=prompt=QUESTION,completion=ANSWER")


def messages_of(record: Record, where: str) -> list[dict[str, Any]]:
    """The conversation of a record as role/content messages. Raises UserError when it is not one."""
    turns = next((found for key in _CONVERSATION if (found := _turns(record, key)) is not None), None)
    if turns is None and (prompt := _turns(record, "prompt")) is not None:
        completion = record.get("completion", [])
        turns = prompt + (
            completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}])
    messages = [_message(turn, where) for turn in turns or []]
    if not messages:
        raise UserError(f"{where} has no messages")
    system = record.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _message(turn: Any, where: str) -> dict[str, Any]:
    """One turn in OpenAI's shape, as chat templates take it."""
    if not isinstance(turn, dict):
        raise UserError(f"{where}: every message needs role and content")
    turn = _without_nothing(turn)
    speaker = turn.get("from", "")
    role = turn.get("role", _SHAREGPT_ROLES.get(speaker))
    if not isinstance(role, str):
        what = f"a message is from {speaker!r}, which is no role" if speaker else "every message needs role and content"
        raise UserError(f"{where}: {what}")
    content = turn.get("content", turn.get("value"))
    calls = turn.get("tool_calls")
    if speaker == "function_call" and not calls:
        calls, content = [{"type": "function", "function": _parsed(content)}], ""
    if content is None and not calls:
        raise UserError(f"{where}: a message of {role} has no content")
    content = _joined(content, role, where)
    message = {key: value for key, value in turn.items() if key not in ("from", "value", "tool_calls")}
    message |= {"role": role, "content": content if content is not None else ""}
    if calls:
        message["tool_calls"] = [_call(call, where) for call in calls]
    return message


def _joined(content: Any, role: str, where: str) -> str | None:
    """The content as text: of a list of parts their texts, which templates of text models would print as a list."""
    if isinstance(content, list):
        kinds = {part.get("type", "text") if isinstance(part, dict) else type(part).__name__ for part in content}
        if kinds - {"text"} or not all(isinstance(part.get("text"), str) for part in content):
            told = ", ".join(sorted(map(str, kinds)))
            raise UserError(f"{where}: a message of {role} has parts of type {told}; only text can be trained on")
        return "".join(part["text"] for part in content)
    if not isinstance(content, (str, type(None))):
        raise UserError(f"{where}: the content of a message of {role} is a {type(content).__name__}; it must be text")
    return content


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call whose arguments are an object: OpenAI writes them as text, templates want to print them themselves."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: a tool call needs function.name and function.arguments")
    arguments = _parsed(function.get("arguments", {}))
    shell = call if "function" in call else {"type": "function"}
    return {**shell, "function": {**function, "arguments": arguments}}


def tools_of(record: Record) -> list[Any] | None:
    """The tools that the conversation may call, or None."""
    tools = _parsed(record.get("tools"))
    return _without_nothing(tools) if isinstance(tools, list) and tools else None


def to_sample(kind: Kind, record: Record, where: str, template: Template) -> Sample:
    """The text that the model will see, and its answers.

    Raises:
        UserError: the record is not of this kind, or the template cannot render it.
    """
    if kind == "messages":
        messages, tools = messages_of(record, where), tools_of(record)
        text, answers = answers_of(template, tools, messages, where)
        return Sample(text, answers, special=True)
    end = template.end
    if kind == "prompt-completion":
        pair = _pair(record)
        if pair is None:
            raise UserError(f"{where} has no prompt and completion (keys: {_keys(record)})")
        prompt, completion = pair
        extra = record.get("input")
        if isinstance(extra, str) and extra and "output" in record and extra != prompt:
            prompt = f"{prompt}\n{extra}"
        if prompt and completion and not (prompt[-1].isspace() or completion[0].isspace()):
            prompt += "\n"
        text = prompt + completion + end
        return Sample(text, ((len(prompt), len(text)),), special=False)
    found = next((record[key] for key in _TEXT if isinstance(record.get(key), str)), None)
    if found is None:
        raise UserError(f"{where} has no text (keys: {_keys(record)})")
    text = found if end and found.endswith(end) else found + end
    return Sample(text, ((0, len(text)),), special=False)


def _pair(record: Record) -> tuple[str, str] | None:
    return next(((record[a], record[b]) for a, b in _PAIRS
                 if isinstance(record.get(a), str) and isinstance(record.get(b), str)), None)


def _turns(record: Record, key: str) -> list[Any] | None:
    """The turns under a key; tables hold them as JSON text."""
    value = record.get(key)
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        value = _parsed(value)
    return value if isinstance(value, list) else None


def _parsed(value: Any) -> Any:
    """JSON text as what it says, anything else as it is."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _without_nothing(value: Any) -> Any:
    """Without the keys that hold null: column formats give every struct all keys of all rows."""
    if isinstance(value, dict):
        return {key: _without_nothing(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nothing(item) for item in value]
    return value


def _keys(record: Record) -> str:
    return ", ".join(sorted(map(str, record))) or "none"
