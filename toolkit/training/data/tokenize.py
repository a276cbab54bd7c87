"""Samples to tokens, once: the result is kept in a cache that every rank maps into memory.

A token store holds all samples end to end: `tokens` int32 [T], `targets` bool [T] (is this token to be
predicted), and `offsets` int64 [samples + 1].
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from toolkit.cache import cache_dir, written_whole
from toolkit.errors import UserError
from toolkit.training.data.format import Kind, Sample, recognise, to_sample
from toolkit.training.data.read import Record, fingerprint, read

_FORMAT_VERSION = 1
"""Raised whenever the same input would give other tokens or another layout."""
_AT_ONCE = 1000
"""Samples handed to the tokenizer together; it spreads them over threads itself."""


@dataclass(frozen=True)
class TokenStore:
    """All samples of one data set as tokens."""

    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    facts: dict[str, Any] = field(default_factory=dict)
    """kind, train_on, samples, tokens, targets, truncated, dropped, fingerprint: for the log and the run's
    record."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample."""
        return np.diff(self.offsets)


def store_key(sources: tuple[str, ...], tokenizer: Any, *, kind: str, train_on: str, seq_len: int) -> str:
    """A name for the tokens of this data under these settings."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        _FORMAT_VERSION, fingerprint(sources), kind, train_on, seq_len,
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


def build(
    key: str,
    sources: tuple[str, ...],
    tokenizer: Any,
    *,
    kind: Literal["auto"] | Kind,
    train_on: Literal["auto", "answers", "everything"],
    seq_len: int,
) -> TokenStore:
    """Read, recognise and tokenise the sources, and keep the result under `key`.

    Conversations and completions longer than `seq_len` are cut at their end; plain text is cut into windows.

    Raises:
        UserError: see `read`, `recognise` and `to_sample`; also when nothing is left to train on.
    """
    records = read(sources)
    first = next(records, None)
    if first is None:
        raise UserError(f"data {', '.join(sources)} holds no records")
    found: Kind = recognise(first[1], first[0]) if kind == "auto" else kind
    aim = train_on if train_on != "auto" else ("everything" if found == "text" else "answers")
    if found == "messages" and not tokenizer.chat_template:
        raise UserError("the data holds conversations, but the model's tokenizer has no chat template; "
                        "use an instruct model, or give prompt and completion")
    if aim == "answers" and not tokenizer.is_fast:
        raise UserError("train_on=answers needs a fast tokenizer; use train_on=everything")
    counts = {"truncated": 0, "dropped": 0}
    pieces = list(_tokenised(_chain(first, records), found, aim, tokenizer, seq_len, counts))
    if not pieces:
        raise UserError(f"data {', '.join(sources)}: no sample has a token to train on "
                        f"(read as {found}, train_on {aim}, {counts['dropped']} samples dropped)")
    ids, flags = zip(*pieces, strict=True)
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in ids])]).astype(np.int64)
    tokens, targets = np.concatenate(ids), np.concatenate(flags)
    facts = {"kind": found, "train_on": aim, "samples": len(ids), "tokens": len(tokens),
             "targets": int(targets.sum()), **counts, "fingerprint": key}
    folder = cache_dir("data") / key
    with written_whole(folder) as scratch:
        for name, array in (("tokens", tokens), ("targets", targets), ("offsets", offsets)):
            np.save(scratch / f"{name}.npy", array, allow_pickle=False)
        (scratch / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    return load(key) or TokenStore(tokens, targets, offsets, facts)


def _chain(first: tuple[str, Record], rest: Iterator[tuple[str, Record]]) -> Iterator[tuple[str, Record]]:
    yield first
    yield from rest


Piece = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]


def _tokenised(records: Iterable[tuple[str, Record]], kind: Kind, aim: str, tokenizer: Any, seq_len: int,
               counts: dict[str, int]) -> Iterator[Piece]:
    """(ids, targets) of every sample that has a target; `counts` is added to on the way."""
    source = iter(records)
    while batch := list(islice(source, _AT_ONCE)):
        samples = [to_sample(kind, record, where, tokenizer) for where, record in batch]
        encoded = tokenizer(
            [sample.text for sample in samples],
            add_special_tokens=not samples[0].special,
            return_offsets_mapping=aim == "answers",
            return_attention_mask=False,
            verbose=False,
        )
        for index, sample in enumerate(samples):
            ids = np.asarray(encoded["input_ids"][index], dtype=np.int32)
            flags = (_inside(encoded["offset_mapping"][index], sample) if aim == "answers"
                     else np.ones(len(ids), dtype=np.bool_))
            counts["truncated"] += len(ids) > seq_len and kind != "text"
            windows = range(0, len(ids), seq_len) if kind == "text" else range(1)
            for start in windows:
                # The first token of a row has nothing before it to be predicted from.
                if flags[start + 1 : start + seq_len].any():
                    yield ids[start : start + seq_len], flags[start : start + seq_len]
                else:
                    counts["dropped"] += 1


def _inside(offsets: list[tuple[int, int]], sample: Sample) -> npt.NDArray[np.bool_]:
    """Which tokens begin inside one of the sample's answers. `offsets` are characters, (0, 0) for added
    tokens."""
    begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    flags: npt.NDArray[np.bool_] = np.zeros(len(begins), dtype=np.bool_)
    for start, end in sample.answers:
        flags |= (begins >= start) & (begins < end) & (ends > begins)
    return flags


def get(sources: tuple[str, ...], tokenizer: Any, *, kind: Literal["auto"] | Kind,
        train_on: Literal["auto", "answers", "everything"], seq_len: int) -> TokenStore:
    """The store of these sources, from the cache if it is there."""
    key = store_key(sources, tokenizer, kind=kind, train_on=train_on, seq_len=seq_len)
    return load(key) or build(key, sources, tokenizer, kind=kind, train_on=train_on, seq_len=seq_len)
