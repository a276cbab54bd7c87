"""What a person reads holds the figures that a program reads, at any width."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli.catalog import TABLES
from toolkit.estimate.engine import Estimator
from toolkit.estimate.result import CATEGORIES, Estimate
from toolkit.planner.recommendation import Recommendation, recommend
from toolkit.planner.search import Request
from toolkit.report.terminal import show_doctor, show_estimate, show_recommendation, show_rows
from toolkit.specs import ModelSpec, Plan, Workload
from toolkit.specs.detect import make_cluster
from toolkit.units import GIB, format_count, format_size

WIDTHS = [60, 80, 110, 200]
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
          "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 512}  # fmt: skip
SPEC = ModelSpec(name="tiny", config=CONFIG)
WORK = Workload(seq_len=64, loss_only=True)


def cluster(gpus: int = 2, memory: int = 80 * GIB) -> Any:
    return make_cluster("a100-80gb-sxm", gpus=gpus, gpu_memory=memory)


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    return Estimator(SPEC).estimate(WORK, Plan(strategy="zero3", offload="all"), cluster())


@pytest.fixture(scope="module")
def found() -> Recommendation:
    return recommend(Request(SPEC, WORK, cluster(), fixed_micro_batch=True))


@pytest.fixture(scope="module")
def nothing() -> Recommendation:
    return recommend(Request(SPEC, WORK, cluster(memory=GIB // 10), fixed_micro_batch=True))


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


def flat(text: str) -> str:
    """The words without the lines that a narrow table breaks them into."""
    return " ".join(re.sub("[█·─]", " ", text).split())


def test_an_estimate_shows_every_term(estimate: Estimate, width: int, capsys: pytest.CaptureFixture[str]) -> None:
    show_estimate(estimate, None)
    text = capsys.readouterr().out
    memory = estimate.memory
    for category in CATEGORIES:
        assert f"{category.replace('_', ' ')} {format_size(memory.breakdown[category])}" in flat(text)
    for size in (memory.peak_allocated, memory.peak_reserved, memory.outside_allocator, memory.first_step_peak, memory.resident,
                 memory.load_peak, memory.host.peak, memory.peak_total, memory.headroom):  # fmt: skip
        assert format_size(size) in flat(text)
    assert f"Alive at the peak: {memory.at_peak.phase}" in text
    assert all(len(line) <= width for line in text.splitlines())


@pytest.mark.parametrize("margin", [None, 0.0, 0.5])
def test_the_verdict_counts_the_margin(margin: float | None, estimate: Estimate, capsys: pytest.CaptureFixture[str]) -> None:
    memory = replace(estimate.memory, capacity=int(estimate.memory.peak_total * 1.5))
    show_estimate(replace(estimate, memory=memory), margin)
    last = capsys.readouterr().out.splitlines()[-1]
    if margin == 0.5:
        short = memory.peak_total - int(memory.capacity * 0.5)
        assert last.startswith("It does not fit") and "with 50% kept free" in last and f"{format_size(short)} too much" in last
    else:
        assert last.startswith("It fits") and f"{format_size(memory.headroom)} to spare" in last


def test_a_recommendation_has_the_figures_of_every_candidate(
    found: Recommendation, width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    show_recommendation(found, every=True)
    text = capsys.readouterr().out
    assert "…" not in text, "nothing is cut off"
    for candidate in found.to_json()["candidates"]:
        row = next(line for line in text.splitlines() if re.match(rf"\s+(→ )?{candidate['name']}\s", line))
        assert format_size(candidate["memory"]["peak_total"]) in row
        assert f" {candidate['cluster']['world_size']} " in row
        if candidate["time"] is not None:
            assert format_count(candidate["time"]["tokens_per_second"]) in row
    assert "→ single" in text and f"Chosen: {found.reason}." in flat(text)
    assert all(len(line) <= width for line in text.splitlines())


def test_when_nothing_fits_every_change_is_shown(nothing: Recommendation, width: int, capsys: pytest.CaptureFixture[str]) -> None:
    show_recommendation(nothing, every=False)
    text = flat(capsys.readouterr().out)
    assert nothing.reason[1:] in text
    for change in nothing.to_json()["changes"]:
        verdict = "fits" if change["fits"] else f"still {format_size(change['short'])} short"
        assert f"{change['what']} {change['option']} {verdict}" in text


def test_the_launch_command_can_be_copied(found: Recommendation, width: int, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("/runs/of mine") / ("long-" * 20)
    show_recommendation(replace(found, files=[str(folder / "accelerate.yaml"), str(folder / "train.yaml")]), every=False)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Launch:"))
    words = shlex.split(line.removeprefix("Launch:"))
    assert words == ["accelerate", "launch", "--config_file", str(folder / "accelerate.yaml"), "recipes/train.py", "--config",
                     str(folder / "train.yaml")]  # fmt: skip


def test_names_are_shown_as_they_are(estimate: Estimate, capsys: pytest.CaptureFixture[str]) -> None:
    show_estimate(replace(estimate, model=replace(estimate.model, name="my[red]model[/] :smile:")), None)
    assert capsys.readouterr().out.startswith("my[red]model[/] :smile: (")


@pytest.mark.parametrize("columns", ["", "0", "-5", "wide", "7"])
def test_a_width_that_is_none_is_no_obstacle(
    columns: str, estimate: Estimate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    show_estimate(estimate, None)
    assert "It fits" in capsys.readouterr().out


def test_rows_of_a_catalog_are_whole(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "gpt2-medium", "hub": "openai-community/gpt2-medium", "parameters": 354823168},
            {"name": "nobody", "hub": None, "parameters": 999_700}]  # fmt: skip
    show_rows("models", rows)
    text = capsys.readouterr().out
    assert "gpt2-medium" in text and "355 M" in text and "1 M" in text and "…" not in text
    assert all(len(line) <= width for line in text.splitlines())


@pytest.mark.parametrize("what", ["gpus", "models", "strategies"])
def test_names_of_a_catalog_are_whole_in_a_usual_terminal(what: str, monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = TABLES[what]()
    show_rows(what, rows)
    lines = capsys.readouterr().out.splitlines()
    assert {str(row["name"]) for row in rows} <= {line.split()[0] for line in lines if line.strip()}
    assert all(len(line) <= 80 for line in lines)


def test_the_doctor_says_what_is_missing(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"toolkit": "1", "python": "3", "cores": 2, "host_memory": GIB, "free_disk": GIB, "gpus": [], "compiler": None,
             "packages": {"torch": "2", "peft": None, "plotly": None}}  # fmt: skip
    show_doctor(facts, {"plotly": "pictures"})
    text = flat(capsys.readouterr().out)
    assert "2 cores, 1 GiB of RAM" in text and "runs use the CPU" in text
    assert "peft missing: needed" in text and "plotly missing: pictures" in text
