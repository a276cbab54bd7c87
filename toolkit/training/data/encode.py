"""Records to tokens and which of them are trained on: one batch at a time, in this process or another."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from toolkit.errors import UserError
from toolkit.training.data.chat import Span, Template
from toolkit.training.data.format import Kind, Sample, TrainOn, recognise, renamed, to_sample
from toolkit.training.data.read import Item, Record, parsed, stop

Ids: TypeAlias = npt.NDArray[np.int32]
Flags: TypeAlias = npt.NDArray[np.bool_]


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


def settled(reading: Reading, record: Record, where: str, tokenizer: Any) -> Reading:
    """The reading with the kind and the targets of the whole data set, from its first record.

    Raises:
        UserError: the record is of no known kind, or its kind has no such targets, or the tokenizer lacks what they need.
    """
    kind: Kind = reading.kind if reading.kind != "auto" else recognise(record, where)
    aim = reading.train_on
    whole = kind == "text" or (kind == "tokens" and record.get("labels") is None)
    if aim == "auto":
        aim = "everything" if whole else "answers"
    elif whole and aim != "everything":
        raise UserError(f"train_on={aim}: data read as {kind}{' without labels' if kind == 'tokens' else ''} has no answers; "
                        "use train_on=everything")
    if kind == "messages" and not tokenizer.chat_template:
        raise UserError("the data holds conversations, but the model's tokenizer has no chat template; "
                        "use an instruct model, or give prompt and completion")
    if aim != "everything" and kind != "tokens" and not tokenizer.is_fast:
        raise UserError(f"train_on={aim} needs a fast tokenizer; use train_on=everything")
    return replace(reading, kind=kind, train_on=aim)


@dataclass
class Encoded:
    """What became of some records: all samples end to end, and what was left out."""

    ids: list[Ids] = field(default_factory=list)
    flags: list[Flags] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"truncated": 0, "dropped": 0, "skipped": 0})
    first_problem: str = ""

    def add(self, ids: Ids, flags: Flags) -> None:
        """One sample."""
        self.ids.append(ids)
        self.flags.append(flags)
        self.lengths.append(len(ids))

    def extend(self, other: Encoded) -> None:
        """The samples of another behind these."""
        self.ids += other.ids
        self.flags += other.flags
        self.lengths += other.lengths
        self.counts = {name: number + other.counts[name] for name, number in self.counts.items()}
        self.first_problem = self.first_problem or other.first_problem

    def joined(self) -> Encoded:
        """The same in two arrays, which another process can send at less cost."""
        if not self.ids:
            return self
        return replace(self, ids=[np.concatenate(self.ids)], flags=[np.concatenate(self.flags)])


class Encoder:
    """Encodes records of one settled reading."""

    def __init__(self, tokenizer: Any, reading: Reading) -> None:
        self.tokenizer, self.reading, self.names = tokenizer, reading, reading.names
        self.template = Template(tokenizer)
        self.out = Encoded()

    def __call__(self, batch: list[Item]) -> Encoded:
        """The samples of a batch that have a target, in order.

        Raises:
            UserError: a line that cannot be used (unless such are skipped), a sample that is too long where that is to stop.
        """
        self.out = Encoded()
        records = []
        for where, item in batch:
            record = parsed(where, item, self.bad)
            if record is not None:
                records.append((where, renamed(record, self.names, where)))
        if self.reading.kind == "tokens":
            self._given(records)
        else:
            self._encoded(records)
        return self.out.joined()

    def bad(self, message: str) -> None:
        """One line that cannot be used. Raises UserError unless such lines are skipped."""
        if self.reading.bad_lines == "stop":
            stop(message)
        self.out.counts["skipped"] += 1
        self.out.first_problem = self.out.first_problem or message

    def _given(self, records: list[tuple[str, Record]]) -> None:
        """Samples that are tokens already."""
        for where, record in records:
            problem, ids, flags = _ready_made(record, self.reading.train_on)
            if problem:
                self.bad(f"{where}: {problem}")
            else:
                self._fit(where, ids, flags)

    def _encoded(self, records: list[tuple[str, Record]]) -> None:
        samples: list[Sample] = []
        places: list[str] = []
        for where, record in records:
            try:
                samples.append(to_sample(self.reading.kind, record, where, self.template))  # type: ignore[arg-type]
                places.append(where)
            except UserError as error:
                self.bad(str(error))
        if not samples:
            return
        everything = self.reading.train_on == "everything"
        texts = [sample.text for sample in samples]
        if not self.tokenizer.is_fast:
            ids = self.tokenizer(texts, add_special_tokens=not samples[0].special, return_attention_mask=False)["input_ids"]
            for where, own in zip(places, ids, strict=True):
                self._fit(where, np.asarray(own, dtype=np.int32), np.ones(len(own), dtype=np.bool_))
            return
        special = not samples[0].special
        for where, sample, encoding in zip(places, samples, self._fast(texts, special=special), strict=True):
            ids = np.asarray(encoding.ids, dtype=np.int32)
            answers = sample.answers[-1:] if self.reading.train_on == "last-answer" else sample.answers
            flags = np.ones(len(ids), dtype=np.bool_) if everything else _inside(encoding.offsets, answers)
            self._fit(where, *(self._once(ids, flags) if special else (ids, flags)))

    def _once(self, ids: Ids, flags: Flags) -> tuple[Ids, Flags]:
        """Without the begin and end tokens that the tokenizer has added to a text that had them already."""
        if len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id:
            ids, flags = ids[1:], flags[1:]
        if len(ids) > 1 and ids[-1] == ids[-2] == self.tokenizer.eos_token_id:
            ids, flags = ids[:-1], flags[:-1]
        return ids, flags

    def _fast(self, texts: list[str], *, special: bool) -> list[Any]:
        """The encodings. The tokenizer's own call would turn every one of them into lists first."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self.tokenizer.split_special_tokens
        return list(backend.encode_batch(texts, add_special_tokens=special))

    def _fit(self, where: str, ids: Ids, flags: Flags) -> None:
        """Add the sample in pieces of at most seq_len tokens that have a target."""
        seq_len, text = self.reading.seq_len, self.reading.kind == "text"
        if len(ids) > seq_len and not text:
            if self.reading.too_long == "stop":
                raise UserError(f"{where} has {len(ids)} tokens, seq_len is {seq_len}; use too_long=truncate or drop, or a "
                                "larger seq_len")
            self.out.counts["truncated" if self.reading.too_long == "truncate" else "dropped"] += 1
            if self.reading.too_long == "drop":
                return
        for start in range(0, len(ids), seq_len) if text else range(1):
            # The first token of a row has nothing before it to be predicted from.
            if flags[start + 1 : start + seq_len].any():
                self.out.add(ids[start : start + seq_len], flags[start : start + seq_len])
            else:
                self.out.counts["dropped"] += 1


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


def _inside(offsets: list[tuple[int, int]], answers: tuple[Span, ...]) -> Flags:
    """Which tokens begin inside one of the answers. `offsets` are characters, (0, 0) for added tokens."""
    begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    flags: Flags = np.zeros(len(begins), dtype=np.bool_)
    for start, end in answers:
        flags |= (begins >= start) & (begins < end) & (ends > begins)
    return flags
