"""FSDP2 as Accelerate runs it: distributed type FSDP with `fsdp_version: 2`.

Facts from accelerate 1.15: `accelerate/utils/dataclasses.py` (FullyShardedDataParallelPlugin),
`accelerate/commands/launch.py` (the launcher's own defaults, which are not always the plugin's) and
`accelerate/utils/launch.py` (what reaches the training process as FSDP_* variables).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from toolkit.errors import UserError
from toolkit.specs import Cluster, FsdpSettings, Plan, Workload
from toolkit.specs.plan import StrategyName
from toolkit.strategies.base import (
    Found,
    LaunchFiles,
    StrategyInfo,
    accelerate_base,
    as_bool,
    as_int,
    mixed_precision,
    processes,
    recipe_keys,
)
from toolkit.strategies.parallel import launch as parallel

STRATEGIES = (
    StrategyInfo(
        name="fsdp",
        family="fsdp",
        engine="FSDP",
        summary="FSDP2: parameters, gradients and optimizer sharded; each layer gathered when it is used",
        when=("the model does not fit on one GPU and the GPUs talk fast: the most memory saved without DeepSpeed"),
        shards=("parameters", "gradients", "optimizer"),
        offloads=("none", "all"),
        offload_to=("cpu",),
        axes=("tp", "cp"),
        excludes="8-bit optimizers and 8-bit base weights, whose tensors can't be sharded",
    ),
    StrategyInfo(
        name="fsdp-grad",
        family="fsdp",
        engine="FSDP",
        summary="FSDP2 that keeps layers gathered from forward to backward: gradients and optimizer sharded",
        when="the 16-bit model fits on one GPU but its optimizer does not: half of fsdp's gathering",
        shards=("gradients", "optimizer"),
        offloads=("none", "all"),
        offload_to=("cpu",),
        axes=("tp", "cp"),
        excludes="8-bit optimizers and 8-bit base weights, whose tensors can't be sharded",
    ),
    StrategyInfo(
        name="hsdp",
        family="fsdp",
        engine="FSDP",
        summary="FSDP2 inside groups of GPUs, copies between the groups",
        when=("a slow network joins the nodes and the GPUs of one node hold the model: gathering stays inside the node"),
        shards=("parameters", "gradients", "optimizer"),
        min_world=4,
        offloads=("none", "all"),
        offload_to=("cpu",),
        axes=("tp", "cp"),
        needs="a number of GPUs that is a multiple of the group's",
        excludes="8-bit optimizers and 8-bit base weights, whose tensors can't be sharded",
    ),
)

WRAPS: dict[str, Literal["transformer", "size", "none"]] = {
    "TRANSFORMER_BASED_WRAP": "transformer", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none",
}  # fmt: skip
STATE_DICTS: dict[str, Literal["sharded", "full"]] = {
    "SHARDED_STATE_DICT": "sharded",
    "FULL_STATE_DICT": "full",
}
SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP1's strategies in the order of their numbers, 1 to 5 (accelerate/utils/constants.py)."""
MIN_NUM_PARAMS = 100_000_000
"""The launcher's default of `--fsdp_min_num_params`, parameters."""
DEFAULTS = FsdpSettings(
    version=2,
    wrap="transformer",
    sync_each_micro_batch=False,
    ram_efficient_loading=True,
    state_dict="sharded",
    min_num_params=MIN_NUM_PARAMS,
)
"""What runs where a plan says nothing, through `accelerate launch`."""


def effective(plan: Plan) -> FsdpSettings:
    """FSDP's settings with the engine's own where the plan says nothing."""
    stated = {name: value for name, value in vars(plan.fsdp).items() if value is not None}
    return FsdpSettings(**{**vars(DEFAULTS), **stated})


STEPS_SHARDS = ("adamw", "sgd")
"""Optimizers that step DTensors; torch's Adafactor calls operators without a sharding rule, bitsandbytes' take plain tensors."""


def check(plan: Plan, workload: Workload, cluster: Cluster) -> None:
    """Refuse what FSDP2 can't shard. Raises UserError."""
    if plan.fsdp.version == 2 and workload.optimizer not in STEPS_SHARDS:
        raise UserError(f"optimizer {workload.optimizer} and {plan.strategy} exclude each other: it does not step FSDP2's "
                        "sharded tensors; use adamw or sgd, or ddp or zero2 with this optimizer")
    if plan.shard_size is not None and plan.strategy != "hsdp":
        raise UserError(f"shard-size {plan.shard_size} and {plan.strategy} exclude each other: groups are hsdp's")
    if plan.strategy == "hsdp":
        parallel.check_shards(plan, cluster)


def render(plan: Plan, workload: Workload, cluster: Cluster) -> LaunchFiles:
    """An Accelerate file of distributed type FSDP, version 2.

    Raises:
        UserError: the plan asks for FSDP version 1, which is estimated but not written.
    """
    settings = plan.fsdp
    if settings.version != 2:
        raise UserError("FSDP version 1 is not written: torch has deprecated it; use version 2 (`fsdp_version: 2`)")
    section: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": plan.strategy != "fsdp-grad",
        "fsdp_auto_wrap_policy": {wrap: name for name, wrap in WRAPS.items()}[settings.wrap],
    }
    if settings.wrap_classes:
        section["fsdp_transformer_layer_cls_to_wrap"] = ",".join(settings.wrap_classes)
    if settings.min_num_params is not None:
        section["fsdp_min_num_params"] = settings.min_num_params
    if plan.offload == "all":
        section["fsdp_offload_params"] = True
    # Spelled out although it is the launcher's default: it decides how much host memory loading takes.
    section["fsdp_cpu_ram_efficient_loading"] = effective(plan).ram_efficient_loading
    if settings.state_dict is not None:
        section["fsdp_state_dict_type"] = {kind: name for name, kind in STATE_DICTS.items()}[settings.state_dict]
    content = {**accelerate_base("FSDP", cluster), "fsdp_config": section}
    if degrees := parallel.render(plan, workload, cluster):
        content["parallelism_config"] = degrees
    recipe = recipe_keys(plan)
    if settings.sync_each_micro_batch:
        recipe["sync_each_micro_batch"] = True
    return LaunchFiles(plan=plan, accelerate=content, recipe=recipe, nodes=cluster.nodes)


def section_of(accelerate: Mapping[str, Any]) -> dict[str, Any]:
    """The `fsdp_config` section with every key under its full name (the launcher adds a missing `fsdp_`)."""
    section = accelerate.get("fsdp_config") or {}
    return {key if str(key).startswith("fsdp") else f"fsdp_{key}": value for key, value in section.items()}


def class_names(value: Any) -> tuple[str, ...]:
    """Layer classes from a comma-separated text or a list."""
    items = value if isinstance(value, (list, tuple)) else str(value or "").split(",")
    return tuple(name for item in items if (name := str(item).strip()))


def sharding_of(section: Mapping[str, Any], version: int) -> str:
    """The sharding in FSDP1's words, from whichever key the version reads.

    Raises:
        UserError: a value that neither version knows.
    """
    if version == 2:
        value = section.get("fsdp_reshard_after_forward", True)
        return "FULL_SHARD" if as_bool(value, "fsdp_reshard_after_forward") else "SHARD_GRAD_OP"
    # With version 1 the launcher always sends fsdp_sharding_strategy, so fsdp_reshard_after_forward is never
    # read.
    value = str(section.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
    if value.isdigit() and 1 <= int(value) <= len(SHARDING):
        return SHARDING[int(value) - 1]
    if value not in SHARDING:
        raise UserError(f"fsdp_sharding_strategy is {value!r}; it must be one of {', '.join(SHARDING)}")
    return value


def _settings(section: Mapping[str, Any], version: Literal[1, 2]) -> FsdpSettings:
    policy = str(section.get("fsdp_auto_wrap_policy") or "NO_WRAP").upper()
    if policy not in WRAPS:
        raise UserError(f"fsdp_auto_wrap_policy is {policy!r}; it must be one of {', '.join(WRAPS)}")
    state = section.get("fsdp_state_dict_type")
    if state is not None and str(state).upper() not in STATE_DICTS:
        raise UserError(f"fsdp_state_dict_type is {state!r}; it must be one of {', '.join(STATE_DICTS)}")
    minimum = section.get("fsdp_min_num_params")
    loading = as_bool(section.get("fsdp_cpu_ram_efficient_loading", True), "fsdp_cpu_ram_efficient_loading")
    return FsdpSettings(
        version=version,
        wrap=WRAPS[policy],
        wrap_classes=class_names(section.get("fsdp_transformer_layer_cls_to_wrap")),
        min_num_params=None if minimum is None else as_int(minimum, "fsdp_min_num_params"),
        ram_efficient_loading=loading,
        # The state dict follows the version where the file is silent: full for 1, sharded for 2.
        state_dict=STATE_DICTS[str(state).upper()] if state is not None else ("full" if version == 1 else None),
    )


def _strategy_of(
    sharding: str, sizes: Mapping[str, int], count: int | None, nodes: int
) -> tuple[StrategyName, int | None, tuple[str, ...]]:
    """(strategy, ranks that share a copy under hsdp, notes) of a sharding and a mesh."""
    if sizes["dp_replicate_size"] > 1:
        note = "groups that keep layers gathered from forward to backward are taken as hsdp, which re-gathers"
        return "hsdp", sizes["dp_shard_size"], (note,) if sharding == "SHARD_GRAD_OP" else ()
    if sharding.startswith("HYBRID") and (count is None or nodes > 1):
        # FSDP1 shards inside a node; on one node that is all there is.
        return "hsdp", None if count is None else max(1, count // nodes), ()
    if sharding == "NO_SHARD":
        return "ddp", None, ("FSDP without sharding is taken as ddp",)
    return "fsdp-grad" if sharding == "SHARD_GRAD_OP" else "fsdp", None, ()


def read(accelerate: Mapping[str, Any], deepspeed: Mapping[str, Any] | None, hidden_size: int | None) -> Found:
    """The plan of a file of distributed type FSDP, version 1 or 2.

    Raises:
        UserError: a value the engine does not know.
    """
    section = section_of(accelerate)
    number = as_int(section.get("fsdp_version", 1), "fsdp_version")
    if number not in (1, 2):
        raise UserError(f"fsdp_version is {number}; it must be 1 or 2")
    version: Literal[1, 2] = 2 if number == 2 else 1
    sizes, count = parallel.read(accelerate), processes(accelerate)
    nodes = as_int(accelerate.get("num_machines", 1), "num_machines")
    strategy, shard, notes = _strategy_of(sharding_of(section, version), sizes, count, nodes)
    plan = Plan(strategy=strategy)
    if strategy != "ddp":
        offloaded = as_bool(section.get("fsdp_offload_params", False), "fsdp_offload_params")
        key = "fsdp_activation_checkpointing"
        plan = plan.with_(
            offload="all" if offloaded else "none",
            shard_size=shard,
            checkpointing="full" if as_bool(section.get(key, False), key) else "none",
            fsdp=_settings(section, version),
        )
        if as_bool(section.get(f"{key}_offload", False), f"{key}_offload"):
            notes += ("offload of checkpointed activations to the host is not modelled",)
    return Found(
        plan=parallel.with_degrees(plan, sizes),
        precision=mixed_precision(accelerate),
        processes=count,
        nodes=nodes,
        notes=notes,
    )


def observe(accelerator: Any) -> Plan:
    """The plan of a live Accelerator that runs FSDP, from its plugin as it stands."""
    plugin = accelerator.state.fsdp_plugin
    version: Literal[1, 2] = 2 if plugin.fsdp_version == 2 else 1
    sizes = parallel.observe(accelerator)
    if version == 2:
        grad_only = plugin.reshard_after_forward is False
        offloaded = type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    else:
        grad_only = getattr(plugin.sharding_strategy, "name", "") == "SHARD_GRAD_OP"
        offloaded = bool(getattr(plugin.cpu_offload, "offload_params", False))
    hybrid = sizes["dp_replicate_size"] > 1
    policy = plugin.auto_wrap_policy
    policy = getattr(policy, "func", policy)  # a partial once a model was prepared
    wrap = {"transformer_auto_wrap_policy": "transformer", "size_based_auto_wrap_policy": "size"}
    state = getattr(plugin.state_dict_type, "name", None)
    minimum = getattr(plugin, "min_num_params", None)
    settings = FsdpSettings(
        version=version,
        wrap=wrap.get(getattr(policy, "__name__", ""), "none"),  # type: ignore[arg-type]
        wrap_classes=class_names(plugin.transformer_cls_names_to_wrap),
        min_num_params=minimum if getattr(policy, "__name__", "") == "size_based_auto_wrap_policy" else None,
        sync_each_micro_batch=bool(accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)),
        ram_efficient_loading=bool(plugin.cpu_ram_efficient_loading),
        state_dict=STATE_DICTS.get(str(state)),
    )
    plan = Plan(
        strategy="hsdp" if hybrid else "fsdp-grad" if grad_only else "fsdp",
        offload="all" if offloaded else "none",
        checkpointing="full" if plugin.activation_checkpointing else "none",
        shard_size=sizes["dp_shard_size"] if hybrid else None,
        fsdp=settings,
    )
    return parallel.with_degrees(plan, sizes)


def canonical(plan: Plan, cluster: Cluster) -> Plan:
    """The group's size and how the weights are loaded spelled out."""
    shard = parallel.shard_size(plan, cluster) if plan.strategy == "hsdp" else None
    settings = {**vars(plan.fsdp), "ram_efficient_loading": effective(plan).ram_efficient_loading}
    settings["sync_each_micro_batch"] = plan.fsdp.sync_each_micro_batch or None
    return plan.with_(fsdp=FsdpSettings(**settings), shard_size=shard)
