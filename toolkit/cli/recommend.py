"""`toolkit recommend`: the lightest plan that fits, with the evidence and the files that launch it."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli import options as o
from toolkit.errors import UserError

EPILOG = ("Example: toolkit recommend llama-3.1-8b --gpu a100-80gb-sxm --gpus 8 --seq-len 4096 --write runs/llama. "
          "Exit status: 0 something fits, 3 nothing does (what would help is printed), 2 bad input.")
PANEL = "What is preferred"


def register(app: typer.Typer) -> None:
    app.command("recommend", epilog=EPILOG)(recommend)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{option} {value!r} is not one of {', '.join(allowed)}")


def _check(values: dict[str, Any]) -> None:
    """What is wrong in this command's own options is said before anything is searched."""
    _one_of("prefer", values["prefer"], ("lightest", "fastest", "fewest-gpus"))
    _one_of("engine", values["engine"], ("any", "fsdp", "deepspeed"))
    _one_of("allow-offload", values["allow_offload"], ("none", "cpu", "nvme"))
    for name in ("global_batch", "tokens", "base_batch"):
        if values[name] is not None and values[name] < 1:
            raise UserError(f"{name.replace('_', '-')} is {values[name]}; it must be at least 1")
    if not 0 < values["learning_rate"] < float("inf"):
        raise UserError(f"learning-rate is {values['learning_rate']}; it must be a number above zero")
    write = values["write"]
    if write is not None:
        there = next(place for place in (write, *write.parents) if place.exists())
        if not there.is_dir():
            raise UserError(f"--write {write}: {there} is a file; name a folder")


def recommend(
    model: o.Model,
    method: o.Method = "full", lora_rank: o.LoraRank = 16, lora_targets: o.LoraTargets = "all-linear",
    seq_len: o.SeqLen = 2048, micro_batch: o.MicroBatchSearched = None, accumulate: o.Accumulate = 1,
    precision: o.Precision = "bf16", weights_dtype: o.WeightsDtype = "auto", optimizer: o.Optimizer = "adamw",
    optimizer_impl: o.OptimizerImpl = "default", attention: o.Attention = "sdpa", loss: o.Loss = "standard",
    compile: o.Compile = False, task: o.Task = "auto", alloc: o.Alloc = "expandable",
    lengths: o.Lengths = "equal", trust_remote_code: o.Trust = False,
    gpu: o.Gpu = "auto", gpus: o.Gpus = None, nodes: o.Nodes = 1, gpu_memory: o.GpuMemory = None,
    host_memory: o.HostMemory = None, margin: o.Margin = None, calibration: o.Calibration = None,
    prefer: Annotated[str, typer.Option("--prefer", help="lightest, fastest or fewest-gpus.",
                                        rich_help_panel=PANEL)] = "lightest",
    engine: Annotated[str, typer.Option("--engine", help="any, fsdp or deepspeed.", rich_help_panel=PANEL)] = "any",
    global_batch: Annotated[int | None, typer.Option("--global-batch", help="Samples per optimizer step over all GPUs.",
                                                     rich_help_panel=PANEL)] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Training tokens of the whole run: the answer speaks of time.",
                                               rich_help_panel=PANEL)] = None,
    allow_offload: Annotated[str, typer.Option("--allow-offload", help="none, cpu or nvme.", rich_help_panel=PANEL)] = "none",
    base_batch: Annotated[int | None, typer.Option("--base-batch", help="Global batch that the learning rate was tuned for.",
                                                   rich_help_panel=PANEL)] = None,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="The rate that was tuned for it.",
                                                 rich_help_panel=PANEL)] = 2e-5,
    write: Annotated[Path | None, typer.Option("--write", help="Write the launch files into this folder.",
                                               rich_help_panel=o.OUT)] = None,
    all: Annotated[bool, typer.Option("--all", help="Show every plan that was tried.", rich_help_panel=o.OUT)] = False,
    json: o.Json = False,
) -> int:  # fmt: skip
    """Find the lightest strategy that fits, say why, and write the files and the command that launch it."""
    values = dict(locals())
    _check(values)
    workload, cluster = o.workload_from(values).with_(loss_only=True, packed=True), o.cluster_from(values)
    spec = o.model_from(values, workload)
    from toolkit.planner.recommendation import recommend as find
    from toolkit.planner.search import Request

    content = None
    request = Request(spec, workload, cluster, prefer, engine, allow_offload, global_batch, micro_batch is not None, margin)  # type: ignore[arg-type]
    if json:
        result = find(request, tokens=tokens)
    else:
        from toolkit.report.terminal import progress, show_recommendation

        with progress("Looking for plans") as say:
            result = find(request, tokens=tokens, progress=say)
    if result.chosen is None and result.closest is None and result.results:  # not one plan of this model could be estimated
        raise UserError(result.results[0].why)
    if write is not None and result.chosen is not None:
        from toolkit.planner.files import write_files
        from toolkit.report.page import add_page

        written = write_files(result, write, model, base_batch=base_batch, learning_rate=learning_rate)
        result, content = add_page(written, write)
    if json:
        print(json_module.dumps(content or result.to_json()))
    else:
        show_recommendation(result, every=all, base_batch=base_batch, learning_rate=learning_rate)
    return 0 if result.chosen is not None else 3
