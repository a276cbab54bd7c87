"""The machines: how many GPUs of which type, and what connects them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from toolkit.errors import UserError
from toolkit.specs.check import check_choices, check_positive


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One row of the GPU catalog. `cpu` is a device too: one gloo process of a CPU run."""

    name: str
    memory: int
    """Bytes, as the driver reports them."""
    bf16_flops: float | None
    """Dense FLOP/s of the matrix units in bf16; None: the device has no bf16 units."""
    fp16_flops: float | None
    """Dense FLOP/s of the matrix units in fp16."""
    fp32_flops: float
    """Dense FLOP/s in fp32 as torch runs it by default (no TF32)."""
    bandwidth: float
    """Device memory, bytes per second."""
    link: Literal["nvlink", "nvswitch", "pcie", "xgmi", "memory"]
    """What joins the GPUs of a node; `memory` for CPU processes."""
    link_bandwidth: float
    """Bytes per second of one GPU in one direction over that link."""
    pcie_bandwidth: float
    """Bytes per second between the GPU and the host in one direction."""
    architecture: str = ""
    """volta, turing, ampere, ada, hopper, blackwell, cdna2, cdna3 or cpu."""
    source: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    def __post_init__(self) -> None:
        check_choices(self)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`nodes` equal machines with `gpus_per_node` GPUs each; one process (rank) per GPU."""

    gpu: Gpu
    gpus_per_node: int = 1
    nodes: int = 1
    host_memory: int | None = None
    """Bytes of RAM per node; None: unknown, host memory is reported and not held against anything."""
    nvme: bool = False
    network_bandwidth: float = 50e9
    """Bytes per second of one node in one direction; no effect with one node."""

    def __post_init__(self) -> None:
        check_positive(self, "gpus_per_node", "nodes", limit=100_000)
        if self.gpu.memory <= 0:
            raise UserError(f"gpu-memory is {self.gpu.memory}; it must be above zero")

    outside_measured: tuple[int, int] | None = None
    """(bytes, ranks): what a run of so many ranks on these GPUs held outside the allocator; None: the table's figures hold."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.gpus_per_node * self.nodes
