"""Ranks that share a sequence: ring attention under fsdp, Ulysses under DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.errors import UserError
from toolkit.estimate.engine import Estimator
from toolkit.specs import Cluster, Gpu, ModelSpec, Plan, Workload

GPU = Gpu(name="test", memory=80 << 30, bf16_flops=3e14, fp16_flops=3e14, fp32_flops=2e13, bandwidth=2e12, link="nvlink",
          link_bandwidth=3e11, pcie_bandwidth=25e9, architecture="ampere")
LLAMA = {"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 7, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": 16, "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 4096}
WORK = Workload(seq_len=1024, micro_batch=2)
FOUR = Cluster(gpu=GPU, gpus_per_node=4)


def estimator(**changes: Any) -> Estimator:
    return Estimator(ModelSpec(name="tiny", config={**LLAMA, **changes}))


@pytest.mark.parametrize(("strategy", "axis"), [("fsdp", "cp"), ("zero3", "sp")])
@pytest.mark.parametrize("changes", [{}, {"precision": "fp32"}])
def test_activations_and_logits_are_those_of_a_part(strategy: Any, axis: str, changes: dict[str, Any]) -> None:
    found, work = estimator(), WORK.with_(**changes)
    alone = found.estimate(work, Plan(strategy=strategy), FOUR)
    split = found.estimate(work, Plan(strategy=strategy, **{axis: 4}), FOUR)
    assert split.model == alone.model
    moving = [found.memory.peak_allocated - found.memory.resident for found in (split, alone)]
    assert moving[0] == pytest.approx(moving[1] / 4, rel=0.4)
    assert split.memory.resident == alone.memory.resident, "all ranks share the shards"
    assert sum(split.memory.breakdown.values()) == split.memory.peak_allocated


def test_ring_attention_holds_the_gathered_keys_for_a_while() -> None:
    """Of one layer at a time: a longer sequence of the other ranks costs less than one's own."""
    found = estimator(num_hidden_layers=2)
    one, two = (found.estimate(WORK.with_(seq_len=1024 * cp), Plan(strategy="fsdp", cp=cp), FOUR).memory for cp in (1, 4))
    assert one.peak_allocated < two.peak_allocated < 1.5 * one.peak_allocated


@pytest.mark.parametrize(("changes", "plan", "line"), [
    ({"model_type": "mistral", "sliding_window": 64}, Plan(strategy="fsdp", cp=2), "cp 2 and layers of type sliding_attention"),
    ({"num_key_value_heads": 3, "num_attention_heads": 6, "hidden_size": 96}, Plan(strategy="zero2", sp=4), "sp 4 does not"),
    ({"model_type": "mixtral", "head_dim": None}, Plan(strategy="zero2", sp=2), "sp 2 and a config without"),
])  # fmt: skip
def test_what_can_not_be_split_is_refused(changes: dict[str, Any], plan: Plan, line: str) -> None:
    with pytest.raises(UserError, match=line):
        estimator(**changes).estimate(WORK, plan, FOUR)
