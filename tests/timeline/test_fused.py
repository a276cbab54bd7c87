"""One product for query, key and value with adapters in it: what a layer keeps, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.specs import ModelSpec, Variant, Workload
from toolkit.timeline.trace import Memory, ModelTrace
from toolkit.timeline.tracing import Numerics, trace_model

HIDDEN, HEADS, WIDTH, LENGTH, RANK = 64, 4, 96, 32, 4


def spec(groups: int) -> ModelSpec:
    return ModelSpec(name="tiny", config={
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": 8,
        "num_attention_heads": HEADS, "num_key_value_heads": groups, "intermediate_size": WIDTH, "vocab_size": 128,
    })  # fmt: skip


def trace(groups: int = HEADS, method: str = "lora", micro: int = 1, **variant: Any) -> ModelTrace:
    work = Workload(method=method, lora_rank=RANK, lora_targets="q_proj,v_proj", seq_len=LENGTH, micro_batch=micro,  # type: ignore[arg-type]
                    precision="bf16-pure", weights_dtype="bf16",
                    variant=Variant(adapter_dtype="weights", loss_code="native", **variant))
    return trace_model(spec(groups), work, Numerics(device="cuda"))


def kept(of: ModelTrace, layer: int, part: str = "") -> int:
    """Bytes that a layer's module holds when the backward starts."""
    level = 0
    for item in of.items:
        if isinstance(item, Memory):
            if item.phase == "backward":
                break
            level += item.delta * item.module.startswith(f"model.layers.{layer}.{part}")
    return level


@pytest.mark.parametrize("groups", [HEADS, 2])
def test_the_attention_keeps_what_the_fused_product_makes_it_keep(groups: int) -> None:
    kv = HIDDEN // HEADS * groups
    copied_in = 2 * (HIDDEN + kv)  # index_copy keeps the adapters' output for query and value
    low = 2 * 2 * RANK
    dropped = (2 + 1) * HIDDEN  # the dropped-out input and its mask
    value = 2 * HIDDEN if groups < HEADS else 2 * 3 * HIDDEN  # a view keeps all of the product; with groups it is a copy
    rotated, out, sums = 2 * 2 * HIDDEN, 2 * HIDDEN, 4 * HEADS
    places = 8 * (HIDDEN + kv)
    counted = LENGTH * (copied_in + low + dropped + value + rotated + out + sums) + places
    found = kept(trace(groups, adapter_dropout=0.05, fused_qkv="q,v"), 4, "self_attn")
    assert counted <= found <= counted + 1024  # the kernel's random state and the like


def test_every_layer_keeps_its_rotary_tables_where_the_code_has_them() -> None:
    none, tables = trace(method="full"), trace(method="full", rotary_tables=100)
    assert tables.buffers - none.buffers == 8 * 2 * 100 * (HIDDEN // HEADS) * 2
    assert tables.items == none.items


def test_a_fused_product_has_the_parameters_of_the_separate_ones() -> None:
    apart, fused = trace(2), trace(2, fused_qkv="q,v")
    assert sum(p.numel for p in fused.parameters if not p.trainable) == sum(p.numel for p in apart.parameters if not p.trainable)
    assert sum(p.numel for p in fused.trainable) == sum(p.numel for p in apart.trainable)
    assert {p.itemsize for p in fused.trainable} == {p.itemsize for p in apart.trainable} == {2}


@pytest.mark.parametrize("stays", [True, False])
def test_inputs_of_packed_layers_live_as_long_as_the_graph(stays: bool) -> None:
    of = trace(method="qlora", quantization="nf4", saves_packed_inputs=True, graph_stays=stays, fused_qkv="q,v")
    kinds = [item.kind for item in of.items if not isinstance(item, Memory)]
    assert ("loss-done" in kinds) is ("graph-dies" in kinds) is stays
    level = sum(item.delta for item in of.items if isinstance(item, Memory) and item.category != "gradients")
    assert level == 0
    if stays:
        place = next(i for i, item in enumerate(of.items) if not isinstance(item, Memory) and item.kind == "graph-dies")
        left = -sum(i.delta for i in of.items[place:] if isinstance(i, Memory) and i.module.startswith("model.layers"))
        inputs = 2 * (3 * HIDDEN + WIDTH)  # of the fused product, the output and the MLP's two sorts of product
        assert left == LENGTH * (8 * inputs - 2 * HIDDEN)  # the first layer's product has no gradient to pass on


def test_gptq_unpacked_by_torch_keeps_the_weight() -> None:
    triton, torchs = (trace(method="qlora", quantization=q) for q in ("gptq", "gptq-torch"))
    weights = 2 * (HIDDEN * HIDDEN * 4 + 3 * HIDDEN * WIDTH)
    assert kept(torchs, 4) - kept(triton, 4) == weights
