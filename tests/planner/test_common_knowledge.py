"""What the field knows, with its source: a recommendation that contradicts it is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.planner.recommendation import Recommendation, recommend
from toolkit.planner.search import Request
from toolkit.specs import Workload
from toolkit.specs.detect import make_cluster
from toolkit.specs.load import load_model_spec


def ask(model: str, gpu: str, gpus: int = 1, nodes: int = 1, offload: Any = "none", host_memory: int | None = None,
        **work: Any) -> Recommendation:
    workload = Workload(loss_only=True, **({"seq_len": 2048} | work))
    cluster = make_cluster(gpu, gpus, nodes, host_memory=host_memory)
    return recommend(Request(load_model_spec(model), workload, cluster, allow_offload=offload, fixed_micro_batch=True))


def strategy(found: Recommendation) -> str:
    assert found.chosen is not None, found.reason
    return found.chosen.candidate.plan.strategy


def test_1b_full_on_80_gb_needs_no_distribution() -> None:
    """torchtune's README: Llama 3.2 1B full fine-tuning on one device."""
    found = ask("llama-3.2-1b", "a100-80gb-sxm", gpus=8)
    assert strategy(found) == "single"
    assert found.chosen is not None and found.chosen.candidate.cluster.world_size == 1
    assert found.one_gpu.startswith("One GPU is enough")


def test_8b_full_needs_sharding_on_80_gb() -> None:
    """16 to 18 bytes per parameter of mixed-precision AdamW: ZeRO, arXiv 1910.02054, section 3.1."""
    assert ask("llama-3.1-8b", "a100-80gb-sxm").chosen is None
    assert strategy(ask("llama-3.1-8b", "a100-80gb-sxm", gpus=8)) in ("zero1", "zero2", "fsdp-grad", "fsdp", "zero3")


@pytest.mark.parametrize("gpu", ["rtx-3090", "rtx-4090"])
def test_8b_qlora_fits_a_24_gb_card(gpu: str) -> None:
    """QLoRA, arXiv 2305.14314: 7B in well under 24 GB; torchtune's README: 8B QLoRA in under 10 GB."""
    assert strategy(ask("llama-3.1-8b", gpu, method="qlora")) == "single"


def test_70b_full_on_one_node_of_80_gb_needs_offload_or_more_gpus() -> None:
    """1,129 GB of states at 16 bytes per parameter against 640 GB: ZeRO, arXiv 1910.02054, table 1."""
    alone = ask("llama-3.1-70b", "a100-80gb-sxm", gpus=8)
    assert alone.chosen is None
    assert alone.changes and alone.changes[0].fits
    offloaded = ask("llama-3.1-70b", "a100-80gb-sxm", gpus=8, offload="cpu", host_memory=4 << 40)
    assert offloaded.chosen is not None and offloaded.chosen.candidate.plan.offload != "none"
    assert strategy(ask("llama-3.1-70b", "a100-80gb-sxm", gpus=8, nodes=4)) in ("fsdp", "zero3")


def test_70b_qlora_fits_two_48_gb_cards_under_fsdp() -> None:
    """Answer.AI, fsdp_qlora: 70B on two 24 GB cards with offload, on two 48 GB cards without."""
    found = ask("llama-3.1-70b", "a6000", gpus=2, method="qlora")
    assert found.chosen is not None, found.reason
    assert any(r.fits and r.candidate.plan.strategy == "fsdp" for r in found.results)
