"""The options that several subcommands share, and how they become specs. The contract is docs/cli.md."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.errors import UserError
from toolkit.specs import Cluster, Plan, Workload
from toolkit.units import parse_size

WORK, CLUSTER, PLAN, OUT = "Workload", "Cluster", "Plan", "Output"


def _option(*names: str, help: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar, show_default=True)


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A directory with config.json, a config.json, a hub id, or a name "
                                      "of the catalog (toolkit catalog models).")]
Json = Annotated[bool, _option("--json", help="Machine output on stdout, nothing else on stdout.", panel=OUT)]
Trust = Annotated[bool, _option("--trust-remote-code", help="Run model code that comes with the config.", panel=WORK)]

Method = Annotated[str, _option("--method", help="full, lora or qlora.", panel=WORK)]
LoraRank = Annotated[int, _option("--lora-rank", help="Rank of the adapters.", panel=WORK)]
LoraTargets = Annotated[str, _option("--lora-targets", help="all-linear, or module names joined by commas.", panel=WORK)]
SeqLen = Annotated[int, _option("--seq-len", help="Tokens per sample.", panel=WORK)]
MicroBatch = Annotated[int, _option("--micro-batch", help="Samples per GPU and forward pass.", panel=WORK)]
MicroBatchSearched = Annotated[int | None, _option("--micro-batch", help="Samples per GPU and forward pass; searched when not "
                                                   "given.", panel=WORK)]
Accumulate = Annotated[int, _option("--accumulate", help="Micro-batches per optimizer step.", panel=WORK)]
Precision = Annotated[str, _option("--precision", help="fp32, bf16, fp16 (mixed, as Accelerate does it for the engine) or "
                                   "bf16-pure.", panel=WORK)]
WeightsDtype = Annotated[str, _option("--weights-dtype", help="What the model is loaded as: auto, fp32 or bf16.", panel=WORK)]
Optimizer = Annotated[str, _option("--optimizer", help="adamw, adamw-8bit, paged-adamw-8bit, adafactor, sgd or lion.",
                                   panel=WORK)]
OptimizerImpl = Annotated[str, _option("--optimizer-impl", help="default, foreach, fused or loop.", panel=WORK)]
Attention = Annotated[str, _option("--attention", help="eager, sdpa or flash.", panel=WORK)]
Loss = Annotated[str, _option("--loss", help="standard, chunked or fused.", panel=WORK)]
Compile = Annotated[bool, _option("--compile", help="torch.compile (a stated approximation).", panel=WORK)]
Alloc = Annotated[str, _option("--alloc", help="expandable, as the launch files set PYTORCH_ALLOC_CONF, or default: fixed "
                               "segments, which leave holes.", panel=WORK)]
Lengths = Annotated[str, _option("--lengths", help="equal: every batch has rows of --seq-len tokens; varied: batches are padded "
                                 "to their longest row (it matters with --alloc default).", panel=WORK)]
Task = Annotated[str, _option("--task", help="auto, causal-lm, seq2seq-lm, sequence-classification or token-classification.",
                              panel=WORK)]

Gpu = Annotated[str, _option("--gpu", help="A name of the catalog, auto (this machine) or cpu (gloo processes).", panel=CLUSTER)]
Gpus = Annotated[int | None, _option("--gpus", help="GPUs per node; auto: those there are.", panel=CLUSTER)]
Nodes = Annotated[int, _option("--nodes", help="Machines.", panel=CLUSTER)]
GpuMemory = Annotated[str | None, _option("--gpu-memory", help="80GiB, 80GB or bytes; replaces the catalog's.", panel=CLUSTER)]
HostMemory = Annotated[str | None, _option("--host-memory", help="RAM of one node.", panel=CLUSTER)]
Calibration = Annotated[Path | None, _option("--calibration", help="memory.json of a short run on the target machine: what it "
                                             "held outside the allocator replaces the table's figure.", panel=CLUSTER)]
Margin = Annotated[float | None, _option("--margin", help="Share of the GPU kept free, 0 to 0.9.", panel=CLUSTER)]

Strategy = Annotated[str, _option("--strategy", help="single, ddp, fsdp, fsdp-grad, hsdp, zero1, zero2 or zero3.", panel=PLAN)]
Checkpointing = Annotated[str, _option("--checkpointing", help="none, selective or full.", panel=PLAN)]
Offload = Annotated[str, _option("--offload", help="none, optimizer or all.", panel=PLAN)]
OffloadTo = Annotated[str, _option("--offload-to", help="cpu or nvme.", panel=PLAN)]
Tp = Annotated[int, _option("--tp", help="Tensor-parallel degree.", panel=PLAN)]
Cp = Annotated[int, _option("--cp", help="Context-parallel degree.", panel=PLAN)]
Sp = Annotated[int, _option("--sp", help="Sequence-parallel degree.", panel=PLAN)]
Bucket = Annotated[int | None, _option("--bucket", help="DeepSpeed's reduce, allgather and prefetch buckets, elements; default: "
                                       "DeepSpeed's own.", panel=PLAN)]
Persist = Annotated[int | None, _option("--persist", help="Stage-3 persistence threshold, elements; default: DeepSpeed's own.",
                                        panel=PLAN)]
ShardSize = Annotated[int | None, _option("--shard-size", help="GPUs that share one copy of the model under hsdp; default: the "
                                          "GPUs of a node.", panel=PLAN)]

_WORKLOAD = ("method", "lora_rank", "lora_targets", "seq_len", "micro_batch", "accumulate", "precision", "weights_dtype",
             "optimizer", "optimizer_impl", "attention", "loss", "compile", "task", "alloc", "lengths")
_PLAN = ("strategy", "checkpointing", "offload", "offload_to", "tp", "cp", "sp", "bucket", "persist", "shard_size")


def workload_from(values: dict[str, Any]) -> Workload:
    """The workload of a command's options."""
    given = {name: values[name] for name in _WORKLOAD if values.get(name) is not None}
    return Workload(**given)


def plan_from(values: dict[str, Any]) -> Plan:
    """The plan of a command's options; DeepSpeed's sizes are dropped, with a word on stderr, where they have no effect."""
    given = {name: values[name] for name in _PLAN if name in values}
    effective = {"bucket": str(given["strategy"]).startswith("zero"), "persist": given["strategy"] == "zero3"}
    for name, counts in effective.items():
        if given.get(name) is not None and not counts:
            typer.echo(f"toolkit: note: --{name} has no effect under {given['strategy']}", err=True)
            given[name] = None
    return Plan(**given)


def cluster_from(values: dict[str, Any]) -> Cluster:
    """The cluster of a command's options."""
    from toolkit.specs.detect import make_cluster

    margin = values.get("margin")
    if margin is not None and not 0 <= margin <= 0.9:
        raise UserError(f"margin is {margin}; it must be a share from 0 to 0.9")
    memory, host = values.get("gpu_memory"), values.get("host_memory")
    cluster = make_cluster(
        gpu=values["gpu"],
        gpus=values.get("gpus"),
        nodes=values.get("nodes", 1),
        gpu_memory=parse_size(memory) if memory is not None else None,
        host_memory=parse_size(host) if host is not None else None,
    )
    if values.get("calibration") is None:
        return cluster
    from toolkit.estimate.outside import read_calibration

    if cluster.gpu.is_cpu:
        raise UserError("--calibration is for GPUs: on a CPU nothing lies outside the allocator to calibrate")
    return dataclasses.replace(cluster, outside_measured=read_calibration(values["calibration"]))


def model_from(values: dict[str, Any], workload: Workload) -> Any:
    """The model spec of a command's options, held against the sequence length."""
    from toolkit.specs.load import check_length, load_model_spec

    spec = load_model_spec(values["model"], trust_remote_code=values.get("trust_remote_code", False))
    check_length(spec, workload.seq_len)
    return spec
