"""`toolkit estimate`: memory and time of one plan."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli import options as o
from toolkit.errors import UserError

EPILOG = ("Example: toolkit estimate llama-3.1-8b --gpu a100-80gb-sxm --gpus 8 --strategy fsdp --seq-len 4096 "
          "--checkpointing full. "
          "Exit status: 0 it fits, 3 it does not, 2 bad input.")


def register(app: typer.Typer) -> None:
    app.command("estimate", epilog=EPILOG)(estimate)


def estimate(
    model: o.Model,
    method: o.Method = "full", lora_rank: o.LoraRank = 16, lora_targets: o.LoraTargets = "all-linear",
    seq_len: o.SeqLen = 2048, micro_batch: o.MicroBatch = 1, accumulate: o.Accumulate = 1,
    precision: o.Precision = "bf16", weights_dtype: o.WeightsDtype = "auto", optimizer: o.Optimizer = "adamw",
    optimizer_impl: o.OptimizerImpl = "default", attention: o.Attention = "sdpa", loss: o.Loss = "standard",
    compile: o.Compile = False, task: o.Task = "auto", trust_remote_code: o.Trust = False,
    gpu: o.Gpu = "auto", gpus: o.Gpus = None, nodes: o.Nodes = 1, gpu_memory: o.GpuMemory = None,
    host_memory: o.HostMemory = None, margin: o.Margin = None,
    strategy: o.Strategy = "single", checkpointing: o.Checkpointing = "none", offload: o.Offload = "none",
    offload_to: o.OffloadTo = "cpu", tp: o.Tp = 1, cp: o.Cp = 1, sp: o.Sp = 1, bucket: o.Bucket = None,
    persist: o.Persist = None,
    accelerate_config: Annotated[Path | None, typer.Option("--accelerate-config", help="Read the plan from an Accelerate file "
                                                           "instead.", rich_help_panel=o.PLAN)] = None,
    ds_config: Annotated[Path | None, typer.Option("--ds-config", help="The DeepSpeed JSON that goes with it.",
                                                   rich_help_panel=o.PLAN)] = None,
    json: o.Json = False,
) -> int:  # fmt: skip
    """Predict what one plan takes, term by term: memory at its peak, between steps, on the host, and the step's time."""
    values = dict(locals())
    if strategy == "single" and gpus is None and gpu == "auto" and accelerate_config is None:
        values["gpus"] = 1
    workload, cluster = o.workload_from(values), o.cluster_from(values)
    spec = o.model_from(values, workload)
    plan = o.plan_from(values)
    if ds_config is not None and accelerate_config is None:
        raise UserError("--ds-config goes with --accelerate-config")
    if accelerate_config is not None:
        from toolkit.strategies import read
        from toolkit.strategies.zero.autos import hidden_size_of

        found = read(accelerate_config, ds_config, hidden_size=hidden_size_of(spec.config))
        plan = found.plan.with_(checkpointing=checkpointing)
        changes = {k: v for k, v in (("precision", found.precision), ("accumulate", found.accumulate)) if v is not None}
        workload = workload.with_(**changes)
    from toolkit.estimate.engine import Estimator

    result = Estimator(spec).estimate(workload, plan, cluster)
    if json:
        print(json_module.dumps(result.to_json()))
    else:
        from toolkit.report.terminal import show_estimate

        show_estimate(result, margin)
    fits = result.memory.fits and (margin is None or result.memory.peak_total <= result.memory.capacity * (1 - margin))
    return 0 if fits else 3
