"""The cluster of a command: a row of the catalog, or what this machine has."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from toolkit.errors import UserError
from toolkit.specs.catalog import gpu as catalog_gpu
from toolkit.specs.catalog import gpus as catalog_gpus
from toolkit.specs.cluster import Cluster, Gpu

CPU_FLOPS_PER_CORE = 60e9
"""fp32 FLOP/s of one core in a matrix product: 2 units x 8 lanes x fused multiply-add at about 2.5 GHz, three quarters of it
reached."""
CPU_BANDWIDTH_PER_CORE = 8e9


def host_ram() -> int:
    """Bytes of RAM of this machine, or what its control group allows."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        return min(total, int(limit)) if limit.isdigit() else total
    except OSError:
        return total


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_gpu(processes: int) -> Gpu:
    """A CPU process as a device: an equal share of the machine's memory and cores."""
    share = max(1.0, cores() / processes) if processes <= cores() else cores() / processes
    return Gpu(
        name="cpu",
        memory=host_ram() // processes,
        bf16_flops=None,
        fp16_flops=None,
        fp32_flops=CPU_FLOPS_PER_CORE * share,
        bandwidth=CPU_BANDWIDTH_PER_CORE * share,
        link="memory",
        link_bandwidth=2e9,
        pcie_bandwidth=8e9,
        architecture="cpu",
        source="this machine",
    )


def _driver_gpus() -> bool:
    """Whether a GPU driver is there at all; asked before torch, whose import takes seconds."""
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def detect_gpus() -> list[Gpu]:
    """The GPUs of this machine, matched to the catalog by name; an unknown one has its memory and no FLOP/s to speak of."""
    if not _driver_gpus():
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    return [_matched(torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory)
            for i in range(torch.cuda.device_count())]


def _matched(name: str, memory: int) -> Gpu:
    """The row of a device by the name that its driver gives it: `NVIDIA A100-SXM4-80GB`, `NVIDIA H100 80GB HBM3` (the SXM
    card), `Tesla T4`; of several rows the one with that form and about that memory."""
    words = set(re.sub(r"sxm\d|hbm\d\w?", "sxm", name.lower()).replace("-", " ").split())
    best, score = None, 0
    for row in catalog_gpus().values():
        parts = row.name.split("-")
        form = {"pcie", "sxm"} & set(parts)
        if not {part for part in parts if not part.endswith("gb")} - form <= words:
            continue
        points = 1 + 2 * (abs(row.memory - memory) < 0.15 * memory) + len(form & words)
        if points > score:
            best, score = row, points
    if best is not None:
        return replace(best, memory=memory)
    return Gpu(name=name.lower().replace(" ", "-"), memory=memory, bf16_flops=None, fp16_flops=None, fp32_flops=1e13,
               bandwidth=5e11, link="pcie", link_bandwidth=12e9, pcie_bandwidth=12e9, source="this machine")


def make_cluster(
    gpu: str = "auto",
    gpus: int | None = None,
    nodes: int = 1,
    gpu_memory: int | None = None,
    host_memory: int | None = None,
) -> Cluster:
    """The cluster that a command's options name.

    Args:
        gpu: a name of the catalog; auto: the GPUs of this machine, else its CPU; cpu: gloo processes on this machine.
        gpus: per node; None: those there are for auto, one for a named GPU.
        gpu_memory: bytes; replaces the row's.

    Raises:
        UserError: unknown GPU, or counts below one.
    """
    for option, value in (("gpus", gpus), ("nodes", nodes)):
        if value is not None and value < 1:
            raise UserError(f"{option} is {value}; it must be at least 1")
    here = gpu in ("auto", "cpu")
    if gpu == "auto":
        found = detect_gpus()
        if found:
            if gpus is not None and gpus > len(found):
                raise UserError(f"gpus is {gpus}, this machine has {len(found)}; name another machine's GPU with --gpu")
            device, count = found[0], gpus or len(found)
        else:
            count = gpus or cores()
            device = cpu_gpu(count)
    elif gpu == "cpu":
        count = gpus or 1
        device = cpu_gpu(count)
    else:
        device, count = catalog_gpu(gpu), gpus or 1
    if gpu_memory is not None:
        device = replace(device, memory=gpu_memory)
    if host_memory is None and here and not device.is_cpu:
        host_memory = host_ram()
    return Cluster(gpu=device, gpus_per_node=count, nodes=nodes, host_memory=host_memory)
