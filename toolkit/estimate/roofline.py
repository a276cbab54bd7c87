"""How long one device computes: the traced operators on a roofline.

A matrix product takes its FLOPs over the rate that its shape reaches, or its bytes over the memory bandwidth, whichever is
longer (Williams, Waterman and Patterson, "Roofline", 2009). What the hardware reaches of its datasheet is data: speed.yaml.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from statistics import NormalDist
from typing import Any

import yaml

from toolkit.specs import Workload
from toolkit.specs.cluster import Gpu
from toolkit.timeline.trace import ModelTrace, Operation

TILE = (128, 256)
"""Rows and columns of a product that one multiprocessor computes at a time (the large tiles of cuBLAS and CUTLASS)."""


@lru_cache(maxsize=1)
def speeds() -> dict[str, Any]:
    """speed.yaml."""
    data: dict[str, Any] = yaml.safe_load(files("toolkit.estimate").joinpath("speed.yaml").read_text(encoding="utf-8"))
    return data


def _by_gpu(table: dict[str, Any], gpu: Gpu) -> Any:
    """The row of a GPU: its own, that of its family (`v100` for `v100-32gb`), of its architecture, or the default."""
    for key in (gpu.name, gpu.name.split("-")[0], gpu.architecture):
        if key in table:
            return table[key]
    return table["default"]


def slowest(ranks: int) -> float:
    """How many times as long as the average GPU the slowest of `ranks` GPUs takes for compute-bound kernels.

    The expected largest of n normal variates: Blom, "Statistical Estimates and Transformed Beta-Variables", 1958.
    """
    if ranks < 2:
        return 1.0
    deviations = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return 1.0 + float(speeds()["spread"]) * deviations


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds of one micro-batch's kernels on one device, recomputation included."""

    forward_layers: float
    """In the repeated layers, all of them together."""
    forward_rest: float
    """Embedding, final norm, output layer and loss."""
    backward_layers: float
    backward_rest: float

    @property
    def forward(self) -> float:
        return self.forward_layers + self.forward_rest

    @property
    def backward(self) -> float:
        return self.backward_layers + self.backward_rest


class Roofline:
    """The rates of one device under one workload: of the slowest, where many wait for each other."""

    def __init__(self, gpu: Gpu, workload: Workload, attention: str = "attention", ranks: int = 1) -> None:
        """`attention` names the table of speed.yaml that says what the attention kernels reach; `ranks` GPUs step together."""
        table = speeds()
        self.gpu = gpu
        pace = 1.0 if gpu.is_cpu else 1.0 / slowest(ranks)
        reached = 1.0 if gpu.is_cpu else _by_gpu(table["matmul"], gpu) * _by_gpu(table["sustained"], gpu) * pace
        half = gpu.bf16_flops if workload.precision != "fp16" else gpu.fp16_flops
        self.half_rate = (half or gpu.fp16_flops or gpu.fp32_flops) * reached
        self.single_rate = gpu.fp32_flops * (1.0 if gpu.is_cpu else 0.9)
        forward, backward = _by_gpu(table[attention], gpu)
        peak = half or gpu.fp16_flops or gpu.fp32_flops
        self.attention_rate = {"forward": peak * forward * pace, "backward": peak * backward * pace}
        self.bandwidth = gpu.bandwidth * _by_gpu(table["memory"], gpu)
        self.multiprocessors = table["multiprocessors"].get(gpu.name, 0)
        self.floor = table["kernel_floor"]["cpu" if gpu.is_cpu else "default"] * (0.3 if workload.compile else 1.0)
        self.traffic = table["compiled_traffic"] if workload.compile else 1.0

    def _fill(self, shape: tuple[int, ...]) -> float:
        """Share of the multiprocessors that the tiles of a product keep busy: the last wave is not full."""
        if not self.multiprocessors or not shape:
            return 1.0
        batch, rows, columns, inner = shape
        tiles = batch * math.ceil(rows / TILE[0]) * math.ceil(columns / TILE[1])
        if tiles < 4 * self.multiprocessors:  # smaller tiles are chosen: the last wave is finer, each tile less efficient
            tiles *= 2
        waves = tiles / self.multiprocessors
        ragged = (rows * columns) / (math.ceil(rows / TILE[0]) * TILE[0] * math.ceil(columns / TILE[1]) * TILE[1])
        depth = inner / (inner + 256)  # prologue and epilogue of a tile against its inner loop
        return waves / math.ceil(waves) * max(ragged, 0.25) * depth

    def seconds(self, operation: Operation) -> float:
        """One call of a kernel."""
        moved = operation.bytes_moved / self.bandwidth
        if operation.kind == "matmul":
            rate = self.half_rate if operation.itemsize == 2 else self.single_rate
            return max(operation.flops / (rate * self._fill(operation.shape)), moved, self.floor)
        if operation.kind == "attention":
            rate = self.attention_rate["backward" if operation.phase == "backward" else "forward"]
            if operation.itemsize != 2 and not self.gpu.is_cpu:
                rate = self.single_rate * 0.6
            return max(operation.flops / rate, moved, self.floor)
        return max(moved * self.traffic, self.floor)

    def _split(self, operation: Operation, tp: int, tokens: int) -> Operation:
        """One rank's part of an operator: `tp` ranks share the columns (or heads), `tokens` ranks the sequence."""
        ranks = tp * tokens
        if ranks == 1:
            return operation
        shape = operation.shape
        if operation.kind == "matmul":
            batch, rows, columns, inner = shape
            if columns >= inner:
                columns = max(1, columns // tp)
            else:
                inner = max(1, inner // tp)
            shape = (batch, max(1, rows // tokens), columns, inner)
        return replace(operation, flops=operation.flops / ranks, bytes_moved=operation.bytes_moved / ranks, shape=shape)

    def phases(self, trace: ModelTrace, tp: int = 1, tokens: int = 1) -> PhaseSeconds:
        """Seconds of the trace's micro-batch by phase, layers apart from the rest.

        Args:
            tp: ranks that share every layer's products.
            tokens: ranks that share the sequence.

        Causal attention computes half of the score matrix that `Operation.flops` counts whole.
        """
        sums = dict.fromkeys(("forward", "forward-rest", "backward", "backward-rest"), 0.0)
        causal = trace.kind == "causal-lm"
        for operation in trace.operations:
            one = self.seconds(self._split(operation, tp, tokens))
            if operation.kind == "attention" and causal:
                one = max(one / 2, self.floor)
            phase = "backward" if operation.phase == "backward" else "forward"
            sums[phase] += one * operation.layers
            sums[phase + "-rest"] += one * (operation.count - operation.layers)
        return PhaseSeconds(sums["forward"], sums["forward-rest"], sums["backward"], sums["backward-rest"])


def model_flops(trace: ModelTrace) -> float:
    """FLOPs of one micro-batch's forward and backward without recomputation, as MFU counts them.

    Forward products and whole attention matrices, three times: the convention of PaLM (arXiv 2204.02311, appendix B).
    """
    forward = sum(o.flops * o.count for o in trace.operations if o.phase != "backward" and o.kind != "other")
    return 3.0 * forward
