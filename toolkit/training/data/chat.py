"""A conversation by the model's chat template, and which characters of it the assistant says.

Templates that mark the answers themselves (`{% generation %}`) are taken at their word. With others an answer runs from where
the template would have the model speak to the end of the turn, its end marker included; that the shorter renderings are
beginnings of the whole is checked, and an answer that a template shows otherwise than alone (thoughts left out of earlier
turns, say) is looked for by its words.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from toolkit.errors import UserError

Span = tuple[int, int]
Messages = list[dict[str, Any]]
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Renderer:
    """The template of a tokenizer with the tools of one conversation."""

    def __init__(self, tokenizer: Any, tools: list[Any] | None, where: str) -> None:
        self.tokenizer, self.tools, self.where = tokenizer, tools, where
        self.end = tokenizer.eos_token or ""

    @property
    def template(self) -> str:
        """The text of the template that applies. Raises UserError when the tokenizer has several and none is the default."""
        return self._told(lambda: str(self.tokenizer.get_chat_template(None, self.tools)))

    def text(self, messages: Messages, *, speak: bool = False) -> str:
        """The rendering; `speak` adds what has the model answer. Raises UserError when the template refuses."""
        return self._told(lambda: str(self.tokenizer.apply_chat_template(
            messages, tools=self.tools, tokenize=False, add_generation_prompt=speak)))

    def marked(self, messages: Messages) -> tuple[str, tuple[Span, ...]]:
        """The rendering and the spans that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, spans = self._told(lambda: render_jinja_template(
            conversations=[messages], tools=self.tools, chat_template=self.template, return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map))
        return rendered[0], tuple((int(start), int(end)) for start, end in spans[0])

    def _told(self, call: Callable[[], Any]) -> Any:
        from jinja2.exceptions import TemplateError

        try:
            return call()
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{self.where}: the model's chat template refuses this conversation ({reason})") from None


def render(tokenizer: Any, tools: list[Any] | None, where: str) -> Renderer:
    """The renderer of one conversation; `where` is fit for a message."""
    return Renderer(tokenizer, tools, where)


def answers_of(renderer: Renderer, messages: Messages, where: str) -> tuple[str, tuple[Span, ...]]:
    """(text, spans of the answers). Raises UserError: see `Renderer`; also when the template leaves a tool call out."""
    if _MARKS.search(renderer.template):
        text, spans = renderer.marked(messages)
    else:
        text, spans = _by_prefix(renderer, messages, where)
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        if call["function"]["name"] not in text:
            raise UserError(f"{where}: the model's chat template leaves tool calls out; use a model that is made for tools")
    return text, spans


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
        until = text if last else renderer.text(messages[: index + 1])
        if text.startswith(before) and text.startswith(until) and len(before) >= cursor:
            spans.append((len(before), len(until)))
            cursor = len(until)
            continue
        said = said.rpartition("</think>")[2].strip()
        start = text.find(said, cursor) if said else -1
        if start < 0:
            continue
        end = len(text) if last else start + len(said)
        if not last and renderer.end and text.startswith(renderer.end, end):
            end += len(renderer.end)
        spans.append((start, end))
        cursor = end
    return text, tuple(spans)
