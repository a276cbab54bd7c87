"""Every strategy by name, and a plan turned into launch files and back.

A strategy's own folder is the only place that knows it; what is here only finds the folder and holds the
rules that follow from the fields of `StrategyInfo`. Importing this is cheap: no torch, no accelerate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import yaml

from toolkit.errors import UserError, nearest
from toolkit.specs import Cluster, DdpSettings, FsdpSettings, Plan, Workload, ZeroSettings
from toolkit.strategies import exclusions
from toolkit.strategies.base import Family, Found, LaunchFiles, StrategyInfo, launch_environment
from toolkit.strategies.ddp import launch as ddp
from toolkit.strategies.fsdp import launch as fsdp
from toolkit.strategies.parallel import launch as parallel
from toolkit.strategies.single import launch as single
from toolkit.strategies.zero import launch as zero

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "single": cast(Family, single),
        "ddp": cast(Family, ddp),
        "fsdp": cast(Family, fsdp),
        "zero": cast(Family, zero),
    }
)
STRATEGIES: Mapping[str, StrategyInfo] = MappingProxyType(
    {info.name: info for family in FAMILIES.values() for info in family.STRATEGIES}
)
_ENGINES = {"NO": "single", "FSDP": "fsdp", "DEEPSPEED": "zero"}
_OWN_SETTINGS = {"ddp": DdpSettings(), "fsdp": FsdpSettings(), "zero": ZeroSettings()}

__all__ = [
    "FAMILIES",
    "STRATEGIES",
    "Found",
    "LaunchFiles",
    "StrategyInfo",
    "canonical",
    "check_plan",
    "family_of",
    "launch_environment",
    "load_file",
    "mismatch",
    "observe",
    "read",
    "render",
]


def family_of(plan: Plan) -> Family:
    """The family that knows the plan's strategy."""
    return FAMILIES[STRATEGIES[plan.strategy].family]


def check_plan(plan: Plan, workload: Workload, cluster: Cluster) -> None:
    """Hold a plan to what its engine can do.

    Raises:
        UserError: one line that names the two things that exclude each other and what would be right.
    """
    info, world = STRATEGIES[plan.strategy], cluster.world_size
    if world < info.min_world:
        raise UserError(
            f"{plan.strategy} needs at least {info.min_world} GPUs, the cluster has {world}; use single"
        )
    if plan.offload not in info.offloads:
        others = [f"{i.name}" for i in STRATEGIES.values() if plan.offload in i.offloads]
        raise UserError(
            f"offload {plan.offload} and {plan.strategy} exclude each other; offload {plan.offload} goes "
            "with " + ", ".join(others)
        )
    if plan.offload != "none" and plan.offload_to not in info.offload_to:
        others = [i.name for i in STRATEGIES.values() if plan.offload_to in i.offload_to]
        raise UserError(
            f"offload to {plan.offload_to} and {plan.strategy} exclude each other; it goes with "
            + ", ".join(others)
        )
    for option in ("bucket", "persist"):
        if getattr(plan, option) is not None and info.family != "zero":
            raise UserError(
                f"{option} and {plan.strategy} exclude each other: it is DeepSpeed's, so zero1, zero2 or "
                "zero3's"
            )
    for name, default in _OWN_SETTINGS.items():
        if name != info.family and getattr(plan, name) != default:
            raise UserError(f"settings of {name} and strategy {plan.strategy} exclude each other")
    exclusions.check(plan, workload, cluster)
    parallel.check(plan, workload, cluster, info.axes)
    family_of(plan).check(plan, workload, cluster)


def render(plan: Plan, workload: Workload, cluster: Cluster) -> LaunchFiles:
    """The files that launch a plan.

    Raises:
        UserError: the plan can't run (see `check_plan`), or can't be written.
    """
    check_plan(plan, workload, cluster)
    return family_of(plan).render(plan, workload, cluster)


def canonical(plan: Plan, cluster: Cluster) -> Plan:
    """The plan as `read` gives it back after `render`: the same run in one spelling."""
    plan = family_of(plan).canonical(plan, cluster)
    return plan.with_(offload_to="cpu") if plan.offload == "none" else plan


def read(
    accelerate: Mapping[str, Any] | str | Path,
    deepspeed: Mapping[str, Any] | str | Path | None = None,
    recipe: Mapping[str, Any] | None = None,
    hidden_size: int | None = None,
) -> Found:
    """The plan that configuration files ask for, with what the engine fills in where they are silent.

    Args:
        accelerate: an Accelerate file, or its content.
        deepspeed: a DeepSpeed JSON, or its content; None: the one that the Accelerate file points at, if any.
        recipe: the recipe's keys, of which `checkpointing` and `sync_each_micro_batch` are the plan's.
        hidden_size: the model's width, which "auto" sizes of a DeepSpeed JSON are made from.

    Raises:
        UserError: a file is missing or not readable, or a value is not known.
    """
    folder = Path(accelerate).parent if isinstance(accelerate, (str, Path)) else Path()
    content = load_file(accelerate) if isinstance(accelerate, (str, Path)) else accelerate
    engine = str(content.get("distributed_type", "")).upper()
    engine = "NO" if engine == "FALSE" else engine  # YAML reads a bare NO as false
    if engine.startswith("MULTI_"):
        family = FAMILIES["ddp"]
    elif engine in _ENGINES:
        family = FAMILIES[_ENGINES[engine]]
    else:
        raise UserError(
            f"distributed_type is {content.get('distributed_type')!r}"
            + nearest(engine, [*_ENGINES, "MULTI_GPU", "MULTI_CPU"])
        )
    json_content = None
    if family is FAMILIES["zero"]:
        json_content = _deepspeed_content(content, deepspeed, folder)
    elif deepspeed is not None:
        raise UserError(
            f"a DeepSpeed config was given, but distributed_type is {engine}; it must be DEEPSPEED"
        )
    found = family.read(content, json_content, hidden_size)
    return _with_recipe(found, recipe or {})


def _with_recipe(found: Found, recipe: Mapping[str, Any]) -> Found:
    plan = found.plan
    if "checkpointing" in recipe:
        plan = plan.with_(checkpointing=recipe["checkpointing"])
    if recipe.get("sync_each_micro_batch") and STRATEGIES[plan.strategy].family == "fsdp":
        plan = plan.with_(fsdp=FsdpSettings(**{**vars(plan.fsdp), "sync_each_micro_batch": True}))
    return Found(**{**vars(found), "plan": plan})


def _deepspeed_content(
    accelerate: Mapping[str, Any], given: Mapping[str, Any] | str | Path | None, folder: Path
) -> Mapping[str, Any] | None:
    if isinstance(given, Mapping):
        return given
    named = (accelerate.get("deepspeed_config") or {}).get("deepspeed_config_file")
    if given is None and named in (None, "none"):
        return None
    if given is not None:
        return load_file(given)
    # Accelerate looks from where the run is started; a file beside the YAML is meant as often.
    for place in (
        Path(str(named)),
        folder / str(named),
        *(parent / str(named) for parent in folder.resolve().parents),
    ):
        if place.is_file():
            return load_file(place)
    raise UserError(
        f"deepspeed_config_file {str(named)!r} does not exist, neither here nor beside the Accelerate file"
    )


def load_file(path: str | Path) -> dict[str, Any]:
    """A YAML or JSON file that holds one mapping.

    Raises:
        UserError: the file is missing, not readable, or holds something else.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{str(path)!r} can't be read: {reason}") from None
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{str(path)!r} is not JSON: line {error.lineno}: {error.msg}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}:" if mark is not None else ""
        raise UserError(
            f"{str(path)!r} is not YAML:{where} {getattr(error, 'problem', 'syntax error')}"
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{str(path)!r} must hold keys and values at its top")
    return content


def observe(accelerator: Any, model: Any = None) -> Plan:
    """The plan that a live Accelerator runs; call it after `prepare`.

    Args:
        accelerator: an `accelerate.Accelerator`.
        model: the model, prepared or not; with it activation checkpointing is seen too.

    Raises:
        UserError: the engine is none that the toolkit knows.
    """
    engine = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type)).upper()
    name = "ddp" if engine.startswith("MULTI_") else _ENGINES.get(engine)
    if name is None:
        raise UserError(
            f"the running engine is {engine}, which is none of {', '.join(_ENGINES)} or MULTI_GPU"
        )
    plan = FAMILIES[name].observe(accelerator)
    checkpointed = model is not None and any(
        getattr(m, "gradient_checkpointing", False) for m in model.modules()
    )
    return plan.with_(checkpointing="full") if checkpointed and plan.checkpointing == "none" else plan


def mismatch(requested: Plan, running: Plan) -> str | None:
    """What differs between the plan that was asked for and the one that runs, in a line; None: nothing.

    Only what decides the engine counts: the strategy, its offload and its degrees.
    """
    fields = ("strategy", "offload", "tp", "cp", "sp")
    differing = [f for f in fields if getattr(requested, f) != getattr(running, f)]
    if not differing:
        return None
    return "; ".join(
        f"{f} {getattr(requested, f)} was asked for, {getattr(running, f)} runs" for f in differing
    )
