"""What the device, the engine and older code do their own way, seen in what the layers hold."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.specs import ModelSpec, Variant, Workload
from toolkit.timeline.trace import Memory, ModelTrace
from toolkit.timeline.tracing import Numerics, trace_model

HIDDEN, HEADS, GROUPS, WIDTH, LENGTH, RANK, LAYERS = 64, 4, 2, 96, 128, 4, 6
HEAD = HIDDEN // HEADS


def mistral(**more: Any) -> ModelSpec:
    return ModelSpec(name="tiny", config={
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "intermediate_size": WIDTH, "vocab_size": 128,
        "sliding_window": None, **more})  # fmt: skip


def traced(spec: ModelSpec, numerics: Numerics | None = None, variant: dict[str, Any] | None = None, **keys: Any) -> ModelTrace:
    given = {"seq_len": LENGTH, "micro_batch": 1, "precision": "bf16-pure", "weights_dtype": "bf16", "lora_rank": RANK, **keys}
    work = Workload(**given, variant=Variant(**(variant or {})))
    return trace_model(spec, work, numerics or Numerics(device="cuda"))


def kept(of: ModelTrace, part: str = "model.layers.3.") -> int:
    """Bytes that a layer holds when the forward is done."""
    return sum(i.delta for i in of.items if isinstance(i, Memory) and i.phase == "forward" and i.module.startswith(part))


def made(of: ModelTrace) -> list[tuple[str, str, int]]:
    return [(i.phase, i.module, i.delta) for i in of.items if isinstance(i, Memory)]


def test_flash_attention_takes_a_sliding_window_as_a_number() -> None:
    """flash_attn_func(window_size=...) needs no mask and takes grouped keys; sdpa needs a mask and repeats them."""
    whole, window = mistral(), mistral(sliding_window=32)
    assert made(traced(window, attention="flash")) == made(traced(whole, attention="flash"))
    assert kept(traced(window, attention="sdpa")) > kept(traced(whole, attention="sdpa"))


def test_keys_and_values_copied_for_every_head_are_kept_instead_of_those_of_the_groups() -> None:
    """MistralFlashAttention2 of transformers 4.45: repeat_kv before the kernel. Measured on fms-197: 12,288 bytes per token more
    at the peak for 32 heads of 128 in 8 groups, two copies less what they replace."""
    once, repeated = (traced(mistral(), attention="flash", variant={"repeats_keys": r}) for r in (False, True))
    both = 2 * LENGTH * HEAD * 2
    assert kept(repeated) - kept(once) == both * HEADS - both * GROUPS


@pytest.mark.parametrize(("targets", "more"), [("q_proj,v_proj", 2 * (HIDDEN + WIDTH)), ("all-linear", 0)])
def test_zero3_keeps_the_input_of_frozen_layers(targets: str, more: int) -> None:
    """DeepSpeed's linear saves it: with adapters on the attention alone, the MLP's two inputs of a layer, in 16 bits."""
    plain, zero3 = (traced(mistral(), Numerics(device="cuda", keeps_inputs=k), method="lora", lora_targets=targets,
                           variant={"adapter_dtype": "weights"}) for k in (False, True))
    assert kept(zero3) - kept(plain) == LENGTH * more


def test_a_layer_of_bitsandbytes_gives_back_the_dtype_it_was_given() -> None:
    """With norms in fp32 (prepare_model_for_kbit_training) the packed layers' products become fp32 as well."""
    low, high = (traced(mistral(), Numerics(device="cuda", autocast="bf16"), method="qlora", precision="bf16",
                        lora_targets="q_proj", variant={"upcast_rest": u}) for u in (False, True))
    gate = "model.layers.3.mlp.gate_proj"
    born = [max(size for phase, module, size in made(t) if phase == "forward" and module == gate) for t in (low, high)]
    assert born[1] == 2 * born[0] == LENGTH * WIDTH * 4


def test_the_cache_of_gpt_bigcode_keeps_each_layers_projection_until_the_loss_is_there() -> None:
    spec = ModelSpec(name="tiny", config={
        "model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"], "n_embd": HIDDEN, "n_layer": LAYERS,
        "n_head": HEADS, "n_inner": WIDTH, "vocab_size": 128, "n_positions": LENGTH, "multi_query": True})  # fmt: skip
    cut, whole = (traced(spec, Numerics(device="cuda", checkpointing="full"), attention="flash",
                         variant={"keeps_projections": k, "loss_code": "shifted", "upcast_logits": False, "reentrant": True})
                  for k in (False, True))

    def highest(of: ModelTrace) -> int:
        level = most = 0
        for item in of.items:
            if isinstance(item, Memory) and item.phase != "backward":
                level += item.delta
                most = max(most, level)
        return most

    assert highest(whole) - highest(cut) == LAYERS * LENGTH * (HIDDEN + 2 * HEAD) * 2
    assert sum(i.delta for i in whole.items if isinstance(i, Memory)) == sum(i.delta for i in cut.items if isinstance(i, Memory))
