"""Step time: what must hold whatever the efficiencies are, and published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from toolkit.estimate.collectives import Group, Network
from toolkit.estimate.engine import Estimator
from toolkit.estimate.result import TimeEstimate
from toolkit.estimate.roofline import Roofline, slowest
from toolkit.estimate.time import Software, StepClock
from toolkit.specs import Cluster, ModelSpec, Plan, Workload
from toolkit.specs.catalog import gpu, gpus
from toolkit.specs.plan import FsdpSettings
from toolkit.specs.variant import Variant
from toolkit.timeline.trace import Operation

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8192,
    "max_position_embeddings": 4096,
}  # fmt: skip
WORK = Workload(seq_len=2048, micro_batch=2, loss_only=True)
NODE = Cluster(gpu=gpu("a100-80gb-sxm"), gpus_per_node=8)


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    return Estimator(ModelSpec(name="small", config=CONFIG))


def time(estimator: Estimator, work: Workload = WORK, plan: Plan | None = None, cluster: Cluster = NODE) -> TimeEstimate:
    found = estimator.estimate(work, plan or Plan(strategy="fsdp"), cluster, detail=False).time
    assert found is not None
    return found


def test_tokens_per_second_are_the_tokens_of_a_step_over_its_seconds(estimator: Estimator) -> None:
    found = time(estimator)
    assert found.tokens_per_second * found.step_seconds == pytest.approx(2 * 2048 * 8)
    assert found.tokens_per_second_per_gpu * 8 == pytest.approx(found.tokens_per_second)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad"])
def test_mfu_and_waiting_are_shares(estimator: Estimator, strategy: str) -> None:
    found = time(estimator, plan=Plan(strategy=strategy))  # type: ignore[arg-type]
    assert found.mfu is not None and 0 < found.mfu < 1
    assert 0 <= found.communication_share < 1


def test_full_checkpointing_costs_about_a_third_more(estimator: Estimator) -> None:
    without, with_it = (time(estimator, plan=Plan(strategy="fsdp", checkpointing=c)) for c in ("none", "full"))
    assert 1.15 < with_it.step_seconds / without.step_seconds < 1.40


def test_a_faster_gpu_is_faster(estimator: Estimator) -> None:
    speeds = [time(estimator, cluster=replace(NODE, gpu=gpu(name))).tokens_per_second
              for name in ("a100-80gb-sxm", "h100-sxm", "b200")]
    assert speeds == sorted(speeds)


def test_a_slower_network_never_helps(estimator: Estimator) -> None:
    two_nodes = replace(NODE, nodes=2)
    seconds = [time(estimator, cluster=replace(two_nodes, network_bandwidth=b)).step_seconds for b in (400e9, 50e9, 5e9, 1e9)]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 2 * seconds[0]


def test_offload_is_slower_than_none(estimator: Estimator) -> None:
    plans = [Plan(strategy="zero3", offload=o) for o in ("none", "optimizer", "all")]  # type: ignore[arg-type]
    seconds = [time(estimator, plan=p).step_seconds for p in plans]
    assert seconds == sorted(seconds) and seconds[0] < seconds[1]


def test_accumulation_repeats_micro_batches_and_not_the_update(estimator: Estimator) -> None:
    once, twice = (time(estimator, work=WORK.with_(accumulate=a)).step_seconds for a in (1, 2))
    assert once < twice < 2 * once


@pytest.mark.parametrize("name", sorted(gpus()))
def test_no_gpu_exceeds_its_datasheet(name: str) -> None:
    rates = Roofline(gpu(name), WORK.with_(precision="fp16"))
    big = Operation("forward", "matmul", 2.0 * 8192**3, 3 * 2 * 8192.0**2, (1, 8192, 8192, 8192), 2)
    peak = gpu(name).fp16_flops
    assert peak is not None
    assert 0.3 * peak < big.flops / rates.seconds(big) <= peak


def test_an_all_gather_over_nodes_is_held_by_the_network() -> None:
    network = Network(replace(NODE, nodes=4, network_bandwidth=25e9))
    inside, across = network.all_gather(1e9, Group(8, 8)), network.all_gather(1e9, Group(32, 8))
    assert across > 1e9 * 31 / 32 / 25e9
    assert inside < across / 4
    assert network.all_gather(1e9, Group(1, 1)) == 0.0


def test_a_synchronous_step_waits_for_the_slowest_gpu() -> None:
    """SC22: 8% between the fastest and the slowest of a cluster; an element-wise kernel is as fast on all of them."""
    paces = [slowest(ranks) for ranks in (1, 2, 8, 64, 512, 4096)]
    assert paces == sorted(paces) and paces[0] == 1.0
    assert 1.02 < slowest(8) < 1.03 and 1.04 < slowest(512) < 1.05
    big = Operation("forward", "matmul", 2.0 * 8192**3, 3 * 2 * 8192.0**2, (1, 8192, 8192, 8192), 2)
    moves = Operation("forward", "other", 0.0, 1e9, (), 2)
    alone, many = (Roofline(gpu("h100-sxm"), WORK, ranks=ranks) for ranks in (1, 512))
    assert many.seconds(big) / alone.seconds(big) == pytest.approx(slowest(512))
    assert many.seconds(moves) == alone.seconds(moves)


def test_a_ring_over_more_ranks_takes_more_steps() -> None:
    """What NCCL's own model says of 128 and 512 ranks: 14 us a step between nodes, 3.4 us inside."""
    network = Network(replace(NODE, nodes=64))
    few, many = (network.all_gather(1.0, Group(ranks, 8)) for ranks in (128, 512))
    assert many - few == pytest.approx(48 * 14e-6 + 336 * 3.4e-6)


def seconds(estimator: Estimator, work: Workload, plan: Plan, software: Software | None = None) -> float:
    cluster = replace(NODE, nodes=2, network_bandwidth=5e9)
    return StepClock(estimator.trace(work, plan, cluster), work, plan, cluster, software).run().total


def test_what_travels_beyond_the_least_costs_time(estimator: Estimator) -> None:
    fsdp, work = Plan(strategy="fsdp"), WORK.with_(accumulate=4)
    least = seconds(estimator, work, fsdp)
    assert seconds(estimator, work.with_(variant=Variant(reduce_fp32=True)), fsdp) > 1.05 * least
    assert seconds(estimator, work, fsdp.with_(fsdp=FsdpSettings(sync_each_micro_batch=True))) > 1.05 * least
    assert seconds(estimator, work, fsdp, Software(gathers_root_again=True)) > least
    ddp = Plan(strategy="ddp")
    assert seconds(estimator, work, ddp, Software(reduces_alone=True)) > 1.05 * seconds(estimator, work, ddp)
