"""From the config to the loaders: sources, tokens (once per node), split, rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from toolkit.errors import UserError
from toolkit.training.config import TrainConfig
from toolkit.training.data import pack
from toolkit.training.data.loader import Loader
from toolkit.training.data.tokenize import TokenStore, get

if TYPE_CHECKING:
    from accelerate import Accelerator

_SPLIT_STREAM = 0x5EED
"""Keeps the split's random numbers apart from those of the order."""


@dataclass(frozen=True)
class Data:
    """What a run trains on and is evaluated on."""

    train: Loader
    evaluation: Loader | None
    facts: dict[str, Any]
    """kind, train_on, samples, rows, tokens, targets, truncated, dropped, fingerprint; of both parts."""


def prepare_data(config: TrainConfig, tokenizer: Any, model_config: Any, accelerator: Accelerator, *,
                 isolates: bool) -> Data:
    """Loaders for this rank. The main process of each node tokenises; the others wait and map the result.

    `isolates` says whether the model keeps samples of one row apart by their positions; without that each
    sample gets a row of its own.

    Raises:
        UserError: the data cannot be read or trained on (see `data.tokenize.build`).
    """
    def store_of(sources: tuple[str, ...]) -> TokenStore:
        with accelerator.local_main_process_first():
            return get(sources, tokenizer, kind=config.data_format, train_on=config.train_on,
                       seq_len=config.seq_len)

    store = store_of(config.data)
    train, evaluation = np.arange(len(store)), None
    evaluation_store = store
    if config.eval_data and config.eval_every:
        evaluation_store = store_of(config.eval_data)
        evaluation = np.arange(len(evaluation_store))
    elif config.eval_every:
        train, evaluation = _split(len(store), config)
    vocab_size = max(model_config.get_text_config().vocab_size, len(tokenizer))
    for part in (store, evaluation_store):
        if (largest := int(part.tokens.max())) >= vocab_size:
            raise UserError(f"the tokenizer gives token {largest}, but the model has only {vocab_size}; "
                            "the tokenizer belongs to another model")
    packed = config.packing and isolates

    def loader(of: TokenStore, samples: npt.NDArray[np.int64], *, shuffle: bool, accumulate: int) -> Loader:
        if not packed:
            rows = pack.one_per_row(samples)
        else:
            rows = (pack.best_fit if shuffle else pack.in_order)(samples, of.lengths, config.seq_len)
        return Loader(
            store=of, rows=rows, micro_batch=config.micro_batch, accumulate=accumulate,
            rank=accelerator.process_index, world=accelerator.num_processes, pad_id=tokenizer.pad_token_id,
            fixed_length=config.seq_len if packed else None, seed=config.seed, shuffle=shuffle,
        )  # fmt: skip

    training = loader(store, train, shuffle=config.shuffle, accumulate=config.accumulate)
    facts = {**store.facts, "packed": packed, "train_samples": len(train), "train_rows": len(training.rows)}
    if evaluation is None:
        return Data(training, None, facts)
    held_out = loader(evaluation_store, evaluation, shuffle=False, accumulate=1)
    facts |= {"eval_samples": len(evaluation), "eval_rows": len(held_out.rows)}
    if config.eval_data and config.eval_every:
        facts["eval_fingerprint"] = evaluation_store.facts["fingerprint"]
    return Data(training, held_out, facts)


def _split(samples: int, config: TrainConfig) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(train, evaluation): a share drawn by the seed is set aside, at least one sample and never all."""
    if samples < 2:
        raise UserError("eval_every asks for evaluations, but one sample cannot be split; give eval_data or "
                        "eval_every=0")
    held = min(max(1, round(samples * config.eval_fraction)), samples - 1)
    drawn = np.random.default_rng([config.seed, _SPLIT_STREAM]).permutation(samples)
    return np.sort(drawn[held:]), np.sort(drawn[:held])
