"""The ladder: lightest first, every step with its reason; and the candidates that are made from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import UserError
from toolkit.planner.candidates import candidates, combinations, gpu_counts, micro_batches, split_candidates
from toolkit.planner.ladder import ladder
from toolkit.specs import Cluster, Plan, Workload
from toolkit.specs.detect import make_cluster
from toolkit.strategies import STRATEGIES

WORK = Workload(seq_len=64)


def machines(gpus: int, nodes: int = 1) -> Cluster:
    return make_cluster("a100-80gb-sxm", gpus=gpus, nodes=nodes)


def strategies(*args: object, **kwargs: object) -> list[str]:
    return list(dict.fromkeys(c.plan.strategy for c in candidates(*args, **kwargs)))  # type: ignore[arg-type]


# -- the data ----------


def test_the_rungs_go_from_light_to_heavy() -> None:
    for nodes in (1, 2):
        rungs = strategies(WORK, machines(8, nodes))
        copies = ["hsdp"] if nodes > 1 else []
        assert rungs == ["single", "ddp", "zero1", "zero2", "fsdp-grad", *copies, "fsdp", "zero3"]


def test_every_strategy_has_a_rung() -> None:
    assert {r.strategy for r in ladder().rungs} == set(STRATEGIES)


def test_what_is_sharded_never_shrinks_on_the_way_up_within_an_engine() -> None:
    for engine in ("zero", "fsdp"):
        shards = [set(STRATEGIES[r.strategy].shards) for r in ladder().rungs if STRATEGIES[r.strategy].family == engine]
        assert all(lower <= upper for lower, upper in zip(shards, shards[1:], strict=False))


def test_the_aids_go_from_cheap_to_dear() -> None:
    assert [a.name for a in ladder().aids] == [
        "chunked loss", "selective checkpointing", "full checkpointing", "optimizer offload", "offload of everything", "NVMe",
    ]  # fmt: skip
    assert [a.offload for a in ladder().aids] == ["none", "none", "none", "cpu", "cpu", "nvme"]


def test_every_step_has_a_reason_of_one_line() -> None:
    for step in (*ladder().rungs, *ladder().aids, *ladder().splits):
        assert len(step.reason) > 20 and "\n" not in step.reason and not step.reason.endswith(".")


def test_every_aid_changes_what_a_plan_or_a_workload_has() -> None:
    for aid in ladder().aids:
        assert aid.plan or aid.workload
        assert Plan(strategy="zero3").with_(**aid.plan) != Plan(strategy="zero3") or not aid.plan
        assert WORK.with_(**aid.workload) != WORK or not aid.workload


def test_margins_are_shares() -> None:
    assert 0 < ladder().margin_gpu < ladder().margin_cpu < 0.5


# -- sets of aids ----------


@pytest.mark.parametrize(("allowed", "seen"), [("none", {"none"}), ("cpu", {"none", "cpu"}), ("nvme", {"none", "cpu", "nvme"})])
def test_offload_is_tried_as_far_as_it_is_allowed(allowed: str, seen: set[str]) -> None:
    assert {aid.offload for aids in combinations(allowed, WORK) for aid in aids} == seen


def test_no_aid_comes_first_and_no_set_twice() -> None:
    sets = [tuple(a.name for a in aids) for aids in combinations("nvme", WORK)]
    assert sets[0] == () and len(sets) == len(set(sets))


def test_a_loss_that_was_asked_for_is_not_replaced() -> None:
    for loss in ("chunked", "fused"):
        assert not any("loss" in a.workload for aids in combinations("nvme", WORK.with_(loss=loss)) for a in aids)


# -- candidates ----------


def test_one_device_leaves_one_strategy() -> None:
    assert strategies(WORK, machines(1)) == ["single"]


def test_an_engine_that_was_asked_for_is_the_only_one_that_shards() -> None:
    assert strategies(WORK, machines(4, 2), engine="fsdp") == ["single", "ddp", "fsdp-grad", "hsdp", "fsdp"]
    assert strategies(WORK, machines(4, 2), engine="deepspeed") == ["single", "ddp", "zero1", "zero2", "zero3"]


def test_candidates_are_numbered_in_their_order_and_named_by_what_they_do() -> None:
    found = list(candidates(WORK, machines(2), allow_offload="cpu"))
    assert [c.order for c in found] == list(range(1, len(found) + 1))
    names = [c.name for c in found]
    assert {"single", "fsdp + chunked loss + full checkpointing", "zero3-offload-all"} <= set(names)
    for candidate in found:
        assert candidate.plan.strategy == candidate.rung.strategy
        assert candidate.cluster.world_size == (1 if candidate.rung.scope == "device" else 2)


@pytest.mark.parametrize(
    ("gpus", "nodes", "every", "counts"),
    [(1, 1, False, [1]), (8, 1, False, [1, 8]), (8, 1, True, [1, 2, 4, 8]), (6, 1, True, [1, 2, 4, 6]),
     (8, 3, True, [1, 2, 4, 8, 16, 24]), (1, 3, True, [1, 2, 3])],
)  # fmt: skip
def test_parts_of_a_cluster_are_powers_of_two_and_whole_nodes(gpus: int, nodes: int, every: bool, counts: list[int]) -> None:
    assert gpu_counts(machines(gpus, nodes), every) == counts


# -- the batch ----------

Choices = Callable[..., list[tuple[int, int]]]


@given(share=st.integers(1, 200), world=st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_a_global_batch_divides_exactly(share: int, world: int) -> None:
    choices = micro_batches(WORK, world, share * world, False)
    assert choices[0] == (1, share)
    assert all(micro * accumulate * world == share * world for micro, accumulate in choices)
    assert [micro for micro, _ in choices] == sorted({micro for micro, _ in choices})


def test_a_global_batch_that_does_not_divide_is_answered_with_the_nearest_that_do() -> None:
    with pytest.raises(UserError, match="global-batch 30 does not divide over 8 ranks; the nearest that do: 24 or 32"):
        micro_batches(WORK, 8, 30, False)
    with pytest.raises(UserError, match="the nearest that do: 8$"):
        micro_batches(WORK, 8, 3, False)
    with pytest.raises(UserError, match="micro-batch 3 does not divide"):
        micro_batches(WORK.with_(micro_batch=3), 8, 32, True)


def test_without_a_global_batch_the_micro_batch_doubles_and_accumulation_stays() -> None:
    choices = micro_batches(WORK.with_(accumulate=3), 8, None, False)
    assert [micro for micro, _ in choices] == [1, 2, 4, 8, 16, 32, 64]
    assert {accumulate for _, accumulate in choices} == {3}
    assert micro_batches(WORK.with_(micro_batch=5, accumulate=3), 8, None, True) == [(5, 3)]


def test_a_candidate_is_plain_data() -> None:
    first = next(candidates(WORK, machines(2)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.order = 7  # type: ignore[misc]


# -- groups and splits ----------


@pytest.mark.parametrize(("nodes", "sizes"), [(2, [None]), (4, [None, 16]), (6, [None, 16]), (8, [None, 16, 32])])
def test_a_copy_takes_one_node_or_several_that_divide_them(nodes: int, sizes: list[int | None]) -> None:
    found = [c.plan.shard_size for c in candidates(WORK, machines(8, nodes)) if c.plan.strategy == "hsdp"]
    assert list(dict.fromkeys(found)) == sizes


def test_gpus_that_share_a_sample_come_last_and_tensor_parallelism_stays_inside_a_node() -> None:
    last = max(c.order for c in candidates(WORK, machines(4, 2), allow_offload="nvme"))
    split = list(split_candidates(WORK, machines(4, 2)))
    assert min(c.order for c in split) > last
    assert {c.plan.tp for c in split} == {1, 2, 4} and {c.plan.cp for c in split} == {c.plan.sp for c in split} == {1, 2, 4, 8}
    for candidate in split:
        assert [candidate.plan.tp, candidate.plan.cp, candidate.plan.sp].count(1) == 2
        assert candidate.plan.checkpointing == "full" and candidate.workload.loss == "chunked"
        assert candidate.data_ranks == 8 // max(candidate.plan.tp, candidate.plan.cp, candidate.plan.sp)
