"""A rank that signal 9 ends: the run says what it was, what it held, and what the host had left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.profiling.killed import Watch, children_of, exit_signal, resident
from toolkit.profiling.killed import main as watch_launch

ROOT = Path(__file__).parents[2]


def wait_for(what: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not (what.is_file() and what.stat().st_size):
        time.sleep(0.1)
    assert what.is_file()


def test_the_signal_of_a_process_that_nobody_asked_about_yet() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; held = bytearray(80 << 20); print(1, flush=True); time.sleep(60)"],
                          stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() and child.pid in children_of(os.getpid())
        watch = Watch([child.pid])
        watch.look()
        assert exit_signal(child.pid) is None and resident(child.pid) > 80 << 20
        os.kill(child.pid, signal.SIGKILL)
        assert watch.first_end() == {child.pid: 9} and exit_signal(child.pid) == 9
        said = watch.explain(child.pid, "rank 0")
        assert said.startswith("rank 0 was killed by signal 9; ") and "it held" in said and "MiB, all 1 processes" in said
    assert exit_signal(child.pid) is None and resident(child.pid) == 0


@pytest.mark.parametrize("killed", [True, False])
def test_a_rank_that_was_gone_before_the_watch_began(killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert Watch([child.pid]).first_end() == {child.pid: None}
    for note in ("started", *(() if killed else ("ended",))):
        (tmp_path / f"{note}-{child.pid}").touch()
    watch_launch([str(child.pid)])  # no children of its own left
    said = capfd.readouterr().err.partition(";")[0]
    assert said == (f"error: process {child.pid} of this run was killed, most likely by signal 9" if killed else "")


def test_without_torchs_launcher_the_watch_ends_with_the_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else its parent has started may live for days, and the watch holds the run's standard error open."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with subprocess.Popen([sys.executable, "-c", ""]) as rank, subprocess.Popen([sys.executable, "-c", "input()"],
                                                                               stdin=subprocess.PIPE) as neighbour:
        watch_launch([str(os.getpid()), str(rank.pid), str(neighbour.pid)])
        assert neighbour.poll() is None
        assert neighbour.stdin is not None
        neighbour.stdin.write(b"\n")


@pytest.mark.slow
def test_a_killed_rank_of_a_launched_run_is_explained(tiny_model: Path, chat_data: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "recipes/accelerate/ddp.yaml"),
             "--num_processes", "2", "--main_process_port", "0", str(ROOT / "recipes/train.py"), f"model={tiny_model}",
             f"data={chat_data}", f"output={tmp_path / 'run'}", "seq_len=64", "max_steps=100000", "tracker=none"]
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(words, cwd=ROOT, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            wait_for(tmp_path / "run" / "metrics.jsonl", 90)
            ranks = [pid for pid in children_of(launcher.pid) if resident(pid) > 100 << 20]
            assert len(ranks) == 2
            os.kill(max(ranks), signal.SIGKILL)
            _, err = launcher.communicate(timeout=90)
        finally:
            launcher.kill()
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and said[0].startswith(f"error: process {max(ranks)} of this run was killed"), err
    assert "by signal 9; " in said[0]
    assert "it held" in said[0] and "of host memory were left" in said[0] and launcher.returncode == 1
