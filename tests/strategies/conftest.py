"""Clusters, and plans of every kind, for the tests of the launch side."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from toolkit.specs import Cluster, Gpu


@pytest.fixture
def make_cluster() -> Callable[..., Cluster]:
    """`make_cluster(gpus, nodes, name)`: a cluster of GPUs, or of CPU processes when the name is cpu."""

    def make(gpus: int = 2, nodes: int = 1, name: str = "a100-80gb-sxm") -> Cluster:
        gpu = Gpu(
            name=name,
            memory=80 * 2**30,
            bf16_flops=3e14,
            fp16_flops=3e14,
            fp32_flops=2e13,
            bandwidth=2e12,
            link="memory" if name == "cpu" else "nvlink",
            link_bandwidth=3e11,
            pcie_bandwidth=2e10,
        )
        return Cluster(gpu=gpu, gpus_per_node=gpus, nodes=nodes)

    return make
