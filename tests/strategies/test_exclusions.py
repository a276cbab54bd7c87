"""Every pair that excludes each other is refused in one line that names both."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.errors import UserError
from toolkit.specs import Plan, Workload
from toolkit.specs.detect import make_cluster
from toolkit.strategies import STRATEGIES, check_plan
from toolkit.strategies.exclusions import EXCLUSIONS, warnings

OFFLOADED: dict[str, Any] = {"strategy": "zero2", "offload": "optimizer"}
RULES: list[tuple[dict[str, Any], dict[str, Any], str, int, tuple[str, str]]] = [
    ({"method": "qlora"}, {}, "cpu", 1, ("method qlora", "gpu cpu")),
    ({"method": "qlora"}, {"strategy": "zero3"}, "a100-80gb-sxm", 4, ("method qlora", "zero3")),
    ({"optimizer": "adamw-8bit"}, {}, "cpu", 1, ("optimizer adamw-8bit", "gpu cpu")),
    ({"attention": "flash"}, {}, "cpu", 1, ("attention flash", "gpu cpu")),
    ({"attention": "flash", "precision": "fp16"}, {}, "t4", 1, ("attention flash", "gpu t4")),
    ({"attention": "flash", "precision": "fp32"}, {}, "a100-80gb-sxm", 1, ("attention flash", "precision fp32")),
    ({"optimizer": "lion", "optimizer_impl": "fused"}, {}, "a100-80gb-sxm", 1, ("optimizer-impl fused", "optimizer lion")),
    ({"optimizer_impl": "fused"}, OFFLOADED, "a100-80gb-sxm", 4, ("optimizer-impl fused", "offload optimizer of zero2")),
    ({}, {"strategy": "zero1", "bucket": 10_001}, "a100-80gb-sxm", 4, ("allgather bucket of 10,001 elements", "zero1")),
]
"""One per rule of EXCLUSIONS, in its order."""
OTHERS: list[tuple[dict[str, Any], dict[str, Any], str, int, tuple[str, str]]] = [
    ({"precision": "fp16"}, {"strategy": "zero2"}, "cpu", 2, ("precision fp16", "zero2 on a CPU")),
    ({}, {"strategy": "ddp", "offload": "optimizer"}, "t4", 2, ("offload optimizer", "ddp")),
    ({}, {"strategy": "single", "offload": "all"}, "t4", 1, ("offload all", "single")),
    ({}, {"strategy": "fsdp", "offload": "optimizer"}, "t4", 2, ("offload optimizer", "fsdp")),
    ({}, {"strategy": "zero2", "offload": "optimizer", "offload_to": "nvme"}, "t4", 2, ("offload to nvme", "zero2")),
    ({}, {"strategy": "zero3", "cp": 2}, "t4", 4, ("cp 2", "zero3")),
    ({}, {"strategy": "fsdp", "sp": 2}, "t4", 4, ("sp 2", "fsdp")),
    ({}, {"strategy": "zero3", "tp": 2}, "t4", 4, ("tp 2", "zero3")),
    ({"method": "lora"}, {"strategy": "ddp", "tp": 2}, "t4", 2, ("tp 2", "method lora")),
    ({}, {"strategy": "hsdp", "shard_size": 4}, "t4", 4, ("hsdp", "one group of 4")),
    ({}, {"strategy": "hsdp", "shard_size": 1}, "t4", 4, ("hsdp", "one rank in a group")),
    ({}, {"strategy": "fsdp", "tp": 4}, "t4", 4, ("tp 4", "fsdp")),
    ({"optimizer": "adamw-8bit"}, {"strategy": "fsdp"}, "t4", 2, ("optimizer adamw-8bit", "fsdp")),
    ({"precision": "bf16-pure"}, {"strategy": "zero1"}, "a10", 2, ("precision bf16-pure", "zero1")),
]


@pytest.mark.parametrize(("work", "plan", "gpu", "gpus", "names"), [*RULES, *OTHERS])
def test_the_two_are_named(work: dict[str, Any], plan: dict[str, Any], gpu: str, gpus: int, names: tuple[str, str]) -> None:
    with pytest.raises(UserError) as refused:
        check_plan(Plan(**plan), Workload(**work), make_cluster(gpu=gpu, gpus=gpus))
    line = str(refused.value)
    assert "\n" not in line and all(name in line for name in names)


def test_every_rule_has_a_case_that_only_it_refuses() -> None:
    assert len(RULES) == len(EXCLUSIONS)
    for rule, (work, plan, gpu, gpus, _) in zip(EXCLUSIONS, RULES, strict=True):
        assert rule.holds(Workload(**work), Plan(**plan), make_cluster(gpu=gpu, gpus=gpus))


def test_an_ordinary_workload_excludes_nothing() -> None:
    for name in STRATEGIES:
        cluster = make_cluster(gpu="a100-80gb-sxm", gpus=1 if name == "single" else 8, nodes=1 if name != "hsdp" else 2)
        for work in ({}, {"precision": "fp16"}, {"attention": "flash"}, {"optimizer_impl": "fused"}, {"method": "lora"}):
            check_plan(Plan(strategy=name), Workload(**work), cluster)  # type: ignore[arg-type]


@pytest.mark.parametrize(("gpu", "precision", "said"), [
    ("t4", "bf16", True), ("v100-32gb", "bf16-pure", True), ("t4", "fp16", False), ("a10", "bf16", False), ("cpu", "bf16", False),
])  # fmt: skip
def test_gpus_without_bf16_are_named(gpu: str, precision: Any, said: bool) -> None:
    found = warnings(Workload(precision=precision), make_cluster(gpu=gpu, gpus=1))
    assert bool(found) is said and all(gpu in line and "bf16" in line for line in found)
