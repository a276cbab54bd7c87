"""A row of published throughput as the toolkit's own terms: model spec, workload, cluster and plan, or why it can't be said."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolkit.estimate.time import Software
from toolkit.specs import Cluster, ModelSpec, Plan, Workload
from toolkit.specs.catalog import gpu as catalog_gpu
from toolkit.specs.cluster import Gpu
from toolkit.specs.plan import FsdpSettings
from toolkit.specs.variant import Variant

Row = dict[str, str]


class Inexpressible(Exception):
    """The row says something that the toolkit's vocabulary has no word for; the message is the reason."""


@dataclass(frozen=True)
class Case:
    """One row, expressed."""

    row: Row
    model: ModelSpec
    workload: Workload
    plan: Plan
    cluster: Cluster
    checkpointed: float
    """Share of the layers that are checkpointed when the plan says full; 1.0 elsewhere."""
    tokens_per_second_per_gpu: float
    software: Software


COLUMNS = (
    "id", "source", "model", "parameters", "hidden", "layers", "heads", "kv_heads", "intermediate", "vocab", "method", "strategy",
    "gpu", "num_gpus", "gpus_per_node", "interconnect", "micro_batch_per_gpu", "seq_len", "global_batch", "precision",
    "activation_checkpointing", "attention", "compile", "optimizer", "tokens_per_second_per_gpu", "grade", "notes", "series",
    "mlp",
)  # fmt: skip
"""What is read of a row; a cell that is not there is empty."""


def cells(row: Mapping[str, str | None]) -> Row:
    """The row with every column that is read, and without the blanks around its cells."""
    return {**{k: v for k, v in row.items() if isinstance(v, str)}, **{k: (row.get(k) or "").strip() for k in COLUMNS}}


def number(text: str, kilo: int = 1000) -> float | None:
    """The first number of a cell; None without one."""
    found = re.search(r"(\d+(?:\.\d+)?)([kKM](?![a-zA-Z]))?", text.replace(",", ""))
    return float(found.group(1)) * {None: 1, "k": kilo, "K": kilo, "M": kilo * kilo}[found.group(2)] if found else None


def one_number(text: str, name: str) -> int:
    """A cell that holds one whole number; 131072 may be written 128K."""
    value = number(text, 1024)
    if value is None:
        raise Inexpressible(f"the {name} is not stated")
    if value < 1 or value % 1 or re.search(r"\d *(-|to|or) *\d|^-", text):
        raise Inexpressible(f"the {name} is not one whole number: {text}")
    return int(value)


def model_of(row: Row) -> ModelSpec:
    """The model's shape from the row's own columns, as the architecture that has these products."""
    try:
        hidden, layers, heads = int(row["hidden"]), int(row["layers"]), int(row["heads"])
        kv, inner, vocab = int(row["kv_heads"]), int(row["intermediate"]), int(row["vocab"])
    except ValueError:
        raise Inexpressible("the model's shape is not stated") from None
    if min(hidden, layers, heads, kv, inner, vocab) < 1 or hidden % heads or heads % kv:
        raise Inexpressible(f"no model has this shape: hidden {hidden}, {layers} layers, {heads} heads, {kv} key-value heads")
    if "experts" in row["notes"].lower() or re.search(r"moe|x\d+b", row["model"].lower()):
        raise Inexpressible("a mixture of experts whose routing is not stated")
    seq_len = one_number(row["seq_len"], "sequence length")
    if "ungated" not in row["mlp"]:
        parameters = number(row["parameters"]) or 0
        per_layer = hidden * (hidden + 2 * hidden // heads * kv + hidden) + 3 * hidden * inner
        tied = bool(parameters > 1e6 and abs(parameters - layers * per_layer - vocab * hidden) < 0.5 * vocab * hidden)
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": inner, "vocab_size": vocab,
            "max_position_embeddings": seq_len, "tie_word_embeddings": tied,
        }  # fmt: skip
    elif 1 < kv < heads:
        config = {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "hidden_size": hidden,
                  "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
                  "intermediate_size": inner, "vocab_size": vocab,
                  "max_position_embeddings": seq_len, "sliding_window": None, "residual_dropout": 0.0, "embedding_dropout": 0.0}
    elif kv < heads:
        config = {"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", "n_embd": hidden, "n_layer": layers,
                  "n_head": heads, "n_inner": inner, "vocab_size": vocab, "n_positions": seq_len, "multi_query": True,
                  "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    else:
        config = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": hidden, "num_hidden_layers": layers,
                  "num_attention_heads": heads, "ffn_dim": inner, "vocab_size": vocab, "word_embed_proj_dim": hidden,
                  "max_position_embeddings": seq_len, "dropout": 0.0}
    return ModelSpec(name=row["model"], config=config, source=row["source"])


GPUS = (
    (r"\bB200", "b200"), (r"\bH200", "h200"), (r"\bH100(?=.*PCIe)", "h100-pcie"), (r"\bH100(?!.*NVL\b)", "h100-sxm"),
    (r"\bA100(?=.*PCIe)(?=.*40)", "a100-40gb-pcie"), (r"\bA100(?=.*PCIe)", "a100-80gb-pcie"),
    (r"\bA100.*40", "a100-40gb-sxm"), (r"\bA100", "a100-80gb-sxm"),
    (r"4090", "rtx-4090"), (r"3090", "rtx-3090"), (r"5090", "rtx-5090"), (r"MI300X", "mi300x"), (r"MI250X", "mi250x"),
    (r"\bL40S", "l40s"), (r"\bA10G", "a10g"), (r"\bV100.*32", "v100-32gb"), (r"\bV100", "v100-16gb"), (r"RTX A6000", "a6000"),
    (r"\bA40\b", "a40"), (r"\bA10\b", "a10"), (r"\bL4\b", "l4"), (r"\bT4\b", "t4"),
)  # fmt: skip
BOARD_WATTS = {"h100-sxm": 700, "h200": 700, "b200": 1000, "a100-40gb-sxm": 400, "a100-80gb-sxm": 400}
"""The datasheets' power, which a lower limit in a row is a share of."""
STRATEGIES = (
    ("shard_grad_op", "fsdp-grad"), ("hsdp", "hsdp"), ("hybrid", "hsdp"), ("fsdp", "fsdp"), ("zero3", "zero3"),
    ("zero2", "zero2"), ("zero1", "zero1"), ("ddp", "ddp"), ("single", "single"),
)  # fmt: skip
DEGREES = {"tp": r"\btp ?(\d+)", "cp": r"\bcp ?(\d+)", "sp": r"(?:\bsp|ulysses|sequence parallel) ?(\d+)"}


def gpu_of(text: str) -> Gpu:
    """The catalog's GPU; what a row says of another bandwidth or power limit replaces the datasheet's."""
    for pattern, name in GPUS:
        if re.search(pattern, text, re.IGNORECASE) and "Ada 48" not in text and "A6000 Ada" not in text:
            found = catalog_gpu(name)
            break
    else:
        raise Inexpressible(f"GPU {text} is not in the catalog")
    if bandwidth := re.search(r"(\d(?:\.\d+)?) TB/s", text):
        found = replace(found, bandwidth=float(bandwidth.group(1)) * 1e12)
    if (watts := re.search(r"(\d{3}) W limit", text)) and found.bf16_flops:
        # Dynamic power goes with the cube of the clock.
        clock = min(1.0, float(watts.group(1)) / BOARD_WATTS.get(found.name, float(watts.group(1)))) ** (1 / 3)
        found = replace(found, bf16_flops=found.bf16_flops * clock, fp16_flops=(found.fp16_flops or 0) * clock)
    return found


def cluster_of(row: Row) -> Cluster:
    """GPUs, nodes and the network between them; a network that is not stated is the usual one of that generation."""
    count = re.fullmatch(r"\d+", row["num_gpus"].strip())
    if count is None:
        raise Inexpressible(f"the number of GPUs is not one number: {row['num_gpus']}")
    world = int(count.group())
    per_node = min(world, int(number(row["gpus_per_node"]) or 8))
    if not world:
        raise Inexpressible("no GPU at all")
    if world % per_node:
        raise Inexpressible(f"{world} GPUs do not fill nodes of {per_node}")
    gpu = gpu_of(row["gpu"])
    wires = row["interconnect"]
    rate = re.search(r"(?:(\d+) ?x ?)?(\d+(?:\.\d+)?) ?(G|T)(b/s|bps|bit/s|bE|B/s)( per GPU| \([^)]*\) per GPU)?", wires)
    usual = {"hopper": 400e9, "blackwell": 400e9}.get(gpu.architecture, 200e9) * per_node
    bits = usual
    if rate and float(rate.group(2)):
        bits = float(rate.group(2)) * (1e9 if rate.group(3) == "G" else 1e12) * (8 if rate.group(4) == "B/s" else 1)
        bits *= int(rate.group(1) or 1) * (per_node if rate.group(5) or "NDR" in wires and not rate.group(1) else 1)
    if re.search(r"no NVLink", wires):
        gpu = replace(gpu, link="pcie", link_bandwidth=gpu.pcie_bandwidth)
    return Cluster(gpu=gpu, gpus_per_node=per_node, nodes=world // per_node, network_bandwidth=bits / 8)


def plan_of(row: Row, world: int) -> Plan:
    """Strategy and degrees from the strategy cell."""
    text = row["strategy"]
    if re.search(r"\bpp\b|pipeline", text, re.IGNORECASE):
        raise Inexpressible("pipeline parallelism")
    if "not stated" in text or "not restated" in text:
        raise Inexpressible("the strategy is not stated")
    if "YaFSDP" in text:
        raise Inexpressible("YaFSDP is another engine")
    lower = re.sub(r"zero[ _-]?(\d)\b", r"zero\1", text.lower())
    if "zero++" in lower or re.search(r"\bep ?\d|expert parallel", lower):
        raise Inexpressible(f"strategy {text} is none of the toolkit's")
    degrees = {axis: int(m.group(1)) for axis, pattern in DEGREES.items() if (m := re.search(pattern, lower))}
    for axis, name in (("tp", "tensor"), ("cp", "context")):
        if re.search(rf"\b{axis}\b", lower) and axis not in degrees:
            raise Inexpressible(f"the {name}-parallel degree is not stated")
    if world % max(1, math.prod(degrees.values())):
        raise Inexpressible(f"{text} does not divide {world} GPUs")
    for key, name in STRATEGIES:
        if key in lower:
            strategy = name
            break
    else:
        if not degrees:
            raise Inexpressible(f"strategy {text} is none of the toolkit's")
        strategy = "single"
    if world == 1:
        strategy = "single"
    extra: dict[str, Any] = {}
    if "offload" in lower:
        extra["offload"] = "optimizer" if "optimizer" in lower else "all"
        extra["offload_to"] = "nvme" if "nvme" in lower else "cpu"
    if strategy == "hsdp" and (size := re.search(r"shard (\d+)|(?<![\d.])(\d+) ?x ?\d+\b", lower)):
        extra["shard_size"] = int(size.group(1) or size.group(2))
        if world // degrees.get("tp", 1) % extra["shard_size"]:
            raise Inexpressible(f"{text} does not divide {world} GPUs")
    # Composer's `ddp_sync_context` leaves only DDP's gradients unreduced between micro-batches (composer/distributed).
    fsdp = FsdpSettings(version=2 if "FSDP2" in text + row["precision"] else 1,
                        sync_each_micro_batch="llm-foundry" in row["source"])
    return Plan(strategy=strategy, fsdp=fsdp, **degrees, **extra)  # type: ignore[arg-type]


def checkpointing_of(text: str) -> tuple[str, float]:
    """(the plan's word, the share of layers)."""
    lower = text.lower()
    if part := re.search(r"(\d+) of (\d+) layers", lower):
        some, of = int(part.group(1)), int(part.group(2))
        if not 0 <= some <= of or not of:
            raise Inexpressible(f"activation checkpointing of {text}")
        return "full", some / of
    if nth := re.search(r"every (\d+)(?:nd|rd|th)", lower):
        return "full", 1 / max(1, int(nth.group(1)))
    if "block)" in lower and "selective" in lower:
        return "full", 0.5
    if "selective" in lower:
        return "selective", 1.0
    if "offload" in lower:
        raise Inexpressible("activation offload")
    if lower.startswith(("full", "yes")) or "default on" in lower or "needed at batch" in lower:
        return "full", 1.0
    if lower.startswith("no"):
        return "none", 1.0
    raise Inexpressible(f"activation checkpointing is not stated: {text}")


def workload_of(row: Row, plan: Plan, world: int) -> Workload:
    """Method, precision, batch and kernels of the row."""
    precision, method, optimizer = row["precision"].lower(), row["method"].lower(), row["optimizer"].lower()
    if re.search(r"fp[468]\b|fp4|float8|int8|8-bit base", precision):
        raise Inexpressible("8-bit matrix products")
    if precision.startswith("tf32"):
        raise Inexpressible("TF32 products")
    if not re.search(r"pretrain|full|sft|tun|lora", method) or "dora" in method:
        raise Inexpressible(f"method {row['method']} is none of the toolkit's")
    micro, seq_len = one_number(row["micro_batch_per_gpu"], "micro-batch"), one_number(row["seq_len"], "sequence length")
    kind = "qlora" if "qlora" in method else "lora" if "lora" in method else "full"
    words: dict[str, Any] = {"precision": "bf16"}
    if precision.startswith(("pure bf16", "bf16-true", "bf16 params, bf16 compute")):
        words["precision"] = "bf16-pure"
    elif "states + bf16 autocast" in precision or "bf16 base + bf16 autocast" in precision:
        words["weights_dtype"] = "bf16"
    elif "fp16" in precision:
        words["precision"] = "fp16"
    elif precision.startswith("fp32") and "bf16" not in precision:
        words["precision"] = "fp32"
    # llm-foundry's models have norm_type low_precision_layernorm.
    words["variant"] = Variant(reduce_fp32=reduces_fp32(row), kernels="fused-norm" if "llm-foundry" in row["source"] else "model")
    if kind != "full":
        rank = re.search(r"r(\d+)", method)
        words["lora_rank"] = int(rank.group(1)) if rank else 16
        if "q,k,v,o" in method:
            opt_like = "ungated" in row["mlp"]
            words["lora_targets"] = "c_attn,c_proj" if opt_like else "q_proj,k_proj,v_proj,o_proj"
    words["optimizer"] = ("paged-" if "paged" in optimizer else "") + "adamw-8bit" if re.search("8-?bit", optimizer) else \
        next((name for name in ("sgd", "lion", "adafactor") if name in optimizer), "adamw")
    if re.search("muon|shampoo|soap|galore|apollo", optimizer):
        raise Inexpressible(f"optimizer {row['optimizer']} is none of the toolkit's")
    words["optimizer_impl"] = "fused" if "fused" in optimizer or "megatron" in optimizer else "default"
    words["compile"] = row["compile"].startswith("yes") or "TE kernels" in row["compile"] or "thunder" in row["compile"]
    words["compile"] |= "custom fused kernels" in row["notes"]
    replicas = max(1, world // (plan.tp * plan.cp * plan.sp))
    whole = number(row["global_batch"]) or 0
    if "token" in row["global_batch"]:
        whole /= seq_len
    accumulate = max(1, round(whole / (micro * replicas)))
    if "one micro-iteration" in row["notes"]:  # timed is the last micro-batch, with the gradients' reduction and the update
        accumulate = 1
    words["attention"] = "eager" if "eager" in row["attention"] else "sdpa" if words["precision"] == "fp32" else "flash"
    return Workload(method=kind, seq_len=seq_len, micro_batch=micro, accumulate=accumulate, **words)  # type: ignore[arg-type]


def attention_of(text: str) -> str:
    """The generation of the attention kernels.

    llm-foundry's tables were measured with torch 1.13 (a comment in that README), so with flash-attn 1.
    """
    if "attn_impl=flash" in text:
        return "attention_flash1"
    return "attention_flash3" if re.search(r"FA[34]|cuDNN", text) else "attention"


def reduces_fp32(row: Row) -> bool:
    """Gradients travel in fp32: as stated, and torchtitan's and Composer's mixed_precision=DEFAULT (mosaicml/composer#2047)."""
    precision = row["precision"].lower()
    return "fp32 gradient reduce" in precision or "fp32 sharded params (fsdp2)" in precision or \
        "mixed_precision=DEFAULT" in row["notes"]


def software_of(row: Row, plan: Plan) -> Software:
    """What the row's framework does otherwise.

    KempnerForge and torchtitan call `fully_shard(model, reshard_after_forward=True)` for all that is outside the layers;
    litgpt's strategy for Thunder (`thunder_ddp.py`) calls `_sync_grads` before the micro-batch that ends the accumulation.
    """
    return Software(attention=attention_of(row["attention"]), gathers_root_again="fsdp2" in row["precision"].lower(),
                    reduces_alone=plan.strategy == "ddp" and "thunder" in row["compile"])


def case_of(row: Mapping[str, str | None]) -> Case:
    """Raises Inexpressible, or a UserError of the toolkit's own words, with the reason."""
    row = cells(row)
    measured = number(row["tokens_per_second_per_gpu"])
    if not measured or row["tokens_per_second_per_gpu"].startswith("-"):
        raise Inexpressible("no tokens per second, only MFU")
    cluster = cluster_of(row)
    plan = plan_of(row, cluster.world_size)
    word, share = checkpointing_of(row["activation_checkpointing"])
    plan = plan.with_(checkpointing=word)
    workload = workload_of(row, plan, cluster.world_size)
    return Case(row, model_of(row), workload, plan, cluster, share, measured, software_of(row, plan))
