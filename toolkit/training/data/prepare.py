"""From the config to the loaders: sources, tokens (once per node), split, rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from toolkit.errors import UserError
from toolkit.training.config import TrainConfig
from toolkit.training.data import pack
from toolkit.training.data.blocks import Maker, Recipe, StreamLoader, shared_spool
from toolkit.training.data.encode import Reading
from toolkit.training.data.loader import Loader
from toolkit.training.data.stream import stream_key
from toolkit.training.data.tokenize import TokenStore, get, settings_key

if TYPE_CHECKING:
    from accelerate import Accelerator

_SPLIT_STREAM = 0x5EED
"""Keeps the split's random numbers apart from those of the order."""
_MIX_STREAM = 0x313C
"""The same for what is drawn of a source with a fraction as its weight."""
_ADDED_TOKENS = 256
"""So many tokens more than the model may a tokenizer have: those that are added for chat, tools or padding."""


@dataclass(frozen=True)
class Data:
    """What a run trains on and is evaluated on."""

    train: Loader | StreamLoader
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
            return get(sources, tokenizer, reading)

    reading = reading_of(config)
    packed = config.packing and isolates
    if config.streaming:
        return _streamed(config, tokenizer, model_config, accelerator, packed,
                         store_of(config.eval_data) if config.eval_data and config.eval_every else None)
    store = store_of(config.data)
    train, evaluation = np.arange(len(store)), None
    evaluation_store = store
    if config.eval_data and config.eval_every:
        evaluation_store = store_of(config.eval_data)
        evaluation = np.arange(len(evaluation_store))
    elif config.eval_every:
        train, evaluation = _split(len(store), config)
    for part in (store, evaluation_store):
        check_vocabulary(part, tokenizer, model_config)
    train = _weighted(train, store, config)
    loader = partial(_loader, config, accelerator, tokenizer.pad_token_id, packed)
    training = loader(store, train, shuffle=config.shuffle, accumulate=config.accumulate)
    facts = {**store.facts, "packed": packed, "train_samples": len(train), "train_rows": len(training.rows),
             "train_tokens": int(store.lengths[train].sum()), "train_targets": _targets(store, train)}
    if evaluation is None:
        return Data(training, None, facts)
    held_out = loader(evaluation_store, evaluation, shuffle=False, accumulate=1)
    facts |= {"eval_samples": len(evaluation), "eval_rows": len(held_out.rows)}
    if config.eval_data and config.eval_every:
        facts["eval_fingerprint"] = evaluation_store.facts["fingerprint"]
    return Data(training, held_out, facts)


def _loader(config: TrainConfig, accelerator: Accelerator, pad_id: int, packed: bool, of: TokenStore,
            samples: npt.NDArray[np.int64], *, shuffle: bool, accumulate: int) -> Loader:
    if not packed:
        rows = pack.one_per_row(samples)
    else:
        rows = (pack.best_fit if shuffle else pack.in_order)(samples, of.lengths, config.seq_len)
    return Loader(
        store=of, rows=rows, micro_batch=config.micro_batch, accumulate=accumulate, rank=accelerator.process_index,
        world=accelerator.num_processes, pad_id=pad_id, fixed_length=config.seq_len if packed else None, seed=config.seed,
        shuffle=shuffle, bucketed=config.bucketing and shuffle and not packed,
    )  # fmt: skip


def _streamed(config: TrainConfig, tokenizer: Any, model_config: Any, accelerator: Accelerator, packed: bool,
              held_out: TokenStore | None) -> Data:
    """As `prepare_data`, of data that is read as it goes; the numbers among the facts are those of its first block."""
    def check(store: TokenStore) -> None:
        check_vocabulary(store, tokenizer, model_config)

    reading, seed = reading_of(config), config.seed if config.shuffle else None
    spool = shared_spool(accelerator)
    key = stream_key(config.data, config.data_weights, config.stream_block, settings_key(tokenizer, reading), f"{seed} {packed}")
    maker = None
    if accelerator.is_local_main_process:
        maker = Maker(Recipe(tokenizer=tokenizer, reading=reading, entries=config.data, weights=config.data_weights, seed=seed,
                             count=config.stream_block), spool)
    train = StreamLoader(
        key=key, notes=Path(config.output) / "stream.jsonl", spool=spool, maker=maker, accelerator=accelerator,
        micro_batch=config.micro_batch, accumulate=config.accumulate, pad_id=tokenizer.pad_token_id,
        seq_len=config.seq_len if packed else None, seed=seed, bucketed=config.bucketing and not packed, check=check,
    )  # fmt: skip
    store = train.block.store
    facts = {**{name: value for name, value in store.facts.items() if name != "after"}, "streamed": True, "fingerprint": key,
             "packed": packed, "train_samples": len(store), "train_rows": len(train.block.rows),
             "train_tokens": store.facts["tokens"], "train_targets": _targets(store, np.arange(len(store)))}
    if held_out is None:
        return Data(train, None, facts)
    check(held_out)
    evaluation = _loader(config, accelerator, tokenizer.pad_token_id, packed, held_out, np.arange(len(held_out)), shuffle=False,
                         accumulate=1)
    return Data(train, evaluation, facts | {"eval_samples": len(held_out), "eval_rows": len(evaluation.rows),
                                            "eval_fingerprint": held_out.facts["fingerprint"]})


def reading_of(config: TrainConfig) -> Reading:
    """How the config has the data read."""
    return Reading(kind=config.data_format, train_on=config.train_on, seq_len=config.seq_len, too_long=config.too_long,
                   bad_lines=config.bad_lines, columns=config.columns)


def check_vocabulary(store: TokenStore, tokenizer: Any, model_config: Any) -> None:
    """Hold the tokens to the model's vocabulary.

    A tokenizer may have a few added tokens more than the model, which is then resized; one with many more, or data with
    token ids beyond both, belongs to another model.

    Raises:
        UserError: names the largest token id and the number of ids there are.
    """
    own = model_config.get_text_config().vocab_size
    added = len(tokenizer) - own
    largest = int(store.tokens.max())
    if added > max(_ADDED_TOKENS, own // 20):
        raise UserError(f"the tokenizer has {len(tokenizer):,} tokens, but the model has only {own:,}; "
                        "the tokenizer belongs to another model")
    if largest >= max(own, len(tokenizer)):
        raise UserError(f"the data has token id {largest:,}, but the model has only {max(own, len(tokenizer)):,} tokens; "
                        "it was tokenised for another model")


def _targets(store: TokenStore, samples: npt.NDArray[np.int64]) -> int:
    """Tokens that are trained in an epoch: a sample's first one has nothing before it to be predicted from."""
    marks = np.array(store.targets, dtype=np.int64)
    marks[store.offsets[:-1]] = 0
    return int(np.add.reduceat(marks, store.offsets[:-1])[samples].sum())


def _weighted(samples: npt.NDArray[np.int64], store: TokenStore, config: TrainConfig) -> npt.NDArray[np.int64]:
    """The samples as often as the weight of their source says; of a fraction, what the seed draws.

    Raises:
        UserError: nothing of a source would be left.
    """
    if not config.data_weights:
        return samples
    ends = np.cumsum(store.facts["sources"])
    parts = []
    for index, (end, weight) in enumerate(zip(ends, config.data_weights, strict=True)):
        own = samples[(samples >= end - store.facts["sources"][index]) & (samples < end)]
        whole, share = divmod(weight, 1)
        drawn = np.random.default_rng([config.seed, _MIX_STREAM, index]).permutation(own)[: round(share * len(own))]
        part = np.concatenate([np.tile(own, int(whole)), drawn])
        if not len(part):
            raise UserError(f"data_weights: nothing of {config.data[index]!r} is left of {len(own)} samples at {weight:g}")
        parts.append(np.sort(part))
    return np.concatenate(parts)


def _split(samples: int, config: TrainConfig) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(train, evaluation): a share drawn by the seed is set aside, at least one sample and never all."""
    if samples < 2:
        raise UserError("eval_every asks for evaluations, but one sample cannot be split; give eval_data or "
                        "eval_every=0")
    held = min(max(1, round(samples * config.eval_fraction)), samples - 1)
    drawn = np.random.default_rng([config.seed, _SPLIT_STREAM]).permutation(samples)
    return np.sort(drawn[held:]), np.sort(drawn[:held])
