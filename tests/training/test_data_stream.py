"""Data that is read as it goes: the same rows however a step is spread, from any step on, and never more than a block of them."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from toolkit.errors import UserError
from toolkit.training.data import stream
from toolkit.training.data.blocks import Maker, Recipe, StreamLoader
from toolkit.training.data.encode import Reading
from toolkit.training.data.read import Cursor, parsed, read_file
from toolkit.training.data.stream import BEGINNING, Drawer, stream_key

Lines = Callable[..., Path]


@pytest.fixture
def numbered(tmp_path: Path) -> Lines:
    """`numbered(name, first, count)`: a file of tokenised samples of unequal length whose first token is their number."""

    def write(name: str, first: int, count: int) -> Path:
        lines = [json.dumps({"input_ids": [number] + [3] * (1 + number * 7 % 9)}) for number in range(first, first + count)]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return tmp_path / name

    return write


@pytest.fixture
def loader(tmp_path: Path, tokenizer: Any) -> Callable[..., StreamLoader]:
    spools = itertools.count()

    def make(*entries: Path | str, rank: int = 0, world: int = 1, count: int = 16, seed: int | None = 5, packed: bool = True,
             weights: tuple[float, ...] = (), notes: str = "stream.jsonl", ahead: bool = False, rows: int = 8) -> StreamLoader:
        spool = tmp_path / f"spool-{next(spools)}"
        spool.mkdir()
        maker = Maker(Recipe(tokenizer=tokenizer, reading=Reading(seq_len=16), entries=tuple(map(str, entries)), weights=weights,
                             seed=seed, count=count), spool)
        if not ahead:
            maker.go_ahead = lambda number, position: None  # type: ignore[method-assign]
        return StreamLoader(
            key="k", notes=tmp_path / notes, spool=spool, maker=maker, micro_batch=rows // world // 2, accumulate=2, pad_id=0,
            accelerator=SimpleNamespace(process_index=rank, num_processes=world, is_main_process=rank == 0),  # type: ignore[arg-type]
            seq_len=16 if packed else None, seed=seed, bucketed=not packed, check=lambda store: None)

    return make


def numbers(batches: list[Any]) -> list[int]:
    """The samples of some batches: what is not padding and not the filling token."""
    return [int(token) for batch in batches for token in batch.input_ids.reshape(-1) if token not in (0, 3)]


@pytest.mark.parametrize("packed", [True, False])
def test_every_spread_of_a_step_has_the_same_rows_and_an_epoch_has_every_sample_once(
    numbered: Lines, loader: Callable[..., StreamLoader], packed: bool
) -> None:
    files = numbered("a.jsonl", 10, 61), numbered("b.jsonl", 100, 7)
    alone = [numbers(loader(*files, packed=packed).step(0))]
    whole = loader(*files, packed=packed)
    alone = [numbers(whole.step(index)) for index in range(20)]
    for world in (2, 4):
        ranks = [loader(*files, packed=packed, rank=rank, world=world, notes=f"{world}-{rank}.jsonl") for rank in range(world)]
        for index in range(20):
            parts = [rank.step(index) for rank in ranks]
            assert len({len(part) for part in parts}) == 1
            assert sorted(sum((numbers(part) for part in parts), [])) == sorted(alone[index])
    first = sorted(set(range(10, 71)) | set(range(100, 107)))
    assert sorted(sum(alone, [])[: len(first)]) == first  # 68 samples, then they come again.
    again = sum(alone, [])[len(first): 2 * len(first)]
    assert again != sum(alone, [])[: len(first)]


def test_a_run_goes_on_where_it_was_and_without_notes_it_finds_the_same_place(
    numbered: Lines, loader: Callable[..., StreamLoader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = numbered("a.jsonl", 10, 61), numbered("b.jsonl", 100, 40)
    whole = loader(*files)
    steps = [numbers(whole.step(index)) for index in range(16)]
    notes = [json.loads(line) for line in (tmp_path / "stream.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [note["block"] for note in notes] == list(range(len(notes))) and notes[-1]["row"] <= 16 * 8
    made = []
    original = Drawer.block
    monkeypatch.setattr(Drawer, "block", lambda *given: (made.append(given), original(*given))[1])
    resumed = loader(*files)
    assert [numbers(resumed.step(index)) for index in range(11, 16)] == steps[11:]
    needed = [note for note in notes if note["row"] + note["rows"] > 11 * 8]
    assert len(made) == 1 + len(needed) < len(notes)  # The first block, and from the one that step 11 begins in.
    assert [numbers(loader(*files, notes="none.jsonl").step(index)) for index in (13,)] == [steps[13]]
    assert numbers(resumed.step(2)) == steps[2]  # Backwards too.


def test_no_more_is_read_than_the_blocks_that_are_needed(
    tmp_path: Path, loader: Callable[..., StreamLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "large.jsonl"
    line = json.dumps({"input_ids": [7] + [3] * 12}) + "\n"
    with file.open("w", encoding="utf-8") as out:
        for _ in range(20):
            out.write(line * 10_000)
    got = []
    monkeypatch.setattr(stream, "read_file", lambda *given: (got.append(1) or item for item in read_file(*given)))
    some = loader(file, count=100)
    for index in range(20):
        some.step(index)
    assert len(got) <= 300 and some.block.store.facts["after"]["open"][0][2] <= 300 * len(line) < file.stat().st_size / 100
    assert sorted(int(path.name) for path in some.spool.iterdir()) == [0, 1] or len(list(some.spool.iterdir())) <= 3


def test_blocks_are_made_ahead_in_a_process_that_ends_with_a_line_when_the_data_is_broken(
    numbered: Lines, loader: Callable[..., StreamLoader]
) -> None:
    file = numbered("a.jsonl", 10, 40)
    with file.open("a", encoding="utf-8") as out:
        out.write("{\n")
    some = loader(file, seed=None, ahead=True, count=20)
    seen = sum((numbers(some.step(index)) for index in range(1)), [])
    assert seen == list(range(10, 10 + len(seen)))
    with pytest.raises(UserError, match="line 41 is not JSON"):
        for index in range(1, 9):
            some.step(index)
    assert "line 41" in (some.spool / "failed").read_text(encoding="utf-8")
    other = loader(file, seed=None)
    other.maker, other.spool = None, some.spool  # A rank that only reads.
    with pytest.raises(UserError, match="line 41 is not JSON"):
        other._take(7, BEGINNING, 0)
    some.maker._pool.terminate()  # type: ignore[union-attr]


def test_weights_take_a_share_of_the_records_or_more_passes_over_them(numbered: Lines, tokenizer: Any) -> None:
    files = str(numbered("a.jsonl", 1000, 400)), str(numbered("b.jsonl", 10_000, 10))
    store = Drawer(tokenizer, Reading(), files, (0.25, 2.0), 1).block(BEGINNING, 5000)
    first = np.asarray(store.tokens[store.offsets[:-1]])
    assert sorted(first[first >= 10_000]) == sorted([*range(10_000, 10_010)] * 2)
    assert 60 < len(first[first < 10_000]) < 140 and store.facts["after"]["epoch"] == 1


def test_files_are_mixed_and_without_a_shuffle_they_come_in_order(numbered: Lines, tokenizer: Any) -> None:
    files = str(numbered("a.jsonl", 1000, 300)), str(numbered("b.jsonl", 10_000, 100))
    mixed = Drawer(tokenizer, Reading(), files, (), 1).block(BEGINNING, 100)
    assert 15 < sum(mixed.tokens[mixed.offsets[:-1]] >= 10_000) < 35
    plain = Drawer(tokenizer, Reading(), files, (), None).block(BEGINNING, 310)
    assert list(plain.tokens[plain.offsets[:-1]]) == [*range(1000, 1300), *range(10_000, 10_010)]


def write_rows(folder: Path, kind: str, texts: list[str]) -> str:
    import pyarrow
    from datasets import Dataset
    from pyarrow import parquet

    file = folder / f"rows.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=7)
    elif kind == "csv":
        file.write_text("text;n\n" + "".join(f'"{text}\nmore";{n}\n' for n, text in enumerate(texts)), encoding="utf-8")
    elif kind == "txt":
        file.write_text("\n\n".join(texts), encoding="utf-8")
    elif kind == "jsonl.gz":
        with gzip.open(file, "wt", encoding="utf-8") as out:
            out.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    else:
        Dataset.from_dict({"text": texts}).save_to_disk(str(folder / "saved"))
        return str(folder / "saved")
    return str(file)


@pytest.mark.parametrize("kind", ["parquet", "csv", "txt", "jsonl.gz", "saved"])
def test_every_kind_of_file_is_taken_up_where_it_was_left(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    source = write_rows(tmp_path, kind, [f"sample {number} of them" for number in range(30)])
    whole = Drawer(tokenizer, Reading(), (source,), (), None)
    position, blocks = BEGINNING, []
    while position["epoch"] == 0:
        blocks.append(whole.block(position, 11))
        # A new process, that knows of the position what JSON holds of it.
        anew = Drawer(tokenizer, Reading(), (source,), (), None).block(json.loads(json.dumps(position)), 11)
        assert np.array_equal(blocks[-1].tokens, anew.tokens) and blocks[-1].facts == anew.facts
        position = blocks[-1].facts["after"]
    texts = [tokenizer.decode(block.tokens[begin:end]) for block in blocks
             for begin, end in itertools.pairwise(block.offsets)]
    assert [int(text.split()[1]) for text in texts] == list(range(30))


def test_hub_data_is_streamed_by_the_library_and_goes_on_from_its_state(
    numbered: Lines, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    real, asked = datasets.load_dataset, []

    def local(name: str, config: str | None, **given: Any) -> Any:
        asked.append((name, config, given["split"], given["revision"], given["streaming"]))
        return real("json", data_files=str(numbered("a.jsonl", 10, 30)), split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", local)
    drawer = Drawer(tokenizer, Reading(), ("owner/name#main:test@abc",), (), 3)
    first = drawer.block(BEGINNING, 12)
    rest = Drawer(tokenizer, Reading(), ("owner/name#main:test@abc",), (), 3).block(
        json.loads(json.dumps(first.facts["after"])), 50)
    assert list(first.tokens[first.offsets[:-1]]) + list(rest.tokens[rest.offsets[:-1]]) == list(range(10, 40))
    assert asked[0] == ("owner/name", "main", "test", "abc", True)


def test_what_cannot_be_streamed_is_said(tmp_path: Path, tokenizer: Any, make_config: Callable[..., Any]) -> None:
    (tmp_path / "a.json").write_text('[{"text": "x"}]', encoding="utf-8")
    with pytest.raises(UserError, match="cannot be streamed"):
        Drawer(tokenizer, Reading(), (str(tmp_path / "a.json"),), (), 1)
    (tmp_path / "b.jsonl").write_text('{"input_ids": [4]}\n', encoding="utf-8")
    with pytest.raises(UserError, match="no sample has a token to train on"):
        Drawer(tokenizer, Reading(), (str(tmp_path / "b.jsonl"),), (), 1).block(BEGINNING, 10)
    with pytest.raises(UserError, match="needs max_steps"):
        make_config(streaming=True, max_steps=None, epochs=1)
    with pytest.raises(UserError, match="give eval_data"):
        make_config(streaming=True, eval_every=2)


def test_the_name_of_a_stream_follows_its_files_and_what_decides_the_order(numbered: Lines) -> None:
    file = str(numbered("a.jsonl", 10, 30))
    name = stream_key((file,), (), 10, "t", "o")
    assert name == stream_key((file,), (), 10, "t", "o") != stream_key((file,), (), 11, "t", "o")
    numbered("a.jsonl", 11, 30)
    assert name != stream_key((file,), (), 10, "t", "o")


def test_a_cursor_names_the_right_line_after_it_was_taken_up(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('\ufeff{"text": "1"}\n\n{"text": "2"}\n{\n', encoding="utf-8")
    cursor = Cursor()
    assert next(read_file(file, lambda text: None, cursor))[0].endswith("line 1")
    rest = list(read_file(file, lambda text: None, Cursor(cursor.number, cursor.offset)))
    assert [where.split()[-1] for where, _ in rest] == ["3", "4"]
    told: list[str] = []
    assert parsed(*rest[1], told.append) is None and "line 4 is not JSON" in told[0]
