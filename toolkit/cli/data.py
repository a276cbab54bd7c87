"""`toolkit data show`: a few samples as the model will see them, with what is trained on coloured."""

from __future__ import annotations

import json as json_module
import re
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from toolkit.cli import options as o
from toolkit.errors import UserError

if TYPE_CHECKING:
    from toolkit.training.data.show import Example
    from toolkit.training.data.tokenize import TokenStore

EPILOG = ("Example: toolkit data show chat.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct --count 2. "
          "Exit status: 0 done, 2 bad input.")
READING = "Reading"


def register(app: typer.Typer) -> None:
    """Add the group and its subcommand."""
    group = typer.Typer(no_args_is_help=True, help="Look at training data before a run does.", epilog=EPILOG)
    group.command("show", epilog=EPILOG)(show)
    app.add_typer(group, name="data")


def _reading(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=READING, show_default=True)


def show(
    data: Annotated[list[str], typer.Argument(metavar="DATA...", help="Files, folders, globs or hub ids (owner/name#config:split"
                                              "@revision), as the key data of the recipe takes them.")],
    model: Annotated[str, typer.Option("--model", help="The model whose tokenizer and chat template apply.")],
    count: Annotated[int, typer.Option("--count", min=0, help="Samples to print.")] = 3,
    first: Annotated[int | None, typer.Option("--first", min=1, help="Read only so many records of it.")] = None,
    seq_len: Annotated[int, _reading("--seq-len", help="Tokens per row.")] = 2048,
    data_format: Annotated[str, _reading("--data-format", help="auto, messages, prompt-completion, text or tokens.")] = "auto",
    train_on: Annotated[str, _reading("--train-on", help="auto, answers, last-answer or everything.")] = "auto",
    too_long: Annotated[str, _reading("--too-long", help="truncate, drop or stop: samples above seq-len.")] = "truncate",
    bad_lines: Annotated[str, _reading("--bad-lines", help="stop or skip.")] = "stop",
    columns: Annotated[str, _reading("--columns", help="known=own, joined by commas: prompt=QUESTION,completion=ANSWER.")] = "",
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a hub model.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run tokenizer code of the model.")] = False,
    json: o.Json = False,
) -> int:
    """Print a few samples as the model will see them, what is trained on coloured, and the counts of the whole data."""
    from toolkit.training.config import TrainConfig
    from toolkit.training.data.encode import Reading
    from toolkit.training.data.show import load_examples, load_tokenizer
    from toolkit.training.start import quiet

    values = {"data_format": data_format, "train_on": train_on, "too_long": too_long, "bad_lines": bad_lines}
    for name, value in values.items():
        choices = get_args(typing_of(TrainConfig, name))
        if value not in choices:
            raise UserError(f"--{name.replace('_', '-')} {value!r} is not one of {', '.join(choices)}")
    if seq_len < 2:
        raise UserError(f"--seq-len is {seq_len}; it must be at least 2")
    quiet()
    settings: dict[str, Any] = {"kind": values.pop("data_format"), **values}
    reading = Reading(seq_len=seq_len, columns=tuple(filter(None, map(str.strip, columns.split(",")))), **settings)
    tokenizer = load_tokenizer(model, revision, trust_remote_code=trust_remote_code)
    store, examples = load_examples(tuple(data), tokenizer, reading, count, first)
    if json:
        typer.echo(json_module.dumps(_object(store, examples), indent=2, ensure_ascii=False))
    else:
        _show(store, examples, data)
    return 0


def typing_of(kind: type, name: str) -> Any:
    """The type of a field as it is meant, not as it is written."""
    from typing import get_type_hints

    return get_type_hints(kind)[name]


def _visible(text: str) -> str:
    """Control characters as their escapes: data must not steer the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found.group()):02x}", text)


def _object(store: TokenStore, examples: list[Example]) -> dict[str, Any]:
    return {
        "schema": 1,
        **store.facts,
        "longest": int(store.lengths.max()),
        "examples": [
            {"index": example.index, "tokens": example.tokens, "targets": example.targets,
             "text": "".join(part.text for part in example.parts),
             "parts": [{"text": part.text, "trained": part.trained, "tokens": part.tokens} for part in example.parts]}
            for example in examples
        ],
    }  # fmt: skip


def _show(store: TokenStore, examples: list[Example], data: list[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for example in examples:
        console.print(Text(f"sample {example.index}: {example.tokens:,} tokens, {example.targets:,} of them trained on", "bold"))
        text = Text()
        for part in example.parts:
            # Without colours, brackets say the same.
            marks = ("", "") if console.color_system else ("⟦", "⟧")
            shown = _visible(part.text)
            text.append(f"{marks[0]}{shown}{marks[1]}" if part.trained else shown, "green" if part.trained else "dim")
        console.print(text)
        console.print()
    facts, lengths = store.facts, store.lengths
    kept = f"{len(store):,} samples, {facts['tokens']:,} tokens, {facts['targets']:,} of them trained on"
    console.print(f"{', '.join(data)}: read as {facts['kind']}, trained on {facts['train_on']}")
    console.print(f"{kept}; lengths {int(lengths.min()):,} to {int(lengths.max()):,}, mean {lengths.mean():,.0f}")
    notes = [f"{facts[name]:,} {text}" for name, text in (
        ("truncated", "cut at seq-len"), ("dropped", "dropped"), ("skipped", "bad lines skipped")) if facts.get(name)]
    if notes:
        console.print(", ".join(notes))
