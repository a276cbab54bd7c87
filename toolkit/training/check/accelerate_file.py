"""Rules for an Accelerate file: what its launcher ignores, refuses, or reads otherwise than it was meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import UserError, nearest
from toolkit.strategies.base import as_bool, as_int
from toolkit.strategies.parallel.launch import PREFIX, SIZES
from toolkit.training.check import known
from toolkit.training.check.finding import Findings

TYPES = (
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_HPU",
    "MULTI_NEURON",
    "XLA",
    "FSDP",
    "DEEPSPEED",
    "MEGATRON_LM",
)
SECTIONS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}


def check_accelerate(content: Mapping[str, Any], out: Findings) -> None:
    """Everything about the file that needs neither a model nor the other files."""
    _keys(content, out)
    _values(content, out)
    _processes(content, out)
    engine = engine_of(content)
    for section, owner in SECTIONS.items():
        if content.get(section) and engine != owner:
            out.error(section, f"is ignored: distributed_type is {engine}, not {owner}")
    if engine in ("FSDP", "DEEPSPEED") and _switch(content, "use_cpu", out):
        out.error("use_cpu", f"with it Accelerate ignores {engine} without a word and runs plain data parallelism; delete it")
    if engine == "DEEPSPEED":
        _deepspeed(content, out)
    _parallelism(content, engine, out)


def engine_of(content: Mapping[str, Any]) -> str:
    """The distributed type in capitals; a bare NO, which YAML reads as false, is NO."""
    value = content.get("distributed_type")
    return "NO" if value is False else str(value or "").upper()


def section_of(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of the file; an empty one when it is missing or no mapping."""
    value = content.get(name)
    return value if isinstance(value, Mapping) else {}


def unknown(section: Mapping[str, Any], names: frozenset[str], prefix: str, out: Findings, effect: str) -> None:
    """Report each key of a section that is not among the known ones."""
    for key in section:
        if key not in names:
            longer = [name for name in names if name.endswith(f"_{key}")]
            close = nearest(longer[0] if longer else str(key), names)
            out.error(f"{prefix}{key}", f"unknown key, {effect}" + (close if "did you mean" in close else ""))


def _keys(content: Mapping[str, Any], out: Findings) -> None:
    unknown(content, known.ACCELERATE | known.LEGACY, "", out, "the launcher refuses the file")
    from toolkit.strategies.fsdp.launch import section_of as full_names

    unknown(
        full_names({"fsdp_config": section_of(content, "fsdp_config")}),
        known.FSDP,
        "fsdp_config.",
        out,
        "ignored by the launcher",
    )
    unknown(section_of(content, "deepspeed_config"), known.PLUGIN, "deepspeed_config.", out, "ignored by the launcher")
    unknown(section_of(content, "parallelism_config"), known.PARALLELISM, "parallelism_config.", out, "ignored by the launcher")
    for name in ("fsdp_config", "deepspeed_config", "parallelism_config"):
        if name in content and content[name] is not None and not isinstance(content[name], Mapping):
            out.error(name, f"is {content[name]!r}; it must be a section of keys and values")


def _values(content: Mapping[str, Any], out: Findings) -> None:
    value = content.get("distributed_type")
    if value is None:
        out.error("distributed_type", f"is missing; it must be one of {', '.join(TYPES)}")
    elif value is False:
        out.warning("distributed_type", "YAML reads a bare NO as false; write 'NO' in quotes")
    elif engine_of(content) not in TYPES:
        out.error("distributed_type", f"is {value!r}{nearest(str(value), TYPES)}")
    precision = content.get("mixed_precision")
    if precision is False:
        out.error("mixed_precision", "YAML reads a bare no as false, on which the launcher fails; write 'no' in quotes")
    elif precision is not None and str(precision).lower() not in ("no", "fp16", "bf16", "fp8"):
        out.error("mixed_precision", f"is {precision!r}; it must be no, fp16, bf16 or fp8")
    if content.get("rdzv_backend") not in (None, "static"):
        out.warning("rdzv_backend", "the launcher takes its own default over this key; give --rdzv_backend on the command line")


def _switch(section: Mapping[str, Any], key: str, out: Findings, default: bool = False) -> bool:
    try:
        return as_bool(section.get(key, default), key)
    except UserError as error:
        out.error(key, str(error))
        return default


def _number(content: Mapping[str, Any], key: str, out: Findings) -> int | None:
    if content.get(key) is None:
        return None
    try:
        return as_int(content[key], key)
    except UserError as error:
        out.error(key, str(error))
        return None


def _processes(content: Mapping[str, Any], out: Findings) -> None:
    count, machines = _number(content, "num_processes", out), _number(content, "num_machines", out) or 1
    engine = engine_of(content)
    if machines < 1:
        out.error("num_machines", f"is {machines}; it must be at least 1")
        return
    if count is None or count < 0:
        if engine != "NO":
            out.note("num_processes", "is not said; give --num_processes, the number of all machines' GPUs together")
        return
    if engine == "NO" and count > 1:
        out.error("num_processes", f"is {count}, but distributed_type NO runs one process; use MULTI_GPU, FSDP or DEEPSPEED")
    if machines > 1:
        if count < machines or count % machines:
            out.error(
                "num_processes",
                f"is {count} for {machines} machines; it is the total, so machines x GPUs of one, "
                f"such as {max(count, 1) * machines}",
            )
        else:
            out.note("num_processes", f"{count} over {machines} machines is {count // machines} on each: it is the total")
        if content.get("main_process_ip") is None:
            out.warning("main_process_ip", f"{machines} machines need it; give --main_process_ip and --machine_rank on each")
    ids = [part for part in str(content.get("gpu_ids") or "all").split(",") if part.strip()]
    if ids != ["all"] and count // machines > len(ids):
        out.error("gpu_ids", f"names {len(ids)} GPUs for {count // machines} processes; name as many, or write all")


def _deepspeed(content: Mapping[str, Any], out: Findings) -> None:
    section = section_of(content, "deepspeed_config")
    if section.get("deepspeed_config_file") not in (None, "none"):
        doubled = sorted(
            (set(section) | ({"mixed_precision"} if content.get("mixed_precision") is not None else set())) & known.IN_JSON
        )
        if doubled:
            out.error(
                "deepspeed_config",
                f"Accelerate refuses {', '.join(doubled)} beside deepspeed_config_file: they are the JSON's; delete them here",
            )
        return
    stage = _number(section, "zero_stage", out)
    stage = 2 if stage is None else stage
    if stage not in (0, 1, 2, 3):
        out.error("deepspeed_config.zero_stage", f"is {stage}; it must be 0, 1, 2 or 3")
    for what in ("optimizer", "param"):
        device = str(section.get(f"offload_{what}_device") or "none").lower()
        key = f"deepspeed_config.offload_{what}_device"
        if device not in ("none", "cpu", "nvme"):
            out.error(key, f"is {device!r}; it must be none, cpu or nvme")
        elif device != "none" and what == "param" and stage != 3:
            out.error(key, f"parameters are offloaded with stage 3 only, and zero_stage is {stage}")
        elif device == "nvme" and section.get(f"offload_{what}_nvme_path") in (None, "none"):
            out.error(key, f"nvme needs offload_{what}_nvme_path, the folder of the disk")
        elif device == "nvme" and stage != 3:
            out.error(key, f"NVMe goes with stage 3 only, and zero_stage is {stage}")
    if section.get("gradient_clipping") is None:
        out.warning("deepspeed_config.gradient_clipping", "is missing: Accelerate silently clips at 1.0; say what you mean")
    if stage == 3 and not _switch(section, "zero3_save_16bit_model", out):
        out.warning("deepspeed_config.zero3_save_16bit_model", "is not true: saving the model fails after the training")
    if stage != 3 and _switch(section, "zero3_init_flag", out):
        out.warning("deepspeed_config.zero3_init_flag", f"has no effect in stage {stage}")


def _parallelism(content: Mapping[str, Any], engine: str, out: Findings) -> None:
    section = section_of(content, "parallelism_config")
    if not section:
        return
    where = "parallelism_config"
    sizes: dict[str, int] = {}
    for name in SIZES:
        size = _number(section, PREFIX + name, out)
        sizes[name] = 1 if size is None else size
        if sizes[name] < 1:
            out.error(f"{where}.{PREFIX + name}", f"is {sizes[name]}; it must be at least 1")
            return
    replicate, shard, tp, cp, sp = (sizes[name] for name in SIZES)
    if engine not in ("FSDP", "DEEPSPEED") and not engine.startswith("MULTI_"):
        out.error(where, f"goes with FSDP (version 2), MULTI_GPU or DEEPSPEED; distributed_type is {engine}")
    if cp > 1 and sp > 1:
        out.error(where, f"cp {cp} and sp {sp} exclude each other: both split the sequence; set one to 1")
        return
    if sp > 1 and engine != "DEEPSPEED":
        out.error(where, f"sp {sp} is DeepSpeed's; distributed_type is {engine}")
    if (tp > 1 or cp > 1) and engine == "DEEPSPEED":
        out.error(where, f"tp {tp}, cp {cp} go with FSDP version 2; distributed_type is DEEPSPEED")
    if cp > 1 and engine.startswith("MULTI_"):
        out.error(where, f"cp {cp} goes with FSDP version 2; distributed_type is {engine}")
    if (tp > 1 or cp > 1) and replicate > 1 and shard == 1:
        out.error(
            where, f"dp_replicate {replicate} alone can't go with tp {tp}, cp {cp}; set dp_shard above 1, or dp_replicate to 1"
        )
    elif engine == "FSDP" and shard == cp == 1:
        out.error(where, "FSDP has nothing to shard over: dp_shard and cp are both 1; raise dp_shard, or use MULTI_GPU")
    product, count = replicate * shard * tp * cp * sp, content.get("num_processes")
    if isinstance(count, int) and count > 0 and product not in (1, count):
        parts = " x ".join(f"{name.removesuffix('_size')} {size}" for name, size in sizes.items() if size > 1)
        out.error(where, f"{parts} is {product}, but num_processes is {count}; they must be equal")
