"""Rules that need several files: what one says and another says otherwise, and what the engine can't run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import UserError
from toolkit.specs import Cluster, Gpu, Workload
from toolkit.strategies import STRATEGIES, Found, check_plan
from toolkit.training.check.finding import Findings, ModelFacts
from toolkit.training.config import TrainConfig

_ANY = Gpu(
    name="any",
    memory=1,
    bf16_flops=None,
    fp16_flops=None,
    fp32_flops=1.0,
    bandwidth=1.0,
    link="nvlink",
    link_bandwidth=1.0,
    pcie_bandwidth=1.0,
)
"""The rules hold on every GPU; those for a CPU are the launch's to check."""


def check_together(
    found: Found | None,
    config: TrainConfig | None,
    deepspeed: Mapping[str, Any] | None,
    model: ModelFacts | None,
    out: Findings,
) -> None:
    """Hold the plan to the recipe and to the model.

    Args:
        found: what the launch files say, or None.
        config: the recipe's configuration, or None.
        deepspeed: the JSON's content, or None.
        model: the model, or None.
        out: where findings go, under the launch file's name.
    """
    if found is not None:
        _engine(found, config, out)
        if model is not None:
            _quantised(found, model, out)
        if config is not None:
            _said_twice(found, config, deepspeed, out)


def _engine(found: Found, config: TrainConfig | None, out: Findings) -> None:
    """The plan's own contradictions, and those with the recipe's workload."""
    processes = found.processes or max(found.nodes, STRATEGIES[found.plan.strategy].min_world)
    per_node = max(1, processes // max(1, found.nodes))
    if found.plan.strategy == "single":
        per_node = 1
    cluster = Cluster(gpu=_ANY, gpus_per_node=per_node, nodes=1 if found.plan.strategy == "single" else found.nodes)
    try:
        workload = config.workload if config is not None else Workload()
        check_plan(found.plan, workload, cluster)
    except UserError as error:
        out.error("", str(error))


def _quantised(found: Found, model: ModelFacts, out: Findings) -> None:
    """bitsandbytes weights under a sharding engine (peft, "Quantization" and "DeepSpeed/FSDP" guides)."""
    settings = model.config.get("quantization_config")
    if not isinstance(settings, Mapping):
        return
    info = STRATEGIES[found.plan.strategy]
    sharded = "parameters" in info.shards or info.family == "fsdp"
    if settings.get("load_in_8bit") and sharded:
        out.error(
            "quantization_config",
            f"{model.name} is loaded in 8 bit, which {found.plan.strategy} can't shard; 8-bit goes "
            "with single, ddp, zero1 and zero2; 4-bit with all of them",
        )
    storage = str(settings.get("bnb_4bit_quant_storage", "uint8")).removeprefix("torch.")
    if settings.get("load_in_4bit") and sharded and storage == "uint8":
        out.error(
            "quantization_config.bnb_4bit_quant_storage",
            f"is uint8: {found.plan.strategy} leaves such weights whole on every GPU; store them as bfloat16",
        )


def _said_twice(found: Found, config: TrainConfig, deepspeed: Mapping[str, Any] | None, out: Findings) -> None:
    """What the recipe decides and the launch files say otherwise."""
    json = deepspeed if deepspeed is not None else {}
    steps = json.get("gradient_accumulation_steps", found.accumulate if deepspeed is None else None)
    pairs = (
        ("gradient_accumulation_steps", steps, config.accumulate, "accumulate"),
        ("train_micro_batch_size_per_gpu", json.get("train_micro_batch_size_per_gpu"), config.micro_batch, "micro_batch"),
        ("gradient_clipping", json.get("gradient_clipping", found.clip if deepspeed is None else None), config.clip, "clip"),
    )
    for key, stated, wanted, name in pairs:
        if isinstance(stated, (int, float)) and float(stated) != float(wanted):
            out.error(key, f'is {stated}, but the recipe\'s {name} is {wanted}; write "auto" here, or delete the key')
    total = json.get("train_batch_size")
    if isinstance(total, int) and found.processes:
        rows = config.micro_batch * config.accumulate * found.processes // (found.plan.tp * found.plan.cp * found.plan.sp)
        if total != rows:
            out.error("train_batch_size", f'is {total}, but micro_batch x accumulate x ranks is {rows}; write "auto"')
    if found.precision is not None and found.precision != config.precision:
        out.error(
            "precision",
            f"is {found.precision} here, but the recipe's precision is {config.precision}; the recipe's is "
            "what runs: delete it here",
        )
    for section in ("optimizer", "scheduler"):
        if section in json:
            out.error(section, "the recipe brings its own optimizer and scheduler; delete the section")
    if found.plan.checkpointing != "none" and config.checkpointing != "none":
        out.error(
            "fsdp_config.fsdp_activation_checkpointing",
            f"the recipe checkpoints already (checkpointing: "
            f"{config.checkpointing}): layers would be recomputed twice; delete it here",
        )
    elif found.plan.checkpointing != "none":
        out.warning(
            "fsdp_config.fsdp_activation_checkpointing",
            "checkpointing is the recipe's key: write checkpointing: full there and delete it here",
        )
    replaced = STRATEGIES[found.plan.strategy].family == "zero" and found.plan.offload != "none"
    if replaced and config.optimizer != "adamw" and json.get("zero_force_ds_cpu_optimizer", True):
        out.error(
            "zero_optimization.offload_optimizer",
            f'Accelerate would replace {config.optimizer} by DeepSpeed\'s CPU Adam; add "zero_force_ds_cpu_optimizer": false',
        )
