"""Rules for a DeepSpeed JSON: keys that nothing reads, "auto" that nothing resolves, buffers larger than the
model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import UserError, nearest
from toolkit.strategies.base import as_bool, as_int
from toolkit.strategies.zero.autos import BATCH_KEYS, OPTIMIZER_KEYS, auto_sizes, unresolved
from toolkit.strategies.zero.defaults import engine_defaults
from toolkit.strategies.zero.files import PERSIST, SETTINGS, STAGE3, zero_section
from toolkit.training.check import known
from toolkit.training.check.accelerate_file import unknown
from toolkit.training.check.finding import Findings, ModelFacts
from toolkit.units import format_count, format_size

ZERO = "zero_optimization"
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")


def check_deepspeed(content: Mapping[str, Any], model: ModelFacts | None, out: Findings) -> None:
    """Everything about the JSON that does not need the recipe."""
    _keys(content, out)
    _autos(content, model, out)
    _precision(content, out)
    _batches(content, out)
    try:
        section = zero_section(content)
    except UserError as error:
        out.error(ZERO, str(error))
        return
    stage = _stage(section, out)
    if stage is None:
        return
    _offload(section, stage, out)
    _stage3(section, stage, out)
    _buckets(section, stage, model, out)


def _keys(content: Mapping[str, Any], out: Findings) -> None:
    for key in content:
        if key not in known.DEEPSPEED:
            close = nearest(str(key), known.DEEPSPEED)
            if "did you mean" in close:
                out.error(str(key), f"unknown key, ignored by DeepSpeed{close}")
            else:
                out.warning(str(key), "a key that DeepSpeed 0.19 does not read")
    section = content.get(ZERO)
    if isinstance(section, Mapping):
        unknown(section, known.ZERO | known.ZERO_ALIASES, f"{ZERO}.", out, "refused by DeepSpeed")
        for old, new in known.DEPRECATED.items():
            if old in section:
                out.warning(f"{ZERO}.{old}", f"is deprecated; write {new}")
        for name, names in known.OFFLOAD.items():
            if isinstance(section.get(name), Mapping):
                unknown(section[name], names, f"{ZERO}.{name}.", out, "refused by DeepSpeed")
    for name, names in known.PRECISION.items():
        if isinstance(content.get(name), Mapping):
            unknown(content[name], names, f"{name}.", out, "refused by DeepSpeed")


def _autos(content: Mapping[str, Any], model: ModelFacts | None, out: Findings) -> None:
    for key in unresolved(content):
        if key in OPTIMIZER_KEYS:
            out.warning(key, 'is "auto": only Accelerate\'s DummyOptim and DummyScheduler (or the Trainer) fill it in')
        else:
            out.error(key, 'is "auto", which nothing fills in: it stays a word and fails late; write a value, or delete it')
    section = content.get(ZERO)
    sizes = [key for key in auto_sizes(1) if isinstance(section, Mapping) and section.get(key) == "auto"]
    if not sizes or model is None or "hidden_size" in model.config or "hidden_sizes" in model.config:
        return
    if model.hidden_size is None:
        out.error(f"{ZERO}.{sizes[0]}", f'"auto" comes from hidden_size, which {model.name} has not; write a number')
    elif any(isinstance(model.config.get(key), Mapping) for key in ("text_config", "llm_config", "language_config")):
        values = ", ".join(f"{key}: {auto_sizes(model.hidden_size)[key]}" for key in sizes)
        out.error(ZERO, f"Accelerate does not look for hidden_size inside {model.name}'s text config; write {values}")


def _precision(content: Mapping[str, Any], out: Findings) -> None:
    enabled = []
    for name in ("bf16", "fp16"):
        section = content.get(name)
        if section is None:
            continue
        if not isinstance(section, Mapping):
            out.error(name, f'is {section!r}; it must be a section such as {{"enabled": "auto"}}')
        elif section.get("enabled") not in (None, "auto"):
            try:
                enabled += [name] if as_bool(section["enabled"], f"{name}.enabled") else []
            except UserError as error:
                out.error(name, str(error))
    if len(enabled) == 2:
        out.error("fp16", "fp16 and bf16 exclude each other; enable one")


def _batches(content: Mapping[str, Any], out: Findings) -> None:
    values: dict[str, int] = {}
    for key in BATCH_KEYS:
        if content.get(key) in (None, "auto"):
            continue
        try:
            values[key] = as_int(content[key], key)
        except UserError as error:
            out.error(key, str(error))
            continue
        if values[key] < 1:
            out.error(key, f"is {values[key]}; it must be at least 1")
    if "gradient_accumulation_steps" not in content:
        out.warning("gradient_accumulation_steps", 'is missing: Accelerate puts 1, whatever the script asks for; write "auto"')
    if len(values) == len(BATCH_KEYS) and min(values.values()) > 0:
        total, micro, steps = (values[key] for key in BATCH_KEYS)
        if total % (micro * steps):
            out.error("train_batch_size", f"{total} is no multiple of {micro} x {steps} (micro-batch x accumulation)")
    said = [key for key in ("optimizer", "scheduler") if key in content]
    if said == ["optimizer"]:
        out.warning(
            "optimizer",
            "the script must pass DummyOptim and use the optimizer that prepare() returns, and its "
            "scheduler must be a DummyScheduler with lr_scheduler_callable; or delete this section",
        )
    elif said == ["scheduler"]:
        out.warning("scheduler", "the script must pass DummyScheduler; delete this section if it brings its own")
    elif said:
        out.warning(
            "optimizer",
            "the script must pass DummyOptim and DummyScheduler and use what prepare() returns; delete "
            "both sections if it brings its own",
        )


def _stage(section: Mapping[str, Any], out: Findings) -> int | None:
    try:
        stage = as_int(section.get("stage", 0), "stage")
    except UserError as error:
        out.error(f"{ZERO}.stage", str(error))
        return None
    if stage not in (0, 1, 2, 3):
        out.error(f"{ZERO}.stage", f"is {stage}; it must be 0, 1, 2 or 3")
        return None
    if stage == 0:
        out.warning(f"{ZERO}.stage", "is 0, which shards nothing; use 1, or Accelerate's MULTI_GPU without DeepSpeed")
    return stage


def _offload(section: Mapping[str, Any], stage: int, out: Findings) -> None:
    for what in ("offload_optimizer", "offload_param"):
        part = section.get(what)
        if part is None:
            continue
        key = f"{ZERO}.{what}"
        if not isinstance(part, Mapping):
            out.error(key, f'is {part!r}; it must be a section such as {{"device": "cpu"}}')
            continue
        device = str(part.get("device", "none"))
        if device not in ("none", "cpu", "nvme", "auto"):
            out.error(f"{key}.device", f"is {device!r}; it must be none, cpu or nvme")
        if device in ("none", "auto"):
            continue
        if what == "offload_param" and stage != 3:
            out.error(key, f"parameters are offloaded with stage 3 only, and the stage is {stage}")
        elif device == "nvme" and stage != 3:
            out.error(key, f"NVMe goes with stage 3 only, and the stage is {stage}")
        elif device == "nvme" and part.get("nvme_path") in (None, "auto", "none"):
            out.error(f"{key}.nvme_path", "is missing: name the folder of the disk")


def _stage3(section: Mapping[str, Any], stage: int, out: Findings) -> None:
    gather = SETTINGS["gather_16bit_on_save"]
    if stage == 3:
        if section.get(gather) in (None, False, "auto"):
            out.warning(f"{ZERO}.{gather}", "is not true: saving the model with Accelerate fails after the training")
        return
    idle = sorted(key for key in (*(SETTINGS[name] for name in STAGE3), PERSIST) if key in section)
    if idle:
        out.note(ZERO, f"{', '.join(idle)} have no effect in stage {stage}")


def _buckets(section: Mapping[str, Any], stage: int, model: ModelFacts | None, out: Findings) -> None:
    for key in BUCKETS if stage == 3 else BUCKETS[:1]:
        said = section.get(key)
        if said == "auto":
            continue
        try:
            size = as_int(engine_defaults()[key] if said is None else said, key)
        except UserError as error:
            out.error(f"{ZERO}.{key}", str(error))
            continue
        if model is not None and size > model.parameters and key == BUCKETS[0]:
            which = "DeepSpeed's default of " if said is None else ""
            out.warning(
                f"{ZERO}.{key}",
                f"{which}{size:,} elements are more than the model's {model.parameters:,} parameters: "
                f"{format_size(2 * size)} in 16 bit for nothing, and ZeRO-3 has failed on it; write "
                f"{max(1, model.parameters // 10):,} or less",
            )
        elif said is None and key == BUCKETS[0] and stage > 0:
            out.note(
                f"{ZERO}.{key}",
                f"DeepSpeed's default of {format_count(size)} elements takes {format_size(2 * size)} in 16 "
                "bit, twice with overlap_comm, whatever the model's size",
            )
