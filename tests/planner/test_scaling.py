"""Scaling curves: which counts they have, what they keep fixed, and what they conclude."""

from __future__ import annotations

from dataclasses import replace

import pytest

from toolkit.errors import UserError
from toolkit.planner.scaling import Curve, counts, scaling
from toolkit.report.curve import show_curves, svg
from toolkit.specs import Cluster, ModelSpec, Plan, Workload
from toolkit.specs.catalog import gpu

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024,
    "max_position_embeddings": 512,
}  # fmt: skip
MODEL = ModelSpec(name="tiny", config=CONFIG)
NODE = Cluster(gpu=gpu("a100-80gb-sxm"), gpus_per_node=8)
WORK = Workload(seq_len=256, micro_batch=4, loss_only=True)


@pytest.fixture(scope="module")
def curves() -> dict[str, Curve]:
    return {mode: scaling(MODEL, WORK, Plan(strategy="fsdp"), NODE, 32, mode=mode) for mode in ("weak", "strong")}  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [80, 110])
def test_a_table_of_a_usual_terminal_cuts_nothing_off(width: int, curves: dict[str, Curve], monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    long = Plan(strategy="zero3", offload="optimizer")
    points = [replace(p, estimate=replace(p.estimate, plan=long)) for p in curves["strong"].points]
    show_curves([replace(curves["strong"], points=points)])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines) and not any("…" in line for line in lines)
    assert sum("computation" in line for line in lines) >= 5 and sum("zero3-offload-" in line for line in lines) == len(points)


def test_counts_double_inside_a_node_and_then_in_whole_nodes() -> None:
    assert counts(NODE, 32) == [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4)]
    assert counts(NODE, 24) == [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 3)]
    assert counts(NODE, 3) == [(1, 1), (2, 1), (3, 1)]


@pytest.mark.parametrize("wrong", [0, -4, 12])
def test_counts_that_are_no_whole_nodes_are_refused(wrong: int) -> None:
    with pytest.raises(UserError):
        counts(NODE, wrong)


def test_one_gpu_runs_single_and_the_others_the_plan(curves: dict[str, Curve]) -> None:
    labels = [p.estimate.plan.strategy for p in curves["weak"].points]
    assert labels == ["single", *["fsdp"] * 5]


def test_weak_scaling_keeps_the_work_of_a_gpu(curves: dict[str, Curve]) -> None:
    assert {(p.estimate.workload.micro_batch, p.estimate.workload.accumulate) for p in curves["weak"].points} == {(4, 1)}


def test_strong_scaling_keeps_the_global_batch(curves: dict[str, Curve]) -> None:
    batches = {p.gpus * p.estimate.workload.micro_batch * p.estimate.workload.accumulate for p in curves["strong"].points}
    assert batches == {4 * 32}


def test_a_global_batch_that_nothing_divides_leaves_one_gpu_alone() -> None:
    curve = scaling(MODEL, WORK, Plan(strategy="fsdp"), NODE, 8, mode="strong", global_batch=7)
    assert [p.gpus for p in curve.points] == [1]


def test_a_slow_network_bends_the_curve() -> None:
    slow = replace(NODE, network_bandwidth=1e9)
    curve = scaling(MODEL, WORK, Plan(strategy="ddp"), slow, 16, mode="weak")
    inside, outside = curve.points[-2], curve.points[-1]
    assert outside.efficiency < 0.5 * inside.efficiency
    assert curve.overtaken is not None and curve.overtaken <= 16
    assert curve.knee is not None


def test_the_picture_names_every_count(curves: dict[str, Curve]) -> None:
    picture = svg(list(curves.values()), "tiny <model>")
    assert picture.startswith("<svg") and picture.endswith("</svg>")
    assert "tiny &lt;model&gt;" in picture
    assert all(f">{n}</text>" in picture for n in (1, 2, 4, 8, 16, 32))
