"""Machines as data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from toolkit.errors import UserError
from toolkit.specs import Cluster
from toolkit.specs.catalog import gpus

T4 = gpus()["t4"]


def test_there_is_one_rank_per_gpu() -> None:
    assert Cluster(gpu=T4).world_size == 1
    assert Cluster(gpu=T4, gpus_per_node=8, nodes=3).world_size == 24


def test_only_the_device_called_cpu_is_one() -> None:
    assert not T4.is_cpu
    assert replace(T4, name="cpu").is_cpu


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpus_per_node": 0}, "gpus-per-node is 0"),
        ({"nodes": 0}, "nodes is 0"),
        ({"nodes": 10**7}, "nothing that large is meant"),
        ({"gpu": replace(T4, memory=0)}, "gpu-memory is 0"),
    ],
)
def test_impossible_counts_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as caught:
        Cluster(**{"gpu": T4, **changes})  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_a_link_is_of_a_known_kind() -> None:
    with pytest.raises(UserError, match="link 'string' is not one of nvlink"):
        replace(T4, link="string")
