"""Samples to tokens, once: the result is kept in a cache that every rank maps into memory.

A token store holds all samples end to end: `tokens` int32 [T], `targets` bool [T] (is this token to be
predicted), and `offsets` int64 [samples + 1].
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.cache import cache_dir, written_whole
from toolkit.errors import UserError
from toolkit.training.data.encode import Encoded, Reading, settled
from toolkit.training.data.format import recognise, renamed
from toolkit.training.data.read import Item, Record, fingerprint, parsed, parts_of, resolve, stop
from toolkit.training.data.workers import AT_ONCE, Encoding

_FORMAT_VERSION = 2
"""Raised whenever the same input would give other tokens or another layout."""
@dataclass(frozen=True)
class TokenStore:
    """All samples of one data set as tokens."""

    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    facts: dict[str, Any] = field(default_factory=dict)
    """kind, train_on, samples, tokens, targets, truncated, dropped, skipped, sources (samples of each), fingerprint: for the
    log and the run's record."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample."""
        return np.diff(self.offsets)


def store_key(sources: tuple[str, ...], tokenizer: Any, reading: Reading) -> str:
    """A name for the tokens of this data under these settings."""
    return hashlib.sha256(f"{fingerprint(sources)}{settings_key(tokenizer, reading)}".encode()).hexdigest()[:32]


def settings_key(tokenizer: Any, reading: Reading) -> str:
    """A digest of all but the data that decides which tokens come out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        _FORMAT_VERSION, asdict(reading), backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()),
        tokenizer.chat_template, tokenizer.eos_token,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def load(folder: Path) -> TokenStore | None:
    """The store in this folder, mapped into memory, or None."""
    try:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
                  for name in ("tokens", "targets", "offsets")]
        whole = len(arrays[0]) == len(arrays[1]) == arrays[2][-1]
    except (OSError, ValueError, IndexError):
        return None
    if not whole:
        return None
    return TokenStore(arrays[0], arrays[1], arrays[2], facts)


def build(key: str, sources: tuple[str, ...], tokenizer: Any, reading: Reading, workers: int | None = None) -> TokenStore:
    """Read, recognise and tokenise the sources, and keep the result under `key`.

    Conversations, completions and tokenised samples longer than `seq_len` are cut at their end, dropped or refused
    (`too_long`); plain text is cut into windows. Large data is spread over `workers` processes; None: one for each core.

    Raises:
        UserError: see `read`, `settled` and `to_sample`; also when nothing is left to train on.
    """
    whole, per_source, first = Encoded(), [0] * len(sources), FirstRecord(tokenizer, reading)
    with Encoding(tokenizer, workers) as encoding:
        for number, part in encoding.run(first.batches(sources)):
            per_source[number] += len(part.lengths)
            whole.extend(part)
    whole.extend(first.out)
    settled = first.reading
    if not whole.lengths:
        raise UserError(f"data {', '.join(sources)}: {why_nothing(whole, settled if first.place else None)}")
    facts = {"kind": settled.kind, "train_on": settled.train_on, "sources": per_source, "fingerprint": key}
    return keep(cache_dir("data") / key, store_of(whole, facts))


def store_of(whole: Encoded, facts: dict[str, Any]) -> TokenStore:
    """A store of these samples, with their numbers added to the facts."""
    offsets = np.concatenate([[0], np.cumsum(whole.lengths)]).astype(np.int64)
    tokens, targets = np.concatenate(whole.ids), np.concatenate(whole.flags)
    return TokenStore(tokens, targets, offsets, {**facts, "samples": len(whole.lengths), "tokens": len(tokens),
                                                 "targets": int(targets.sum()), **whole.counts})


def keep(folder: Path, store: TokenStore) -> TokenStore:
    """Write a store as `folder`, whole or not at all, and give back what was written, mapped into memory.

    Raises:
        UserError: the disk is full, or may not be written.
    """
    if folder.exists() and load(folder) is None:
        shutil.rmtree(folder, ignore_errors=True)  # It was damaged since it was written.
    try:
        with written_whole(folder) as scratch:
            for name, array in (("tokens", store.tokens), ("targets", store.targets), ("offsets", store.offsets)):
                np.save(scratch / f"{name}.npy", array, allow_pickle=False)
            (scratch / "facts.json").write_text(json.dumps(store.facts), encoding="utf-8")
    except OSError as error:
        raise UserError(f"the tokens cannot be kept in {str(folder.parent)!r} ({error.strerror or error}); make room, or set "
                        "TOOLKIT_CACHE to another folder") from None
    return load(folder) or store


def why_nothing(whole: Encoded, reading: Reading | None) -> str:
    """Why no sample came out; without a reading there was no record."""
    skipped, problem = whole.counts["skipped"], whole.first_problem
    if reading is None:
        return f"holds no records{f'; the first of {skipped} bad lines: {problem}' if problem else ''}"
    told = f", {skipped} skipped; the first: {problem}" if problem else ""
    hint = ("; the answers of long samples lie beyond seq_len" if whole.counts["truncated"] else
            "; is there an answer in it, are all labels masked?" if reading.train_on != "everything" else "")
    return (f"no sample has a token to train on (read as {reading.kind}, train_on {reading.train_on}, "
            f"{whole.counts['dropped']} samples dropped{told}){hint}")


class FirstRecord:
    """Settles what the data is by its first record, and holds the first record of every file to that."""

    def __init__(self, tokenizer: Any, reading: Reading) -> None:
        self.tokenizer, self.reading, self.asked = tokenizer, reading, reading.kind
        self.place = ""
        self.out = Encoded()
        """Bad lines that were met on the way to a first record."""

    def batches(self, sources: tuple[str, ...]) -> Iterator[tuple[int, Reading, list[Item]]]:
        """(number of the source, the settled reading, items) until all is read. Raises UserError."""
        for number, text in enumerate(sources):
            for items in parts_of(resolve(text), self.bad):
                rest = self.checked(items)
                while batch := list(islice(rest, AT_ONCE)):
                    yield number, self.reading, batch

    def checked(self, items: Iterator[Item]) -> Iterator[Item]:
        """The items of one file, from its first record on. Raises UserError when it is of another kind than files before."""
        for where, item in items:
            record = parsed(where, item, self.bad)
            if record is None:
                continue
            self._settle(renamed(record, self.reading.names, where), where)
            yield where, item
            yield from items
            return

    def _settle(self, record: Record, where: str) -> None:
        if not self.place:
            self.reading, self.place = settled(self.reading, record, where, self.tokenizer), where
        elif self.asked == "auto" and (found := recognise(record, where)) != self.reading.kind:
            raise UserError(f"{where} is {found}, but {self.place} is {self.reading.kind}; one run trains on one format: "
                            "convert one of them")

    def bad(self, message: str) -> None:
        """One line that cannot be used. Raises UserError unless such lines are skipped."""
        if self.reading.bad_lines == "stop":
            stop(message)
        self.out.counts["skipped"] += 1
        self.out.first_problem = self.out.first_problem or message


def get(sources: tuple[str, ...], tokenizer: Any, reading: Reading, workers: int | None = None) -> TokenStore:
    """The store of these sources, from the cache if it is there."""
    key = store_key(sources, tokenizer, reading)
    return load(cache_dir("data") / key) or build(key, sources, tokenizer, reading, workers)
