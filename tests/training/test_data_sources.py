"""Where records come from: every kind of file, folders, globs, saved data sets, and what is said when there is nothing."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import UserError
from toolkit.training.data.read import read
from toolkit.training.data.sources import check_sources, fingerprint, resolve
from toolkit.training.data.tokenize import Reading, build

PAIR = {"prompt": "Why?", "completion": "So."}


def put(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def records(*sources: Any) -> list[dict[str, Any]]:
    return [record for _, record in read(tuple(map(str, sources)))]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", [PAIR]),
        ("a.json", {"version": 1, "data": [PAIR]}),
        ("a.json", json.dumps(PAIR) + "\n"),
        ("a.json", json.dumps(PAIR, indent=2)),
        ("a.csv", "prompt,completion\nWhy?,So.\n"),
        ("a.csv", "\ufeffprompt;completion\nWhy?;So.\n"),
        ("a.tsv", "prompt\tcompletion\nWhy?\tSo.\n"),
    ],
)
def test_arrays_and_tables_are_read(name: str, content: Any, tmp_path: Path) -> None:
    assert records(put(tmp_path / name, content)) == [PAIR]


def test_compressed_lines_and_parquet_are_read(tmp_path: Path) -> None:
    from pyarrow import Table, parquet

    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(PAIR).encode()))
    parquet.write_table(Table.from_pylist([PAIR] * 3), tmp_path / "b.parquet")
    assert records(tmp_path / "a.jsonl.gz", tmp_path / "b.parquet") == [PAIR] * 4


def test_a_quoted_field_of_a_table_may_hold_lines(tmp_path: Path) -> None:
    assert records(put(tmp_path / "a.csv", 'prompt,completion\n"one\n\ntwo","a ""b"""\n')) == [
        {"prompt": "one\n\ntwo", "completion": 'a "b"'}]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", '[{"text": "x"},\n{"text": ]', "line 2 is not JSON"),
        ("a.json", "[1]", "item 1 is a JSON int"),
        ("a.json", '"x"', "is a JSON str"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", "line 3 has 3 fields, the header has 2"),
        ("a.csv", 'a,b\n1,"2"x\n', "line 2 is not CSV"),
        ("a.parquet", "PAR1 no more", "is not Parquet, or damaged"),
        ("a.jsonl.gz", "not gzip", "cannot be read"),
    ],
)
def test_what_is_broken_is_named(name: str, content: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        records(put(tmp_path / name, content))


def test_a_folder_is_all_its_data_and_not_its_readme(tmp_path: Path) -> None:
    for name in ("b.jsonl", "deep/a.jsonl"):
        put(tmp_path / name, PAIR)
    put(tmp_path / "README.md", "words")
    put(tmp_path / ".hidden.jsonl", PAIR)
    assert len(resolve(str(tmp_path)).files) == 2
    assert len(resolve(str(tmp_path / "*.jsonl")).files) == 1
    assert len(resolve(str(tmp_path / "**" / "*.jsonl")).files) == 2


def test_a_folder_with_splits_gives_the_one_to_train_on_unless_told_otherwise(tmp_path: Path) -> None:
    for name in ("train-00000-of-00001.jsonl", "test.jsonl"):
        put(tmp_path / name, {"text": name})
    assert records(tmp_path) == [{"text": "train-00000-of-00001.jsonl"}]
    assert records(f"{tmp_path}:test") == [{"text": "test.jsonl"}]
    with pytest.raises(UserError, match="no file of the folder is named after split 'dev'"):
        records(f"{tmp_path}:dev")


def test_a_saved_data_set_is_read_by_split(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    DatasetDict(train=Dataset.from_list([PAIR] * 2), test=Dataset.from_list([PAIR])).save_to_disk(str(tmp_path / "saved"))
    assert len(records(tmp_path / "saved")) == 2
    assert len(records(f"{tmp_path / 'saved'}:test")) == 1
    with pytest.raises(UserError, match="has no split 'x'; it has train, test"):
        records(f"{tmp_path / 'saved'}:x")


def test_hub_ids_have_a_config_a_split_and_a_revision() -> None:
    source = resolve("owner/name#main:train[:10%]@abc123")
    assert (source.kind, source.name, source.config, source.split, source.revision) == (
        "hub", "owner/name", "main", "train[:10%]", "abc123")
    assert resolve("owner/name@v1:test").split == "test"
    with pytest.raises(UserError, match="at most once"):
        resolve("owner/name:a:b")


def test_a_hub_id_without_network_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match="'owner/name' is neither a file here nor a hub dataset that can be fetched: no route to"):
        records("owner/name")


def test_what_is_not_there_or_not_data_is_said(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    put(tmp_path / "a.pdf", "x")
    for source, said in ((empty, "holds no file that is read"), (tmp_path / "a.pdf", "are read"),
                         (tmp_path / "*.csv", "no file matches"), (tmp_path / "no" / "such", "does not exist")):
        with pytest.raises(UserError, match=said):
            check_sources((str(source),))


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_an_unreadable_folder_is_said(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    try:
        for source in (locked, locked / "a.jsonl"):
            with pytest.raises(UserError, match="cannot be read"):
                check_sources((str(source),))
    finally:
        locked.chmod(0o700)


def test_the_fingerprint_follows_content_split_and_order(tmp_path: Path) -> None:
    one, two = put(tmp_path / "one.jsonl", PAIR), put(tmp_path / "two.jsonl", {"text": "x"})
    same = put(tmp_path / "three.jsonl", PAIR)
    assert fingerprint((str(one),)) == fingerprint((str(same),)) != fingerprint((str(two),))
    assert fingerprint((str(one), str(two))) != fingerprint((str(two), str(one)))


def test_files_of_two_formats_are_not_mixed(tmp_path: Path, tokenizer: Any) -> None:
    put(tmp_path / "a.jsonl", PAIR)
    put(tmp_path / "b.jsonl", {"text": "x"})
    with pytest.raises(UserError, match=r"b\.jsonl line 1 is text, but .*a\.jsonl line 1 is prompt-completion"):
        build("k", (str(tmp_path),), tokenizer, Reading())
