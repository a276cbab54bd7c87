"""A plan that is rendered and read back is the same plan, whatever its strategy and knobs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from toolkit.errors import UserError
from toolkit.specs import Cluster, FsdpSettings, Gpu, Plan, Workload, ZeroSettings
from toolkit.strategies import FAMILIES, STRATEGIES, canonical, check_plan, mismatch, read, render
from toolkit.strategies.zero.files import STAGE3
from toolkit.strategies.zero.launch import effective, persistence

GPU = Gpu(
    name="l4",
    memory=2**34,
    bf16_flops=1e14,
    fp16_flops=1e14,
    fp32_flops=1e13,
    bandwidth=1e12,
    link="pcie",
    link_bandwidth=1e10,
    pcie_bandwidth=1e10,
)
SIZES = st.one_of(st.none(), st.integers(1, 10**12))
SWITCH = st.sampled_from((None, True, False))
NAMES = st.lists(st.from_regex(r"[A-Z][A-Za-z0-9]{1,12}", fullmatch=True), max_size=3).map(tuple)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Cluster]:
    """A plan that its engine can run, and a cluster for it."""
    info = STRATEGIES[draw(st.sampled_from(sorted(STRATEGIES)))]
    cluster = Cluster(gpu=GPU, gpus_per_node=draw(st.sampled_from((1, 2, 4, 8))), nodes=draw(st.sampled_from((1, 2, 3))))
    fields: dict[str, object] = {"offload": draw(st.sampled_from(info.offloads))}
    if fields["offload"] != "none":
        fields["offload_to"] = draw(st.sampled_from(info.offload_to))
    for axis in info.axes:
        fields[axis] = draw(st.sampled_from((1, 1, 2)))
    fields["checkpointing"] = draw(st.sampled_from(("none", "selective", "full")))
    if info.family == "fsdp":
        fields["fsdp"] = FsdpSettings(
            wrap=draw(st.sampled_from(("transformer", "size", "none"))),
            wrap_classes=draw(NAMES),
            min_num_params=draw(SIZES),
            sync_each_micro_batch=draw(SWITCH),
            ram_efficient_loading=draw(SWITCH),
            state_dict=draw(st.sampled_from((None, "sharded", "full"))),
        )
        if info.name == "hsdp":
            fields["shard_size"] = draw(st.sampled_from((None, 2, 4)))
    if info.family == "zero":
        fields["bucket"] = draw(SIZES)
        fields["persist"] = draw(st.one_of(st.none(), st.integers(0, 10**9))) if info.stage == 3 else None
        sizes = (
            "reduce_bucket",
            "allgather_bucket",
            "prefetch_bucket",
            "max_live_parameters",
            "max_reuse_distance",
            "sub_group_size",
        )
        switches = (
            "overlap_comm",
            "contiguous_gradients",
            "round_robin_gradients",
            "pin_memory",
            "gather_16bit_on_save",
        )
        values: dict[str, object] = {name: draw(SIZES) for name in sizes} | {name: draw(SWITCH) for name in switches}
        values["grad_accum_dtype"] = draw(st.sampled_from((None, "fp32", "bf16", "fp16")))
        values["gradient_clipping"] = draw(st.sampled_from((None, 0.0, 0.5, 1.0)))
        fields["zero"] = ZeroSettings(**values)  # type: ignore[arg-type]
    plan = Plan(strategy=info.name, **fields)  # type: ignore[arg-type]
    try:
        check_plan(plan, Workload(), cluster)
    except UserError:
        assume(False)
    return plan, cluster


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
@given(plans())
def test_render_then_read_gives_the_plan_back(drawn: tuple[Plan, Cluster]) -> None:
    plan, cluster = drawn
    files = render(plan, Workload(), cluster)
    text = files.deepspeed_json()
    found = read(yaml.safe_load(files.accelerate_yaml()), None if text is None else json.loads(text), files.recipe)
    assert found.plan == canonical(plan, cluster)
    assert (found.processes, found.nodes) == (cluster.world_size, cluster.nodes)
    assert found.notes == ()
    assert mismatch(plan, found.plan) is None
    assert found.precision is None, "the precision is the recipe's"


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
@given(plans())
def test_canonical_is_a_fixed_point_and_the_same_run(drawn: tuple[Plan, Cluster]) -> None:
    plan, cluster = drawn
    once = canonical(plan, cluster)
    assert canonical(once, cluster) == once
    first, second = (render(p, Workload(), cluster) for p in (plan, once))
    assert (first.accelerate, first.deepspeed, first.recipe) == (
        second.accelerate,
        second.deepspeed,
        second.recipe,
    )
    if STRATEGIES[plan.strategy].family == "zero":
        # What only stage 3 reads is not written below it, nor pinning where nothing is offloaded.
        unused: dict[str, Any] = {} if plan.strategy == "zero3" else dict.fromkeys(STAGE3)
        unused |= {"gather_16bit_on_save": None, "pin_memory": None}
        sides = [dataclasses.replace(effective(p, Workload()), **unused) for p in (plan, once)]
        assert sides[0] == sides[1]
        assert persistence(plan) == persistence(once)


def test_every_strategy_is_drawn_from_one_table() -> None:
    names = {"single", "ddp", "fsdp", "fsdp-grad", "hsdp", "zero1", "zero2", "zero3"}
    assert set(STRATEGIES) == names
    assert {info.family for info in STRATEGIES.values()} == set(FAMILIES)
    for info in STRATEGIES.values():
        assert info.summary and info.when and not info.summary.endswith(".")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("strategy", "zero3", "zero3 was asked for, zero2 runs"),
        ("offload", "optimizer", "offload optimizer was asked"),
    ],
)
def test_mismatch_says_what_differs(field: str, value: str, words: str) -> None:
    running = Plan(strategy="zero2")
    assert words in str(mismatch(running.with_(**{field: value}), running))
