"""Tensor parallelism: the model's own plan, as one of its ranks sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from toolkit.errors import UserError
from toolkit.estimate.engine import Estimator
from toolkit.specs import Cluster, Gpu, ModelSpec, Plan, Workload

GPU = Gpu(name="test", memory=80 << 30, bf16_flops=3e14, fp16_flops=3e14, fp32_flops=2e13, bandwidth=2e12, link="nvlink",
          link_bandwidth=3e11, pcie_bandwidth=25e9, architecture="ampere")
WORK = Workload(seq_len=64, micro_batch=2)
LLAMA = {"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 7, "num_attention_heads": 8, "num_key_value_heads": 4,
         "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 512}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 32},
}


def estimator(config: dict[str, Any]) -> Estimator:
    return Estimator(ModelSpec(name="tiny", config=config))


def cluster(gpus: int) -> Cluster:
    return Cluster(gpu=GPU, gpus_per_node=gpus)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_split_and_the_model_stays_the_same(family: str) -> None:
    whole, half = (estimator(FAMILIES[family]).estimate(WORK, plan, cluster(gpus))
                   for plan, gpus in ((Plan(strategy="single"), 1), (Plan(strategy="ddp", tp=2), 2)))
    assert half.model == whole.model
    for category in ("parameters", "optimizer_states"):
        assert half.memory.breakdown[category] == pytest.approx(whole.memory.breakdown[category] / 2, rel=0.15)
    assert sum(half.memory.breakdown.values()) == half.memory.peak_allocated < whole.memory.peak_allocated
    assert half.memory.breakdown["communication"] == 0, "no DDP buckets: every rank has the same samples"
    assert not dist.is_initialized()


def test_fsdp_shards_what_a_tensor_parallel_rank_holds() -> None:
    found = estimator(LLAMA)
    four = found.estimate(WORK, Plan(strategy="fsdp"), cluster(4)).memory
    mixed = found.estimate(WORK, Plan(strategy="fsdp", tp=2), cluster(4)).memory
    assert mixed.breakdown["optimizer_states"] == pytest.approx(four.breakdown["optimizer_states"], rel=0.05)
    assert mixed.breakdown["activations"] < four.breakdown["activations"]


def test_the_quick_grain_finds_the_same_peak() -> None:
    for micro in (1, 3):
        work, plan = WORK.with_(micro_batch=micro), Plan(strategy="ddp", tp=4)
        full = estimator(LLAMA).estimate(work, plan, cluster(4)).memory
        quick = estimator(LLAMA).estimate(work, plan, cluster(4), detail=False).memory
        assert (quick.peak_allocated, quick.first_step_peak) == (full.peak_allocated, full.first_step_peak)


@pytest.mark.parametrize(("config", "plan", "work", "line"), [
    ({"model_type": "gpt2", "n_embd": 64, "n_head": 4}, Plan(strategy="ddp", tp=2), WORK, "no tensor-parallel plan"),
    (LLAMA, Plan(strategy="ddp", tp=8), WORK, "tp 8 does not divide num_key_value_heads 4"),
    (LLAMA, Plan(strategy="ddp", tp=2), WORK.with_(method="lora"), "tp 2 and method lora exclude each other"),
])  # fmt: skip
def test_what_can_not_be_split_is_refused(config: dict[str, Any], plan: Plan, work: Workload, line: str) -> None:
    with pytest.raises(UserError, match=line):
        estimator(config).estimate(work, plan, cluster(plan.tp))
