"""Records from files and hub datasets. A record is a plain dict; a mistake is named with its file and
line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import UserError

Record = dict[str, Any]
LINES, TEXT = (".jsonl", ".ndjson", ".json"), (".txt", ".text", ".md")


def is_hub_id(source: str) -> bool:
    """`owner/name`, with `owner/name:split` and `owner/name@revision` understood, and no such path here."""
    plain = source.partition(":")[0].partition("@")[0]
    return (
        not Path(source).exists()
        and plain.count("/") <= 1
        and not plain.startswith((".", "/", "~"))
        and Path(plain).suffix.lower() not in LINES + TEXT
    )


def check_sources(sources: tuple[str, ...]) -> None:
    """Raises UserError when a file is missing, empty, or of a kind that is not read."""
    for source in sources:
        if is_hub_id(source):
            continue
        path = Path(source)
        if not path.is_file():
            raise UserError(f"data file {source!r} does not exist")
        if path.suffix.lower() not in LINES + TEXT:
            raise UserError(f"data file {source!r}: only {', '.join(LINES + TEXT)} files are read")
        if path.stat().st_size == 0:
            raise UserError(f"data file {source!r} is empty")


def fingerprint(sources: tuple[str, ...]) -> str:
    """A digest of the files' bytes and the hub ids: the same data gives the same text, wherever it lies."""
    digest = hashlib.sha256()
    for source in sources:
        if is_hub_id(source):
            digest.update(source.encode())
            continue
        with Path(source).open("rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
        digest.update(b"\0")
    return digest.hexdigest()


def read(sources: tuple[str, ...]) -> Iterator[tuple[str, Record]]:
    """(where, record) of every record: `where` is fit for a message (`data.jsonl line 17`).

    Raises:
        UserError: a broken line, a line that is no object, a hub dataset that cannot be fetched.
    """
    for source in sources:
        if is_hub_id(source):
            yield from _read_hub(source)
        elif Path(source).suffix.lower() in TEXT:
            yield from _read_text(Path(source))
        else:
            yield from _read_lines(Path(source))


def _read_lines(path: Path) -> Iterator[tuple[str, Record]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                raise UserError(f"{where} is not UTF-8 text") from None
            except json.JSONDecodeError as error:
                raise UserError(f"{where} is not JSON ({error.msg.removesuffix(' at')} at column {error.colno}); "
                                "every line must be one JSON object") from None
            if not isinstance(record, dict):
                raise UserError(f"{where} is a JSON {type(record).__name__}; "
                                "every line must be one JSON object")
            yield where, record


def _read_text(path: Path) -> Iterator[tuple[str, Record]]:
    """One record per paragraph group: a text file is cut at blank lines so that a split can be taken from
    it."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"data file {str(path)!r} is not UTF-8 text") from None
    for number, part in enumerate(text.split("\n\n"), start=1):
        if part.strip():
            yield f"{path} paragraph {number}", {"text": part.strip("\n")}


def _read_hub(source: str) -> Iterator[tuple[str, Record]]:
    from datasets import load_dataset

    plain, _, split = source.partition(":")
    name, _, revision = plain.partition("@")
    try:
        rows = load_dataset(name, split=split or "train", revision=revision or None)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"data {source!r} is neither a file here nor a hub dataset that can be fetched: "
                        f"{reason}") from None
    for number, row in enumerate(rows):
        yield f"{source} row {number}", dict(row)
