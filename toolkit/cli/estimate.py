"""`toolkit estimate`: memory and time of one plan."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli import options as o
from toolkit.errors import UserError
from toolkit.specs import Cluster, Plan, Workload

if TYPE_CHECKING:
    from toolkit.specs import ModelSpec

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
    compile: o.Compile = False, task: o.Task = "auto", alloc: o.Alloc = "expandable",
    lengths: o.Lengths = "equal", trust_remote_code: o.Trust = False,
    gpu: o.Gpu = "auto", gpus: o.Gpus = None, nodes: o.Nodes = 1, gpu_memory: o.GpuMemory = None,
    host_memory: o.HostMemory = None, margin: o.Margin = None, calibration: o.Calibration = None,
    strategy: o.Strategy = "single", checkpointing: o.Checkpointing = "none", offload: o.Offload = "none",
    offload_to: o.OffloadTo = "cpu", tp: o.Tp = 1, cp: o.Cp = 1, sp: o.Sp = 1, bucket: o.Bucket = None,
    persist: o.Persist = None, shard_size: o.ShardSize = None,
    accelerate_config: Annotated[Path | None, typer.Option("--accelerate-config", help="Read the plan from an Accelerate file "
                                                           "instead.", rich_help_panel=o.PLAN)] = None,
    ds_config: Annotated[Path | None, typer.Option("--ds-config", help="The DeepSpeed JSON that goes with it.",
                                                   rich_help_panel=o.PLAN)] = None,
    json: o.Json = False,
) -> int:  # fmt: skip
    """Predict what one plan takes, term by term: memory at its peak, between steps, on the host, and the step's time."""
    values = dict(locals())
    if ds_config is not None and accelerate_config is None:
        raise UserError("--ds-config goes with --accelerate-config")
    workload = o.workload_from(values)
    if accelerate_config is None:
        plan = o.plan_from(values)
        if plan.strategy == "single" and gpu == "auto":
            values["gpus"] = gpus or 1
        cluster = o.cluster_from(values)
        spec = o.model_from(values, workload)
    else:
        spec = o.model_from(values, workload)
        plan, workload, cluster = _as_the_files_say(values, workload, spec)
    from toolkit.estimate.engine import Estimator

    result = Estimator(spec).estimate(workload, plan, cluster)
    if json:
        print(json_module.dumps(result.to_json()))
    else:
        from toolkit.report.terminal import show_estimate

        show_estimate(result, margin)
    fits = result.memory.fits and (margin is None or result.memory.peak_total <= result.memory.capacity * (1 - margin))
    return 0 if fits else 3


def _as_the_files_say(values: dict[str, Any], workload: Workload, spec: ModelSpec) -> tuple[Plan, Workload, Cluster]:
    """Plan, workload and cluster where Accelerate's files say more than the options; counts that were given as options hold."""
    from toolkit.strategies import read
    from toolkit.strategies.zero.autos import hidden_size_of

    asked = Plan()
    for name in ("strategy", "offload", "offload_to", "tp", "cp", "sp", "bucket", "persist", "shard_size"):
        if values[name] != getattr(asked, name):
            raise UserError(f"--{name.replace('_', '-')} and --accelerate-config exclude each other: the file names the plan")
    found = read(values["accelerate_config"], values["ds_config"], hidden_size=hidden_size_of(spec.config))
    if values["gpus"] is None and values["nodes"] == 1 and found.processes:
        values = {**values, "gpus": max(1, found.processes // found.nodes), "nodes": found.nodes}
    said = {name: getattr(found, name) for name in ("precision", "accumulate", "micro_batch")}
    workload = workload.with_(**{name: value for name, value in said.items() if value is not None})
    plan = found.plan
    if values["checkpointing"] != "none":  # most files leave it to the recipe
        plan = plan.with_(checkpointing=values["checkpointing"])
    return plan, workload, o.cluster_from(values)
