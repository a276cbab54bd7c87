"""Samples to tokens, once: the result is kept in a cache that every rank maps into memory.

A token store holds all samples end to end: `tokens` int32 [T], `targets` bool [T] (is this token to be
predicted), and `offsets` int64 [samples + 1].
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from toolkit.cache import cache_dir, written_whole
from toolkit.errors import UserError
from toolkit.training.data.format import Kind, Sample, TrainOn, recognise, renamed, to_sample
from toolkit.training.data.read import Record, fingerprint, read_file, read_source, resolve, stop

_FORMAT_VERSION = 2
"""Raised whenever the same input would give other tokens or another layout."""
_AT_ONCE = 1000
"""Samples handed to the tokenizer together; it spreads them over threads itself."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How data is read: the keys of the config of the same names."""

    kind: Literal["auto"] | Kind = "auto"
    train_on: TrainOn = "auto"
    seq_len: int = 2048
    too_long: Literal["truncate", "drop", "stop"] = "truncate"
    bad_lines: Literal["stop", "skip"] = "stop"
    columns: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, str]:
        """Known name to the data's own, from `known=own`. Raises UserError."""
        pairs = [entry.partition("=") for entry in self.columns]
        if any(not (known and equals and own) for known, equals, own in pairs):
            raise UserError(f"columns={','.join(self.columns)}: write known=own, as in prompt=QUESTION,completion=ANSWER")
        return {known.strip(): own.strip() for known, _, own in pairs}


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
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        _FORMAT_VERSION, fingerprint(sources), asdict(reading),
        backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()),
        tokenizer.chat_template, tokenizer.eos_token,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def load(key: str) -> TokenStore | None:
    """The cached store of this name, mapped into memory, or None."""
    folder = cache_dir("data") / key
    try:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
                  for name in ("tokens", "targets", "offsets")]
    except (OSError, ValueError):
        return None
    return TokenStore(arrays[0], arrays[1], arrays[2], facts)


def build(key: str, sources: tuple[str, ...], tokenizer: Any, reading: Reading) -> TokenStore:
    """Read, recognise and tokenise the sources, and keep the result under `key`.

    Conversations, completions and tokenised samples longer than `seq_len` are cut at their end, dropped or refused
    (`too_long`); plain text is cut into windows.

    Raises:
        UserError: see `read`, `recognise` and `to_sample`; also when nothing is left to train on.
    """
    maker = _Maker(tokenizer, reading)
    pieces = list(maker.pieces(sources))
    if not pieces:
        raise UserError(f"data {', '.join(sources)}: {maker.why_nothing()}")
    ids, flags = zip(*pieces, strict=True)
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in ids])]).astype(np.int64)
    tokens, targets = np.concatenate(ids), np.concatenate(flags)
    facts = {"kind": maker.kind, "train_on": maker.aim, "samples": len(ids), "tokens": len(tokens),
             "targets": int(targets.sum()), **maker.counts, "sources": maker.per_source, "fingerprint": key}
    folder = cache_dir("data") / key
    with written_whole(folder) as scratch:
        for name, array in (("tokens", tokens), ("targets", targets), ("offsets", offsets)):
            np.save(scratch / f"{name}.npy", array, allow_pickle=False)
        (scratch / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    return load(key) or TokenStore(tokens, targets, offsets, facts)


Piece = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]


class _Maker:
    """Turns records into (ids, targets), and counts what becomes of them on the way."""

    def __init__(self, tokenizer: Any, reading: Reading) -> None:
        self.tokenizer, self.reading, self.names = tokenizer, reading, reading.names
        self.kind: Kind = "text"
        self.aim: TrainOn = reading.train_on
        self.found_in: str | None = None
        self.counts = {"truncated": 0, "dropped": 0, "skipped": 0}
        self.per_source: list[int] = []
        self.first_problem = ""

    def bad(self, message: str) -> None:
        """One line that cannot be used. Raises UserError unless such lines are skipped."""
        if self.reading.bad_lines == "stop":
            stop(message)
        self.counts["skipped"] += 1
        self.first_problem = self.first_problem or message

    def pieces(self, sources: tuple[str, ...]) -> Iterator[Piece]:
        """Every sample that has a target, of one source after the other."""
        for text in sources:
            source = resolve(text)
            self.per_source.append(0)
            parts = [read_file(path, self.bad) for path in source.files] or [read_source(source, self.bad)]
            for records in parts:
                for piece in self._tokenised(self._of_one_kind(records)):
                    self.per_source[-1] += 1
                    yield piece

    def why_nothing(self) -> str:
        """Why no sample came out."""
        if self.found_in is None:
            reason = f"; the first of {self.counts['skipped']} bad lines: {self.first_problem}" if self.first_problem else ""
            return f"holds no records{reason}"
        skipped = f", {self.counts['skipped']} skipped; the first: {self.first_problem}" if self.first_problem else ""
        hint = ("; the answers of long samples lie beyond seq_len" if self.counts["truncated"] else
                "; is there an answer in it, are all labels masked?" if self.aim != "everything" else "")
        return (f"no sample has a token to train on (read as {self.kind}, train_on {self.aim}, {self.counts['dropped']} samples "
                f"dropped{skipped}){hint}")

    def _of_one_kind(self, records: Iterator[tuple[str, Record]]) -> Iterator[tuple[str, Record]]:
        """The records of one file, whose first one must be of the kind of the files before."""
        first = next(records, None)
        if first is None:
            return
        where, record = first[0], renamed(first[1], self.names, first[0])
        found = self.reading.kind if self.reading.kind != "auto" else recognise(record, where)
        if self.found_in is None:
            self._settle(found, record)
            self.found_in = where
        elif found != self.kind:
            raise UserError(f"{where} is {found}, but {self.found_in} is {self.kind}; one run trains on one format: convert "
                            "one of them")
        for place, following in chain([first], records):
            yield place, renamed(following, self.names, place)

    def _settle(self, kind: Kind, record: Record) -> None:
        """The kind and the targets of the whole data set, from its first record. Raises UserError when they cannot be had."""
        self.kind = kind
        whole = kind == "text" or (kind == "tokens" and record.get("labels") is None)
        if self.aim == "auto":
            self.aim = "everything" if whole else "answers"
        elif whole and self.aim != "everything":
            raise UserError(f"train_on={self.aim}: data read as {kind}"
                            f"{' without labels' if kind == 'tokens' else ''} has no answers; use train_on=everything")
        if kind == "messages" and not self.tokenizer.chat_template:
            raise UserError("the data holds conversations, but the model's tokenizer has no chat template; "
                            "use an instruct model, or give prompt and completion")
        if self.aim != "everything" and kind != "tokens" and not self.tokenizer.is_fast:
            raise UserError(f"train_on={self.aim} needs a fast tokenizer; use train_on=everything")

    def _tokenised(self, records: Iterable[tuple[str, Record]]) -> Iterator[Piece]:
        source = iter(records)
        while batch := list(islice(source, _AT_ONCE)):
            whole = self._given(batch) if self.kind == "tokens" else self._encoded(batch)
            for where, ids, flags in whole:
                yield from self._fitted(where, ids, flags)

    def _given(self, batch: list[tuple[str, Record]]) -> Iterator[tuple[str, Any, Any]]:
        """Samples that are tokens already."""
        for where, record in batch:
            problem, ids, flags = _ready_made(record, self.aim)
            if problem:
                self.bad(f"{where}: {problem}")
            else:
                yield where, ids, flags

    def _encoded(self, batch: list[tuple[str, Record]]) -> Iterator[tuple[str, Any, Any]]:
        samples: list[Sample] = []
        places: list[str] = []
        for where, record in batch:
            try:
                samples.append(to_sample(self.kind, record, where, self.tokenizer))
                places.append(where)
            except UserError as error:
                self.bad(str(error))
        if not samples:
            return
        marked = self.aim != "everything"
        encoded = self.tokenizer([sample.text for sample in samples], add_special_tokens=not samples[0].special,
                                 return_offsets_mapping=marked, return_attention_mask=False, verbose=False)
        for index, (where, sample) in enumerate(zip(places, samples, strict=True)):
            ids = np.asarray(encoded["input_ids"][index], dtype=np.int32)
            answers = sample.answers[-1:] if self.aim == "last-answer" else sample.answers
            yield where, ids, (_inside(encoded["offset_mapping"][index], answers) if marked
                               else np.ones(len(ids), dtype=np.bool_))

    def _fitted(self, where: str, ids: Any, flags: Any) -> Iterator[Piece]:
        """The sample in pieces of at most seq_len tokens that have a target."""
        seq_len, text = self.reading.seq_len, self.kind == "text"
        if len(ids) > seq_len and not text:
            if self.reading.too_long == "stop":
                raise UserError(f"{where} has {len(ids)} tokens, seq_len is {seq_len}; use too_long=truncate or drop, or a "
                                "larger seq_len")
            self.counts["truncated" if self.reading.too_long == "truncate" else "dropped"] += 1
            if self.reading.too_long == "drop":
                return
        for start in range(0, len(ids), seq_len) if text else range(1):
            # The first token of a row has nothing before it to be predicted from.
            if flags[start + 1 : start + seq_len].any():
                yield ids[start : start + seq_len], flags[start : start + seq_len]
            else:
                self.counts["dropped"] += 1


def _ready_made(record: Record, aim: TrainOn) -> tuple[str, Any, Any]:
    """(problem or "", ids, targets) of a record with input_ids and perhaps labels and attention_mask."""
    values, labels, mask = record.get("input_ids"), record.get("labels"), record.get("attention_mask")
    if not isinstance(values, list) or not all(isinstance(value, int) and 0 <= value < 2**31 for value in values):
        return "input_ids must be a list of whole numbers from 0", None, None
    ids = np.asarray(values, dtype=np.int32)
    flags: npt.NDArray[np.bool_] = np.ones(len(ids), dtype=np.bool_)
    if labels is not None and aim != "everything":
        if not isinstance(labels, list) or len(labels) != len(values):
            return f"labels must be a list as long as input_ids ({len(values)})", None, None
        flags = np.asarray([label >= 0 for label in labels], dtype=np.bool_)
        if any(label not in (own, -100) for label, own in zip(labels, values, strict=True)):
            return "labels must be input_ids, or -100 where nothing is trained (unshifted)", None, None
        if aim == "last-answer":
            begins = np.flatnonzero(flags & ~np.concatenate([[False], flags[:-1]]))
            flags[: begins[-1] if len(begins) else 0] = False
    if isinstance(mask, list) and len(mask) == len(values):  # What was padded is no text.
        kept = np.asarray(mask, dtype=np.bool_)
        ids, flags = ids[kept], flags[kept]
    return "", ids, flags


def _inside(offsets: list[tuple[int, int]], answers: tuple[tuple[int, int], ...]) -> npt.NDArray[np.bool_]:
    """Which tokens begin inside one of the answers. `offsets` are characters, (0, 0) for added tokens."""
    begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    flags: npt.NDArray[np.bool_] = np.zeros(len(begins), dtype=np.bool_)
    for start, end in answers:
        flags |= (begins >= start) & (begins < end) & (ends > begins)
    return flags


def get(sources: tuple[str, ...], tokenizer: Any, reading: Reading) -> TokenStore:
    """The store of these sources, from the cache if it is there."""
    key = store_key(sources, tokenizer, reading)
    return load(key) or build(key, sources, tokenizer, reading)
