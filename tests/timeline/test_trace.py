"""The trace of a cut model stands for the whole one, and adds up."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from toolkit.errors import UserError
from toolkit.specs import ModelSpec, Workload
from toolkit.timeline import build
from toolkit.timeline.trace import Mark, Memory, ModelTrace
from toolkit.timeline.tracing import Numerics, trace_model

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 9,
         "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128,
         "max_position_embeddings": 256}
GEMMA2 = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 8,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 128,
          "sliding_window": 16}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 7,
      "num_decoder_layers": 7, "num_heads": 4, "vocab_size": 128, "decoder_start_token_id": 0}
BERT = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 64, "num_hidden_layers": 7,
        "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 128}
MODELS = {"llama": LLAMA, "gemma2": GEMMA2, "t5": T5, "bert": BERT}
WORK = Workload(seq_len=32, micro_batch=2, precision="fp32", attention="eager")


def spec(name: str) -> ModelSpec:
    return ModelSpec(name=name, config=MODELS[name])


def events(trace: ModelTrace) -> Counter[Any]:
    """What happens where, without the order of equal things."""
    out: Counter[Any] = Counter()
    for item in trace.items:
        out[(item.delta, item.phase) if isinstance(item, Memory) else (item.kind, item.name)] += 1
    return out


def peak(trace: ModelTrace) -> int:
    level = top = 0
    for item in trace.items:
        if isinstance(item, Memory):
            level += item.delta
            top = max(top, level)
    return top


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_cut_model_gives_the_trace_of_the_whole(name: str, checkpointing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    numerics = Numerics(checkpointing=checkpointing)
    cut = trace_model(spec(name), WORK, numerics)
    monkeypatch.setattr(build, "_choose", lambda signatures, types: (list(range(len(signatures))), list(range(len(signatures)))))
    whole = trace_model(spec(name), WORK, numerics)
    assert [p.name for p in cut.parameters] == [p.name for p in whole.parameters]
    assert sum(p.numel for p in cut.parameters) == sum(p.numel for p in whole.parameters)
    assert events(cut) == events(whole)
    assert peak(cut) == peak(whole)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_left_at_the_end_are_the_gradients(name: str) -> None:
    trace = trace_model(spec(name), WORK, Numerics())
    left = sum(item.delta for item in trace.items if isinstance(item, Memory))
    assert left == sum(p.nbytes for p in trace.trainable)
    marked = [item for item in trace.items if isinstance(item, Mark) and item.kind == "gradient"]
    assert {m.name for m in marked} == {p.name for p in trace.trainable}


def test_autocast_on_cuda_keeps_fp32_norms_and_16_bit_products() -> None:
    """CUDA's autocast keeps a 16-bit copy of each weight until the forward ends; the CPU's list differs."""
    fp32 = trace_model(spec("llama"), WORK, Numerics(device="cuda"))
    bf16 = trace_model(spec("llama"), WORK, Numerics(device="cuda", autocast="bf16"))
    sizes = {item.delta for item in bf16.items if isinstance(item, Memory) and item.delta > 0}
    assert 64 * 96 * 2 in sizes, "the copy of gate_proj's weight"
    assert 64 * 96 * 2 not in {i.delta for i in fp32.items if isinstance(i, Memory) and "gate_proj" in i.module}


def test_sdpa_of_whole_rows_takes_no_mask() -> None:
    """transformers sees on real tensors that a row is one sequence, and lets the flash kernel be causal by itself."""
    work = WORK.with_(attention="sdpa", precision="bf16", seq_len=416, micro_batch=1)
    sizes = {item.delta for item in trace_model(spec("llama"), work, Numerics(device="cuda", autocast="bf16")).items
             if isinstance(item, Memory)}
    assert not {416 * 416, 2 * 416 * 416, 4 * 416 * 416} & sizes


def test_lora_leaves_gradients_for_adapters_only() -> None:
    trace = trace_model(spec("llama"), WORK.with_(method="lora", lora_rank=4), Numerics())
    assert all("lora_" in p.name for p in trace.trainable)
    assert len(trace.trainable) == 9 * 7 * 2
    frozen = [p for p in trace.parameters if not p.trainable]
    assert {p.itemsize for p in frozen} == {2}, "the base is loaded in bf16"
    assert {p.itemsize for p in trace.trainable} == {4}, "peft keeps adapters in fp32"


def test_qlora_packs_linear_layers_and_leaves_the_output_layer() -> None:
    trace = trace_model(spec("llama"), WORK.with_(method="qlora", precision="bf16"), Numerics(device="cuda", autocast="bf16"))
    packed = [p for p in trace.parameters if not p.floating]
    assert len(packed) == 9 * 7
    assert sum(p.numel for p in packed) * 2 == 9 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 96)
    assert next(p for p in trace.parameters if "lm_head" in p.name).floating


def test_chunked_loss_never_holds_all_logits() -> None:
    work = Workload(seq_len=128, micro_batch=16, precision="fp32", attention="eager")
    logits = 16 * 128 * 128 * 4
    standard = trace_model(spec("llama"), work, Numerics())
    chunked = trace_model(spec("llama"), work.with_(loss="chunked"), Numerics())
    assert max(i.delta for i in standard.items if isinstance(i, Memory) and i.category == "logits_and_loss") == logits
    assert max(i.delta for i in chunked.items if isinstance(i, Memory) and i.category == "logits_and_loss") <= logits // 2


def test_a_model_type_that_transformers_does_not_know_is_one_line() -> None:
    with pytest.raises(UserError, match="does not know model type 'nothing-like-it'"):
        trace_model(ModelSpec(name="x", config={"model_type": "nothing-like-it"}), WORK, Numerics())


def test_remote_code_is_refused() -> None:
    config = {**LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}
    with pytest.raises(UserError, match="remote code"):
        trace_model(ModelSpec(name="x", config=config), WORK, Numerics())


def test_a_nested_text_model_is_traced_by_its_text_config() -> None:
    nested = ModelSpec(name="vlm", config={"model_type": "something-vl", "text_config": LLAMA})
    assert trace_model(nested, WORK, Numerics()).hidden_size == 64


def test_only_packed_rows_need_a_mask() -> None:
    """Held against real runs by tests/engines: sdpa on unpacked rows in test_memory_truth, packed ones in test_every_engine."""
    work = WORK.with_(attention="sdpa")
    plain, packed = (peak(trace_model(spec("llama"), work.with_(packed=packed), Numerics())) for packed in (False, True))
    eager = [peak(trace_model(spec("llama"), WORK.with_(packed=packed), Numerics())) for packed in (False, True)]
    assert plain < packed
    assert eager[0] == pytest.approx(eager[1], rel=0.01), "eager always has one"
    flash = [peak(trace_model(spec("llama"), work.with_(attention="flash", packed=packed), Numerics(device="cuda")))
             for packed in (False, True)]
    assert flash[0] == pytest.approx(flash[1], rel=0.01)


def test_a_text_model_that_is_only_built_with_its_eyes() -> None:
    """Qwen2-VL's text config has no causal model of its own in transformers. A real step took 33,464,532 bytes."""
    text = {"model_type": "qwen2_5_vl_text", "hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 4, "intermediate_size": 256, "vocab_size": 1024,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}}
    whole = ModelSpec(name="eyes", config={"model_type": "qwen2_5_vl", "text_config": text})
    trace = trace_model(whole, WORK.with_(seq_len=96, attention="sdpa"), Numerics())
    assert len(trace.layer_paths) == 8 and not any("visual" in p.name for p in trace.parameters)
    states = 3 * sum(p.nbytes for p in trace.parameters)
    assert states + peak(trace) == pytest.approx(33_464_532, rel=0.002)
