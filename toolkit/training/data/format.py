"""What kind of sample a record is, and its text with the spans of it that are answers.

Kinds: `messages` (a conversation), `prompt-completion`, `text`. A record is recognised by its keys; the
whole of a data set has one kind. Spans are (start, end) in characters of the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from toolkit.errors import UserError
from toolkit.training.data.read import Record

Kind = Literal["messages", "prompt-completion", "text"]
Span = tuple[int, int]

_CONVERSATION = ("messages", "conversations", "conversation")
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("instruction", "output"))
_TEXT = ("text", "content")
_SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant",
}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One text and the spans of it that are answers; `special` says that the text holds its special tokens
    itself."""

    text: str
    answers: tuple[Span, ...]
    special: bool


def recognise(record: Record, where: str) -> Kind:
    """The kind of a data set from its first record. Raises UserError when no key is known."""
    if any(isinstance(record.get(key), list) for key in (*_CONVERSATION, "prompt")):
        return "messages"
    if any(isinstance(record.get(a), str) and isinstance(record.get(b), str) for a, b in _PAIRS):
        return "prompt-completion"
    if any(isinstance(record.get(key), str) for key in _TEXT):
        return "text"
    keys = ", ".join(sorted(record)) or "none"
    raise UserError(f"{where} has nothing to train on (keys: {keys}); "
                    "give messages, prompt and completion, or text")


def messages_of(record: Record, where: str) -> list[dict[str, Any]]:
    """The conversation of a record as role/content messages. Raises UserError when it is not one."""
    turns = next((record[key] for key in _CONVERSATION if isinstance(record.get(key), list)), None)
    if turns is None and isinstance(record.get("prompt"), list):
        completion = record.get("completion", [])
        turns = record["prompt"] + (
            completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}])
    messages = []
    for turn in turns or []:
        role = turn.get("role", _SHAREGPT_ROLES.get(turn.get("from", ""))) if isinstance(turn, dict) else None
        if role is None:
            raise UserError(f"{where}: every message needs role and content")
        content = turn.get("content", turn.get("value"))
        if content is None and not turn.get("tool_calls"):
            raise UserError(f"{where}: a message of {role} has no content")
        messages.append({**{k: v for k, v in turn.items() if k not in ("from", "value")},
                         "role": role, "content": content})
    if not messages:
        raise UserError(f"{where} has no messages")
    return messages


def to_sample(kind: Kind, record: Record, where: str, tokenizer: Any) -> Sample:
    """The text that the model will see, and its answers.

    Raises:
        UserError: the record is not of this kind, or the template cannot render it.
    """
    if kind == "messages":
        return _conversation(messages_of(record, where), where, tokenizer)
    end = tokenizer.eos_token or ""
    if kind == "prompt-completion":
        pair = next(((record[a], record[b]) for a, b in _PAIRS
                     if isinstance(record.get(a), str) and isinstance(record.get(b), str)), None)
        if pair is None:
            keys = ", ".join(sorted(record)) or "none"
            raise UserError(f"{where} has no prompt and completion (keys: {keys})")
        prompt, completion = pair
        extra = record.get("input")
        if isinstance(extra, str) and extra:
            prompt = f"{prompt}\n{extra}"
        if prompt and completion and not (prompt[-1].isspace() or completion[0].isspace()):
            prompt += "\n"
        text = prompt + completion + end
        return Sample(text, ((len(prompt), len(text)),), special=False)
    text = next((record[key] for key in _TEXT if isinstance(record.get(key), str)), None)
    if text is None:
        raise UserError(f"{where} has no text (keys: {', '.join(sorted(record)) or 'none'})")
    return Sample(text + end, ((0, len(text) + len(end)),), special=False)


def _conversation(messages: list[dict[str, Any]], where: str, tokenizer: Any) -> Sample:
    """A conversation by the model's chat template. An answer runs from where the template would have the
    model speak to the end of the turn, its end marker included; that the shorter renderings are beginnings
    of the whole is checked.
    """
    text = _render(messages, where, tokenizer)
    answers: list[Span] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if index == 0:
            raise UserError(f"{where}: a conversation cannot begin with the assistant")
        before = _render(messages[:index], where, tokenizer, speak=True)
        until = _render(messages[: index + 1], where, tokenizer)
        if text.startswith(before) and text.startswith(until):
            answers.append((len(before), len(until)))
        elif index == len(messages) - 1 and (start := text.rfind(str(message["content"]).strip())) >= 0:
            answers.append((start, len(text)))
    return Sample(text, tuple(answers), special=True)


def _render(messages: list[dict[str, Any]], where: str, tokenizer: Any, *, speak: bool = False) -> str:
    from jinja2.exceptions import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=speak))
    except (TemplateError, TypeError, KeyError) as error:
        raise UserError(f"{where}: the model's chat template refuses this conversation ({error})") from None
