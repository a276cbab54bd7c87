"""What can't run is refused in one line that names the two things that exclude each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from toolkit.errors import UserError
from toolkit.specs import Cluster, DdpSettings, FsdpSettings, Plan, Workload, ZeroSettings
from toolkit.strategies import STRATEGIES, check_plan, render

Make = Callable[..., Cluster]

REFUSED = [
    (Plan(strategy="single"), {}, (4, 1), "single and 4 GPUs"),
    (Plan(strategy="ddp"), {}, (1, 1), "ddp needs at least 2 GPUs"),
    (Plan(strategy="ddp", offload="optimizer"), {}, (2, 1), "offload optimizer and ddp"),
    (Plan(strategy="zero1", offload="all"), {}, (2, 1), "offload all and zero1"),
    (Plan(strategy="zero2", offload="all"), {}, (2, 1), "offload all and zero2"),
    (Plan(strategy="fsdp", offload="optimizer"), {}, (2, 1), "offload optimizer and fsdp"),
    (Plan(strategy="zero2", offload="optimizer", offload_to="nvme"), {}, (2, 1), "offload to nvme and zero2"),
    (Plan(strategy="fsdp", offload="all", offload_to="nvme"), {}, (2, 1), "offload to nvme and fsdp"),
    (Plan(strategy="fsdp", bucket=10), {}, (2, 1), "bucket and fsdp"),
    (Plan(strategy="zero2", persist=10), {}, (2, 1), "persist and zero2"),
    (Plan(strategy="zero3", persist=-1), {}, (2, 1), "persist is -1"),
    (Plan(strategy="fsdp"), {"optimizer": "adamw-8bit"}, (2, 1), "optimizer adamw-8bit and fsdp"),
    (Plan(strategy="hsdp"), {"optimizer": "adafactor"}, (4, 1), "optimizer adafactor and hsdp"),
    (
        Plan(strategy="zero2", offload="optimizer"),
        {"optimizer": "paged-adamw-8bit"},
        (2, 1),
        "and offload optimizer",
    ),
    (Plan(strategy="zero2"), {"precision": "bf16-pure"}, (2, 1), "precision bf16-pure and zero2"),
    (Plan(strategy="hsdp"), {}, (8, 1), "hsdp with one group of 8 is fsdp"),
    (Plan(strategy="hsdp", shard_size=3), {}, (4, 2), "shard-size 3 does not divide 8"),
    (Plan(strategy="hsdp", shard_size=16), {}, (4, 2), "shard-size 16 is more than the 8"),
    (Plan(strategy="hsdp", shard_size=1), {}, (4, 2), "one rank in a group"),
    (Plan(strategy="fsdp", shard_size=2), {}, (4, 1), "shard-size 2 and fsdp"),
    (Plan(strategy="fsdp", tp=3), {}, (4, 1), "tp 3 does not divide 4 GPUs"),
    (Plan(strategy="fsdp", tp=4), {}, (4, 1), "leaves fsdp none to shard over"),
    (Plan(strategy="ddp", tp=2), {}, (4, 1), "tp 2 and ddp over 4 GPUs"),
    (Plan(strategy="zero3", tp=2), {}, (4, 1), "tp 2 and zero3"),
    (Plan(strategy="zero3", cp=2), {}, (4, 1), "cp 2 and zero3"),
    (Plan(strategy="fsdp", sp=2), {}, (4, 1), "sp 2 and fsdp"),
    (Plan(strategy="fsdp", cp=2), {"attention": "eager"}, (4, 1), "cp 2 and attention eager"),
    (Plan(strategy="fsdp", cp=2), {"seq_len": 1026}, (4, 1), "seq-len 1026"),
    (Plan(strategy="zero3", sp=2), {"attention": "eager"}, (4, 1), "sp 2 and attention eager"),
    (Plan(strategy="zero3", sp=4), {"seq_len": 1026}, (4, 1), "seq-len 1026"),
    (
        Plan(strategy="fsdp", zero=ZeroSettings(sub_group_size=5)),
        {},
        (2, 1),
        "settings of zero and strategy fsdp",
    ),
    (
        Plan(strategy="zero2", ddp=DdpSettings(static_graph=True)),
        {},
        (2, 1),
        "settings of ddp and strategy zero2",
    ),
]


@pytest.mark.parametrize(("plan", "changes", "shape", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_refused(plan: Plan, changes: dict[str, object], shape: tuple[int, int], words: str, make_cluster: Make) -> None:
    with pytest.raises(UserError) as caught:
        check_plan(plan, Workload().with_(**changes), make_cluster(*shape))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "workload", "words"),
    [
        (Plan(strategy="zero2"), Workload(precision="fp16"), "precision fp16 and zero2 on a CPU"),
        (Plan(strategy="fsdp", cp=2), Workload(precision="fp32"), "cp 2 and gpu cpu"),
        (Plan(strategy="fsdp"), Workload(method="qlora"), "method qlora and gpu cpu"),
    ],
)
def test_refused_on_a_cpu(plan: Plan, workload: Workload, words: str, make_cluster: Make) -> None:
    with pytest.raises(UserError, match=words):
        check_plan(plan, workload, make_cluster(4, 1, "cpu"))
    # The same runs on GPUs.
    check_plan(plan, workload, make_cluster(4, 1))


def test_every_combination_of_degrees_is_rendered_or_refused_in_words(make_cluster: Make) -> None:
    """No combination ends in a KeyError of a device mesh, neither here nor in Accelerate's own validation."""
    from accelerate.parallelism_config import ParallelismConfig

    accepted = 0
    worlds = [(1, 1), (2, 1), (4, 1), (4, 2), (3, 1)]
    for name, tp, cp, sp, shape in itertools.product(STRATEGIES, (1, 2, 3, 4), (1, 2), (1, 2), worlds):
        cluster = make_cluster(*shape)
        try:
            files = render(Plan(strategy=STRATEGIES[name].name, tp=tp, cp=cp, sp=sp), Workload(), cluster)
        except UserError as error:
            assert "\n" not in str(error)
            continue
        accepted += 1
        section = files.accelerate.get("parallelism_config")
        if section is None:
            continue
        sizes = {key.removeprefix("parallelism_config_"): value for key, value in section.items()}
        kernel = sizes.pop("sp_attn_implementation", None)
        assert (kernel == "sdpa") == (sp > 1)
        config = ParallelismConfig(**sizes)
        assert config.total_size == cluster.world_size
        if files.accelerate["distributed_type"] == "FSDP":
            assert config.dp_shard_enabled or config.cp_enabled, "FSDP2 has an axis to shard over"
    assert accepted > 40


def test_ddp_settings_have_no_key_in_the_file(make_cluster: Make) -> None:
    with pytest.raises(UserError, match="gradient_as_bucket_view can't be written"):
        render(Plan(strategy="ddp", ddp=DdpSettings(gradient_as_bucket_view=True)), Workload(), make_cluster())
    # torch's own value needs no key.
    render(Plan(strategy="ddp", ddp=DdpSettings(bucket_cap_mb=25)), Workload(), make_cluster())


def test_fsdp_version_1_is_not_written(make_cluster: Make) -> None:
    with pytest.raises(UserError, match="FSDP version 1 is not written"):
        render(Plan(strategy="fsdp", fsdp=FsdpSettings(version=1)), Workload(), make_cluster())
