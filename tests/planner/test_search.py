"""What is recommended for real estimates: the lightest class that fits, and when nothing does, what would help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from toolkit.errors import UserError
from toolkit.planner.candidates import candidates
from toolkit.planner.ladder import ladder
from toolkit.planner.recommendation import Recommendation, recommend
from toolkit.planner.search import ALIKE, Evaluated, Request, Search, choose
from toolkit.specs import ModelSpec, Workload
from toolkit.strategies import STRATEGIES
from toolkit.units import GIB, MIB

Ask = Callable[..., Request]
WORK = Workload(seq_len=64, loss_only=True)


def tried(results: list[Evaluated], strategy: str) -> list[Evaluated]:
    return [r for r in results if r.candidate.plan.strategy == strategy]


def total(result: Evaluated | None) -> int:
    assert result is not None and result.estimate is not None
    return result.estimate.memory.peak_total


def chosen(found: Recommendation) -> Evaluated:
    assert found.chosen is not None
    return found.chosen


@pytest.fixture(scope="module")
def roomy(ask: Ask) -> list[Evaluated]:
    """What is found on four GPUs on which everything fits."""
    return Search(ask(80)).run()


# -- one device, many devices ----------


def test_one_device_that_is_enough_is_the_answer_however_many_there_are(ask: Ask) -> None:
    found = recommend(ask(80))
    assert chosen(found).candidate.name == "single"
    assert chosen(found).candidate.cluster.world_size == 1
    assert found.one_gpu.startswith("One GPU is enough")


def test_what_one_device_cannot_hold_is_spread(ask: Ask) -> None:
    alone = total(recommend(ask(80, 1)).chosen)
    found = recommend(ask(0.7 * alone / GIB))
    assert chosen(found).candidate.cluster.world_size == 4
    assert found.one_gpu.startswith("One GPU is not enough")
    assert "distributed because one is not enough for the memory" in found.reason


def test_the_lightest_class_wins_and_speed_decides_inside_it(roomy: list[Evaluated]) -> None:
    by_class = [{"single"}, {"ddp"}, {"zero1"}, {"zero2", "fsdp-grad"}, {"fsdp", "zero3"}]
    for place, names in enumerate(by_class):
        allowed = set().union(*by_class[place:])
        fitting = [r for r in roomy if r.candidate.plan.strategy in allowed]
        best = choose(fitting, "lightest")
        assert best is not None and best.candidate.plan.strategy in names
        peers = [r for r in fitting if r.candidate.plan.strategy in names]
        assert best.speed == max(r.speed for r in peers)


def test_the_fastest_is_the_lightest_of_those_as_fast_as_any(roomy: list[Evaluated]) -> None:
    limit = (1 - ALIKE) * max(r.speed for r in roomy)
    assert choose(roomy, "fastest") is next(r for r in roomy if r.speed >= limit)


def test_the_fewest_gpus_beat_the_lightest_plan(ask: Ask) -> None:
    request = ask(2.3, prefer="fewest-gpus", engine="fsdp")
    results = Search(request).run()
    assert {r.candidate.cluster.world_size for r in results} == {1, 2, 4}
    best = choose(results, "fewest-gpus")
    assert best is not None
    assert best.candidate.cluster.world_size == min(r.candidate.cluster.world_size for r in results if r.fits)


def test_what_does_not_fit_is_never_chosen(roomy: list[Evaluated]) -> None:
    none = [replace(r, fits=False) for r in roomy]
    assert all(choose(none, prefer) is None for prefer in ("lightest", "fastest", "fewest-gpus"))


# -- the margin ----------


def test_the_margin_is_kept_free(ask: Ask) -> None:
    alone = total(recommend(ask(80, 1)).chosen)
    gib = (alone + MIB) / GIB
    assert chosen(recommend(ask(gib, 1))).candidate.name == "single"
    tight = recommend(ask(gib, 1, margin=0.3))
    assert tight.chosen is None or tight.chosen.candidate.aids
    for result in tight.results:
        assert result.fits == (total(result) <= int(int(gib * GIB) * 0.7))


def test_without_a_margin_the_ladders_holds(ask: Ask) -> None:
    assert ask(80, margin=None).kept_free == ladder().margin_gpu
    assert ask(80, margin=0.2).kept_free == 0.2


def test_host_memory_is_held_to_as_well(ask: Ask) -> None:
    request = ask(80, host=MIB, allow_offload="cpu", engine="deepspeed")
    offloaded = [c for c in candidates(WORK, request.cluster, allow_offload="cpu") if c.plan.label == "zero3-offload-all"]
    assert offloaded
    for candidate in offloaded:
        result = Search(request).evaluate(candidate)
        assert not result.fits and result.why.startswith("host memory: needs")
        assert result.why.endswith("has 1 MiB")


# -- pruning ----------


def test_on_a_rung_that_fits_nothing_dearer_is_tried(ask: Ask) -> None:
    results = Search(ask(2.0)).run()
    for strategy in {r.candidate.plan.strategy for r in results}:
        fits = [r.fits for r in tried(results, strategy)]
        assert not any(fits[:-1]), "the first that fits is the last that is tried"


def test_where_the_states_alone_are_too_much_activations_are_not_saved(ask: Ask) -> None:
    results = Search(ask(2.0, allow_offload="cpu")).run()
    assert any(r.fits for r in results)
    assert [r.candidate.name for r in tried(results, "single") if r.estimate] == ["single"]
    assert any(r.candidate.plan.offload != "none" and r.fits for r in tried(results, "zero3"))


def test_pruning_loses_nothing_that_fits(ask: Ask) -> None:
    """Every candidate of the rungs that were cut short is estimated after all."""
    request = ask(2.0)
    search = Search(request)
    results = search.run()
    seen = {r.candidate.order for r in results}
    first_fit = {r.candidate.plan.strategy: r.candidate.order for r in results if r.fits}
    for candidate in candidates(request.workload, request.cluster):
        if candidate.order not in seen and candidate.order < first_fit.get(candidate.plan.strategy, 10**9):
            assert not search.best_micro_batch(candidate).fits, candidate.name


def test_what_was_pruned_is_counted_by_reason(ask: Ask) -> None:
    search = Search(ask(2.0, allow_offload="cpu"))
    seen = {r.candidate.order for r in search.run()}
    every = sum(1 for _ in candidates(WORK, search.request.cluster, allow_offload="cpu"))
    impossible = sum(1 for c in candidates(WORK, search.request.cluster, allow_offload="cpu")
                     if c.plan.offload not in STRATEGIES[c.plan.strategy].offloads)
    assert sum(search.pruned.values()) == every - impossible - len(seen)
    assert all(count > 0 for count in search.pruned.values()) and len(search.pruned) == 2
    assert recommend(ask(2.0, allow_offload="cpu")).to_json()["pruned"] == search.pruned


# -- the batch ----------


@pytest.mark.parametrize("batch", [8, 12])
def test_a_global_batch_is_met_exactly_by_every_plan(batch: int, ask: Ask) -> None:
    for result in Search(ask(80, 2, fixed_micro_batch=False, global_batch=batch)).run():
        work, world = result.candidate.workload, result.candidate.cluster.world_size
        assert work.micro_batch * work.accumulate * world == batch


def test_a_global_batch_that_only_one_device_divides_leaves_that(ask: Ask) -> None:
    found = recommend(ask(80, global_batch=7))
    assert {r.candidate.plan.strategy for r in found.results} == {"single"}


def test_a_global_batch_that_the_ranks_do_not_divide_is_told_with_the_nearest_when_one_device_is_too_small(ask: Ask) -> None:
    with pytest.raises(UserError, match="global-batch 6 does not divide over 4 ranks; the nearest that do: 4 or 8"):
        recommend(ask(2.0, global_batch=6))


def test_a_global_batch_that_nothing_divides_is_refused(ask: Ask) -> None:
    with pytest.raises(UserError, match="micro-batch 2 does not divide"):
        recommend(ask(80, 1, work=WORK.with_(micro_batch=2), global_batch=7))


# -- nothing fits ----------


def test_when_nothing_fits_the_closest_is_the_one_that_misses_least(ask: Ask) -> None:
    found = recommend(ask(0.6))
    assert found.chosen is None and not found.alternatives
    assert found.closest is not None
    assert found.closest.candidate == min((r for r in found.results if r.estimate), key=total).candidate
    assert found.closest.candidate.name in found.reason
    assert found.reason.startswith("nothing fits; the closest is")


def test_changes_are_held_to_an_estimate_and_sorted_by_what_they_bring(ask: Ask) -> None:
    found = recommend(ask(0.6))
    # 4 bits exclude ZeRO-3 and 8-bit states exclude FSDP2: whichever is closest, both changes are held to an engine that can.
    assert {"LoRA", "QLoRA", "8-bit optimizer", "one more GPU"} <= {change.what for change in found.changes}
    assert any(change.what.startswith("a larger GPU") and change.fits for change in found.changes)
    keys = [(not change.fits, change.short) for change in found.changes]
    assert keys == sorted(keys)
    assert all((change.short == 0) == change.fits for change in found.changes)
    assert all(change.option.startswith("--") for change in found.changes)


def test_a_micro_batch_that_was_asked_for_is_halved_until_it_fits(ask: Ask) -> None:
    found = recommend(ask(4, gpus=1, work=WORK.with_(micro_batch=160, accumulate=1), global_batch=320))
    (smaller,) = (change for change in found.changes if change.what.startswith("micro-batch"))
    assert smaller.fits and smaller.option == "--micro-batch 80"


def test_aids_that_a_model_has_not_are_no_plans(ask: Ask) -> None:
    albert = {"model_type": "albert", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
    request = replace(ask(0.3, gpus=2), model=ModelSpec(name="albert", config=albert))
    found = recommend(request)  # no output layer for a chunked loss, and no checkpointing
    assert found.chosen is None and found.changes
    assert all(not r.candidate.aids for r in found.results if r.candidate.plan.strategy == "single")
    with pytest.raises(UserError, match="no causal-lm of model type 'vit'"):
        recommend(replace(request, model=ModelSpec(name="vit", config={"model_type": "vit"})))


def test_alternatives_fit_and_say_what_they_trade(ask: Ask) -> None:
    found = recommend(ask(80))
    assert 1 <= len(found.alternatives) <= 3
    for other, trade in found.alternatives:
        assert other.fits and other.candidate != chosen(found).candidate
        assert "per GPU" in trade and ("less" in trade or "more" in trade)


def test_the_same_request_has_the_same_answer(ask: Ask) -> None:
    def said(found: Recommendation) -> Any:
        return found.to_json()

    assert said(recommend(ask(2.0, engine="fsdp"))) == said(recommend(ask(2.0, engine="fsdp")))


@pytest.mark.parametrize("gib", [2.76, 2.8, 3.0, 3.2])
def test_what_is_recommended_fits_when_it_is_estimated_in_detail(gib: float, ask: Ask) -> None:
    """The allocator's rounding tips plans that just fit by their quick estimate."""
    request = ask(gib)
    best = chosen(recommend(request))
    again = Search(request).evaluate(best.candidate, detail=True)
    assert again.fits
    assert total(again) == total(best)


def test_the_closest_plan_has_one_figure(ask: Ask) -> None:
    found = recommend(ask(0.5))
    assert found.closest is not None and any(r is found.closest for r in found.results)
    assert all(change.short > 0 for change in found.changes if not change.fits)
