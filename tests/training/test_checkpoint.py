"""Checkpoints are whole or not there, pruned, found, and refused where they do not belong."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.errors import UserError
from toolkit.training.checkpoint import Checkpoints, NotSaved, is_complete
from toolkit.training.config import TrainConfig
from toolkit.training.identity import Identity, Progress
from toolkit.training.run_folder import check_room
from toolkit.training.state.manifest import named

IDENTITY = Identity(strategy="single", processes=1, method="full", optimizer="adamw", data="abc", rows=8)


@pytest.fixture
def trained(accelerator: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def make(accelerator: Any, folder: Path, *, keep: int = 2, **identity: Any) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", accelerator, dataclasses.replace(IDENTITY, **identity), keep)


def update(model: Any, optimizer: Any) -> None:
    model(torch.rand(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_what_is_loaded_goes_on_as_what_was_saved(accelerator: Any, trained: Any, tmp_path: Path) -> None:
    model, optimizer = trained
    update(model, optimizer)
    checkpoints = make(accelerator, tmp_path)
    progress = Progress(step=1).after(100, skipped=True)
    assert checkpoints.save(progress) is None
    ends = []
    for _ in range(2):
        path = checkpoints.find("auto")
        assert path is not None and checkpoints.load(path) == Progress(step=2, skipped=1, tokens=100) == progress
        update(model, optimizer)
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)


def test_only_the_newest_are_kept(accelerator: Any, trained: Any, tmp_path: Path) -> None:
    checkpoints = make(accelerator, tmp_path)
    for step in (1, 2, 10):
        assert checkpoints.save(Progress(step=step)) is None
    assert names(checkpoints) == ["step-00000002", "step-00000010"]
    assert checkpoints.newest() == checkpoints.folder / "step-00000010"


@pytest.mark.parametrize("damage", ["manifest", "cut", "missing"])
def test_a_damaged_checkpoint_is_passed_over(damage: str, accelerator: Any, trained: Any, tmp_path: Path) -> None:
    checkpoints = make(accelerator, tmp_path)
    for step in (1, 2):
        checkpoints.save(Progress(step=step))
    last = checkpoints.folder / "step-00000002"
    victim = last / ("manifest.json" if damage == "manifest" else "rank-00000-000.safetensors")
    if damage == "cut":
        victim.write_bytes(victim.read_bytes()[:-1])
    else:
        victim.unlink()
    assert not is_complete(last)
    assert checkpoints.find("auto") == checkpoints.folder / "step-00000001"
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoints.find(str(last))


def flip(path: Path) -> None:
    """One bit of the weights, which only a checksum tells."""
    file = path / "rank-00000-000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_what_turns_out_to_be_damaged_while_it_is_loaded_gives_way_to_the_one_before(
    accelerator: Any, trained: Any, tmp_path: Path
) -> None:
    model, optimizer = trained
    checkpoints, said, weights = make(accelerator, tmp_path, keep=3), [], {}
    checkpoints.say = said.append
    for step in (1, 2, 3):
        update(model, optimizer)
        checkpoints.save(Progress(step=step))
        weights[step] = model.weight.detach().clone()
    first, second, third = named(checkpoints.folder)
    flip(third)
    assert checkpoints.begin(checkpoints.find("auto")) == Progress(step=2) and checkpoints.resumed == second
    assert torch.equal(model.weight, weights[2])
    shard = third / "rank-00000-000.safetensors"
    assert said == [f"warning: {third.name} is passed over: the contents of {shard} are not what was written"]
    with pytest.raises(UserError, match="the contents of .* are not what was written"):
        checkpoints.begin(checkpoints.find(str(third)))
    flip(second)
    flip(first)
    found = checkpoints.find("auto")
    with pytest.raises(UserError, match="has no checkpoint that is sound; start anew with resume=never"):
        checkpoints.begin(found)
    for path in (second, third):
        shutil.rmtree(path)
    before = model.weight.detach().clone()
    assert checkpoints.find("auto") is None and torch.equal(model.weight, before)  # It is the last: found before it is loaded.


@pytest.mark.parametrize(("name", "value"), [("method", "lora"), ("optimizer", "sgd"), ("data", "other")])
def test_a_checkpoint_of_another_kind_of_run_is_refused(
    name: str, value: Any, accelerator: Any, trained: Any, tmp_path: Path
) -> None:
    make(accelerator, tmp_path).save(Progress(step=1))
    with pytest.raises(UserError, match=f"was made with {name} .*, this run has {name} {value}"):
        make(accelerator, tmp_path, **{name: value}).find("auto")


def test_another_global_batch_is_refused_with_what_would_be_right(accelerator: Any, trained: Any, tmp_path: Path) -> None:
    make(accelerator, tmp_path).save(Progress(step=1))
    with pytest.raises(UserError, match="global batch of 8 rows, this run has 4; .* x accumulate x processes is 8"):
        make(accelerator, tmp_path, rows=4).find("auto")


def test_another_strategy_and_number_of_processes_are_taken(accelerator: Any, trained: Any, tmp_path: Path) -> None:
    make(accelerator, tmp_path).save(Progress(step=1))
    other = make(accelerator, tmp_path, strategy="zero3", processes=2)
    said: list[str] = []
    other.say = said.append
    path = other.find("auto")
    assert path is not None and other.load(path) == Progress(step=1)
    assert "random states of 1 ranks do not fit 2" in said[0] and "was made by single on 1 processes" in said[1]


def test_a_run_folder_instead_of_a_checkpoint_is_understood(accelerator: Any, trained: Any, tmp_path: Path) -> None:
    make(accelerator, tmp_path).save(Progress(step=3))
    with pytest.raises(UserError, match="did you mean .*step-00000003"):
        make(accelerator, tmp_path).find(str(tmp_path))


def test_a_failed_save_leaves_the_older_ones_and_no_scratch(accelerator: Any, trained: Any, tmp_path: Path) -> None:
    checkpoints = make(accelerator, tmp_path)
    checkpoints.save(Progress(step=1))
    (checkpoints.folder / "step-00000002").write_text("a file where the folder should be", encoding="utf-8")
    assert checkpoints.save(Progress(step=2)) is not None
    assert names(checkpoints) == ["step-00000001", "step-00000002"]
    assert checkpoints.newest() == checkpoints.folder / "step-00000001"


def test_leftovers_of_a_killed_save_are_removed(accelerator: Any, trained: Any, tmp_path: Path) -> None:
    checkpoints = make(accelerator, tmp_path)
    (checkpoints.folder / ".saving-step-00000001" / "state").mkdir(parents=True)
    assert checkpoints.newest() is None
    checkpoints.save(Progress(step=2))
    assert names(checkpoints) == ["step-00000002"]


def test_starting_anew_keeps_the_old_ones_aside(accelerator: Any, trained: Any, tmp_path: Path) -> None:
    checkpoints = make(accelerator, tmp_path)
    checkpoints.save(Progress(step=1))
    assert checkpoints.find("never") is None
    assert checkpoints.begin(None) == Progress(step=0)
    assert checkpoints.find("auto") is None
    assert is_complete(tmp_path / "checkpoints-before-1" / "step-00000001")


def test_room_is_asked_for_what_the_run_writes(make_config: Callable[..., TrainConfig]) -> None:
    enormous = 10**15
    with pytest.raises(UserError, match="free; make room"):
        check_room(make_config(checkpoint_every=1, export=False), enormous, enormous)
    with pytest.raises(UserError, match="free; make room"):
        check_room(make_config(), enormous, enormous)
    check_room(make_config(export=False), enormous, enormous)
    check_room(make_config(checkpoint_every=1), 1000, 1000)


def test_a_save_in_the_background_holds_what_was_when_it_began(accelerator: Any, trained: Any, tmp_path: Path) -> None:
    model, optimizer = trained
    update(model, optimizer)
    apart, together = make(accelerator, tmp_path / "apart"), make(accelerator, tmp_path / "together")
    apart.mode = "async"
    together.save(Progress(step=1))
    for step in (1, 2):  # The second reuses the memory of the first.
        assert apart.save(Progress(step=step)) is None
        update(model, optimizer)
        assert apart.newest() is None or step == 2
        if step == 1:
            apart.advance(1)
            assert apart.newest() is None  # A rank is still writing, by what was told.
            assert apart.wait() is None
    assert apart.wait() is None and apart.saved == 2
    files = [(checkpoints.folder / "step-00000001" / "rank-00000-000.safetensors") for checkpoints in (apart, together)]
    assert files[0].read_bytes() == files[1].read_bytes()
    later = apart.folder / "step-00000002" / files[0].name
    assert later.read_bytes() != files[0].read_bytes() and later.stat().st_size == files[0].stat().st_size


def test_a_failed_save_in_the_background_is_told_at_a_boundary(accelerator: Any, trained: Any, tmp_path: Path) -> None:
    checkpoints = make(accelerator, tmp_path)
    checkpoints.mode, checkpoints.on_error = "async", "stop"
    checkpoints.folder.mkdir()
    (checkpoints.folder / "step-00000001").write_text("a file where the folder should be", encoding="utf-8")
    assert checkpoints.save(Progress(step=1)) is None
    with pytest.raises(NotSaved, match=r"no checkpoint at step 1 \(NotADirectoryError.*the last good one is None"):
        while True:
            checkpoints.advance(int(checkpoints.busy))
    assert checkpoints.wait() is None and not checkpoints.busy


def test_another_tokenizer_is_refused_by_name_and_an_unknown_one_is_not(accelerator: Any, trained: Any, tmp_path: Path) -> None:
    make(accelerator, tmp_path, tokenizer="a").save(Progress(step=1))
    with pytest.raises(UserError, match="was made with another tokenizer"):
        make(accelerator, tmp_path, tokenizer="b").find("auto")
    assert make(accelerator, tmp_path).find("auto") is not None


def test_a_checkpoint_tells_the_run_that_made_it_and_another_format_is_named(
    accelerator: Any, trained: Any, tmp_path: Path
) -> None:
    checkpoints = make(accelerator, tmp_path)
    checkpoints.record = {"config": {"model": "one"}, "plan": {"strategy": "single"}}
    checkpoints.save(Progress(step=1))
    path = checkpoints.folder / "step-00000001"
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    assert state["config"] == {"model": "one"} and state["plan"] == {"strategy": "single"}
    said: list[str] = []
    checkpoints.say, checkpoints.record = said.append, {"config": {"model": "other"}}
    checkpoints.load(path)
    assert said == ["note: step-00000001 was made with model=one, this run has other: what was trained is carried over, what is "
                    "frozen is this one's"]
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    (path / "manifest.json").write_text(json.dumps({**manifest, "version": 99}), encoding="utf-8")
    with pytest.raises(UserError, match="is in format 99, this version reads format 2; a newer version of the toolkit made it"):
        checkpoints.find(str(path))
