"""DATA and HANG: what went wrong in public with the order of data, uneven ranks, preprocessing and waiting. cases.yaml lists
the reports."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.training.config import TrainConfig
from toolkit.training.data import pack, tokenize
from toolkit.training.data.encode import Reading
from toolkit.training.data.loader import Loader
from toolkit.training.data.tokenize import TokenStore

ROOT = Path(__file__).parents[2]
COLLECTIVES = {"save", "load", "find", "evaluate", "across_ranks", "count_batch", "gradient_norm", "export_model", "prepare",
               "wait_for_everyone", "backward", "end_training", "begin", "advance", "wait", "secure", "leave"}


def loader(samples: int, *, rank: int = 0, world: int = 1, bucketed: bool = False) -> Loader:
    """Samples of unequal length whose first token is their number, from 1."""
    lengths = [2 + index * 7 % 11 for index in range(samples)]
    tokens = np.concatenate([[index + 1] + [0] * (length - 1) for index, length in enumerate(lengths)]).astype(np.int32)
    store = TokenStore(tokens, np.ones(len(tokens), dtype=np.bool_), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    return Loader(store=store, rows=pack.one_per_row(np.arange(samples)), micro_batch=2, accumulate=1, rank=rank, world=world,
                  pad_id=0, fixed_length=None, seed=5, shuffle=True, bucketed=bucketed)


def seen(of: Loader, steps: range) -> list[int]:
    return [int(row[0]) for index in steps for batch in of.step(index) for row in batch.input_ids if row[0]]


@pytest.mark.parametrize("bucketed", [False, True])
def test_data_after_a_resume_is_what_would_have_come(bucketed: bool) -> None:
    """https://github.com/huggingface/accelerate/issues/2823, https://github.com/wyim-pgl/transgenic/issues/59"""
    for rank in range(2):
        whole = loader(20, rank=rank, world=2, bucketed=bucketed)
        per_epoch = whole.steps_per_epoch
        resumed = loader(20, rank=rank, world=2, bucketed=bucketed)  # A new process that starts within the second epoch.
        rest = range(per_epoch + 2, 2 * per_epoch)
        assert seen(resumed, rest) == seen(whole, range(2 * per_epoch))[-len(seen(resumed, rest)):]
    parts = [seen(loader(20, rank=rank, world=2, bucketed=bucketed), range(per_epoch, 2 * per_epoch)) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == list(range(1, 21))


@pytest.mark.parametrize(("samples", "world"), [(5, 2), (7, 3), (1, 4)])
def test_data_uneven_samples_give_every_rank_as_many_batches(samples: int, world: int) -> None:
    """https://github.com/huggingface/datasets/issues/6623, .../6437, https://github.com/huggingface/accelerate/issues/2375"""
    ranks = [list(loader(samples, rank=rank, world=world).epoch()) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(batch.input_ids.shape[0] == 2 for batches in ranks for batch in batches)
    assert sum(len([row for row in batch.input_ids if row[0]]) for batches in ranks for batch in batches) == samples


def test_data_every_rank_pads_for_itself() -> None:
    """https://github.com/huggingface/transformers/issues/26548"""
    shapes = {next(iter(loader(4, rank=rank, world=2).epoch())).input_ids.shape[1] for rank in range(2)}
    assert len(shapes) == 2


def test_data_is_tokenised_once_for_all_ranks_of_a_node(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/axolotl-ai-cloud/axolotl/issues/921"""
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "x y z"}\n', encoding="utf-8")
    calls = []
    build = tokenize.build
    monkeypatch.setattr(tokenize, "build", lambda *given: (calls.append(1), build(*given))[1])
    stores = [tokenize.get((str(file),), tokenizer, Reading()) for _ in range(4)]
    assert len(calls) == 1 and all(len(store) == 1 for store in stores)
    prepare = (ROOT / "toolkit" / "training" / "data" / "prepare.py").read_text(encoding="utf-8")
    assert "with accelerator.local_main_process_first():\n            return get(" in prepare


def test_data_the_wait_for_preprocessing_is_a_key(make_config: Callable[..., TrainConfig]) -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/2424, https://github.com/huggingface/accelerate/issues/1114"""
    assert make_config().timeout_minutes == 60 and make_config(timeout_minutes=0.1).timeout_minutes == 0.1
    engage = (ROOT / "toolkit" / "training" / "accelerator.py").read_text(encoding="utf-8")
    assert "InitProcessGroupKwargs(timeout=timeout)" in engage and "init_distributed(dist_backend=\"gloo\"" in engage


def test_hang_no_collective_of_the_recipe_stands_under_a_question_of_rank() -> None:
    """https://github.com/huggingface/accelerate/issues/3250: a save that only the main process calls waits for ever."""
    tree = ast.parse((ROOT / "recipes" / "train.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and any(word in ast.unparse(node.test) for word in ("main_process", "process_index", "rank")):
            called = {call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
                      for part in node.body for call in ast.walk(part) if isinstance(call, ast.Call)}
            assert not called & COLLECTIVES, ast.unparse(node)


def test_data_a_text_that_begins_or_ends_itself_has_one_begin_and_one_end(tmp_path: Path, tokenizer: Any) -> None:
    """Templates' output given as text, with a tokenizer that adds both tokens: doubled begins and ends in public reports."""
    from copy import deepcopy

    from tokenizers.processors import TemplateProcessing

    both = deepcopy(tokenizer)
    both.add_special_tokens({"bos_token": "<|begin|>"})
    begin, end = both.bos_token_id, both.eos_token_id
    both.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", begin), ("<|end|>", end)])
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "<|begin|>one"}\n{"text": "one"}\n{"text": "one<|end|>"}\n', encoding="utf-8")
    store = tokenize.get((str(file),), both, Reading())
    rows = [list(map(int, store.tokens[a:b])) for a, b in zip(store.offsets, store.offsets[1:], strict=False)]
    assert rows[0] == rows[1] == rows[2]
    assert rows[0][0] == begin != rows[0][1] and rows[0][-1] == end != rows[0][-2]
    assert list(store.targets[store.offsets[1] - 1 : store.offsets[1]]) == [True]  # The end is learned.
