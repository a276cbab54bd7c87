"""Offload to NVMe: what is on the disk, and what stages it on the host."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.estimate.engine import Estimator
from toolkit.specs import Cluster, Gpu, ModelSpec, Plan, Workload, ZeroSettings
from toolkit.strategies.zero.nvme import BUFFER_ELEMENTS, PARAMETER_BUFFERS

GPU = Gpu(name="test", memory=80 << 30, bf16_flops=3e14, fp16_flops=3e14, fp32_flops=2e13, bandwidth=2e12, link="nvlink",
          link_bandwidth=3e11, pcie_bandwidth=25e9, architecture="ampere")
LLAMA = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
         "intermediate_size": 1536, "vocab_size": 8192, "max_position_embeddings": 512}
WORK = Workload(seq_len=64)
FOUR = Cluster(gpu=GPU, gpus_per_node=4)


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    return Estimator(ModelSpec(name="tiny", config=LLAMA))


def plan(offload: Any, to: Any = "nvme", **settings: Any) -> Plan:
    return Plan(strategy="zero3", offload=offload, offload_to=to, bucket=1_000_000, zero=ZeroSettings(**settings))


def test_the_optimizer_goes_to_the_disk(estimator: Estimator) -> None:
    """16 bytes per parameter: weight, gradient and two moments in fp32.

    On the host stay four buffers of the largest sub-group and the 16-bit gradients, pinned in a power of two per rank.
    """
    found = estimator.estimate(WORK, plan("optimizer"), FOUR)
    parameters = found.model.parameters
    assert found.memory.nvme == pytest.approx(16 * parameters, rel=0.001)
    staging = 16 * parameters / 4
    gradients = 1 << (2 * parameters // 4 - 1).bit_length()
    assert found.memory.host.pinned == pytest.approx(4 * (staging + gradients), rel=0.001)
    on_cpu = estimator.estimate(WORK, plan("optimizer", "cpu"), FOUR).memory
    assert on_cpu.nvme == 0
    assert found.memory.peak_allocated == on_cpu.peak_allocated, "the device sees no difference"


def test_smaller_sub_groups_need_smaller_buffers(estimator: Estimator) -> None:
    whole, parts = (estimator.estimate(WORK, plan("optimizer", sub_group_size=size), FOUR).memory for size in (10**9, 2_000_000))
    assert parts.host.pinned < whole.host.pinned / 1.8
    assert parts.nvme == pytest.approx(whole.nvme, rel=0.001)


def test_weights_wait_in_memory_as_far_as_they_may(estimator: Estimator) -> None:
    """max_in_cpu is a billion elements, so a small model's weights never reach the disk; the buffers are there all the same."""
    optimizer, everything = (estimator.estimate(WORK, plan(what), FOUR).memory for what in ("optimizer", "all"))
    assert everything.nvme == optimizer.nvme
    assert everything.host.pinned - optimizer.host.pinned >= 4 * PARAMETER_BUFFERS * BUFFER_ELEMENTS * 2
    assert everything.peak_allocated <= optimizer.peak_allocated
