"""metrics.jsonl: one JSON object a line, resumed without a double or a half."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from toolkit.training.metrics import Log, Metrics, Spikes
from toolkit.training.step import Diverged

RECORD = {"loss": 1.5, "grad_norm": 0.5, "learning_rate": 1e-4, "tokens": 10, "tokens_per_second": 5.0, "step_seconds": 2.0,
          "mfu": None, "memory_peak": 4096}  # fmt: skip


def write(accelerator: Any, file: Path, steps: range, *, log_every: int = 1, **changes: Any) -> None:
    with Metrics(Log(accelerator), accelerator, file, total=4, first=steps.start, log_every=log_every) as metrics:
        for step in steps:
            metrics.step({"step": step, **RECORD, **changes})


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_every_step_is_written_and_only_some_are_said(
    accelerator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(accelerator, tmp_path / "m.jsonl", range(1, 5), log_every=3)
    assert [record["step"] for record in records(tmp_path / "m.jsonl")] == [1, 2, 3, 4]
    said = capsys.readouterr().out
    assert "step 3/4" in said and "step 4/4" in said and "step 2/4" not in said and "trained in" in said
    assert "4 KiB  2 s left" in said.splitlines()[0] and "left" not in said.splitlines()[1]


def test_a_resumed_run_drops_what_it_writes_again(accelerator: Any, tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    write(accelerator, file, range(1, 4))
    with file.open("a", encoding="utf-8") as half:
        half.write('{"step": 4, "lo')
    write(accelerator, file, range(3, 5), loss=0.5)
    assert [(record["step"], record["loss"]) for record in records(file)] == [(1, 1.5), (2, 1.5), (3, 0.5), (4, 0.5)]


def test_what_json_has_no_number_for_is_null(accelerator: Any, tmp_path: Path) -> None:
    write(accelerator, tmp_path / "m.jsonl", range(1, 2), grad_norm=math.inf)
    assert records(tmp_path / "m.jsonl")[0]["grad_norm"] is None


def test_evaluations_have_their_own_keys(accelerator: Any, tmp_path: Path) -> None:
    with Metrics(Log(accelerator), accelerator, tmp_path / "m.jsonl", total=4, first=1, log_every=1) as metrics:
        metrics.evaluation(0, 2.5, 1234)
    assert records(tmp_path / "m.jsonl") == [{"step": 0, "eval_loss": 2.5, "eval_tokens": 1234}]


def test_a_spike_is_said_once_and_noise_is_not(accelerator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Metrics(Log(accelerator), accelerator, tmp_path / "m.jsonl", total=40, first=1, log_every=99) as metrics:
        for step in range(1, 41):
            loss = 9.0 if step in (30, 31) else 2.0 + 0.3 * (step % 3)
            metrics.step({"step": step, **RECORD, "loss": loss, "grad_norm": 50.0 if step == 35 else 1.0})
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(said) == 2, said
    assert said[0] == "warning: step 30: loss 9 is far above the last 29 steps (median 2.3)"
    assert said[1].startswith("warning: step 35: grad_norm 50 is far above")


def test_a_falling_loss_and_what_is_no_number_are_no_spikes() -> None:
    spikes = Spikes("loss")
    assert not any(spikes.seen(value) for value in [10.0 / step for step in range(1, 60)] + [math.nan, math.inf])


def test_steps_that_an_overflow_undid_are_counted_and_end_the_run_when_nothing_else_happens(
    accelerator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(accelerator), "optimizer_step_was_skipped", True)
    file = tmp_path / "m.jsonl"
    with pytest.raises(Diverged, match="overflowed in each of the last 50 steps, up to step 50.*precision=bf16 or fp32"), \
            Metrics(Log(accelerator), accelerator, file, total=99, first=1, log_every=99) as metrics:
        for step in range(1, 99):
            metrics.step({"step": step, **RECORD, "grad_norm": math.inf})
    assert "step 3 changed nothing: the gradients overflowed (3 such steps so far)" in capsys.readouterr().out
    assert len(records(file)) == 50


def test_a_tracker_that_fails_on_the_way_is_spoken_of_once_and_does_not_end_the_run(
    accelerator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(accelerator, "trackers", [object()], raising=False)
    monkeypatch.setattr(accelerator, "log", away, raising=False)
    write(accelerator, tmp_path / "m.jsonl", range(1, 5))
    assert len(records(tmp_path / "m.jsonl")) == 4
    assert capsys.readouterr().out.count("the tracker does not take it (no route)") == 1
