"""Records from files and data sets. A record is a plain dict; a mistake is named with its file and line."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
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

__all__ = ["Bad", "Cursor", "Item", "Record", "check_sources", "fingerprint", "is_hub_id", "parsed", "parts_of", "read",
           "read_file", "read_hub", "read_saved", "resolve", "size_of", "stop"]

Record = dict[str, Any]
Bad = Callable[[str], None]
"""Told what is wrong with one line; raises, or counts and returns when such lines are skipped."""


def stop(message: str) -> None:
    """Do not go on after a bad line. Raises UserError."""
    raise UserError(f"{message} (bad_lines=skip leaves such lines out)")


@dataclass
class Cursor:
    """How far a source has been read. A reader starts where it stands, and keeps it at the end of what it has given."""

    number: int = 0
    """Lines, rows or items."""
    offset: int = 0
    """Bytes (unpacked ones of a .gz), of files that are read line by line."""


Item = tuple[str, Record | bytes]
"""Where it stands, fit for a message, and a record, or the line of JSON that holds it."""


def read(sources: tuple[str, ...], bad: Bad = stop) -> Iterator[tuple[str, Record]]:
    """(where, record) of every record: `where` is fit for a message (`data.jsonl line 17`).

    Raises:
        UserError: a broken line (unless `bad` returns), a file that is not what its name says, a data set that cannot be
            fetched or has no such split.
    """
    for text in sources:
        for items in parts_of(resolve(text), bad):
            for where, item in items:
                record = parsed(where, item, bad)
                if record is not None:
                    yield where, record


def parts_of(source: Source, bad: Bad = stop) -> Iterator[Iterator[Item]]:
    """The items of each file of one entry, or of its one data set. Raises UserError as `read` does."""
    if source.kind == "hub":
        yield ((f"{source.text} row {number}", dict(row)) for number, row in enumerate(read_hub(source, streaming=False)))
    elif source.kind == "saved":
        yield read_saved(source, Cursor())
    for path in source.files:
        yield read_file(path, bad, Cursor())


def read_file(path: Path, bad: Bad, cursor: Cursor) -> Iterator[Item]:
    """The items of one file from `cursor` on. Raises UserError as `read` does."""
    suffix = suffix_of(path)
    if suffix in PARQUET:
        yield from _read_parquet(path, cursor)
        return
    reader = _read_text if suffix in TEXT else _read_table if suffix in TABLES else (
        _read_json if suffix in ARRAYS else _read_lines)
    try:
        yield from reader(path, bad, cursor)
    except UnicodeDecodeError:
        raise UserError(f"data file {str(path)!r} is not UTF-8 text") from None
    except (OSError, EOFError) as error:  # A .gz that is none, or a disk that fails.
        raise UserError(f"data file {str(path)!r} cannot be read: {error}") from None


def parsed(where: str, item: Record | bytes, bad: Bad) -> Record | None:
    """The record of an item; None when it cannot be used and `bad` returns."""
    if not isinstance(item, bytes):
        return item
    try:
        record = json.loads(item.decode("utf-8"))
    except UnicodeDecodeError:
        bad(f"{where} is not UTF-8 text")
        return None
    except (json.JSONDecodeError, RecursionError) as error:
        what = f"{error.msg.removesuffix(' at')} at column {error.colno}" if isinstance(
            error, json.JSONDecodeError) else "nested too deeply"
        bad(f"{where} is not JSON ({what}); every line must be one JSON object")
        return None
    if not isinstance(record, dict):
        bad(f"{where} is a JSON {type(record).__name__}; every line must be one JSON object")
        return None
    return record


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


def _lines(path: Path, cursor: Cursor, *, old_ends: bool = False) -> Iterator[bytes]:
    """The lines from the cursor on, without the mark that some files begin with; `old_ends`: a bare carriage return ends one
    too, as in tables of old spreadsheets."""
    with _open(path) as file:
        file.seek(cursor.offset)
        for line in file:
            for part in line.splitlines(keepends=True) if old_ends else (line,):
                cursor.offset += len(part)
                cursor.number += 1
                yield part.removeprefix(b"\xef\xbb\xbf") if cursor.number == 1 else part


def _read_lines(path: Path, bad: Bad, cursor: Cursor) -> Iterator[Item]:
    for line in _lines(path, cursor):
        if line.strip():
            yield f"{path} line {cursor.number}", line


def _read_json(path: Path, bad: Bad, cursor: Cursor) -> Iterator[Item]:
    """An array of objects, an object that holds one array of them, or, as many tools write under this name, one object a
    line."""
    with _open(path) as file:
        filled = (line for line in file if line.strip())
        head, more = next(filled, b"").lstrip(b"\xef\xbb\xbf \t"), next(filled, None) is not None
    if more and head.startswith(b"{") and _is_whole(head):
        yield from _read_lines(path, bad, cursor)
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


def _read_table(path: Path, bad: Bad, cursor: Cursor) -> Iterator[Item]:
    """CSV with a header; the separator is the one that the header has most of."""
    csv.field_size_limit(1 << 30)
    first = next((line for line in _lines(path, Cursor(), old_ends=True) if line.strip()), b"").decode("utf-8")
    separator = "\t" if suffix_of(path) == ".tsv" else max(",;\t", key=first.count)

    def rows(at: Cursor) -> Iterator[list[str]]:
        return csv.reader((line.decode("utf-8") for line in _lines(path, at, old_ends=True)), delimiter=separator, strict=True)

    top = Cursor()
    try:
        names = [name.strip() for name in next((row for row in rows(top) if row), [])]
    except csv.Error as error:
        raise UserError(f"{path} line {top.number}: the header is not CSV ({error})") from None
    if not cursor.number:
        cursor.number, cursor.offset = top.number, top.offset
    following = rows(cursor)
    while True:
        where = f"{path} line {cursor.number + 1}"
        try:
            row = next(following, None)
        except csv.Error as error:
            bad(f"{where} is not CSV ({error})")
            continue
        if row is None:
            return
        if row and len(row) != len(names):
            bad(f"{where} has {len(row)} fields, the header has {len(names)}")
        elif row:
            yield where, dict(zip(names, row, strict=True))


def _read_parquet(path: Path, cursor: Cursor) -> Iterator[Item]:
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
        groups, before = list(range(file.num_row_groups)), 0
        while groups and before + file.metadata.row_group(groups[0]).num_rows <= cursor.number:
            before += file.metadata.row_group(groups.pop(0)).num_rows
        for batch in file.iter_batches(batch_size=1000, row_groups=groups):
            skipped = min(max(0, cursor.number - before), batch.num_rows)
            before += batch.num_rows
            for record in batch.slice(skipped).to_pylist():
                cursor.number += 1
                yield f"{path} row {cursor.number}", record
    except (ArrowException, OSError) as error:
        raise UserError(f"data file {str(path)!r} is not Parquet, or damaged: {_one_line(error)}") from None


def size_of(path: Path) -> int:
    """What a cursor has counted at the end of a file: its bytes, or the rows of a Parquet file. Raises UserError."""
    if suffix_of(path) not in PARQUET:
        return path.stat().st_size
    from pyarrow import ArrowException, parquet

    try:
        return int(parquet.read_metadata(path).num_rows)
    except (ArrowException, OSError) as error:
        raise UserError(f"data file {str(path)!r} is not Parquet, or damaged: {_one_line(error)}") from None


def _read_text(path: Path, bad: Bad, cursor: Cursor) -> Iterator[Item]:
    """One record per paragraph group: a text file is cut at blank lines so that a split can be taken from it."""
    part: list[str] = []
    first = cursor.number + 1
    for line in chain(_lines(path, cursor), [b""]):
        text = line.decode("utf-8").replace("\r\n", "\n")
        if text.strip("\n"):
            part.append(text)
            continue
        whole, where = "".join(part), f"{path} line {first}"
        part, first = [], cursor.number + 1
        if whole.strip():
            yield where, {"text": whole.strip("\n")}


def read_saved(source: Source, cursor: Cursor) -> Iterator[Item]:
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
    for number in range(cursor.number, len(rows)):
        cursor.number = number + 1
        yield f"{source.text} row {number}", dict(rows[number])


def read_hub(source: Source, *, streaming: bool = True) -> Any:
    """The rows of a data set of the hub, fetched as they are read. Raises UserError when it cannot be reached."""
    from datasets import load_dataset

    try:
        return load_dataset(source.name, source.config, split=source.split or "train", revision=source.revision,
                            streaming=streaming)
    except Exception as error:  # The network, the hub and the data set's own files each raise their own kinds.
        raise UserError(f"data {source.text!r} is neither a file here nor a hub dataset that can be fetched: "
                        f"{_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
