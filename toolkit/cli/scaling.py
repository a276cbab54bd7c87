"""`toolkit scaling`: throughput and efficiency from one GPU to many."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli import options as o
from toolkit.errors import UserError

EPILOG = ("Example: toolkit scaling llama-3.1-8b --gpu h100-sxm --gpus 8 --strategy fsdp --checkpointing full --max-gpus 256 "
          "--image scaling.svg. Exit status: 0 done, 2 bad input.")
PANEL = "Scaling"


def register(app: typer.Typer) -> None:
    app.command("scaling", epilog=EPILOG)(scaling)


def scaling(
    model: o.Model,
    max_gpus: Annotated[int, typer.Option("--max-gpus", help="The largest number of GPUs.", rich_help_panel=PANEL)],
    mode: Annotated[str, typer.Option("--mode", help="weak (each GPU's work stays), strong (the global batch stays) or both.",
                                      rich_help_panel=PANEL)] = "both",
    global_batch: Annotated[int | None, typer.Option("--global-batch", help="Samples per step under strong scaling; default: "
                                                     "what the workload makes on the largest number.",
                                                     rich_help_panel=PANEL)] = None,
    gain: Annotated[float, typer.Option("--gain", help="What a doubling of the GPUs must gain to be worth it, 1 to 2.",
                                        rich_help_panel=PANEL)] = 1.5,
    image: Annotated[Path | None, typer.Option("--image", help="Write the curve as an SVG picture.",
                                               rich_help_panel=o.OUT)] = None,
    method: o.Method = "full", lora_rank: o.LoraRank = 16, lora_targets: o.LoraTargets = "all-linear",
    seq_len: o.SeqLen = 2048, micro_batch: o.MicroBatch = 1, accumulate: o.Accumulate = 1,
    precision: o.Precision = "bf16", weights_dtype: o.WeightsDtype = "auto", optimizer: o.Optimizer = "adamw",
    optimizer_impl: o.OptimizerImpl = "default", attention: o.Attention = "sdpa", loss: o.Loss = "standard",
    compile: o.Compile = False, task: o.Task = "auto", trust_remote_code: o.Trust = False,
    gpu: o.Gpu = "auto", gpus: o.Gpus = None, nodes: o.Nodes = 1, gpu_memory: o.GpuMemory = None,
    host_memory: o.HostMemory = None,
    strategy: o.Strategy = "fsdp", checkpointing: o.Checkpointing = "none", offload: o.Offload = "none",
    offload_to: o.OffloadTo = "cpu", tp: o.Tp = 1, cp: o.Cp = 1, sp: o.Sp = 1, bucket: o.Bucket = None,
    persist: o.Persist = None, shard_size: o.ShardSize = None, json: o.Json = False,
) -> int:  # fmt: skip
    """Predict throughput and efficiency from one GPU to many, what bounds them, and where more GPUs stop paying."""
    values = dict(locals())
    modes = {"both": ("weak", "strong"), "weak": ("weak",), "strong": ("strong",)}.get(mode)
    if modes is None:
        raise UserError(f"--mode {mode!r} is not one of weak, strong, both")
    if not 1 < gain <= 2:
        raise UserError(f"gain is {gain}; it must lie above 1 and be at most 2")
    if global_batch is not None and global_batch < 1:
        raise UserError(f"global-batch is {global_batch}; it must be at least 1")
    if max_gpus < 1:
        raise UserError(f"max-gpus is {max_gpus}; it must be at least 1")
    if gpus is None and gpu not in ("auto", "cpu"):
        values["gpus"] = min(8, max_gpus)
    workload = o.workload_from(values).with_(loss_only=True, packed=True)
    plan, cluster = o.plan_from(values), o.cluster_from(values)
    spec = o.model_from(values, workload)
    from toolkit.planner.scaling import scaling as find

    curves = [find(spec, workload, plan, cluster, max_gpus, mode=m, global_batch=global_batch, least_gain=gain)  # type: ignore[arg-type]
              for m in modes]
    if image is not None:
        from toolkit.report.curve import svg
        from toolkit.strategies.base import write_whole

        try:
            write_whole(image, svg(curves, f"{spec.name}, {plan.label} on {cluster.gpu.name}"))
        except OSError as error:
            raise UserError(f"--image {image}: {error.strerror or error}") from None
    if json:
        print(json_module.dumps({"schema": 1, "curves": [c.to_json() for c in curves]}))
    else:
        from toolkit.report.curve import show_curves

        show_curves(curves)
    return 0
