"""A row of published throughput as the toolkit's own terms: model spec, workload, cluster and plan, or why it can't be said."""

from __future__ import annotations

import re
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


def number(text: str) -> float | None:
    """The first number of a cell; None without one."""
    found = re.search(r"\d+(?:\.\d+)?", text.replace(",", ""))
    return float(found.group()) if found else None


def model_of(row: Row) -> ModelSpec:
    """The model's shape from the row's own columns, as the architecture that has these products."""
    try:
        hidden, layers, heads = int(row["hidden"]), int(row["layers"]), int(row["heads"])
        kv, inner, vocab = int(row["kv_heads"]), int(row["intermediate"]), int(row["vocab"])
    except (KeyError, ValueError):
        raise Inexpressible("the model's shape is not stated") from None
    if "experts" in row.get("notes", "").lower() or re.search(r"moe|x\d+b", row["model"].lower()):
        raise Inexpressible("a mixture of experts whose routing is not stated")
    seq_len = int(number(row["seq_len"]) or 2048)
    if "ungated" not in row["mlp"]:
        parameters = number(row["parameters"]) or 0
        per_layer = hidden * (hidden + 2 * hidden // heads * kv + hidden) + 3 * hidden * inner
        tied = bool(parameters > 1e6 and abs(parameters - layers * per_layer - vocab * hidden) < 0.5 * vocab * hidden)
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": inner, "vocab_size": vocab,
            "max_position_embeddings": seq_len, "tie_word_embeddings": tied,
        }  # fmt: skip
    elif kv < heads:
        config = {"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", "n_embd": hidden, "n_layer": layers,
                  "n_head": heads, "n_inner": inner, "vocab_size": vocab, "n_positions": seq_len, "multi_query": kv == 1,
                  "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    else:
        config = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": hidden, "num_hidden_layers": layers,
                  "num_attention_heads": heads, "ffn_dim": inner, "vocab_size": vocab, "word_embed_proj_dim": hidden,
                  "max_position_embeddings": seq_len, "dropout": 0.0}
    return ModelSpec(name=row["model"], config=config, source=row["source"])


GPUS = (
    (r"B200", "b200"), (r"H200", "h200"), (r"H100.*PCIe", "h100-pcie"), (r"H100", "h100-sxm"),
    (r"A100.*PCIe.*80", "a100-80gb-pcie"), (r"A100.*40", "a100-40gb-sxm"), (r"A100", "a100-80gb-sxm"),
    (r"4090", "rtx-4090"), (r"3090", "rtx-3090"), (r"5090", "rtx-5090"), (r"MI300X", "mi300x"), (r"MI250X", "mi250x"),
    (r"L40S", "l40s"), (r"A10G", "a10g"), (r"V100.*32", "v100-32gb"), (r"V100", "v100-16gb"), (r"RTX A6000", "a6000"),
    (r"\bA40\b", "a40"), (r"\bA10\b", "a10"), (r"\bL4\b", "l4"), (r"\bT4\b", "t4"),
)  # fmt: skip
STRATEGIES = (
    ("shard_grad_op", "fsdp-grad"), ("hsdp", "hsdp"), ("hybrid", "hsdp"), ("zero3", "zero3"), ("zero-3", "fsdp"),
    ("zero2", "zero2"), ("zero1", "zero1"), ("fsdp", "fsdp"), ("ddp", "ddp"), ("single", "single"),
    ("tp ", "single"), ("cp ", "single"),
)  # fmt: skip


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
        # Dynamic power goes with the cube of the clock; the SXM card's datasheet is for 700 W.
        clock = (float(watts.group(1)) / 700) ** (1 / 3)
        found = replace(found, bf16_flops=found.bf16_flops * clock, fp16_flops=(found.fp16_flops or 0) * clock)
    return found


def cluster_of(row: Row) -> Cluster:
    """GPUs, nodes and the network between them; a network that is not stated is the usual one of that generation."""
    count = re.fullmatch(r"\d+", row["num_gpus"].strip())
    if count is None:
        raise Inexpressible(f"the number of GPUs is not one number: {row['num_gpus']}")
    world = int(count.group())
    per_node = min(world, int(number(row["gpus_per_node"]) or 8))
    if world % per_node:
        raise Inexpressible(f"{world} GPUs do not fill nodes of {per_node}")
    gpu = gpu_of(row["gpu"])
    wires = row["interconnect"]
    rate = re.search(r"(\d+(?:\.\d+)?) ?(Gb|Tb)/s( per GPU| \([^)]*\) per GPU)?", wires)
    usual = {"hopper": 400e9, "blackwell": 400e9}.get(gpu.architecture, 200e9) * per_node
    bits = usual
    if rate:
        bits = float(rate.group(1)) * (1e9 if rate.group(2) == "Gb" else 1e12)
        bits *= per_node if rate.group(3) or "NDR" in wires else 1
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
    degrees = {axis: int(m.group(1)) for axis in ("tp", "cp") if (m := re.search(rf"\b{axis} ?(\d+)", text))}
    if re.search(r"\btp\b", text) and "tp" not in degrees:
        raise Inexpressible("the tensor-parallel degree is not stated")
    lower = text.lower()
    for key, name in STRATEGIES:
        if key in lower:
            strategy = name
            break
    else:
        raise Inexpressible(f"strategy {text} is none of the toolkit's")
    if world == 1:
        strategy = "single"
    extra: dict[str, Any] = {}
    if "offload" in lower:
        extra["offload"] = "optimizer" if "optimizer" in lower else "all"
    if strategy == "hsdp" and (size := re.search(r"shard (\d+)", lower)):
        extra["shard_size"] = int(size.group(1))
    # Composer's `ddp_sync_context` leaves only DDP's gradients unreduced between micro-batches (composer/distributed).
    fsdp = FsdpSettings(version=2 if "FSDP2" in text + row["precision"] else 1,
                        sync_each_micro_batch="llm-foundry" in row["source"])
    return Plan(strategy=strategy, fsdp=fsdp, **degrees, **extra)  # type: ignore[arg-type]


def checkpointing_of(text: str) -> tuple[str, float]:
    """(the plan's word, the share of layers)."""
    lower = text.lower()
    if part := re.search(r"(\d+) of (\d+) layers", lower):
        return "full", int(part.group(1)) / int(part.group(2))
    if "every 2nd" in lower or "block)" in lower and "selective" in lower:
        return "full", 0.5
    if "selective" in lower:
        return "selective", 1.0
    if "offload" in lower:
        raise Inexpressible("activation offload")
    if lower.startswith("full") or "default on" in lower or "needed at batch" in lower:
        return "full", 1.0
    if lower.startswith("no"):
        return "none", 1.0
    raise Inexpressible(f"activation checkpointing is not stated: {text}")


def workload_of(row: Row, plan: Plan, world: int) -> Workload:
    """Method, precision, batch and kernels of the row."""
    precision = row["precision"].lower()
    if "fp8" in precision or "float8" in precision:
        raise Inexpressible("8-bit matrix products")
    micro, seq_len = number(row["micro_batch_per_gpu"]), number(row["seq_len"])
    if not micro or not seq_len:
        raise Inexpressible("the micro-batch or the sequence length is not stated")
    method = row["method"].lower()
    kind = "qlora" if "qlora" in method else "lora" if "lora" in method else "full"
    words: dict[str, Any] = {"precision": "bf16"}
    if precision.startswith(("pure bf16", "bf16-true", "bf16 params, bf16 compute")):
        words["precision"] = "bf16-pure"
    elif "states + bf16 autocast" in precision or "bf16 base + bf16 autocast" in precision:
        words["weights_dtype"] = "bf16"
    elif "fp16" in precision:
        words["precision"] = "fp16"
    # llm-foundry's models have norm_type low_precision_layernorm.
    words["variant"] = Variant(reduce_fp32=reduces_fp32(row), kernels="fused-norm" if "llm-foundry" in row["source"] else "model")
    if kind != "full":
        rank = re.search(r"r(\d+)", method)
        words["lora_rank"] = int(rank.group(1)) if rank else 16
        if "q,k,v,o" in method:
            opt_like = "ungated" in row["mlp"]
            words["lora_targets"] = "c_attn,c_proj" if opt_like else "q_proj,k_proj,v_proj,o_proj"
    optimizer = row["optimizer"].lower()
    words["optimizer"] = "adamw-8bit" if "8-bit" in optimizer else "adamw"
    words["optimizer_impl"] = "fused" if "fused" in optimizer or "megatron" in optimizer else "default"
    words["compile"] = row["compile"].startswith("yes") or "TE kernels" in row["compile"] or "thunder" in row["compile"]
    words["compile"] |= "custom fused kernels" in row["notes"]
    replicas = max(1, world // (plan.tp * plan.cp))
    whole = number(row["global_batch"])
    accumulate = max(1, round(whole / (micro * replicas))) if whole else 1
    if "one micro-iteration" in row["notes"]:  # timed is the last micro-batch, with the gradients' reduction and the update
        accumulate = 1
    return Workload(method=kind, seq_len=int(seq_len), micro_batch=int(micro), accumulate=accumulate, attention="flash", **words)  # type: ignore[arg-type]


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


def case_of(row: Row) -> Case:
    """Raises Inexpressible with the reason."""
    measured = number(row["tokens_per_second_per_gpu"])
    if not measured:
        raise Inexpressible("no tokens per second, only MFU")
    cluster = cluster_of(row)
    plan = plan_of(row, cluster.world_size)
    word, share = checkpointing_of(row["activation_checkpointing"])
    plan = plan.with_(checkpointing=word)
    workload = workload_of(row, plan, cluster.world_size)
    return Case(row, model_of(row), workload, plan, cluster, share, measured, software_of(row, plan))
