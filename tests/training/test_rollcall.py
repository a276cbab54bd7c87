"""When a rank is missing, every other rank ends within the time-out, and one line names it with where it was last."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.training.rollcall import Standing, who_is_missing

ROOT = Path(__file__).parents[2]
WAITS = Standing(beats=9, step=3, phase="counting the batch", line="c10d.py:1", waits="yes", seconds=6.0)
STUCK = replace(WAITS, phase="data", line="loader.py:7", waits="no", seconds=7.0)


def later(standing: Standing) -> Standing:
    return replace(standing, beats=standing.beats + 3)


def named(**ranks: tuple[Standing | None, Standing | None]) -> str | None:
    looks = list(ranks.values())
    return who_is_missing({rank: look[0] for rank, look in enumerate(looks)},
                          {rank: look[1] for rank, look in enumerate(looks)}, 60.0)


def alive(standing: Standing) -> tuple[Standing, Standing]:
    return standing, later(standing)


def test_the_rank_that_does_not_wait_is_the_missing_one() -> None:
    assert named(a=alive(WAITS), b=alive(STUCK), c=alive(WAITS)) == (
        "rank 1 of 3 stood after step 3 in data (loader.py:7), for 7 s; the others waited 6 s after step 3 in counting the batch "
        "(timeout_minutes=1)")


def test_a_rank_that_tells_nothing_any_more_comes_first() -> None:
    line = named(a=alive(STUCK), b=(WAITS, WAITS), c=alive(WAITS))
    assert line is not None and line.startswith("rank 1 of 3 has told nothing since it stood after step 3 in counting the batch")
    assert "rank 2 of 3 has not begun" in str(named(a=alive(WAITS), b=alive(WAITS), c=(None, None)))


def test_a_failure_is_told_before_everything_else() -> None:
    failed = replace(STUCK, ended="failed (ValueError: 3 is none)")
    assert str(named(a=(WAITS, WAITS), b=(failed, failed), c=alive(WAITS))).startswith(
        "rank 1 of 3 failed (ValueError: 3 is none) after step 3")


def test_where_all_wait_the_odd_place_is_named_and_one_place_names_nobody() -> None:
    elsewhere = replace(WAITS, step=4, phase="checkpoint")
    assert str(named(a=alive(WAITS), b=alive(WAITS), c=alive(elsewhere))).startswith("rank 2 of 3 stood after step 4 in check")
    assert str(named(a=alive(elsewhere), b=alive(WAITS))).startswith("rank 1 of 2 stood after step 3 in counting")
    assert named(a=alive(WAITS), b=alive(WAITS)) is None
    device = replace(WAITS, phase="backward", waits="perhaps")
    assert str(named(a=alive(device), b=alive(WAITS))).startswith("rank 0 of 2 stood after step 3 in backward")
    many = {f"r{rank}": alive(STUCK) for rank in range(6)} | {"w": alive(WAITS)}
    assert "; and 2 more; the others" in str(named(**many))


SCRIPT = """
import os, sys, time
from toolkit.training import Log, Metrics, across_ranks, engage, run

def load_next(step, how):
    if os.environ["RANK"] == "1" and step == 3:
        if how == "sleeps":
            time.sleep(600)
        elif how == "dies":
            os._exit(7)
        elif how == "fails":
            raise ValueError("3 is none")
        return how == "leaves"

def main(words):
    folder, how = words
    accelerator = engage(output=folder, precision="fp32", timeout_minutes=0.15)
    from pathlib import Path
    metrics = Metrics(Log(accelerator), accelerator, Path(folder) / f"{how}.jsonl", total=9, first=1, log_every=9)
    with metrics:
        for step in range(1, 6):
            if load_next(step, how):
                break
            across_ranks(accelerator, 1.0)
            metrics.step({"step": step, "loss": 1.0, "grad_norm": 1.0, "step_seconds": 0.1})
            time.sleep(0.6)
    if how == "leaves" and os.environ["RANK"] == "1":
        time.sleep(600)

run(main)
"""


@pytest.mark.slow
def test_every_rank_ends_within_the_time_out_and_one_line_names_the_missing_one(tmp_path: Path, free_port: int) -> None:
    """Two processes without a launcher that would end the survivor; one run for each way to be missing."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    ways = ("sleeps", "dies", "fails", "leaves")
    begun = time.monotonic()
    running = {}
    for number, how in enumerate(ways):
        shared = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": "2",
                  "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port + number), "LOCAL_WORLD_SIZE": "2"}
        for rank in ("0", "1"):
            running[how, rank] = subprocess.Popen(
                [sys.executable, "script.py", str(tmp_path), how], cwd=tmp_path, env={**shared, "RANK": rank, "LOCAL_RANK": rank},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        told = {key: (process.communicate(timeout=90)[1], process.returncode) for key, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    assert time.monotonic() - begun < 100
    for how in ways:
        text, status = told[how, "0"]
        line = next((line for line in text.splitlines() if line.startswith("error: ")), text)
        assert status == 1 and told[how, "1"][1] != 0, line
        assert line.startswith("error: rank 1 of 2 ") and "after step 2" in line, line
        assert "Traceback" not in text
    assert "in load_next() (script.py:8)" in told["sleeps", "0"][0]
    assert "has told nothing since" in told["dies", "0"][0]
    assert "failed (ValueError: 3 is none)" in told["fails", "0"][0]


@pytest.fixture
def free_port() -> int:
    """The first of four that nobody listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
