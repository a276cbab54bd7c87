"""The workload of a published row: method, precision, loss and what the row's program does its own way."""

from __future__ import annotations

import re
from typing import Any

from published_rows import Case, NotExpressible, Row, _number, _strategy, cluster_of, metric_of, spec_of

from toolkit.specs import ModelSpec, Variant, Workload
from toolkit.strategies.exclusions import TORCH_FUSED, WITHOUT_BF16

_TARGETS: dict[str, dict[str, str]] = {
    "llama": {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "up": "up_proj", "gate": "gate_proj",
              "down": "down_proj", "mlp": "gate_proj,up_proj,down_proj", "c_attn": "q_proj,k_proj,v_proj",
              "c_proj": "o_proj,down_proj", "w1": "up_proj", "w2": "gate_proj"},
    "gpt_neox": {"q": "query_key_value", "k": "query_key_value", "v": "query_key_value", "o": "dense",
                 "mlp": "dense_h_to_4h,dense_4h_to_h", "up": "dense_h_to_4h", "down": "dense_4h_to_h", "gate": ""},
    "phi": {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "dense", "mlp": "fc1,fc2", "up": "fc1", "down": "fc2", "gate": ""},
    "phi3": {"q": "qkv_proj", "k": "qkv_proj", "v": "qkv_proj", "o": "o_proj", "mlp": "gate_up_proj,down_proj",
             "up": "gate_up_proj", "gate": "gate_up_proj", "down": "down_proj"},
    "gpt_bigcode": {"c_attn": "c_attn", "c_proj": "c_proj", "q": "", "k": "", "v": "", "o": ""},
    "mixtral": {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"},
}  # fmt: skip
_TARGETS["falcon"] = _TARGETS["gpt_neox"]
_HUGGING_FACE = ("fms", "hf ", "peft", "qwen", "swift", "axolotl", "llama-factory", "cookbook", "liger", "atorch", "answer.ai")
"""Sources whose models are transformers' own."""


def _targets(row: Row, spec: ModelSpec) -> str:
    task = row["task"].replace("[", "").replace("]", "").replace("'", "")
    if re.search(r"all[- ]linear", task):
        return "all-linear"
    found = re.search(r"targets?=([\w,]+(?:(?:, | )[a-z_0-9]+(?=[ ,]|$))*)", task)
    words = re.split(r"[ ,]+", found[1]) if found else []
    if "dropout" in words:
        words = words[: words.index("dropout")]
    table = _TARGETS.get(str(spec.config.get("model_type")), _TARGETS["llama"])
    if not words:
        stated = re.search(r"q,k,v,o,mlp|q,k,v|q,v", task)
        words = stated[0].split(",") if stated else []
    if not words and "torchtune" in row["source"].lower():
        # recipes/configs/llama3_2/3B_{lora,qlora}_single_device.yaml and llama2/70B_lora.yaml
        words = ["q", "v", "o", "mlp"] if "3B" in task else ["q", "k", "v"]
    out: dict[str, None] = {}
    for word in words:
        key = word.removesuffix("_proj") if word.removesuffix("_proj") in table else word
        if key == "head":
            out["lm_head"] = None
        elif key in table:
            out.update(dict.fromkeys(t for t in table[key].split(",") if t))
    return ",".join(out) or "q_proj,v_proj"


def _method(row: Row) -> str:
    task = row["task"].lower() + " " + row["precision"].lower()
    if re.search(r"qlora|nf4|fp4|int8|int4|gptq|4-bit base", task):
        return "qlora"
    return "lora" if re.search(r"\blora|dora", task) else "full"


def _precision(row: Row, method: str, zero: bool) -> tuple[str, str]:
    """(precision, weights' dtype)"""
    text = row["precision"].lower()
    hugging_face = any(s in row["source"].lower() for s in _HUGGING_FACE)
    if zero:
        return ("fp16" if text.startswith("fp16") else "bf16"), "bf16" if method != "full" else "fp32"
    if text.startswith("fp32") and "bf16" not in text:
        return "fp32", "fp32"
    if "fp16 mixed" in text or "fp16 + fp32" in text:
        return "fp16", "fp32"
    if re.search(r"amp_|fsdp2: fp32|fp32 params|fp32 master \(fsdp", text) or "mixed_precision" in text:
        return "bf16", "bf16" if "upcast" in text else "fp32"
    if re.search(r"pure bf16|bf16-true|bf16 pure", text):
        return "bf16-pure", "bf16"
    if "autocast" in text or (hugging_face and method != "full" and "answer" not in row["source"].lower()):
        return "bf16", "bf16"
    return "bf16-pure", "bf16"


def _loss(row: Row) -> tuple[str, str]:
    """(loss, variant's loss code)"""
    text, source, software = row["loss_impl"].lower(), row["source"].lower(), row["software"].lower()
    if re.search(r"fused-linear|cut cross|linear-cut|tiled fused|lce", text):
        return "fused", "current"
    if "triton" in text or "fused ce" in text:
        return "standard", _hugging_face_loss(software)
    if "chunk" in text:
        return "standard", "native" if "litgpt" in source else "pieces" if "torchtune" in source else "chunks"
    if "litgpt" in source:
        return "standard", "native"
    if "torchtitan" in source or "nemo" in source:
        return "standard", "current"
    return "standard", _hugging_face_loss(software)


def _transformers(software: str) -> tuple[int, int] | None:
    found = re.search(r"transformers (\d+)\.(\d+)", software.lower())
    return (int(found[1]), int(found[2])) if found else None


def _hugging_face_loss(software: str) -> str:
    version = _transformers(software)
    if version is None:
        return "current" if re.search(r"torch 2\.(8|9|1\d)|202[56]", software) else "upcast"
    return "current" if version >= (4, 49) else "shifted" if version >= (4, 46) else "upcast"


def _variant(row: Row, method: str, loss_code: str) -> Variant:
    task, precision, source = row["task"].lower(), row["precision"].lower(), row["source"].lower()
    text, loss_text = task + " " + precision, row["loss_impl"].lower()
    quantization = "nf4-dq"
    if "gptq" in text:
        # fms-acceleration asks for triton; transformers' GPTQConfig(disable_exllama=True) gets qlinear_cuda_old
        quantization = "gptq" if source.startswith("fms") else "gptq-torch"
    elif "int8" in text:
        quantization = "int8"
    elif not re.search(r"nf4-dq|double[- ]?quant|dq", text) and re.search(r"bnb|nf4|fp4", text) and "torchtune" not in source:
        quantization = "nf4"
    stated = re.search(r"dropout=([\d.]+)", task)
    # finetune/lora.py of litgpt and finetune.py of Qwen: lora_dropout 0.05 unless a file says otherwise
    dropout = float(stated[1]) if stated else 0.05 if re.search("litgpt|qwen readme", source) and method != "full" else 0.0
    litgpt = "litgpt" in source
    adapted = ",".join(p for p in "qkv" if re.search(rf"targets=\S*\b{p}\b", task))
    names_logits = _names_logits(row, loss_code)
    peft = any(s in source for s in _HUGGING_FACE) and "answer" not in source
    bigcode = "bigcode" in row["model"].lower()
    return Variant(
        quantization=quantization,  # type: ignore[arg-type]
        # the main branches of TheBloke's 70B and Mixtral files state group size None, his 7B ones 128 (their model cards)
        gptq_group=0 if re.search(r"thebloke/\S*(70b|8x7b)", row["model"].lower()) else 128,
        adapter_dtype="fp32" if peft else "weights",
        adapter_dropout=dropout,
        packs_head=litgpt,
        unpacks_twice=litgpt,
        fp32_output=litgpt or names_logits,
        # its resource tables run the longest sample first, so that no other is there
        graph_stays=litgpt and "is run first" not in row["notes"],
        fused_qkv=(adapted or "none") if litgpt else "",
        # Lightning's FSDPStrategy keeps use_orig_params and wraps by block
        mixed_flat=litgpt,
        # TRL does not prepare a model that FSDP will shard (trl/trainer/sft_trainer.py, is_sharded_qlora)
        upcast_rest=method == "qlora" and ("upcast" in precision or "4bit-transformers" in source)
        and "fsdp" not in row["strategy"].lower(),
        saves_packed_inputs=bool(re.search(r"bitsandbytes 0\.(3\d|4[0-2])|^litgpt", row["software"].lower())),
        trainable_modules="embed_tokens,lm_head" if "trainable emb" in task else "",
        loss_code=loss_code,  # type: ignore[arg-type]
        triton_loss=bool(re.search(r"triton|fused ce", loss_text)),
        compiled_loss=row["torch_compile"] in ("yes", "per-block") and _compiles_loss(row, loss_code),
        upcast_logits=not re.search(r"bigcode|santacoder|gpt2|mpt|qwen-[\d_]+b", row["model"].lower()),
        # llm-foundry's models have norm_type low_precision_layernorm
        # foak's kernels take the place of RMSNorm, which GPT-BigCode does not have
        kernels="fused-norm" if re.search("foak|mpt-", (loss_text + row["notes"] + row["model"]).lower()) and not bigcode
        or _titan_fused_norm(row)
        # a compiled layer saves what its products need and recomputes the rest (functorch's min-cut partitioner)
        else "liger" if "liger" in loss_text or row["torch_compile"] in ("yes", "per-block") else "model",
        # Hugging Face's Trainer checkpoints around the FSDP unit and reentrantly; llama-recipes, fsdp_qlora and Accelerate's
        # own option wrap the layer inside the unit
        reentrant=bool(re.search(r"^fms|^peft|factory", source)),
        keep_logits="cookbook" in source and "not kept" not in row["notes"] or litgpt or names_logits,
        optimizer_in_backward="in_bwd" in row["optimizer"].lower(),
        foreach_denominators=bool(re.search(r"torch 2\.0", row["software"].lower())),
        every_second_matmul="torchtitan" in source,
        rotary_tables=131072 if "liger" in source else 0,  # max_position_embeddings of Qwen2-7B, its only model
        repeats_keys=_repeats_keys(row),
        keeps_projections=bigcode and (_transformers(row["software"]) or (9, 0)) < (4, 49),
        expert_loop="mixtral" in row["model"].lower(),
        cuda_modules="eager" if _eager_modules(row["software"]) else "lazy",
        shard_packed="torchtune" in source,
        reduce_fp32="fp32 reduce" in precision,
        frozen_stays=bool(re.search(r"torch (1\.|2\.0)", row["software"].lower())),
    )  # fmt: skip


def _names_logits(row: Row, loss_code: str) -> bool:
    """Models that made logits fp32 in loops that named them while backward ran: torchtitan before #391 (2024-06-12), torchtune
    before #1235 (2024-07-27)."""
    source = row["source"].lower()
    if "torchtune" in source:
        return loss_code != "pieces"
    return "torchtitan" in source and "" < _month(row) < "2024-06"


def _compiles_loss(row: Row, loss_code: str) -> bool:
    """torchtune compiles the cross entropy of a piece where it compiles the model; torchtitan all of it from April 2025 on (its
    #1033)."""
    return loss_code == "pieces" or ("torchtitan" in row["source"].lower() and _month(row) >= "2025-04")


def _titan_fused_norm(row: Row) -> bool:
    """Whether torchtitan's Triton RMSNorm ran: between its #181 (2024-03-30, "+15% eager") and #297 (2024-05-02) its configs said
    `fused_rmsnorm`, and the list of what its figures waited for (#186) names an efficient norm."""
    return "torchtitan" in row["source"] and _month(row) == "2024-04"


def _repeats_keys(row: Row) -> bool:
    """Whether the run's code copied keys and values for every query head: torchtitan before its #2259 (2026-01), torchtune,
    litgpt, transformers' sdpa before #39412 (2025-07, 4.55), its flash attention before 4.48 in every model but Llama."""
    source, software = row["source"].lower(), row["software"]
    if "torchtitan" in source:
        return _month(row) < "2026-02"
    if not any(s in source for s in _HUGGING_FACE):
        return "torchtune" in source or "litgpt" in source
    version = _transformers(software)
    if "flash" in row["attention"].lower():
        return version is not None and version < (4, 48) and "llama" not in row["model"].lower()
    return version < (4, 55) if version else bool(re.search(r"202[2-4]|transformers 4", software))


def _expandable(row: Row) -> bool:
    """Whether the run's launcher set expandable segments: run_llama_train.sh of torchtitan (its #643, 2024-10-22), axolotl's
    command line (its #1765, 2024-07), projects/sequence-parallelism/README.md of ArcticTraining."""
    source = row["source"].lower()
    titan = "torchtitan" in source and _month(row) > "2024-10"
    return titan or source.startswith(("axolotl", "arctic")) or "expandable" in row["notes"].lower()


def _month(row: Row) -> str:
    """The year and month of the run's software, as 2024-06: what its column states, else what its document tells; empty when
    neither does. torchtitan's docs/performance.md was written in its #255 (2024-04-18)."""
    dated = re.search(r"20\d\d-\d\d", row["software"])
    if dated:
        return dated[0]
    return "2024-04" if "docs/performance.md" in row.get("source_location", "") else ""


def _eager_modules(software: str) -> bool:
    """Whether the run's CUDA loaded all kernels at start: before 12.2, so torch before 2.2 or so."""
    text = software.lower()
    found = re.search(r"torch (\d+)\.(\d+)", text)
    if re.search(r"cuda 11|cu11|cu121|2022|2020", text):
        return True
    return (int(found[1]), int(found[2])) < (2, 2) if found else bool(re.search(r"2023|4\.1x", text))


def _optimizer(row: Row) -> str:
    text = row["optimizer"].lower()
    if "adafactor" in text:
        return "adafactor"
    if "paged" in text:
        return "paged-adamw-8bit"
    if "8-bit" in text or "8bit" in text:
        return "adamw-8bit"
    return "sgd" if "sgd" in text else "lion" if "lion" in text else "adamw"


def _varied(row: Row) -> bool:
    """Whether batches were padded to their longest row: ms-swift's and Liger's examples, MRPC with Hugging Face's collator.
    PEFT's method comparison does so as well, but empties the cache as it goes (method_comparison/MetaMathQA/run.py)."""
    return bool(re.search("variable-length|padded to the 512 cap|dynamic padding", row["notes"] + row["assumption"]))


def _length(row: Row) -> int | None:
    """Tokens of the longest batch: the stated maximum, unless batches are padded to their longest row and no row is that long.
    MRPC's longest pair has 103 tokens (TensorFlow's tutorial on fine-tuning BERT); run_glue_no_trainer.py pads to eighths."""
    stated = _number(row["seq_len"])
    return min(stated, 104) if stated and "dynamic padding on MRPC" in row["assumption"] else stated


def case_of(row: Row) -> Case:
    """Map a row. Raises NotExpressible with the reason."""
    metric = metric_of(row)
    if "graph_trainer" in row["torch_compile"]:
        raise NotExpressible("a graph compiler that chooses what is recomputed by its own memory policy")
    if re.search(r"activation offload|checkpoint cpu offload", (row["activation_ckpt"] + row["strategy"]).lower()):
        raise NotExpressible("checkpointed inputs that wait on the host")
    spec = spec_of(row)
    cluster = cluster_of(row)
    plan = _strategy(row, spec)
    method = _method(row)
    if row["source"].startswith("Qwen README") and "gptq" in row["task"].lower() and plan.strategy == "single":
        # finetune/finetune_qlora_single_gpu.sh passes finetune/ds_config_zero2.json, whose buckets are 2e8
        plan = plan.with_(strategy="zero2", bucket=200_000_000)
    precision, weights = _precision(row, method, plan.strategy.startswith("zero"))
    loss, code = _loss(row)
    batch, length = _number(row["micro_batch"]), _length(row)
    if batch is None or length is None:
        raise NotExpressible("the row states no batch or sequence length")
    rank = re.search(r"\br=(\d+)", row["task"])
    stated = re.search(r"(?:accumulation|grad_accum)[ =](\d+)", row["notes"])
    # litgpt's global batch is several micro-batches in every file of its config hub and in its scripts
    accumulate = int(stated[1]) if stated else 2 if "litgpt" in row["source"] else 1
    attention = row["attention"].lower()
    fused = "fused" in row["optimizer"].lower() or "torchtune" in row["source"].lower() or plan.strategy.startswith("zero")
    # foreach is torch's default on CUDA from 2.0 on; llm-foundry's DecoupledAdamW loops
    old = re.search(r"torch 1\.|\b202[012]\b|4\.1x", row["software"].lower())
    loops = old or "decoupled" in row["optimizer"].lower()
    optimizer = _optimizer(row)
    # DeepSpeed's CPU Adam and bitsandbytes' optimizers have one form
    one_form = optimizer not in TORCH_FUSED or (plan.offload != "none" and plan.strategy.startswith("zero"))
    impl = "default" if one_form else "fused" if fused else "loop" if loops else "default"
    # an assumption: what is called flash on a GPU that flash-attn does not know counts as torch's memory-efficient kernel
    flash = "flash" in attention and cluster.gpu.architecture not in WITHOUT_BF16
    # rows that are padded come with a mask, which sdpa then takes; the trace makes one for a packed row
    options: dict[str, Any] = {"packed": bool(re.search("peft method|liger", row["source"].lower())),
                               "alloc": "expandable" if _expandable(row) else "default",
                               "lengths": "varied" if _varied(row) else "equal"}
    if spec.config.get("model_type") in ("bert", "deberta-v2", "roberta") or "classification" in row["task"]:
        options["task"] = "sequence-classification"
    workload = Workload(
        method=method, lora_rank=int(rank[1]) if rank else 64 if "3B_" in row["task"] else 16 if "70B" in row["task"] else 8,  # type: ignore[arg-type]
        lora_targets=_targets(row, spec) if method != "full" else "all-linear", seq_len=length, micro_batch=batch,
        accumulate=accumulate, precision=precision, weights_dtype=weights,  # type: ignore[arg-type]
        optimizer=optimizer, optimizer_impl=impl,  # type: ignore[arg-type]
        attention="eager" if attention.startswith("eager") else "flash" if flash else "sdpa",
        loss=loss, variant=_variant(row, method, code), **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return Case(spec, workload, plan, cluster, metric)
