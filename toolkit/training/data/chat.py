"""A conversation by the model's chat template, and which characters of it the assistant says.

Templates that mark the answers themselves (`{% generation %}`) are taken at their word. With others an answer runs from where
the template would have the model speak to the end of the turn, its end marker included; that the shorter renderings are
beginnings of the whole is checked, and an answer that a template shows otherwise than alone (thoughts left out of earlier
turns, say) is looked for by its words.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

from toolkit.errors import UserError

Span = tuple[int, int]
Messages = list[dict[str, Any]]
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Renderer:
    """The template of a tokenizer with the tools of one conversation."""

    def __init__(self, template: Template, tools: list[Any] | None, where: str) -> None:
        self.template, self.tools, self.where = template, tools, where

    @property
    def source(self) -> str:
        """The text of the template that applies. Raises UserError when the tokenizer has several and none is the default."""
        return self._told(lambda: self.template.source(bool(self.tools)))

    def text(self, messages: Messages, *, speak: bool = False) -> str:
        """The rendering; `speak` adds what has the model answer. Raises UserError when the template refuses."""
        return self._rendered(messages, speak=speak)[0]

    def marked(self, messages: Messages) -> tuple[str, tuple[Span, ...]]:
        """The rendering and the spans that the template marks."""
        text, spans = self._rendered(messages, marks=True)
        return text, tuple((int(start), int(end)) for start, end in spans)

    def _rendered(self, messages: Messages, *, speak: bool = False, marks: bool = False) -> tuple[str, Any]:
        from transformers.utils.chat_template_utils import render_jinja_template

        # What apply_chat_template of the tokenizer does, without what it looks up anew every time.
        texts, spans = self._told(lambda: render_jinja_template(
            conversations=[messages], tools=self.tools, chat_template=self.source, add_generation_prompt=speak,
            return_assistant_tokens_mask=marks, **self.template.special))
        return texts[0], spans[0] if marks else ()

    def _told(self, call: Callable[[], Any]) -> Any:
        from jinja2.exceptions import TemplateError

        try:
            return call()
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{self.where}: the model's chat template refuses this conversation ({reason})") from None


class Template:
    """The chat template of a tokenizer, and what is the same in all of its conversations."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.end: str = tokenizer.eos_token or ""
        self.special: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self._sources: dict[bool, str] = {}

    @cached_property
    def after_answers(self) -> str:
        """What stands between an answer and the end of its turn, from a made-up conversation; empty when that is not plain."""
        turns = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}]
        renderer = Renderer(self, None, "")
        try:
            alone, followed = renderer.text(turns), renderer.text([*turns, {"role": "user", "content": "MORE"}])
        except UserError:
            return ""
        after = alone.rpartition("ANSWER")[2]
        return after if after.strip() and followed.startswith(alone) else ""

    def source(self, tools: bool) -> str:
        """The template's text. Raises ValueError when there are several and none is the default."""
        if tools not in self._sources:
            self._sources[tools] = str(self.tokenizer.get_chat_template(None, [{}] if tools else None))
        return self._sources[tools]


def answers_of(template: Template, tools: list[Any] | None, messages: Messages, where: str) -> tuple[str, tuple[Span, ...]]:
    """(text, spans of the answers). Raises UserError: see `Renderer`; also when the template leaves a tool call out."""
    renderer = Renderer(template, tools, where)
    silent = [index for index, message in enumerate(messages) if message.get("weight") == 0]
    messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    if _MARKS.search(renderer.source):
        text, spans = renderer.marked(messages)
    else:
        text, spans = _by_prefix(renderer, messages, where)
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        if call["function"]["name"] not in text:
            raise UserError(f"{where}: the model's chat template leaves tool calls out; use a model that is made for tools")
    return text, _without(spans, silent, messages, where) if silent else spans


def _without(spans: tuple[Span, ...], silent: list[int], messages: Messages, where: str) -> tuple[Span, ...]:
    """The spans of the answers but for those whose weight is 0."""
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if len(answers) != len(spans):
        raise UserError(f"{where}: a message has weight 0, but the chat template does not show every answer by itself")
    return tuple(span for index, span in zip(answers, spans, strict=True) if index not in silent)


def _by_prefix(renderer: Renderer, messages: Messages, where: str) -> tuple[str, tuple[Span, ...]]:
    text = renderer.text(messages)
    spans: list[Span] = []
    cursor = 0  # What stands before has been said by others.
    for index, message in enumerate(messages):
        said = message["content"].strip() if isinstance(message["content"], str) else ""
        if message["role"] != "assistant":
            at = text.find(said, cursor)
            cursor = at + len(said) if at >= 0 else cursor
            continue
        if index == 0:
            raise UserError(f"{where}: a conversation cannot begin with the assistant")
        last = index == len(messages) - 1
        before = renderer.text(messages[:index], speak=True)
        end = _end_of_turn(renderer, messages[: index + 1], text, before, last=last) if text.startswith(before) else None
        if end is not None and len(before) >= cursor:
            spans.append((len(before), end))
            cursor = end
            continue
        said = said.rpartition("</think>")[2].strip()
        start = text.find(said, cursor) if said else -1
        if start < 0:
            continue
        end = len(text) if last else start + len(said)
        if not last and renderer.template.end and text.startswith(renderer.template.end, end):
            end += len(renderer.template.end)
        spans.append((start, end))
        cursor = end
    return text, tuple(spans)


def _end_of_turn(renderer: Renderer, messages: Messages, text: str, before: str, *, last: bool) -> int | None:
    """Where the last of the messages, an answer, ends in the text of the whole conversation, its end marker included; None when
    the template shows it there otherwise than alone."""
    if last:
        return len(text)
    content, after = messages[-1]["content"], renderer.template.after_answers
    plain = after and isinstance(content, str) and not messages[-1].get("tool_calls")
    if plain and text.startswith(content + after, len(before)):
        return len(before) + len(content) + len(after)
    until = renderer.text(messages)
    return len(until) if text.startswith(until) else None
