"""What must hold for every estimate, whatever the figures are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.errors import UserError
from toolkit.estimate.engine import Estimator, estimate_many
from toolkit.specs import Cluster, Gpu, ModelSpec, Plan, Workload

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_hidden_layers": 7,
          "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 512,
          "max_position_embeddings": 512}
GPU = Gpu(name="test", memory=80 << 30, bf16_flops=3e14, fp16_flops=3e14, fp32_flops=2e13, bandwidth=2e12, link="nvlink",
          link_bandwidth=3e11, pcie_bandwidth=25e9, architecture="ampere")
SHARDED = ["fsdp", "fsdp-grad", "zero1", "zero2", "zero3"]
WORK = Workload(seq_len=64, micro_batch=2)


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    return Estimator(ModelSpec(name="tiny", config=CONFIG))


def cluster(gpus: int, nodes: int = 1) -> Cluster:
    return Cluster(gpu=GPU, gpus_per_node=gpus, nodes=nodes)


@pytest.mark.parametrize("strategy", ["single", "ddp", *SHARDED])
@pytest.mark.parametrize(
    "changes", [{}, {"accumulate": 2}, {"method": "lora"}, {"precision": "fp32"}, {"precision": "bf16-pure"}]
)
def test_breakdown_sums_to_the_peak(estimator: Estimator, strategy: Any, changes: dict[str, Any]) -> None:
    work = WORK.with_(**changes)
    if work.precision == "bf16-pure" and strategy.startswith("zero"):
        with pytest.raises(UserError, match="exclude each other"):
            estimator.estimate(work, Plan(strategy=strategy), cluster(4))
        return
    found = estimator.estimate(work, Plan(strategy=strategy), cluster(1 if strategy == "single" else 4))
    memory = found.memory
    assert sum(memory.breakdown.values()) == memory.peak_allocated
    assert memory.peak_reserved >= memory.peak_allocated >= memory.resident > 0
    assert all(size >= 0 for size in memory.breakdown.values())


@pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
def test_the_quick_grain_finds_the_same_peaks(estimator: Estimator, strategy: Any) -> None:
    for micro in (1, 2, 3, 5):
        work = WORK.with_(micro_batch=micro)
        full = estimator.estimate(work, Plan(strategy=strategy), cluster(4)).memory
        quick = Estimator(estimator.model).estimate(work, Plan(strategy=strategy), cluster(4), detail=False).memory
        assert quick.peak_allocated == full.peak_allocated
        assert quick.first_step_peak == full.first_step_peak


@given(micro=st.integers(1, 6), seq=st.sampled_from([32, 64, 96]), more=st.integers(1, 3))
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_larger_micro_batch_never_takes_less(micro: int, seq: int, more: int) -> None:
    estimator = Estimator(ModelSpec(name="tiny", config=CONFIG))
    work = Workload(seq_len=seq, micro_batch=micro)
    for strategy in ("single", "fsdp", "zero2"):
        plan = Plan(strategy=strategy)  # type: ignore[arg-type]
        where = cluster(1 if strategy == "single" else 2)
        small = estimator.estimate(work, plan, where, detail=False).memory.peak_allocated
        large = estimator.estimate(work.with_(micro_batch=micro + more), plan, where, detail=False).memory.peak_allocated
        assert large >= small


def test_longer_sequences_never_take_less(estimator: Estimator) -> None:
    peaks = [estimator.estimate(WORK.with_(seq_len=n), Plan(strategy="single"), cluster(1)).memory.peak_allocated
             for n in (32, 64, 128, 256)]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("strategy", SHARDED)
def test_sharded_states_scale_with_the_ranks(estimator: Estimator, strategy: Any) -> None:
    """Optimizer states are 1/N of the whole, up to the padding of shards and one step counter per tensor."""
    sizes = {}
    for ranks in (2, 4, 8):
        memory = estimator.estimate(WORK, Plan(strategy=strategy), cluster(ranks)).memory
        sizes[ranks] = memory.breakdown["optimizer_states"]
    assert sizes[2] == pytest.approx(2 * sizes[4], rel=0.01)
    assert sizes[4] == pytest.approx(2 * sizes[8], rel=0.01)


def test_checkpointing_never_raises_activations(estimator: Estimator) -> None:
    work = WORK.with_(seq_len=256, micro_batch=4)
    none = estimator.estimate(work, Plan(strategy="single"), cluster(1)).memory
    full = estimator.estimate(work, Plan(strategy="single", checkpointing="full"), cluster(1)).memory
    assert full.breakdown["activations"] <= none.breakdown["activations"]
    assert full.peak_allocated < none.peak_allocated


def test_zero1_splits_only_states_and_master_weights(estimator: Estimator) -> None:
    one, two = (estimator.estimate(WORK, Plan(strategy=s, bucket=1000), cluster(4)).memory for s in ("zero1", "zero2"))
    parameters = estimator.estimate(WORK, Plan(strategy="zero1"), cluster(4)).model.parameters
    assert one.breakdown["parameters"] == pytest.approx(2 * parameters, rel=0.01)
    assert one.breakdown["master_weights"] == pytest.approx(4 * parameters / 4, rel=0.01)
    assert one.resident == two.resident


def test_plans_that_are_impossible_are_named_not_raised() -> None:
    plans = [Plan(strategy="ddp"), Plan(strategy="ddp", offload="all")]
    found = estimate_many(ModelSpec(name="tiny", config=CONFIG), WORK, plans, cluster(2))
    assert not isinstance(found[0], UserError)
    assert isinstance(found[1], UserError) and "offload" in str(found[1])


def test_a_slower_allocator_setting_is_not_assumed_on_a_cpu() -> None:
    cpu = Cluster(gpu=Gpu(name="cpu", memory=1 << 34, bf16_flops=None, fp16_flops=None, fp32_flops=1e11, bandwidth=1e10,
                          link="memory", link_bandwidth=1e9, pcie_bandwidth=1e9), gpus_per_node=2)
    memory = Estimator(ModelSpec(name="tiny", config=CONFIG)).estimate(WORK, Plan(strategy="ddp"), cpu).memory
    assert memory.peak_reserved == memory.peak_allocated
    assert memory.outside_allocator == 0
