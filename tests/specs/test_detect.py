"""The cluster of a command: a row of the catalog, or what this machine has."""

from __future__ import annotations

import dataclasses

import pytest

from toolkit.errors import UserError
from toolkit.specs.catalog import gpus
from toolkit.specs.detect import _matched, cores, cpu_gpu, detect_gpus, host_ram, make_cluster
from toolkit.units import GIB


def test_a_named_gpu_is_its_row_and_one_of_it_unless_said() -> None:
    cluster = make_cluster("h100-sxm")
    assert cluster.gpu == gpus()["h100-sxm"]
    assert (cluster.gpus_per_node, cluster.nodes, cluster.world_size, cluster.host_memory) == (1, 1, 1, None)
    assert make_cluster("h100-sxm", gpus=8, nodes=4).world_size == 32


def test_a_given_memory_replaces_the_rows_and_nothing_else() -> None:
    cluster = make_cluster("t4", gpu_memory=10 * GIB, host_memory=64 * GIB)
    assert cluster.gpu == dataclasses.replace(gpus()["t4"], memory=10 * GIB)
    assert cluster.host_memory == 64 * GIB


@pytest.mark.parametrize("processes", [1, 2, 3, 64])
def test_cpu_processes_share_the_machine(processes: int) -> None:
    cluster = make_cluster("cpu", gpus=processes)
    assert cluster.gpu == cpu_gpu(processes) and cluster.gpu.is_cpu
    assert cluster.gpus_per_node == processes
    assert cluster.gpu.memory * processes <= host_ram()
    assert cluster.gpu.fp32_flops * processes <= cpu_gpu(1).fp32_flops * max(1, processes / cores()) * 1.001
    assert cluster.gpu.bf16_flops is None and cluster.gpu.link == "memory"


def test_auto_is_what_this_machine_has() -> None:
    cluster, found = make_cluster("auto"), detect_gpus()
    if found:
        assert cluster.gpu == found[0] and cluster.gpus_per_node == len(found) and cluster.host_memory == host_ram()
    else:
        assert cluster.gpu.is_cpu and cluster.gpus_per_node == cores()
    assert make_cluster("auto", gpus=1).world_size == 1


def test_what_the_machine_has_is_above_zero() -> None:
    assert cores() >= 1 and host_ram() > GIB // 4


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb-sxm"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_the_drivers_names_are_found_in_the_catalog(name: str, row: str) -> None:
    found = _matched(name, gpus()[row].memory - 1)
    assert found == dataclasses.replace(gpus()[row], memory=gpus()[row].memory - 1)


@pytest.mark.parametrize("name", ["Voodoo 3", "NVIDIA RTX 5000 Ada Generation", "NVIDIA L40", "NVIDIA GeForce GTX 4090"])
def test_a_device_that_no_row_describes_keeps_its_name_and_memory(name: str) -> None:
    found = _matched(name, 24 * GIB)
    assert (found.name, found.memory, found.source) == (name.lower().replace(" ", "-"), 24 * GIB, "this machine")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"gpu": "h1000"}, "gpu 'h1000' is not in the catalog; did you mean 'h"),
        ({"gpu": "h200", "gpus": 0}, "gpus is 0; it must be at least 1"),
        ({"gpu": "h200", "nodes": -1}, "nodes is -1; it must be at least 1"),
        ({"gpu": "h200", "gpus": 10**6}, "nothing that large is meant"),
        ({"gpu": "h200", "gpu_memory": 0}, "it must be above zero"),
        ({"gpu": "cuda"}, "is not in the catalog"),
    ],
)
def test_impossible_machines_are_refused(values: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as caught:
        make_cluster(**values)  # type: ignore[arg-type]
    assert says in str(caught.value)
