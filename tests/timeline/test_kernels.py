"""What cuBLAS takes from torch's allocator, and the loss in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from toolkit.estimate.engine import Estimator
from toolkit.specs import ModelSpec, Plan, Variant, Workload
from toolkit.specs.detect import make_cluster
from toolkit.timeline.kernels import blas_workspaces, code_size, compiled_products, compiles_products
from toolkit.timeline.trace import Memory
from toolkit.timeline.tracing import Numerics, trace_model

SPEC = ModelSpec(name="tiny", config={
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 4096,
})  # fmt: skip


@pytest.mark.parametrize(("gpu", "mib"), [("a100-80gb-sxm", 2 * 8.125), ("h100-sxm", 2 * 32), ("cpu", 0)])
def test_workspaces_lie_in_the_allocator_for_good(gpu: str, mib: float) -> None:
    work = Workload(seq_len=32, precision="bf16")
    memory = Estimator(SPEC).estimate(work, Plan(), make_cluster(gpu=gpu, gpus=1)).memory
    held = sum(b for _, what, b in memory.largest if what == "cuBLAS workspaces")
    assert held == mib * 2**20
    assert memory.resident > held


def test_the_default_of_torch_is_one_workspace_per_thread() -> None:
    assert blas_workspaces("ampere") == 2 * 8519680
    assert blas_workspaces("hopper") == 2 * 33554432


def test_a_product_is_compiled_once_for_each_shape_and_layout() -> None:
    mm, weight = torch.ops.aten.mm.default, torch.zeros(96, 64, dtype=torch.bfloat16)
    rows = torch.zeros(32, 64, dtype=torch.bfloat16)
    first = compiled_products(mm, (rows, weight.t()), {})
    assert first == [(1, 32, 96, 64, 0, 1, 0)] == compiled_products(mm, (rows + 1, weight.t()), {})
    assert compiled_products(mm, (rows, weight.t().contiguous()), {}) == [(1, 32, 96, 64, 0, 0, 0)]
    biased = compiled_products(torch.ops.aten.addmm.default, (torch.zeros(96, dtype=torch.bfloat16), rows, weight.t()), {})
    assert biased == [(1, 32, 96, 64, 0, 1, 1)], "with a bias it is another product"
    assert compiled_products(mm, (rows.float(), weight.float().t()), {}) == []
    assert compiled_products(mm, (rows[:1, :16], weight[:16, :16].t()), {}) == [], "torch runs small ones itself"


def test_only_rows_wider_than_a_block_need_the_kernels_of_its_rest() -> None:
    """Counted on AVX-512: an adapter of rank 16 keeps as much as a layer of 64, one of 80 keeps 14,768 bytes more."""
    assert code_size((1, 520, 16, 512, 0, 0, 0)) == code_size((1, 520, 64, 512, 0, 0, 0)) == 537_688
    assert code_size((1, 520, 80, 512, 0, 0, 0)) == 537_688 + 14_768


def test_the_exact_gelu_is_compiled_for_each_shape() -> None:
    """Counted: 11,584 bytes for the forward, 24,296 with the backward, nothing for the approximation by tanh."""
    gelu, back, x = torch.ops.aten.gelu.default, torch.ops.aten.gelu_backward.default, torch.zeros(4, 33, 97)
    products = {*compiled_products(gelu, (x,), {}), *compiled_products(back, (x, x), {})}
    assert sum(map(code_size, products)) == 24_296
    assert compiled_products(gelu, (x,), {"approximate": "tanh"}) == []


@pytest.mark.parametrize(("length", "width", "kept"), [(33, 16, 1_620_936), (129, 32, 3_241_872), (600, 32, 6_483_744),
                                                       (1024, 64, 1_620_936), (512, 96, 1_665_240)])
def test_flash_attention_on_a_cpu_compiles_three_products_of_its_backward_per_pair_of_blocks(
        length: int, width: int, kept: int) -> None:
    """`kept`: bytes that one forward and backward of 1 x 4 x length x width in bf16 left behind, torch 2.13 on AVX-512."""
    q = torch.zeros(1, 4, length, width, dtype=torch.bfloat16)
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    products = compiled_products(call, (q, q, q, q, q, q, 0.0, True), {})
    assert sum(map(code_size, set(products))) == kept


@pytest.mark.skipif(not compiles_products(), reason="oneDNN has no bf16 kernels for this processor")
def test_a_cpu_keeps_the_code_of_its_bf16_products() -> None:
    work = Workload(seq_len=32, precision="bf16")
    memory = Estimator(SPEC).estimate(work, Plan(), make_cluster(gpu="cpu", gpus=1)).memory
    held = sum(b for _, what, b in memory.largest if what.startswith("oneDNN"))
    assert held > 10 * code_size((1, 32, 64, 64, 0, 0, 0))
    plain = Estimator(SPEC).estimate(work.with_(precision="fp32"), Plan(), make_cluster(gpu="cpu", gpus=1)).memory
    assert not any(what.startswith("oneDNN") for _, what, _ in plain.largest)


def top(**variant: Any) -> int:
    work = Workload(seq_len=256, micro_batch=1, precision="bf16-pure", weights_dtype="bf16", method="lora",
                    lora_targets="q_proj", variant=Variant(**variant))
    level = most = 0
    for item in trace_model(SPEC, work, Numerics(device="cuda")).items:
        if isinstance(item, Memory) and item.category == "logits_and_loss":
            level += item.delta
            most = max(most, level)
    return most


def test_a_loss_in_pieces_never_holds_the_gradient_of_all_logits() -> None:
    logits = 256 * 4096 * 2
    assert top(loss_code="chunks", compiled_loss=True) >= 2 * logits
    assert logits < top(loss_code="pieces", compiled_loss=True) < 1.4 * logits
    assert top(loss_code="current", compiled_loss=True) < top(loss_code="current", triton_loss=False)
