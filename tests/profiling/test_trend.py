"""What ends a run long after this step is said once: memory that rises at every step, and an allocator full of holes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.profiling.test_counter import counted
from toolkit.profiling.killed import first_of_node
from toolkit.profiling.trend import gap_line, rise_line, rise_per_step
from toolkit.units import GIB, MIB


def test_only_what_rises_at_every_step_is_a_leak() -> None:
    assert rise_per_step([10, 20, 30, 40], 4) == 10 and rise_per_step([10, 20, 30, 40], 5) == 0
    assert rise_per_step([10, 20, 20, 40], 4) == 0 and rise_per_step([], 2) == 0
    said = rise_line("rank 1", 2 * MIB, 7 * MIB)
    assert said == "rank 1 holds 2 MiB more after every step; at this pace it lasts for 3 more steps"


def test_holes_are_worth_a_word_above_a_quarter() -> None:
    assert gap_line("x", 80 * GIB, 61 * GIB, {}) is None
    said = gap_line("x", 80 * GIB, 59 * GIB, {})
    assert said == "x reserves 80 GiB for 59 GiB of tensors: PYTORCH_ALLOC_CONF=expandable_segments:True may help"
    on = gap_line("x", 80 * GIB, 59 * GIB, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert on is not None and "are on already" in on


def test_ranks_of_a_node_say_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_of_node("leak") and first_of_node("leak")  # no launcher, one process
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    assert first_of_node("leak")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1" / "error.json"))
    assert not first_of_node("leak") and first_of_node("gap")


@pytest.mark.parametrize("leaks", [True, False])
def test_a_leaking_loop_is_flagged_once(leaks: bool, tmp_path: Path) -> None:
    said, held = counted(f"""
import contextlib, io
from toolkit.training.memory import MemoryWatch
model = torch.nn.Linear(500, 500)
optimizer = torch.optim.AdamW(model.parameters())
memory = MemoryWatch("cpu")
memory.follow(model, optimizer)
kept, out = [], io.StringIO()
with contextlib.redirect_stderr(out):
    for step in range(20):
        memory.begin_step()
        loss = model(torch.ones(500, 500)).relu().sum()
        kept.append(loss if {leaks} else loss.item())  # with its graph
        loss.backward(retain_graph={leaks})
        optimizer.step()
        optimizer.zero_grad()
        del loss
        memory.end_step()
print(json.dumps([out.getvalue().splitlines(), memory.resident]))
""", tmp_path)
    assert len(said) == leaks
    if leaks:
        assert said[0].startswith("warning: this run holds 1.") and "more after every step; at this pace it lasts for" in said[0]
        assert held > 18 * MIB
