"""A plan read back from a DeepSpeed JSON, from `deepspeed_config` of an Accelerate file, or from a live
Accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from toolkit.errors import UserError
from toolkit.specs import Plan, ZeroSettings
from toolkit.specs.plan import Offload, OffloadTo, StrategyName
from toolkit.specs.workload import Precision
from toolkit.strategies.base import Found, as_bool, as_int, mixed_precision, processes
from toolkit.strategies.parallel import launch as parallel
from toolkit.strategies.zero.autos import PERSIST, auto_sizes

NVME_PATH = "/local_nvme"
"""Where rendered files offload to; a run's own disk has to be put there."""
SIZES = ("reduce_bucket", "allgather_bucket", "prefetch_bucket")
SETTINGS: dict[str, str] = {
    "reduce_bucket": "reduce_bucket_size",
    "allgather_bucket": "allgather_bucket_size",
    "prefetch_bucket": "stage3_prefetch_bucket_size",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "sub_group_size": "sub_group_size",
    "overlap_comm": "overlap_comm",
    "contiguous_gradients": "contiguous_gradients",
    "round_robin_gradients": "round_robin_gradients",
    "gather_16bit_on_save": "stage3_gather_16bit_weights_on_model_save",
}
"""ZeroSettings' fields by their key in `zero_optimization`."""
STAGE3 = (
    "prefetch_bucket",
    "max_live_parameters",
    "max_reuse_distance",
    "sub_group_size",
    "gather_16bit_on_save",
)
"""Settings that only stage 3 reads; below it they are neither written nor taken from a file."""
FLAGS = ("overlap_comm", "contiguous_gradients", "round_robin_gradients", "gather_16bit_on_save")
UNMODELLED = (
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "zenflow",
    "stage3_model_persistence_threshold",
    "stage3_allgather_sequential",
    "stage3_module_granularity_threshold",
)
"""Keys of `zero_optimization` that change memory and that a Plan has no word for."""


def zero_section(deepspeed: Mapping[str, Any]) -> dict[str, Any]:
    """`zero_optimization` with each key under its one name: DeepSpeed also takes them without `stage3_`.

    Raises:
        UserError: there is no such section, or it is not a mapping.
    """
    section = deepspeed.get("zero_optimization")
    if not isinstance(section, Mapping):
        raise UserError("the DeepSpeed config has no `zero_optimization` section; write one with its `stage`")
    names: dict[str, str] = {key.removeprefix("stage3_"): key for key in (*SETTINGS.values(), PERSIST)}
    names["stage3_gather_fp16_weights_on_model_save"] = SETTINGS["gather_16bit_on_save"]
    return {names.get(str(key), str(key)): value for key, value in section.items()}


def read(
    accelerate: Mapping[str, Any], deepspeed: Mapping[str, Any] | None, hidden_size: int | None
) -> Found:
    """The plan of a file of distributed type DEEPSPEED.

    Args:
        accelerate: the Accelerate file; without a JSON its `deepspeed_config` holds the settings.
        deepspeed: the DeepSpeed JSON, or None.
        hidden_size: the model's width, for sizes that are "auto".

    Raises:
        UserError: a value DeepSpeed does not know, or an "auto" that nothing resolves.
    """
    found = _from_json(deepspeed, hidden_size) if deepspeed is not None else _from_plugin(accelerate)
    return Found(
        plan=parallel.with_degrees(found.plan, parallel.read(accelerate)),
        precision=found.precision or mixed_precision(accelerate),
        accumulate=found.accumulate,
        micro_batch=found.micro_batch,
        clip=found.clip,
        processes=processes(accelerate),
        nodes=as_int(accelerate.get("num_machines", 1), "num_machines"),
        notes=found.notes,
    )


def _strategy(stage: Any, key: str) -> StrategyName:
    number = as_int(stage, key)
    names: dict[int, StrategyName] = {1: "zero1", 2: "zero2", 3: "zero3"}
    if number == 0:
        raise UserError(f"{key} is 0: DeepSpeed without sharding is not modelled; use stage 1, or ddp")
    if number not in names:
        raise UserError(f"{key} is {number}; it must be 1, 2 or 3")
    return names[number]


def _from_plugin(accelerate: Mapping[str, Any]) -> Found:
    """Settings that stand in the Accelerate file itself: its plugin makes a DeepSpeed config of them."""
    section = accelerate.get("deepspeed_config") or {}
    strategy = _strategy(section.get("zero_stage", 2), "zero_stage")
    devices = [
        str(section.get(f"offload_{what}_device") or "none").lower() for what in ("optimizer", "param")
    ]
    offload, target, notes = _offload(strategy, *devices)
    save = as_bool(section.get("zero3_save_16bit_model", False), "zero3_save_16bit_model")
    clip = _clip(section.get("gradient_clipping", "auto"))
    accumulate = section.get("gradient_accumulation_steps", "auto")
    return Found(
        plan=Plan(
            strategy=strategy,
            offload=offload,
            offload_to=target,
            zero=ZeroSettings(
                gradient_clipping=clip, gather_16bit_on_save=save if strategy == "zero3" else None
            ),
        ),
        accumulate=None
        if accumulate in ("auto", None)
        else as_int(accumulate, "gradient_accumulation_steps"),
        clip=clip,
        notes=notes,
    )


def _from_json(deepspeed: Mapping[str, Any], hidden_size: int | None) -> Found:
    section = zero_section(deepspeed)
    strategy = _strategy(section.get("stage", 0), "zero_optimization.stage")
    values: dict[str, Any] = {name: _value(section, key, name, hidden_size) for name, key in SETTINGS.items()}
    persist = _value(section, PERSIST, "persist", hidden_size)
    offloads = [_mapping(section, f"offload_{what}") for what in ("optimizer", "param")]
    # Older files say `cpu_offload: true`.
    old = ["cpu" if section.get(key) is True else "none" for key in ("cpu_offload", "cpu_offload_param")]
    devices = [str(part.get("device", instead)) for part, instead in zip(offloads, old, strict=True)]
    offload, target, notes = _offload(strategy, *("none" if d == "auto" else d for d in devices))
    pins = [part["pin_memory"] for part in offloads if "pin_memory" in part]
    # A JSON without the key does not clip; only Accelerate's own config is given a silent 1.0.
    clip = _clip(deepspeed.get("gradient_clipping", 0.0))
    accumulation = _mapping(deepspeed, "data_types").get("grad_accum_dtype")
    values |= {
        "gradient_clipping": clip,
        "grad_accum_dtype": accumulation,
        "pin_memory": as_bool(pins[0], "pin_memory") if pins and offload != "none" else None,
    }
    names = SIZES if strategy == "zero3" else SIZES[:2]
    if strategy != "zero3":
        persist = None
        values |= dict.fromkeys(STAGE3)
    bucket = values[names[0]] if len({values[name] for name in names}) == 1 else None
    if bucket is not None:
        values |= dict.fromkeys(names)
    others = tuple(
        f"zero_optimization.{key} is not modelled"
        for key in UNMODELLED
        if section.get(key) not in (None, False)
    )
    return Found(
        plan=Plan(
            strategy=strategy,
            offload=offload,
            offload_to=target,
            bucket=bucket,
            persist=persist,
            zero=ZeroSettings(**values),
        ),
        precision=_precision(deepspeed),
        accumulate=_count(deepspeed, "gradient_accumulation_steps", 1),
        micro_batch=_count(deepspeed, "train_micro_batch_size_per_gpu", None),
        clip=clip,
        notes=notes + others,
    )


def _mapping(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, Mapping):
        raise UserError(f"{key} of the DeepSpeed config is {value!r}; it must be a section {{...}}")
    return value


def _value(section: Mapping[str, Any], key: str, name: str, hidden_size: int | None) -> Any:
    value, where = section.get(key), f"zero_optimization.{key}"
    if value is None:
        return None
    if value == "auto":
        if name == "gather_16bit_on_save":
            return False  # what Accelerate fills in
        if key not in auto_sizes(1):
            raise UserError(f'{where} is "auto", which nothing resolves: write a value, or delete the key')
        if hidden_size is None:
            raise UserError(
                f'{where} is "auto", which comes from the model\'s hidden size; name the model, or write '
                "a number"
            )
        return auto_sizes(hidden_size)[key]
    return as_bool(value, where) if name in FLAGS else as_int(value, where)


def _offload(
    strategy: StrategyName, optimizer: str, params: str
) -> tuple[Offload, OffloadTo, tuple[str, ...]]:
    for what, device in (("optimizer", optimizer), ("param", params)):
        if device not in ("none", "cpu", "nvme"):
            raise UserError(f"the device of offload_{what} is {device!r}; it must be none, cpu or nvme")
    notes: list[str] = []
    if params != "none" and strategy != "zero3":
        raise UserError(
            f"offload_param and {strategy} exclude each other: parameters are offloaded with stage 3 only"
        )
    target: OffloadTo = "nvme" if "nvme" in (optimizer, params) else "cpu"
    if params == "none":
        return ("none" if optimizer == "none" else "optimizer"), target, ()
    if optimizer == "none":
        notes.append("offload of the parameters alone is taken as offload of everything")
    elif optimizer != params:
        notes.append(f"offload to {optimizer} and {params} is taken as offload of everything to {target}")
    return "all", target, tuple(notes)


def _clip(value: Any) -> float | None:
    if value in ("auto", None):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f'gradient_clipping is {value!r}; it must be a number or "auto"') from None


def _count(deepspeed: Mapping[str, Any], key: str, default: int | None) -> int | None:
    value = deepspeed.get(key, default)
    return None if value in ("auto", None) else as_int(value, key)


def _precision(deepspeed: Mapping[str, Any]) -> Precision | None:
    said: dict[str, Any] = {name: _mapping(deepspeed, name).get("enabled") for name in ("bf16", "fp16")}
    for name in ("bf16", "fp16"):
        if said[name] not in (None, "auto") and as_bool(said[name], f"{name}.enabled"):
            precision: Literal["bf16", "fp16"] = "bf16" if name == "bf16" else "fp16"
            return precision
    return "fp32" if all(value not in (None, "auto") for value in said.values()) else None


def observe(accelerator: Any) -> Plan:
    """The plan of a live Accelerator that runs DeepSpeed, from the config its engine was given.

    Call it after `prepare`, when every "auto" has its value.
    """
    found = _from_json(accelerator.deepspeed_plugin.deepspeed_config, None)
    return parallel.with_degrees(found.plan, parallel.observe(accelerator))
