"""The preloaded allocation counter is exact: sizes, peaks, other threads, and no trace in child processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.profiling.counter import build_shim, device_counter

ROOT = Path(__file__).parents[2]
BEGIN = """
import json, os, sys
sys.path.insert(0, {root!r})
from toolkit.profiling.counter import device_counter, preload
preload()
import torch
counter = device_counter("cpu")
torch.empty(1)
"""


def counted(body: str, tmp_path: Path, *arguments: str) -> Any:
    """What a script prints as JSON that starts itself anew under the counter."""
    script = tmp_path / "script.py"
    script.write_text(BEGIN.format(root=str(ROOT)) + body, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_live_and_peak_are_the_bytes_of_the_tensors(tmp_path: Path) -> None:
    found = counted("""
start = counter.live()
counter.reset()
a = torch.empty(1000)
b = torch.empty(3, 7, dtype=torch.float64)
one = counter.live() - start
del a
two = counter.live() - start
view = b[1:]
del b
three = counter.live() - start
del view
print(json.dumps([counter.kind, one, two, three, counter.live() - start, counter.peak() - start]))
""", tmp_path)
    assert found == ["allocations", 4000 + 168, 168, 168, 0, 4168]


def test_the_peak_begins_anew_at_a_reset(tmp_path: Path) -> None:
    found = counted("""
start = counter.live()
held = torch.empty(500)
torch.empty(10**6)
first = counter.peak() - start
counter.reset()
second = counter.peak() - start
torch.empty(100)
print(json.dumps([first, second, counter.peak() - start]))
""", tmp_path)
    assert found == [2000 + 4 * 10**6, 2000, 2400]


def test_nothing_is_lost_when_other_threads_free(tmp_path: Path) -> None:
    found = counted("""
import random, threading
start = counter.live()
pool, lock = [], threading.Lock()
def work(seed):
    draw = random.Random(seed)
    for _ in range(3000):
        tensor = torch.empty(draw.randrange(1, 5000))
        with lock:
            pool.append(tensor)
            if len(pool) > 50:
                pool.pop(draw.randrange(len(pool)))
        del tensor
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
alive = sum(t.untyped_storage().nbytes() for t in pool)
live = counter.live() - start
pool.clear()
print(json.dumps([live - alive, counter.live() - start]))
""", tmp_path)
    assert found == [0, 0]


def test_the_same_process_begins_again_with_its_arguments_and_children_are_not_counted(tmp_path: Path) -> None:
    found = counted("""
print(json.dumps([sys.argv[1:], "TOOLKIT_ALLOC_COUNT" in os.environ, "alloc_count" in os.environ.get("LD_PRELOAD", "")]))
""", tmp_path, "a b", "--c=d")
    assert found == [["a b", "--c=d"], False, False]


def test_the_shim_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    first = build_shim()
    assert first is not None
    stamp = first.stat().st_mtime_ns
    assert build_shim() == first and first.stat().st_mtime_ns == stamp
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_without_the_shim_the_resident_set_stands_in_and_is_named(tmp_path: Path) -> None:
    counter = device_counter("cpu")
    assert counter.kind == "rss" and counter.live() > 10**6 and counter.peak() >= counter.live() * 0.5
