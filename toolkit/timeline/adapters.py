"""LoRA and QLoRA on a model that has no weights: which modules get adapters, what is frozen, what is packed."""

from __future__ import annotations

from typing import Any

from toolkit.specs import Workload


def freeze_and_adapt(model: Any, workload: Workload) -> None:
    """Add the adapters that peft would add (in place); with `full` nothing happens."""
    if workload.method == "full":
        return
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    targets: Any = workload.lora_targets
    if targets != "all-linear":
        targets = [t.strip() for t in targets.split(",") if t.strip()]
    config = LoraConfig(r=workload.lora_rank, target_modules=targets, task_type="CAUSAL_LM")
    with torch.device("meta"):
        inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or "modules_to_save" in name)
        if "lora_" in name and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def after_loading(model: Any, workload: Workload) -> None:
    """Hook for what must happen once the tensors are fake CPU tensors."""
