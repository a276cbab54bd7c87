"""Files of pieces are read once each, into memory that is there, and held to their checksums on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.errors import UserError
from toolkit.training.state import loading, store
from toolkit.training.state.loading import Loading
from toolkit.training.state.store import CACHED, Fragment, Reader, write_fragments

SIZE = CACHED // 2
"""Elements: twice a block in fp32, and each of two files holds a part of them."""
CUT = SIZE // 3


@pytest.fixture
def written(tmp_path: Path) -> tuple[torch.Tensor, dict[str, str]]:
    """A tensor in two files, with others around it; and the files' checksums."""
    torch.manual_seed(0)
    whole = torch.randn(SIZE)
    parts = [("rank-00000", 0, whole[:CUT]), ("rank-00001", CUT, whole[CUT:])]
    files: dict[str, Any] = {}
    for prefix, start, part in parts:
        around = [Fragment("weights", f"{side}.{prefix}", 0, (9,), torch.arange(9.0)) for side in ("before", "after")]
        files |= write_fragments(tmp_path, prefix, [around[0], Fragment("weights", "w", start, (SIZE,), part), around[1]])
    return whole, {name: facts["xxh3"] for name, facts in files.items()}


def test_a_tensor_is_filled_from_several_files_and_what_is_wanted_twice_is_hashed_once(
    written: tuple[torch.Tensor, dict[str, str]], tmp_path: Path
) -> None:
    whole, held = written
    run = Loading(Reader(tmp_path, held), held)
    all_of_it, part, rounded = torch.empty(SIZE), torch.empty(SIZE // 2), torch.empty(SIZE, dtype=torch.bfloat16)
    strided = torch.empty(SIZE, 2)[:, 0]
    for tensor, start in ((part, CUT - 5), (all_of_it, 0), (rounded, 0), (strided, 0)):
        run.want(Fragment("weights", "w", start, (SIZE,), tensor))
    assert run.run() is None
    assert torch.equal(all_of_it, whole) and torch.equal(part, whole[CUT - 5 :][: SIZE // 2])
    assert torch.equal(rounded, whole.bfloat16()) and torch.equal(strided, whole)


def test_a_file_is_held_to_its_checksum_by_who_holds_it_wanted_or_not(
    written: tuple[torch.Tensor, dict[str, str]], tmp_path: Path
) -> None:
    _, held = written
    first, second = sorted(held)
    content = bytearray((tmp_path / second).read_bytes())
    content[-1] ^= 1
    (tmp_path / second).write_bytes(content)
    assert Loading(Reader(tmp_path, held), {first: held[first]}).run() is None
    told = Loading(Reader(tmp_path, held), held).run()
    assert told is not None and second in told


def test_each_byte_comes_from_the_files_once(
    written: tuple[torch.Tensor, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, held = written
    read: list[tuple[str, int, int]] = []

    def counted(data: memoryview, file: Any, offset: int) -> None:
        read.append((file.name, offset, len(data)))
        store.read_into(data, file, offset)

    monkeypatch.setattr(loading, "read_into", counted)
    run = Loading(Reader(tmp_path, held), held)
    run.want(Fragment("weights", "w", 0, (SIZE,), torch.empty(SIZE)))
    assert run.run() is None
    reached: dict[str, int] = {}
    for name, offset, size in read:
        assert offset == reached.get(name, 0)
        reached[name] = offset + size
    assert reached == {str(tmp_path / name): (tmp_path / name).stat().st_size for name in held}


def test_what_no_file_holds_is_named(written: tuple[torch.Tensor, dict[str, str]], tmp_path: Path) -> None:
    run = Loading(Reader(tmp_path, [sorted(written[1])[0]]), {})
    with pytest.raises(UserError, match=rf"no file holds elements {CUT} to {SIZE} of weights of w"):
        run.want(Fragment("weights", "w", 0, (SIZE,), torch.empty(SIZE)))
    with pytest.raises(UserError, match="has no exp_avg of w"):
        run.want(Fragment("exp_avg", "w", 0, (SIZE,), torch.empty(SIZE)))
