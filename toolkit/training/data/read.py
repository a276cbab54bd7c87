"""Records from files and data sets. A record is a plain dict; a mistake is named with its file and line."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from toolkit.errors import UserError
from toolkit.training.data.sources import (
    ARRAYS,
    PARQUET,
    TABLES,
    TEXT,
    Source,
    check_sources,
    fingerprint,
    is_hub_id,
    resolve,
    suffix_of,
)

__all__ = ["Bad", "Record", "check_sources", "fingerprint", "is_hub_id", "read", "read_file", "read_source", "resolve", "stop"]

Record = dict[str, Any]
Bad = Callable[[str], None]
"""Told what is wrong with one line; raises, or counts and returns when such lines are skipped."""


def stop(message: str) -> None:
    """Do not go on after a bad line. Raises UserError."""
    raise UserError(f"{message} (bad_lines=skip leaves such lines out)")


def read(sources: tuple[str, ...], bad: Bad = stop) -> Iterator[tuple[str, Record]]:
    """(where, record) of every record: `where` is fit for a message (`data.jsonl line 17`).

    Raises:
        UserError: a broken line (unless `bad` returns), a file that is not what its name says, a data set that cannot be
            fetched or has no such split.
    """
    for text in sources:
        yield from read_source(resolve(text), bad)


def read_source(source: Source, bad: Bad = stop) -> Iterator[tuple[str, Record]]:
    """As `read`, of one entry."""
    if source.kind == "hub":
        yield from _read_hub(source)
    elif source.kind == "saved":
        yield from _read_saved(source)
    for path in source.files:
        yield from read_file(path, bad)


def read_file(path: Path, bad: Bad = stop) -> Iterator[tuple[str, Record]]:
    """As `read`, of one file."""
    suffix = suffix_of(path)
    if suffix in PARQUET:
        yield from _read_parquet(path)
        return
    reader = _read_text if suffix in TEXT else _read_table if suffix in TABLES else (
        _read_json if suffix in ARRAYS else _read_lines)
    try:
        yield from reader(path, bad)
    except (OSError, EOFError) as error:  # A .gz that is none, or a disk that fails.
        raise UserError(f"data file {str(path)!r} cannot be read: {error}") from None


def _open(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def _decoded(path: Path) -> str:
    with _open(path) as file:
        try:
            return file.read().decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UserError(f"data file {str(path)!r} is not UTF-8 text") from None


def _read_lines(path: Path, bad: Bad) -> Iterator[tuple[str, Record]]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            where = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                bad(f"{where} is not UTF-8 text")
                continue
            except (json.JSONDecodeError, RecursionError) as error:
                what = f"{error.msg.removesuffix(' at')} at column {error.colno}" if isinstance(
                    error, json.JSONDecodeError) else "nested too deeply"
                bad(f"{where} is not JSON ({what}); every line must be one JSON object")
                continue
            if not isinstance(record, dict):
                bad(f"{where} is a JSON {type(record).__name__}; every line must be one JSON object")
                continue
            yield where, record


def _read_json(path: Path, bad: Bad) -> Iterator[tuple[str, Record]]:
    """An array of objects, an object that holds one array of them, or, as many tools write under this name, one object a
    line."""
    with _open(path) as file:
        filled = (line for line in file if line.strip())
        head, more = next(filled, b"").lstrip(b"\xef\xbb\xbf \t"), next(filled, None) is not None
    if more and head.startswith(b"{") and _is_whole(head):
        yield from _read_lines(path, bad)
        return
    try:
        content = json.loads(_decoded(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} line {error.lineno} is not JSON ({error.msg.removesuffix(' at')} at column {error.colno}); "
                        "the file must hold an array of objects, or one object a line") from None
    if isinstance(content, dict):
        arrays = [value for value in content.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
        content = arrays[0] if len(arrays) == 1 and not {"messages", "conversations"} & set(content) else [content]
    if not isinstance(content, list):
        raise UserError(f"{path} is a JSON {type(content).__name__}; it must hold an array of objects, or one object a line")
    for number, record in enumerate(content, start=1):
        if not isinstance(record, dict):
            bad(f"{path} item {number} is a JSON {type(record).__name__}; every item must be an object")
            continue
        yield f"{path} item {number}", record


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError as error:
        # A first line that is broken, not merely unfinished, is a broken line.
        return isinstance(error, json.JSONDecodeError) and error.pos < len(line.rstrip()) - 1
    return True


def _read_table(path: Path, bad: Bad) -> Iterator[tuple[str, Record]]:
    """CSV with a header; the separator is the one that the header has most of."""
    csv.field_size_limit(1 << 30)
    text = _decoded(path)
    header = text.lstrip("\n").partition("\n")[0]
    separator = "\t" if suffix_of(path) == ".tsv" else max(",;\t", key=header.count)
    rows = csv.reader(text.splitlines(keepends=True), delimiter=separator, strict=True)
    names: list[str] | None = None
    while True:
        where = f"{path} line {rows.line_num + 1}"
        try:
            row = next(rows, None)
        except csv.Error as error:
            bad(f"{where} is not CSV ({error})")
            continue
        if row is None:
            return
        if not row:
            continue
        if names is None:
            names = [name.strip() for name in row]
        elif len(row) != len(names):
            bad(f"{where} has {len(row)} fields, the header has {len(names)}")
        else:
            yield where, dict(zip(names, row, strict=True))


def _read_parquet(path: Path) -> Iterator[tuple[str, Record]]:
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches(batch_size=1000):
            for record in batch.to_pylist():
                number += 1
                yield f"{path} row {number}", record
    except (ArrowException, OSError) as error:
        raise UserError(f"data file {str(path)!r} is not Parquet, or damaged: {_one_line(error)}") from None


def _read_text(path: Path, bad: Bad) -> Iterator[tuple[str, Record]]:
    """One record per paragraph group: a text file is cut at blank lines so that a split can be taken from it."""
    for number, part in enumerate(_decoded(path).replace("\r\n", "\n").split("\n\n"), start=1):
        if part.strip():
            yield f"{path} paragraph {number}", {"text": part.strip("\n")}


def _read_saved(source: Source) -> Iterator[tuple[str, Record]]:
    """A folder that `save_to_disk` of `datasets` wrote."""
    from datasets import DatasetDict, load_from_disk

    try:
        rows = load_from_disk(source.name)
    except Exception as error:  # Whatever the library's file formats raise.
        raise UserError(f"data {source.text!r}: datasets cannot load this folder: {_one_line(error)}") from None
    if isinstance(rows, DatasetDict):
        split = source.split or ("train" if "train" in rows else next(iter(rows), ""))
        if split not in rows:
            raise UserError(f"data {source.text!r} has no split {split!r}; it has {', '.join(rows) or 'none'}")
        rows = rows[split]
    elif source.split:
        raise UserError(f"data {source.text!r} was saved without splits; leave out :{source.split}")
    for number, row in enumerate(rows):
        yield f"{source.text} row {number}", dict(row)


def _read_hub(source: Source) -> Iterator[tuple[str, Record]]:
    from datasets import load_dataset

    try:
        rows = load_dataset(source.name, source.config, split=source.split or "train", revision=source.revision)
    except Exception as error:  # The network, the hub and the data set's own files each raise their own kinds.
        raise UserError(f"data {source.text!r} is neither a file here nor a hub dataset that can be fetched: "
                        f"{_one_line(error)}") from None
    for number, row in enumerate(rows):
        yield f"{source.text} row {number}", dict(row)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
