"""Files that users write: other versions' keys, silent defaults, "auto" values, and what is wrong in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.errors import UserError
from toolkit.specs import FsdpSettings, Plan, Workload, ZeroSettings
from toolkit.strategies import read
from toolkit.strategies.zero.autos import autos, hidden_size_of, resolve, unresolved
from toolkit.strategies.zero.launch import effective, persistence


def accelerate(kind: str = "FSDP", **sections: Any) -> dict[str, Any]:
    """An Accelerate file's content."""
    return {"distributed_type": kind, "num_processes": 8, **sections}


FSDP1 = {
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_offload_params": False,
    "fsdp_use_orig_params": True,
}


@pytest.mark.parametrize(
    ("changes", "strategy"),
    [
        ({}, "fsdp"),
        ({"fsdp_sharding_strategy": 2}, "fsdp-grad"),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "fsdp-grad"),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, "ddp"),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, "hsdp"),
        # The launcher sends fsdp_sharding_strategy with its default, so this key of version 2 is never read.
        ({"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, "fsdp"),
    ],
)
def test_fsdp_version_1(changes: dict[str, Any], strategy: str) -> None:
    plan = read(accelerate(fsdp_config={**FSDP1, **changes}, num_machines=2)).plan
    assert plan.strategy == strategy
    if strategy != "ddp":
        assert plan.fsdp.version == 1 and plan.fsdp.state_dict == "full"
        assert plan.fsdp.wrap_classes == ("LlamaDecoderLayer",)
    assert plan.shard_size == (4 if strategy == "hsdp" else None), "a node's ranks: 8 processes on 2 machines"


def test_fsdp_version_2_and_what_the_launcher_fills_in() -> None:
    found = read(accelerate(fsdp_config={"fsdp_version": 2}, mixed_precision="bf16"))
    assert found.plan.fsdp == FsdpSettings(version=2, wrap="none", ram_efficient_loading=True)
    assert found.plan.strategy == "fsdp" and found.precision == "bf16" and found.processes == 8


def test_a_missing_version_is_version_1() -> None:
    assert read(accelerate(fsdp_config={"fsdp_reshard_after_forward": True})).plan.fsdp.version == 1


def test_reshard_off_is_fsdp_grad_whether_text_or_not() -> None:
    for value in (False, "false", "False", "no"):
        section = {"fsdp_version": 2, "fsdp_reshard_after_forward": value}
        assert read(accelerate(fsdp_config=section)).plan.strategy == "fsdp-grad"


@pytest.mark.parametrize("value", ["T5Block,T5Stack", "T5Block, T5Stack", ["T5Block", "T5Stack"]])
def test_two_layer_classes_as_text_or_list(value: Any) -> None:
    section = {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": value}
    assert read(accelerate(fsdp_config=section)).plan.fsdp.wrap_classes == ("T5Block", "T5Stack")


def test_keys_without_their_prefix_are_completed_as_the_launcher_does() -> None:
    assert read(accelerate(fsdp_config={"version": 2, "offload_params": True})).plan.offload == "all"


def test_hybrid_sharding_through_the_mesh() -> None:
    mesh = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
    plan = read(accelerate(fsdp_config={"fsdp_version": 2}, parallelism_config=mesh)).plan
    assert plan.strategy == "hsdp" and plan.shard_size == 4


def test_degrees() -> None:
    mesh = {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 2, "parallelism_config_cp_size": "2"}
    plan = read(accelerate(fsdp_config={"fsdp_version": 2}, parallelism_config=mesh)).plan
    assert (plan.tp, plan.cp, plan.sp) == (2, 2, 1)


def test_deepspeed_keys_in_the_accelerate_file() -> None:
    section = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu",
               "gradient_accumulation_steps": 4, "gradient_clipping": 0.7, "zero3_save_16bit_model": True}  # fmt: skip
    found = read(accelerate("DEEPSPEED", deepspeed_config=section, mixed_precision="fp16"))
    assert found.plan == Plan(strategy="zero3", offload="all",
                              zero=ZeroSettings(gradient_clipping=0.7, gather_16bit_on_save=True))  # fmt: skip
    assert (found.accumulate, found.clip, found.precision) == (4, 0.7, "fp16")


def test_silent_defaults_of_the_two_ways_to_configure_deepspeed() -> None:
    """Accelerate's own config is stage 2 and clips at 1.0; a JSON that does not speak of clipping does not clip."""
    plugin = read(accelerate("DEEPSPEED", deepspeed_config={}))
    assert plugin.plan.strategy == "zero2" and plugin.clip is None and plugin.accumulate is None
    assert effective(plugin.plan, Workload()).gradient_clipping == 1.0
    assert effective(plugin.plan, Workload(clip=0.3)).gradient_clipping == 0.3
    file = read(accelerate("DEEPSPEED"), {"zero_optimization": {"stage": 2}})
    assert file.clip == 0.0 and file.accumulate == 1
    assert effective(file.plan, Workload()).gradient_clipping == 0.0


def test_effective_settings_are_the_engines_where_the_plan_is_silent() -> None:
    zero2 = effective(Plan(strategy="zero2"), Workload())
    zero3 = effective(Plan(strategy="zero3", bucket=7, offload="all"), Workload(precision="fp32"))
    assert None not in vars(zero2).values() and None not in vars(zero3).values()
    assert (zero2.reduce_bucket, zero2.overlap_comm, zero2.grad_accum_dtype) == (500_000_000, False, "bf16")
    assert (zero3.reduce_bucket, zero3.prefetch_bucket, zero3.overlap_comm) == (7, 7, True)
    assert (zero3.grad_accum_dtype, zero3.pin_memory, zero2.pin_memory) == ("fp32", True, False)
    assert persistence(Plan(strategy="zero3")) == 100_000 and persistence(Plan(strategy="zero3", persist=0)) == 0


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
}


def test_auto_sizes_as_accelerate_makes_them() -> None:
    found = read(accelerate("DEEPSPEED"), AUTO, hidden_size=4096)
    assert found.plan.zero.reduce_bucket == 4096**2
    assert found.plan.zero.prefetch_bucket == int(0.9 * 4096 * 4096)
    assert found.plan.persist == 40_960
    assert found.plan.zero.gather_16bit_on_save is False
    assert (found.accumulate, found.micro_batch, found.clip, found.precision) == (None, None, None, None)
    with pytest.raises(UserError, match="zero_optimization.reduce_bucket_size.*name the model"):
        read(accelerate("DEEPSPEED"), AUTO)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_auto_is_left_whatever_the_stage(stage: int) -> None:
    content = {**AUTO, "zero_optimization": {**AUTO["zero_optimization"], "stage": stage}}  # type: ignore[dict-item]
    resolved = resolve(content, hidden_size=64, micro_batch=2, accumulate=3, ranks=4, clip=0.0, precision="bf16")
    assert not list(autos(resolved)) and len(list(autos(content))) == 10
    assert resolved["train_batch_size"] == 24 and resolved["zero_optimization"]["reduce_bucket_size"] == 4096
    assert resolved["bf16"]["enabled"] is True and resolved["fp16"]["enabled"] is False
    assert content["train_batch_size"] == "auto", "the given content is not changed"


@pytest.mark.parametrize("key", ["allgather_bucket_size", "stage3_max_live_parameters", "sub_group_size", "overlap_comm"])
def test_an_auto_that_nothing_resolves_is_named(key: str) -> None:
    content = {"zero_optimization": {"stage": 3, key: "auto"}, "wall_clock_breakdown": "auto"}
    assert unresolved(content) == [f"zero_optimization.{key}", "wall_clock_breakdown"]
    with pytest.raises(UserError, match=f"zero_optimization.{key}, wall_clock_breakdown"):
        resolve(content, hidden_size=64, micro_batch=1, accumulate=1, ranks=1, clip=1.0, precision="fp32")
    with pytest.raises(UserError, match=f"zero_optimization.{key}"):
        read(accelerate("DEEPSPEED"), content, hidden_size=64)


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({"hidden_size": 64}, 64),
        ({"text_config": {"hidden_size": 96}, "vision_config": {"hidden_size": 32}}, 96),
        ({"hidden_sizes": [16, 32, 64]}, 64),
        ({"d_model": 512}, 512),
        ({"n_embd": 768}, 768),
        ({"model_type": "unknown"}, None),
    ],
)
def test_the_width_of_nested_and_uneven_models(config: dict[str, Any], width: int | None) -> None:
    assert hidden_size_of(config) == width


def test_both_spellings_of_a_deepspeed_key() -> None:
    for prefix in ("", "stage3_"):
        content = {"zero_optimization": {"stage": 3, f"{prefix}prefetch_bucket_size": 5e6, f"{prefix}max_live_parameters": 1e8}}
        zero = read(accelerate("DEEPSPEED"), content).plan.zero
        assert (zero.prefetch_bucket, zero.max_live_parameters) == (5_000_000, 100_000_000)


def test_old_offload_keys_and_mixed_devices() -> None:
    old = read(accelerate("DEEPSPEED"), {"zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert old.plan.offload == "optimizer"
    mixed = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/d"}, "offload_param": {"device": "cpu"}}
    found = read(accelerate("DEEPSPEED"), {"zero_optimization": mixed})
    assert (found.plan.offload, found.plan.offload_to) == ("all", "nvme") and "nvme and cpu" in found.notes[0]


def test_what_a_plan_has_no_word_for_is_noted() -> None:
    content = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    assert read(accelerate("DEEPSPEED"), content).notes == ("zero_optimization.zero_hpz_partition_size is not modelled",)


WRONG: list[tuple[dict[str, Any], Any, str]] = [
    ({}, None, "distributed_type is None"),
    (accelerate("FSPD"), None, "did you mean 'FSDP'"),
    (accelerate(fsdp_config={"fsdp_version": 3}), None, "fsdp_version is 3"),
    (accelerate(fsdp_config={"fsdp_sharding_strategy": "FULL"}), None, "fsdp_sharding_strategy is 'FULL'"),
    (accelerate(fsdp_config={"fsdp_version": 2, "fsdp_reshard_after_forward": "FULL_SHARD"}), None, "must be true or false"),
    (accelerate(fsdp_config={"fsdp_auto_wrap_policy": "BIG"}), None, "fsdp_auto_wrap_policy is 'BIG'"),
    (accelerate(mixed_precision="bf8"), None, "mixed_precision is 'bf8'"),
    (accelerate(num_processes="many"), None, "num_processes is 'many'"),
    (accelerate("DEEPSPEED", deepspeed_config={"zero_stage": 0}), None, "zero_stage is 0"),
    (accelerate("DEEPSPEED", deepspeed_config={"zero_stage": 4}), None, "zero_stage is 4"),
    (accelerate("DEEPSPEED", deepspeed_config={"zero_stage": 2, "offload_param_device": "cpu"}), None, "stage 3 only"),
    (accelerate("DEEPSPEED", deepspeed_config={"offload_optimizer_device": "disk"}), None, "is 'disk'"),
    (accelerate("DEEPSPEED"), {"fp16": {}}, "no `zero_optimization` section"),
    (accelerate("DEEPSPEED"), {"zero_optimization": {"stage": "two"}}, "must be a whole number"),
    (accelerate("DEEPSPEED"), {"zero_optimization": {"stage": 2}, "gradient_clipping": "yes"}, "gradient_clipping is 'yes'"),
    (accelerate("DEEPSPEED"), {"zero_optimization": {"stage": 2}, "bf16": True}, "bf16 of the DeepSpeed config is True"),
    (accelerate("FSDP"), {"zero_optimization": {"stage": 2}}, "it must be DEEPSPEED"),
    (accelerate(parallelism_config={"parallelism_config_tp_size": 0}), None, "tp_size is 0; it must be at least 1"),
]


@pytest.mark.parametrize(("content", "deepspeed", "words"), WRONG, ids=[words for *_, words in WRONG])
def test_wrong_values_are_one_line(content: dict[str, Any], deepspeed: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        read(content, deepspeed)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_bare_no_in_yaml_is_no_engine() -> None:
    assert read(yaml.safe_load("distributed_type: NO\nmixed_precision: no")).plan.strategy == "single"


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read: No such file"):
        read(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("distributed_type: [FSDP\n", encoding="utf-8")
    with pytest.raises(UserError, match="is not YAML: line"):
        read(broken)
    broken.write_text("just words\n", encoding="utf-8")
    with pytest.raises(UserError, match="must hold keys and values"):
        read(broken)
    pointing = tmp_path / "accelerate.yaml"
    pointing.write_text(yaml.safe_dump(accelerate("DEEPSPEED", deepspeed_config={"deepspeed_config_file": "ds.json"})), "utf-8")
    with pytest.raises(UserError, match=r"deepspeed_config_file 'ds.json' does not exist"):
        read(pointing)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1,}}', encoding="utf-8")
    with pytest.raises(UserError, match="is not JSON: line 1"):
        read(pointing)
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}), encoding="utf-8")
    assert read(pointing).plan.strategy == "zero1"
