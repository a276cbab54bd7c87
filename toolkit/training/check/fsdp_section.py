"""Rules for the FSDP section of an Accelerate file: which version reads which key, and what becomes a unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import UserError, nearest
from toolkit.strategies.base import as_bool, as_int
from toolkit.strategies.fsdp.launch import MIN_NUM_PARAMS, STATE_DICTS, WRAPS, class_names, sharding_of
from toolkit.strategies.fsdp.launch import section_of as full_names
from toolkit.training.check import known
from toolkit.training.check.accelerate_file import engine_of
from toolkit.training.check.finding import Findings, ModelFacts
from toolkit.units import format_count

WHERE = "fsdp_config."


def check_fsdp(content: Mapping[str, Any], model: ModelFacts | None, out: Findings) -> None:
    """Everything about `fsdp_config` when FSDP is the engine."""
    if engine_of(content) != "FSDP" or not isinstance(content.get("fsdp_config") or {}, Mapping):
        return
    section = full_names(content)
    try:
        version = as_int(section.get("fsdp_version", 1), "fsdp_version")
        sharding = sharding_of(section, version)
        _switches(section)
    except UserError as error:
        out.error("fsdp_config", str(error))
        return
    if version not in (1, 2):
        out.error(f"{WHERE}fsdp_version", f"is {version}; it must be 1 or 2")
        return
    _version(section, version, sharding, out)
    _loading(section, version, out)
    _wrap(section, model, out)
    if content.get("parallelism_config") and version == 1:
        out.error("parallelism_config", "goes with fsdp_version 2 only")


def _switches(section: Mapping[str, Any]) -> None:
    for key in (
        "offload_params",
        "cpu_ram_efficient_loading",
        "sync_module_states",
        "activation_checkpointing",
        "activation_checkpointing_offload",
        "use_orig_params",
        "forward_prefetch",
    ):
        as_bool(section.get(f"fsdp_{key}", False), f"fsdp_{key}")


def _version(section: Mapping[str, Any], version: int, sharding: str, out: Findings) -> None:
    if version == 1:
        said = "is missing, so version 1 runs" if "fsdp_version" not in section else "is 1"
        out.warning(f"{WHERE}fsdp_version", f"{said}, which torch has deprecated and the recipes refuse; write 2")
        if "fsdp_reshard_after_forward" in section:
            out.warning(
                f"{WHERE}fsdp_reshard_after_forward", f"version 1 does not read it; {sharding} runs, from fsdp_sharding_strategy"
            )
        if sharding.startswith("HYBRID"):
            out.warning(
                f"{WHERE}fsdp_sharding_strategy",
                f"{sharding} makes its groups from the GPUs that torch sees, not from "
                "the processes, and fails with fewer processes; use version 2 with parallelism_config",
            )
        return
    strategy = str(section.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
    if strategy not in ("FULL_SHARD", "1"):
        out.error(
            f"{WHERE}fsdp_sharding_strategy",
            f"version 2 does not read it, so {strategy} does not run; write " + _instead(strategy),
        )
    ignored = sorted(set(section) & known.FSDP1_ONLY - ({"fsdp_sharding_strategy"} if strategy != "FULL_SHARD" else set()))
    if ignored:
        out.warning("fsdp_config", f"version 2 does not read {', '.join(ignored)}; delete them")


def _instead(strategy: str) -> str:
    if "HYBRID" in strategy or strategy in ("4", "5"):
        return "parallelism_config with dp_replicate_size and dp_shard_size"
    if strategy in ("NO_SHARD", "3"):
        return "distributed_type: MULTI_GPU"
    return "fsdp_reshard_after_forward: false"


def _loading(section: Mapping[str, Any], version: int, out: Findings) -> None:
    efficient = as_bool(section.get("fsdp_cpu_ram_efficient_loading", True), "fsdp_cpu_ram_efficient_loading")
    if efficient and not as_bool(section.get("fsdp_sync_module_states", True), "fsdp_sync_module_states"):
        out.error(
            f"{WHERE}fsdp_sync_module_states",
            "the launcher refuses false while fsdp_cpu_ram_efficient_loading is true (its default)",
        )
    state = section.get("fsdp_state_dict_type")
    if state is not None and str(state).upper() not in STATE_DICTS:
        out.error(f"{WHERE}fsdp_state_dict_type", f"is {state!r}; it must be one of {', '.join(STATE_DICTS)}")
    checkpointing = as_bool(section.get("fsdp_activation_checkpointing", False), "fsdp_activation_checkpointing")
    if as_bool(section.get("fsdp_activation_checkpointing_offload", False), "") and (not checkpointing or version == 1):
        out.error(
            f"{WHERE}fsdp_activation_checkpointing_offload", "needs fsdp_activation_checkpointing: true and fsdp_version: 2"
        )


def _wrap(section: Mapping[str, Any], model: ModelFacts | None, out: Findings) -> None:
    policy = str(section.get("fsdp_auto_wrap_policy") or "NO_WRAP").upper()
    key = f"{WHERE}fsdp_auto_wrap_policy"
    if policy not in WRAPS:
        out.error(key, f"is {policy!r}{nearest(policy, WRAPS)}")
    elif policy == "NO_WRAP":
        layers = f" of {model.layers} layers" if model else ""
        out.warning(key, f"without wrapping the whole model{layers} is gathered at once; write TRANSFORMER_BASED_WRAP")
    elif policy == "SIZE_BASED_WRAP":
        try:
            minimum = as_int(section.get("fsdp_min_num_params", MIN_NUM_PARAMS), "fsdp_min_num_params")
        except UserError as error:
            out.error(f"{WHERE}fsdp_min_num_params", str(error))
            return
        if model and minimum >= model.parameters:
            out.warning(
                f"{WHERE}fsdp_min_num_params",
                f"{format_count(minimum)} is no less than the model's "
                f"{format_count(model.parameters)} parameters, so nothing becomes a unit of its own",
            )
    else:
        _classes(section, model, out)


def _classes(section: Mapping[str, Any], model: ModelFacts | None, out: Findings) -> None:
    key = f"{WHERE}fsdp_transformer_layer_cls_to_wrap"
    value = section.get("fsdp_transformer_layer_cls_to_wrap")
    if isinstance(value, (list, tuple)):
        out.error(key, f"the launcher turns a list into text that names no class; write {','.join(class_names(value))}")
    names = class_names(value)
    if value is not None and not names:
        out.error(key, "is empty, which names no class; name the layer classes, or delete the key")
    if model is None:
        return
    have = ", ".join(model.blocks) or "none that repeat"
    missing = [name for name in names if name not in model.classes]
    for name in missing:
        out.error(key, f"{model.name} has no class {name!r}; its layers are {have}")
    units = sum(model.classes[name] for name in names) if names and not missing else model.layers
    if names and not missing and units < model.layers:
        out.warning(key, f"{', '.join(names)} makes {units} units of {model.layers} layers; the layers are {have}")
    if not names and not model.blocks:
        out.error(key, f"{model.name} names no layers of its own; name them here")
