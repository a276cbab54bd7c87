"""Batches of other lengths before the longest one: what fixed segments keep of them, and growing ones do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.estimate.engine import Estimator, engine_class
from toolkit.specs import Plan, Variant, Workload
from toolkit.specs.detect import make_cluster
from toolkit.specs.load import load_model_spec
from toolkit.strategies.lowering import lower
from toolkit.timeline.cuda_allocator import replay_reserved
from toolkit.timeline.lengths import Events, one_after_the_other, shorter_lengths
from toolkit.timeline.tape import Tape, compile_trace

CLUSTER = make_cluster(gpu="a100-80gb-sxm", gpus=2)
VARIED = Workload(seq_len=512, micro_batch=2, alloc="default", lengths="varied", attention="flash")
ESTIMATOR = Estimator(load_model_spec("qwen2.5-0.5b"))


@given(seq_len=st.integers(1, 1 << 20), micro_batch=st.integers(1, 4096), multiple=st.sampled_from([1, 2, 8]))
def test_records_rise_to_the_longest_and_are_of_the_multiple(seq_len: int, micro_batch: int, multiple: int) -> None:
    lengths = shorter_lengths(seq_len, micro_batch, multiple)
    assert lengths == sorted(set(lengths)) and len(lengths) <= 3
    assert all(0 < length < seq_len and length % multiple == 0 for length in lengths)


def test_a_larger_batch_is_nearer_to_its_longest_row() -> None:
    assert shorter_lengths(1024, 1) == [512, 768, 896]
    assert shorter_lengths(1024, 2) == [724, 886, 957], "roots of them: the longer of two rows"
    assert shorter_lengths(1, 1) == []


def _tape(workload: Workload, plan: Plan) -> Tape:
    kind = engine_class(plan)
    trace = ESTIMATOR.trace(workload, plan, CLUSTER)
    program = compile_trace(trace, kind.wants(trace))
    return lower(program, kind(trace, workload, plan, CLUSTER))


PLANS = [Plan(strategy="ddp"), Plan(strategy="fsdp", checkpointing="full"), Plan(strategy="zero2"), Plan(strategy="zero3")]
GRAPH_STAYS = Variant(graph_stays=True, saves_packed_inputs=True)
STAYING = VARIED.with_(method="qlora", variant=GRAPH_STAYS)
EQUAL_BATCHES = [*((plan, VARIED.with_(accumulate=2)) for plan in PLANS),
                 *((plan, STAYING) for plan in PLANS if plan.strategy != "zero3")]  # which excludes quantized weights


@pytest.mark.parametrize(("plan", "workload"), EQUAL_BATCHES, ids=lambda x: x.strategy if isinstance(x, Plan) else x.method)
def test_equal_batches_one_after_the_other_are_the_tape_itself(plan: Plan, workload: Workload) -> None:
    tape = _tape(workload, plan)
    events = one_after_the_other([tape, tape, tape, tape], workload.accumulate)
    assert replay_reserved(events).peak == replay_reserved(tape).peak
    assert sum(events.deltas) == sum(tape.deltas), "nothing stays that a run of two steps does not keep"
    alive: dict[object, int] = {}
    for delta, key in zip(events.deltas, events.keys, strict=True):
        alive[key] = alive.get(key, 0) + delta
    assert min(alive.values()) >= 0 and sum(alive.values()) == sum(tape.deltas)


def test_fixed_segments_keep_what_the_longest_does_not_fit_in_and_growing_ones_do_not() -> None:
    plan = Plan(strategy="ddp", checkpointing="full")
    equal = ESTIMATOR.estimate(VARIED.with_(lengths="equal"), plan, CLUSTER).memory
    varied = ESTIMATOR.estimate(VARIED, plan, CLUSTER).memory
    assert varied.peak_allocated == equal.peak_allocated and varied.breakdown == equal.breakdown
    assert varied.peak_reserved - equal.peak_reserved > 2 << 30, "of 13 GiB"
    assert any("other lengths" in note for note in varied.notes) and not equal.notes
    tapes = [_tape(VARIED.with_(seq_len=length), plan) for length in (362, 443, 478, 512)]
    events = one_after_the_other(tapes, 1)
    assert replay_reserved(events).peak == varied.peak_reserved, "records of two rows each up to 512 tokens"
    growing = replay_reserved(events, expandable=True).peak
    assert growing < 1.02 * replay_reserved(tapes[-1], expandable=True).peak


def test_a_hole_beside_something_kept_can_not_be_given_back() -> None:
    """Above the limit torch gives back whole segments only: what a short batch left free around a block in use is lost."""
    mib = 1 << 20
    short_first = Events([100 * mib, -100 * mib, 60 * mib, 120 * mib], ["short", "short", "kept", "long"])
    assert replay_reserved(short_first, limit=200 * mib).peak == 220 * mib, "more than there is"
    assert replay_reserved(Events([60 * mib, 120 * mib], ["kept", "long"]), limit=200 * mib).peak == 180 * mib
