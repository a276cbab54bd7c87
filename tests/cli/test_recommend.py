"""`toolkit recommend`: the contract of its JSON, the files it writes, and what it says when nothing fits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.planner.search import ALIKE
from toolkit.strategies import read

Run = Callable[..., Any]
SEARCHED = ("--seq-len", 64, "--gpu", "a100-80gb-sxm")
SHORT = (*SEARCHED, "--micro-batch", 1)
"""Fixed, the micro-batch is not searched, which is most of the work."""
KEYS = {"schema", "recommended", "candidates", "reason", "alternatives", "files"}
ESTIMATE = {"schema", "model", "workload", "cluster", "plan", "memory", "time"}


def ask(run: Run, model: Path, *words: object, status: int = 0, base: tuple[object, ...] = SHORT) -> Any:
    done = run("recommend", model, *base, *words, "--json")
    assert done.status == status and done.err == "", done
    return done.json


def test_the_json_is_the_contract(run: Run, tiny: Path) -> None:
    found = ask(run, tiny, "--gpus", 2)
    assert set(found) >= KEYS and found["schema"] == 1 and found["files"] == []
    assert set(found["recommended"]) >= ESTIMATE
    assert found["recommended"] in found["candidates"]
    for candidate in found["candidates"]:
        assert set(candidate) >= ESTIMATE and candidate["schema"] == 1
        assert sum(candidate["memory"]["breakdown"].values()) == candidate["memory"]["peak_allocated"]
    assert found["recommended"]["plan"]["strategy"] in found["reason"]


def test_one_device_that_is_enough_is_what_is_recommended(run: Run, tiny: Path) -> None:
    found = ask(run, tiny, "--gpus", 4)
    assert found["recommended"]["plan"]["strategy"] == "single"
    assert found["recommended"]["cluster"]["world_size"] == 1
    assert "the other GPUs are not needed" in found["reason"]
    assert found["one_gpu"].startswith("One GPU is enough for the memory")


def test_candidates_come_lightest_first(run: Run, tiny: Path) -> None:
    rungs = ["single", "ddp", "zero1", "zero2", "fsdp-grad", "hsdp", "fsdp", "zero3"]
    names = [c["plan"]["strategy"] for c in ask(run, tiny, "--gpus", 2, "--nodes", 2)["candidates"]]
    assert [rungs.index(name) for name in names] == sorted(rungs.index(name) for name in names)
    assert set(names) == set(rungs)


@pytest.mark.parametrize(
    ("engine", "absent"), [("fsdp", {"zero1", "zero2", "zero3"}), ("deepspeed", {"fsdp", "fsdp-grad", "hsdp"})]
)
def test_an_engine_can_be_asked_for(engine: str, absent: set[str], run: Run, tiny: Path) -> None:
    names = {c["plan"]["strategy"] for c in ask(run, tiny, "--gpus", 2, "--engine", engine)["candidates"]}
    assert not names & absent and {"single", "ddp"} <= names and len(names) > 2


def test_the_fastest_is_the_lightest_of_those_that_are_as_fast_as_any(run: Run, tiny: Path) -> None:
    found = ask(run, tiny, "--gpus", 2, "--prefer", "fastest")
    speeds = [(c["name"], (c["time"] or {}).get("tokens_per_second", 0)) for c in found["candidates"] if c["fits_with_margin"]]
    alike = [name for name, speed in speeds if speed >= (1 - ALIKE) * max(speed for _, speed in speeds)]
    assert found["recommended"]["name"] == alike[0]


def test_the_fewest_gpus_are_the_least_that_fit(run: Run, tiny: Path) -> None:
    tight = ("--gpus", 4, "--gpu-memory", "1GiB", "--prefer", "fewest-gpus")
    found = ask(run, tiny, *tight)
    assert found["recommended"]["cluster"]["world_size"] == 1
    worlds = {c["cluster"]["world_size"] for c in found["candidates"]}
    assert worlds == {1, 2, 4}, "part of the GPUs is tried too"


def test_a_global_batch_is_met_exactly(run: Run, tiny: Path) -> None:
    for candidate in ask(run, tiny, "--gpus", 2, "--global-batch", 12, base=SEARCHED)["candidates"]:
        work = candidate["workload"]
        assert work["micro_batch"] * work["accumulate"] * candidate["cluster"]["world_size"] == 12


def test_without_a_micro_batch_the_largest_that_pays_is_searched(run: Run, wide: Path) -> None:
    found = ask(run, wide, base=SEARCHED)["recommended"]
    assert found["workload"]["micro_batch"] > 1
    assert found["memory"]["fits"] and found["fits_with_margin"]


def test_a_micro_batch_that_was_asked_for_stays(run: Run, tiny: Path) -> None:
    candidates = ask(run, tiny, "--gpus", 2, "--micro-batch", 3, base=SEARCHED)["candidates"]
    assert {c["workload"]["micro_batch"] for c in candidates} == {3}


def test_tokens_make_the_answer_speak_of_time(run: Run, tiny: Path) -> None:
    found = ask(run, tiny, "--tokens", 10**9)
    assert found["recommended"]["time"] is None or "for 1 B tokens" in found["reason"]


# -- nothing fits ----------


def test_when_nothing_fits_the_closest_and_what_would_help_are_there(run: Run, tiny: Path, tmp_path: Path) -> None:
    found = ask(run, tiny, "--gpus", 2, "--gpu-memory", "100MiB", "--write", tmp_path / "out", status=3)
    assert found["recommended"] is None and found["alternatives"] == [] and found["files"] == []
    assert not (tmp_path / "out").exists()
    assert found["reason"].startswith("nothing fits; the closest is ")
    assert not any(c["fits_with_margin"] for c in found["candidates"])
    least = min(found["candidates"], key=lambda c: c["memory"]["peak_total"])
    assert found["closest"]["name"] == least["name"] and not found["closest"]["fits_with_margin"]
    changes = found["changes"]
    assert any(change["option"].startswith("--gpu ") and change["fits"] for change in changes)
    assert all((change["short"] == 0) == change["fits"] for change in changes)


def test_a_change_that_is_said_to_help_does(run: Run, tiny: Path) -> None:
    words = ("--gpus", 2, "--gpu-memory", "100MiB", "--engine", "fsdp")
    option = next(c["option"] for c in ask(run, tiny, *words, status=3)["changes"] if c["fits"])
    name, value = option.split(" ", 1)
    assert name == "--gpu"
    assert ask(run, tiny, "--gpus", 2, "--engine", "fsdp", name, value)["recommended"] is not None


def test_people_are_told_too(run: Run, tiny: Path) -> None:
    done = run("recommend", tiny, *SHORT, "--gpu-memory", "100MiB")
    assert done.status == 3 and done.err == ""
    assert "Nothing fits; the closest is single" in done.out
    assert "a larger GPU" in done.out and "One GPU is not enough for the memory" in done.out


# -- what people read ----------


def test_people_read_the_choice_the_reason_and_how_to_go_on(run: Run, tiny: Path, tmp_path: Path) -> None:
    done = run("recommend", tiny, *SHORT, "--gpus", 2)
    assert done.status == 0 and done.err == ""
    lines = done.out.splitlines()
    assert lines[0].startswith("One GPU is enough for the memory")
    assert "→ single" in done.out and "Chosen: single on 1 GPU" in done.out and "--write DIR" in done.out
    every = run("recommend", tiny, *SHORT, "--gpus", 2, "--all")
    assert len(every.out.splitlines()) >= len(lines)
    rate = run("recommend", tiny, *SHORT, "--base-batch", 1, "--micro-batch", 4, "--learning-rate", 1e-4)
    assert "0.0002 is proposed (square root of the global batch of 4)" in rate.out


# -- the files ----------


@pytest.mark.parametrize(("engine", "enough"), [("fsdp", "fsdp-grad"), ("deepspeed", "zero1")])
def test_written_files_are_accepted_by_check_and_hold_the_plan(
    engine: str, enough: str, run: Run, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_")):
            monkeypatch.delenv(name)
    folder, words = tmp_path / "out", ("--gpus", 4)
    need = run("estimate", wide, *SHORT, *words, "--strategy", enough, "--json").json["memory"]["peak_total"]
    found = ask(run, wide, *words, "--gpu-memory", int(need * 1.03), "--margin", 0, "--engine", engine, "--write", folder)
    assert found["recommended"]["plan"]["strategy"].startswith(engine[:4].replace("deep", "zero"))
    names = {Path(name).name for name in found["files"]}
    assert names >= {"accelerate.yaml", "train.yaml", "launch.sh", "README.md", "recommendation.json"}
    assert all(Path(name).is_file() and Path(name).parent == folder for name in found["files"])
    assert {path.name for path in folder.iterdir()} == names
    plan = read(folder / "accelerate.yaml").plan
    assert plan.strategy == found["recommended"]["plan"]["strategy"]
    assert json.loads((folder / "recommendation.json").read_text(encoding="utf-8")) == found
    checked = run("check", folder / "accelerate.yaml", folder / "train.yaml", "--model", wide, "--json")
    assert checked.json["errors"] == 0, checked.json["findings"]
    assert checked.status == 0


def test_the_recipes_file_says_what_was_asked(run: Run, tiny: Path, tmp_path: Path) -> None:
    ask(run, tiny, "--method", "lora", "--lora-rank", 4, "--micro-batch", 2, "--accumulate", 3, "--write", tmp_path / "out")
    train = yaml.safe_load((tmp_path / "out" / "train.yaml").read_text(encoding="utf-8"))
    expected = {"method": "lora", "lora_rank": 4, "seq_len": 64, "micro_batch": 2, "accumulate": 3, "model": str(tiny)}
    assert {key: train[key] for key in expected} == expected
    assert os.access(tmp_path / "out" / "launch.sh", os.X_OK)


def test_writing_twice_is_writing_once(run: Run, tiny: Path, tmp_path: Path) -> None:
    def content() -> dict[str, str]:
        ask(run, tiny, "--write", tmp_path / "out")
        return {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "out").iterdir()}

    assert content() == content()
