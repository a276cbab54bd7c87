"""From the config to the loaders: the split, the weights of a mixture, and a tokenizer that fits the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.errors import UserError
from toolkit.training.config import TrainConfig
from toolkit.training.data.prepare import Data, prepare_data

Make = Callable[..., TrainConfig]


def model_of(vocab_size: int) -> Any:
    """A model's config, as far as data looks at it."""
    return SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=vocab_size))


@pytest.fixture
def prepared(make_config: Make, tokenizer: Any, accelerator: Any, tmp_path: Path) -> Callable[..., Data]:
    """`prepared(records, records, ..., key=value)`: one file for each list of records."""

    def make(*parts: list[dict[str, Any]], vocab_size: int = 320, tokenizer: Any = tokenizer, **keys: Any) -> Data:
        files = []
        for index, records in enumerate(parts):
            files.append(tmp_path / f"{index}.jsonl")
            files[-1].write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        config = make_config(data=[str(file) for file in files], **{"seq_len": 64, "packing": False, **keys})
        return prepare_data(config, tokenizer, model_of(vocab_size), accelerator, isolates=True)

    return make


def texts(prefix: str, count: int) -> list[dict[str, Any]]:
    return [{"input_ids": [ord(prefix), index + 1]} for index in range(count)]


def drawn(data: Data) -> list[str]:
    return sorted(chr(int(row[0])) for batch in data.train.epoch() for row in batch.input_ids if row[0])


def test_a_mixture_takes_each_source_as_often_as_its_weight_says(prepared: Callable[..., Data]) -> None:
    parts = texts("a", 10), texts("b", 10)
    assert drawn(prepared(*parts)) == ["a"] * 10 + ["b"] * 10
    mixed = prepared(*parts, data_weights=[2.5, 0.3])
    assert drawn(mixed) == ["a"] * 25 + ["b"] * 3
    assert mixed.facts["train_samples"] == 28 and mixed.facts["train_tokens"] == 56 and mixed.facts["train_targets"] == 28
    with pytest.raises(UserError, match="nothing of '.*1.jsonl' is left of 10 samples at 0.01"):
        prepared(*parts, data_weights=[1, 0.01])


def test_a_share_is_set_aside_and_never_trained_on(prepared: Callable[..., Data]) -> None:
    data = prepared(texts("a", 20), eval_every=1, eval_fraction=0.2)
    assert data.evaluation is not None

    def numbers(loader: Any) -> set[int]:
        return {int(row[1]) for batch in loader.epoch() for row in batch.input_ids if row[0]}

    assert len(numbers(data.train)) == 16 and len(numbers(data.evaluation)) == 4
    assert not numbers(data.train) & numbers(data.evaluation)
    with pytest.raises(UserError, match="one sample cannot be split"):
        prepared(texts("a", 1), eval_every=1)


def test_an_empty_source_is_said(prepared: Callable[..., Data]) -> None:
    with pytest.raises(UserError, match="is empty"):
        prepared([])


def test_token_ids_beyond_the_model_are_refused(prepared: Callable[..., Data]) -> None:
    with pytest.raises(UserError, match="the data has token id 5,000, but the model has only 320"):
        prepared([{"input_ids": [1, 5000]}])


def test_the_tokenizer_of_another_model_is_refused(prepared: Callable[..., Data], tokenizer: Any) -> None:
    with pytest.raises(UserError, match=f"the tokenizer has {len(tokenizer)} tokens, but the model has only 40; "
                                        "the tokenizer belongs to another model"):
        prepared([{"text": "x y"}], vocab_size=40)
    prepared([{"text": "x y"}], vocab_size=len(tokenizer) - 3)  # A few tokens that were added: the model is resized.
