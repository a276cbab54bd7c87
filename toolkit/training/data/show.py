"""A few samples as the model will see them, in parts that are trained on and parts that are not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.errors import UserError
from toolkit.training.data.encode import Reading
from toolkit.training.data.read import check_sources
from toolkit.training.data.stream import BEGINNING, Drawer
from toolkit.training.data.tokenize import TokenStore, get


@dataclass(frozen=True)
class Part:
    """Neighbouring tokens that are all trained on, or all not."""

    text: str
    trained: bool
    tokens: int


@dataclass(frozen=True)
class Example:
    """One sample."""

    index: int
    """Its place in the data, from 0."""
    parts: tuple[Part, ...]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def targets(self) -> int:
        return sum(part.tokens for part in self.parts if part.trained)


def load_tokenizer(model: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model's directory, GGUF file or hub id. Raises UserError."""
    from transformers import AutoTokenizer

    path = model.removeprefix("config:")
    if not Path(path).exists() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise UserError(f"model {model!r}: neither a directory, a .gguf file nor a hub id")
    if path.endswith(".gguf"):
        from toolkit.training.gguf import as_directory

        path = str(as_directory(Path(path)))
    try:
        return AutoTokenizer.from_pretrained(path, revision=None if Path(path).is_dir() else revision,
                                             trust_remote_code=trust_remote_code)
    except Exception as error:  # Each kind of tokenizer file fails in its own way.
        raise UserError(f"model {model!r}: the tokenizer cannot be loaded: {' '.join(str(error).split())[:200]}") from None


def load_examples(sources: tuple[str, ...], tokenizer: Any, reading: Reading, count: int,
                  first: int | None = None) -> tuple[TokenStore, list[Example]]:
    """The whole data as tokens (kept for the run that follows), or its first records alone, and `count` samples in parts.

    Raises:
        UserError: the data cannot be read or trained on (see `data.tokenize.build`).
    """
    check_sources(sources)
    if first is None:
        store = get(sources, tokenizer, reading)
    else:
        store = Drawer(tokenizer, reading, sources, (), None).block(BEGINNING, first)
        del store.facts["after"]
    return store, [_example(store, tokenizer, index) for index in range(min(count, len(store)))]


def _example(store: TokenStore, tokenizer: Any, index: int) -> Example:
    begin, end = store.offsets[index], store.offsets[index + 1]
    ids, marks = np.asarray(store.tokens[begin:end]), np.array(store.targets[begin:end])
    marks[0] = False  # Nothing stands before it from which it could be predicted.
    if int(ids.max()) >= len(tokenizer):
        raise UserError(f"sample {index} has token id {int(ids.max()):,}, but the tokenizer has only {len(tokenizer):,} tokens; "
                        "it was tokenised for another model")
    cuts = [0, *(np.flatnonzero(marks[1:] != marks[:-1]) + 1).tolist(), len(ids)]
    # A character whose bytes are spread over tokens shows only when they are decoded together: grow from the front.
    shown = [tokenizer.decode(ids[:cut], clean_up_tokenization_spaces=False) if cut else "" for cut in cuts]
    parts = []
    for (start, stop), before, after in zip(zip(cuts, cuts[1:], strict=False), shown, shown[1:], strict=False):
        text = after[len(before):] if after.startswith(before) else tokenizer.decode(ids[start:stop])
        parts.append(Part(text, bool(marks[start]), stop - start))
    return Example(index, tuple(parts))
