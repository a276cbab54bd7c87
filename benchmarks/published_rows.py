"""A published row as the toolkit's terms: model spec, workload, cluster and plan, and which quantity it measured.

Words of the columns are matched by substring, so rows of other files with the same columns map as well. What a row does
that the engine has no term for raises `NotExpressible` with the reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from toolkit.specs import Cluster, FsdpSettings, ModelSpec, Plan, Workload
from toolkit.specs.catalog import gpu as catalog_gpu
from toolkit.specs.catalog import model as catalog_model
from toolkit.specs.detect import make_cluster
from toolkit.units import GIB

Row = dict[str, str]


class NotExpressible(Exception):
    """The engine has no term for something the row does."""


@dataclass(frozen=True)
class Case:
    """One row, mapped."""

    spec: ModelSpec
    workload: Workload
    plan: Plan
    cluster: Cluster
    metric: str
    """peak_allocated, peak_reserved, peak_total or fits."""


_GPUS = (
    ("h200", "h200"), ("h100", "h100-sxm"), ("a800", "a100-80gb-sxm"), ("a100-40", "a100-40gb-sxm"), ("a100", "a100-80gb-sxm"),
    ("a10g", "a10g"), ("a10", "a10"), ("t4", "t4"), ("v100-16", "v100-16gb"), ("v100-32", "v100-32gb"), ("v100", "v100-16gb"),
    ("3090", "rtx-3090"), ("4090", "rtx-4090"), ("5090", "rtx-5090"), ("titan rtx", "rtx-3090"), ("a5000", "rtx-3090"),
    ("6000 ada", "l40s"), ("l40s", "l40s"), ("l40", "l40s"), ("a40", "a40"), ("a6000", "a6000"), ("l4", "l4"), ("b200", "b200"),
    ("mi300", "mi300x"), ("mi250", "mi250x"),
)  # fmt: skip

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5}
_BY_NAME: tuple[tuple[str, dict[str, Any]], ...] = (
    # Architectures by what a model's name says; the sizes come from the row. What the library has no class for is
    # described by the one with the same tensors (Qwen 1 by qwen2's, MPT by GPT-NeoX with tied embeddings).
    ("qwen3", {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128}),
    ("qwen2", {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}),
    ("qwen", {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}),
    ("santacoder", {"model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"], "multi_query": True}),
    ("bigcode", {"model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"], "multi_query": True}),
    ("mpt", {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "tie_word_embeddings": True}),
    ("stablelm-base-alpha", {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}),
    ("pythia", {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}),
    ("phi-1", {"model_type": "phi", "architectures": ["PhiForCausalLM"]}),
    ("phi-2", {"model_type": "phi", "architectures": ["PhiForCausalLM"]}),
    ("gemma-2b", {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "head_dim": 256, "tie_word_embeddings": True}),
    ("gemma-7b", {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "head_dim": 256, "tie_word_embeddings": True}),
    ("gpt", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}),
    ("deberta", {"model_type": "deberta-v2", "architectures": ["DebertaV2ForSequenceClassification"]}),
    ("mixtral", {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}),
    ("olmo", _LLAMA), ("apertus", {**_LLAMA, "hidden_act": "relu2"}), ("devstral", {**_LLAMA, "head_dim": 128}),
    ("magistral", {**_LLAMA, "head_dim": 128}), ("mistral-small", {**_LLAMA, "head_dim": 128}),
    ("powerlm", {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "tie_word_embeddings": True,
                 "attention_bias": True, "mlp_bias": True, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
                 "logits_scaling": 9.0}),
    ("llama-3.2-1b", {**_LLAMA, "tie_word_embeddings": True}), ("llama-3.2-3b", {**_LLAMA, "tie_word_embeddings": True}),
)  # fmt: skip
_ALIASES = (
    ("llama-3.1-8b", "llama-3.1-8b"), ("llama-3-8b", "llama-3-8b"), ("llama-3.1-70b", "llama-3.1-70b"),
    ("llama-3-70b", "llama-3-70b"), ("llama-3.1-405b", "llama-3.1-405b"),
    ("llama-3.2-1b", "llama-3.2-1b"), ("llama-3.2-3b", "llama-3.2-3b"),
    ("llama-3.3-70b", "llama-3.3-70b"), ("mixtral-8x7b", "mixtral-8x7b"), ("mixtral-8x22b", "mixtral-8x22b"),
    ("mistral-7b", "mistral-7b"), ("llama-2-7b", "llama-2-7b"), ("llama-2-13b", "llama-2-13b"), ("llama-2-70b", "llama-2-70b"),
    ("llama-7b", "llama-2-7b"), ("llama-13b", "llama-2-13b"), ("qwen3-32b", "qwen3-32b"), ("qwen3-8b", "qwen3-8b"),
    ("qwen3-14b", "qwen3-14b"), ("gemma-2-9b", "gemma-2-9b"), ("gemma-2-2b", "gemma-2-2b"), ("phi-3-mini", "phi-3-mini"),
    ("falcon-7b", "falcon-7b"), ("falcon-40b", "falcon-40b"), ("bert-large", "bert-large"), ("bert-base", "bert-base"),
    ("qwen2-7b", "qwen2.5-7b"), ("plano-orchestrator-4b", "qwen3-4b"), ("qwen3-4b", "qwen3-4b"),
)  # fmt: skip


def _number(text: str) -> int | None:
    found = re.match(r"~?\s*([\d.]+)", text or "")
    return int(float(found[1])) if found else None


def spec_of(row: Row) -> ModelSpec:
    """The model: from the catalog by its hub id or name, else from the row's sizes."""
    name = row["model"].strip()
    low = name.lower().replace("_", "-")
    known = catalog_model(name)
    if known is None:
        known = next((catalog_model(target) for part, target in _ALIASES if part in low), None)
    if known is not None:
        config = _without_limit(dict(known.config))
        if row["source"].lower().startswith("fms") and config["model_type"] in ("llama", "mistral", "mixtral"):
            config["vocab_size"] += 1  # fms-hf-tuning adds a padding token where a tokenizer has none: tuning/sft_trainer.py
        if "litgpt" in row["source"].lower():
            config["tie_word_embeddings"] = False  # litgpt's GPT has a head of its own
        return ModelSpec(name=known.name, config=config, source=f"catalog:{known.name}")
    hidden, layers, heads = (_number(row[c]) for c in ("hidden", "layers", "heads"))
    if "+" in row["layers"] or "transformerencoder" in low.replace(".", "") and not hidden:
        raise NotExpressible("a model that transformers does not have (torch.nn.Transformer)")
    if not (hidden and layers and heads):
        raise NotExpressible("the row does not state the model's sizes")
    base = dict(next((values for part, values in _BY_NAME if part in low), _LLAMA))
    vocab = _number(row["vocab"]) or (256 if "char" in row["task"] else None)
    intermediate = _number(row["intermediate"])
    if vocab is None or intermediate is None:
        raise NotExpressible("the row does not state the model's vocabulary or MLP width")
    config = {**base, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocab,
              "num_key_value_heads": _number(row["kv_heads"]) or heads, "intermediate_size": intermediate,
              "max_position_embeddings": 1 << 20}  # fmt: skip
    if "litgpt" in row["source"].lower():
        config["tie_word_embeddings"] = False  # litgpt's GPT has a head of its own
        if base["model_type"] == "phi":
            config["hidden_act"] = "gelu_pytorch_tanh"  # litgpt calls torch's kernel; transformers' gelu_new is many operators
    config.setdefault("tie_word_embeddings", False)
    if base["model_type"] in ("gpt2", "gpt_bigcode"):
        config.update(n_embd=hidden, n_layer=layers, n_head=heads, n_inner=intermediate, tie_word_embeddings=True,
                      n_positions=max(2048, _number(row["seq_len"]) or 0))
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "intermediate_size",
                    "num_key_value_heads"):
            config.pop(key)
    if base["model_type"] == "deberta-v2":
        # config.json of microsoft/deberta-v2-xlarge-mnli
        config.update(relative_attention=True, position_buckets=256, pos_att_type=["p2c", "c2p"], max_position_embeddings=512,
                      share_att_key=True, position_biased_input=False, type_vocab_size=0, norm_rel_ebd="layer_norm",
                      conv_kernel_size=3, conv_act="gelu", max_relative_positions=-1)
    return ModelSpec(name=low, config=config, source=f"row:{row['id']}")


def _without_limit(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("model_type") not in ("gpt2", "bert", "opt", "roberta"):
        config["max_position_embeddings"] = max(1 << 20, int(config.get("max_position_embeddings") or 0))
    return config


def cluster_of(row: Row) -> Cluster:
    """GPUs of one node, eight at most, and as many nodes as that takes."""
    count = _number(row["num_gpus"]) or 1
    text = row["gpu_type"].lower()
    name = next((target for part, target in _GPUS if part in text), None)
    if name is None:
        if not re.search(r"unstated|not stated|single gpu|various", text):
            raise NotExpressible(f"GPU type {row['gpu_type']!r} is not in the catalog")
        name = "a100-80gb-sxm"
    per_node = min(count, 8)
    memory = None
    stated = re.search(r"([\d.]+)\s*gib", text)
    if stated:
        memory = int(float(stated[1]) * GIB)
    cluster = make_cluster(gpu=name, gpus=per_node, nodes=max(1, count // per_node), gpu_memory=memory)
    if "a5000" in text:
        cluster = replace(cluster, gpu=replace(catalog_gpu("rtx-3090"), memory=int(23.67 * GIB)))
    if "6000 ada" in text:
        cluster = replace(cluster, gpu=replace(catalog_gpu("l40s"), memory=int(47.5 * GIB)))
    if "titan rtx" in text:
        cluster = replace(cluster, gpu=replace(catalog_gpu("rtx-3090"), memory=int(23.65 * GIB), architecture="turing"))
    return cluster


def metric_of(row: Row) -> str:
    """Which predicted quantity the row's figure is compared with."""
    kind = row["metric_kind"].lower()
    if row["outcome"].lower() != "measured":
        return "fits"
    if "reserved" in kind:
        return "peak_reserved"
    if "allocated" in kind or "active" in kind or "torchtune memory stats" in kind:
        return "peak_allocated"
    if re.search(r"nvidia|nvml|tool not stated|gram|vram|gpu memory", kind):
        return "peak_total"
    raise NotExpressible(f"metric {row['metric_kind']!r} is not known")


def _strategy(row: Row, spec: ModelSpec) -> Plan:
    text = row["strategy"].lower()
    note = (text + " " + row["notes"]).lower()
    if re.search(r"\btp\s*\d|tensor.parallel|\bpp\b|pipeline|3d|ulysses|\bsp \d|tiled|zero\+\+|simplefsdp 4", text) \
            or re.search(r"\bcp [2-9]", text):
        raise NotExpressible(f"strategy {row['strategy']!r}: parallel degrees or features that the engine does not lower")
    offload = "none"
    if "offload" in re.sub(r"no offload|(checkpoint|activation) (cpu )?offload", "", text):
        offload = "optimizer" if "optimizer" in text and not re.search(r"param", text) else "all"
    checkpointing = "none"
    ckpt = row["activation_ckpt"].lower()
    if ckpt.startswith("full"):
        checkpointing = "full"
    elif ckpt.startswith("selective"):
        checkpointing = "selective"
    elif not ckpt.startswith("none"):
        raise NotExpressible(f"activation checkpointing {row['activation_ckpt']!r} is not known")
    common: dict[str, Any] = {"checkpointing": checkpointing, "offload": offload}
    if "no_shard" in text or text.startswith("ddp") or "dataparallel" in text:
        return Plan(strategy="ddp", **common)
    if "fsdp" in text:
        version = 1 if re.search(r"fsdp ?1|fsdp\b(?!2)", text) and "fsdp2" not in text else 2
        name = "fsdp-grad" if re.search(r"shard_grad_op|zero-?2", text) else "hsdp" if "hybrid" in text else "fsdp"
        return Plan(strategy=name, fsdp=FsdpSettings(version=version), **common)  # type: ignore[arg-type]
    if row["source"].startswith("Qwen README") and text == "zero-3 or none":
        text = "zero-2"  # README.md: with the embedding trainable "it is not available to use ZeRO 3", its script takes ZeRO-2
    zero = re.search(r"zero[- ]?stage[- ]?(\d)|zero[- ]?(\d)", text)
    if zero:
        stage = zero[1] or zero[2]
        plan = Plan(strategy=f"zero{stage}", **common)  # type: ignore[arg-type]
        if re.search(r"qwen readme|hf|peft", row["source"].lower()):
            # their DeepSpeed files say "auto", which Hugging Face fills from the hidden size
            hidden = int(spec.config.get("hidden_size") or _number(row["hidden"]) or 0)
            if hidden and stage == "3":
                plan = plan.with_(bucket=hidden * hidden, persist=10 * hidden)
        return plan
    if text.startswith(("single", "none", "1 gpu")):
        return Plan(strategy="single", **common)
    raise NotExpressible(f"strategy {row['strategy']!r} ({note[:40]}) is not known")
