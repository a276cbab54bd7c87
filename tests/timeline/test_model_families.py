"""Families of models by their config alone: the true parameters and gradients of each, or one line that says why not."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.errors import UserError
from toolkit.estimate.engine import Estimator
from toolkit.specs import ModelSpec, Plan, Workload
from toolkit.specs.detect import make_cluster
from toolkit.timeline import build
from toolkit.timeline.trace import Memory
from toolkit.timeline.tracing import Numerics, trace_model

SIZE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128}
KV = {**SIZE, "num_key_value_heads": 2, "pad_token_id": 0}
EXPERTS = {**KV, "head_dim": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 32}
LATENT = {**SIZE, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
          "first_k_dense_replace": 1, "n_shared_experts": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1}
GPT = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 128}
BOTH = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 128, "pad_token_id": 0, "is_encoder_decoder": True}
EYES = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen2", "mistral", "phi", "phi3", "stablelm", "starcoder2", "olmo2", "cohere", "granite"), KV),
    **dict.fromkeys(("qwen3", "gemma", "gemma2", "gemma3_text", "glm4", "smollm3"), {**KV, "head_dim": 16}),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "granitemoe"), EXPERTS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), LATENT),
    **dict.fromkeys(("gpt2", "gptj", "gpt_bigcode"), {**GPT, "rotary_dim": 8}),
    **dict.fromkeys(("gpt_neox", "falcon", "bloom", "bert", "roberta", "persimmon"), SIZE),
    "opt": {**SIZE, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "mpt": {"d_model": 64, "n_layers": 4, "n_heads": 4, "vocab_size": 128},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 4, "num_heads": 4, "vocab_size": 128, "is_encoder_decoder": True},
    "bart": BOTH,
    "mamba2": {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 128, "state_size": 8, "num_heads": 4, "head_dim": 32,
               "n_groups": 1, "chunk_size": 16},
    "zamba2": {**KV, "num_hidden_layers": 8, "n_mamba_heads": 4, "mamba_d_state": 8, "mamba_expand": 2, "mamba_ngroups": 1,
               "layers_block_type": ["mamba", "mamba", "hybrid"] + ["mamba"] * 4 + ["hybrid"], "num_mem_blocks": 1,
               "attention_head_dim": 32, "attention_hidden_size": 128, "adapter_rank": 8, "chunk_size": 16},
}  # fmt: skip
ONE, WORK = Plan(strategy="single"), Workload(seq_len=32, precision="bf16")
GPU = make_cluster("a100-80gb-sxm", gpus=1)


def spec(family: str, **more: Any) -> ModelSpec:
    return ModelSpec(name=family, config={"model_type": family, **FAMILIES.get(family, {}), **more})


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_gradients_and_states_are_the_models(family: str) -> None:
    model, _, _ = build.build_meta(spec(family), WORK, "eager")
    count = sum(p.numel() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    found = Estimator(spec(family)).estimate(WORK.with_(precision="fp32"), ONE, make_cluster("cpu", gpus=1))
    assert found.model.parameters == found.model.trainable_parameters == count
    # Weights, AdamW's two moments and steps and compiled code stay between the steps; the inputs are the rest.
    code = trace_model(spec(family), WORK.with_(precision="fp32"), Numerics(device="cpu")).compiled
    assert 0 <= found.memory.resident - code - 12 * count - 4 * len(list(model.parameters())) - buffers < 1024
    on_gpu = trace_model(spec(family), WORK, Numerics(device="cuda", autocast="bf16"))
    assert sum(p.whole for p in on_gpu.trainable) == count


def test_values_narrower_than_keys_are_padded_for_flash_attention_alone() -> None:
    """DeepSeek's: the flash kernel takes one width, so sdpa runs the memory-efficient one, and transformers pads for flash."""
    wide = 4 * 32 * 24 * 2  # heads, tokens, width of keys, bf16

    def made(attention: Any) -> list[int]:
        work = WORK.with_(attention=attention)
        trace = trace_model(spec("deepseek_v3"), work, Numerics(device="cuda", autocast="bf16"))
        return [item.delta for item in trace.items if isinstance(item, Memory) and item.phase == "forward"]

    assert made("flash").count(wide) - made("sdpa").count(wide) == 2 * 4  # values and outputs of four layers


def test_a_cut_that_the_models_code_does_not_bear_is_not_made() -> None:
    cut, whole = (build.build(spec("zamba2"), WORK, "eager", whole=whole) for whole in (False, True))
    assert cut.is_cut and not whole.is_cut and cut.parameters == whole.parameters
    trace = trace_model(spec("zamba2"), WORK, Numerics())
    assert len(trace.layer_paths) == 8 and any("Zamba2MambaMixer is estimated as" in note for note in trace.notes)


@pytest.mark.parametrize(("model", "work", "says"), [
    (spec("vit", architectures=["ViTForImageClassification"]), {}, "no causal-lm of model type 'vit'; only models of text"),
    (spec("whisper", **BOTH, architectures=["WhisperForConditionalGeneration"]), {}, "'whisper'; only models of text"),
    (spec("whisper", **BOTH), {}, "'whisper'; only models of text"),
    (spec("llama"), {"task": "seq2seq-lm"}, "no seq2seq-lm of model type 'llama'; say --task causal-lm or seq"),
    (spec("hunyuan_v1_dense", **KV, head_dim=None), {}, "it can't be built from its config (TypeError"),
    (spec("bert"), {"loss": "chunked"}, "loss chunked needs an output layer over words, which Bert"),
    (spec("mamba2"), {"method": "lora"}, "is incompatible with Mamba-based models (model_type='mamba2'); name some of in_proj"),
    (spec("longformer", **SIZE, attention_window=8, architectures=["LongformerForMaskedLM"]), {}, "code does depends on values"),
])  # fmt: skip
def test_what_is_not_estimated_is_one_line(model: ModelSpec, work: dict[str, Any], says: str,
                                           capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as refused:
        Estimator(model).estimate(WORK.with_(**work), ONE, GPU)
    assert says in str(refused.value) and "\n" not in str(refused.value) and capfd.readouterr().err == ""


def test_checkpointing_that_a_model_has_not() -> None:
    albert = spec("albert", **SIZE, embedding_size=32, architectures=["AlbertForMaskedLM"])
    with pytest.raises(UserError, match="AlbertForSequenceClassification has no activation checkpointing"):
        Estimator(albert).estimate(WORK, Plan(strategy="single", checkpointing="full"), GPU)


def test_what_sees_is_said_not_to_be_counted() -> None:
    llava = spec("llava", text_config={"model_type": "llama", **KV}, vision_config=EYES, quantization_config={})
    assert llava.left_out == ("vision",) and spec("llama").left_out == ()
    assert Estimator(llava).estimate(WORK, ONE, GPU).to_json()["model"]["left_out"] == ("vision",)
