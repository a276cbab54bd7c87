"""The recipe's configuration: one frozen dataclass, read from YAML and overrides, with every key explained.

The keys are a contract (docs/training.md lists them). A config says what is trained; how it is spread over
devices is the launch file's business, so no key here names a strategy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from toolkit.errors import UserError, nearest
from toolkit.specs import Workload
from toolkit.specs.plan import Checkpointing
from toolkit.specs.workload import Attention, Loss, Method, Optimizer, OptimizerImpl, Precision, WeightsDtype


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything a run is told. Counts are per rank unless they say otherwise."""

    model: str
    """Hub id, directory, GGUF file, or `config:DIR` for random weights (the same on every engine for a
    seed)."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; no effect on local files."""
    trust_remote_code: bool = False
    """Run Python code that the model's repository brings. Only for repositories you have read."""

    data: tuple[str, ...]
    """Files, folders, globs, or hub ids (docs/data.md)."""
    data_weights: tuple[float, ...] = ()
    """How often an epoch passes over each entry of `data`: 2 is twice, 0.5 a half that the seed draws; empty: once each."""
    eval_data: tuple[str, ...] = ()
    """As `data`; empty: a share `eval_fraction` of `data` is set aside when `eval_every` is above zero."""
    data_format: Literal["auto", "messages", "prompt-completion", "text", "tokens"] = "auto"
    columns: tuple[str, ...] = ()
    """`known=own`, where the data has other names for its columns: prompt=question_text,completion=gold."""
    train_on: Literal["auto", "answers", "last-answer", "everything"] = "auto"
    """Which tokens are targets; auto: the answers of conversations and completions, everything of plain
    text."""
    too_long: Literal["truncate", "drop", "stop"] = "truncate"
    """What becomes of samples with more than seq_len tokens; plain text is cut into windows whatever this says."""
    bad_lines: Literal["stop", "skip"] = "stop"
    """Whether a line that cannot be used ends the run, or is left out and counted."""
    eval_fraction: float = 0.05
    packing: bool = True
    """True: several samples share a row of seq_len tokens, each attending to itself alone. False: one
    sample a row, padded to the longest of its micro-batch."""
    bucketing: bool = True
    """Without packing: rows of like length share a step and a micro-batch, so that there is less padding."""

    streaming: bool = False
    """Read the data as it is needed and keep none of it; needs max_steps."""
    stream_block: int = 10_000
    """With streaming: records that are tokenised, shuffled and packed together."""

    output: str
    """The run folder."""
    method: Method = "full"
    lora_rank: int = 16
    lora_targets: str = "all-linear"
    """`all-linear`, or module names joined by commas."""

    seq_len: int = 2048
    """Tokens per row."""
    micro_batch: int = 1
    """Rows per rank and forward pass."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    sync_each_micro_batch: bool = False
    """Under fsdp: reduce gradients after every micro-batch, so that no full gradients are kept in between
    (less memory, more communication). No effect on the numbers; none at all for other engines."""

    precision: Precision = "bf16"
    weights_dtype: WeightsDtype = "auto"
    """What the weights are loaded as; auto: fp32 for full, bf16 for the frozen base of an adapter."""
    attention: Attention = "sdpa"
    loss: Loss = "standard"
    checkpointing: Checkpointing = "none"
    compile: bool = False

    optimizer: Optimizer = "adamw"
    optimizer_impl: OptimizerImpl = "default"
    learning_rate: float = 2e-5
    """Peak learning rate, at the global batch it was tuned for (see scale_lr)."""
    scale_lr: Literal["none", "sqrt", "linear"] = "none"
    """How learning_rate follows the global batch when that differs from base_batch."""
    base_batch: int | None = None
    """Rows of the global batch that learning_rate was tuned for; no effect when scale_lr is none."""
    weight_decay: float = 0.0
    """On matrices only: never on norms and biases."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises to its peak."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """After warm-up: cosine or linear down to zero at the last step, or constant."""
    clip: float = 1.0
    """Maximum global gradient norm; 0: never clip."""

    max_steps: int | None = None
    """Optimizer steps; give this or epochs."""
    epochs: float | None = None
    seed: int = 42
    shuffle: bool = True

    eval_every: int = 0
    """Optimizer steps between evaluations, also before the first and after the last; 0: never."""
    log_every: int = 1
    """Optimizer steps between lines of the log; metrics.jsonl has every step."""
    checkpoint_every: int = 0
    """Optimizer steps between checkpoints, also after the last; 0: only when a signal asks the run to end."""
    checkpoint_mode: Literal["sync", "async"] = "sync"
    """sync: training waits until a checkpoint is on the disk. async: only until each rank has copied its share to host memory;
    a thread writes the copy."""
    on_save_error: Literal["warn", "stop"] = "warn"
    """A checkpoint that cannot be written (disk full, no permission) is a warning, or ends the run; older ones stay."""
    keep: int = 2
    """Checkpoints that are kept."""
    resume: str = "auto"
    """auto: go on from the newest complete checkpoint of the run folder; never: start anew; or a
    checkpoint's path."""
    export: bool = True
    """Write a Hugging Face directory `export/` at the end."""
    export_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: what the model's config names, else what it was trained in."""
    tracker: Literal["tensorboard", "wandb", "mlflow", "trackio", "none"] = "tensorboard"
    preflight: Literal["stop", "warn", "off"] = "stop"
    """Before the weights are loaded the run is estimated on its device: stop (exit status 3) or warn when it does not fit."""
    on_oom: Literal["stop", "shrink"] = "stop"
    """When a rank is out of memory: stop with an explanation, or begin anew on all ranks with half the micro-batch and twice the
    accumulation, from the last checkpoint, down to one row."""
    memory_snapshot: bool = False
    """Keep the CUDA allocator's history, and leave it as a snapshot for PyTorch's viewer when a rank is out of memory. It costs
    some speed; a CPU has none."""
    profile: bool = True
    """Tell memory apart by phase, and print predicted against measured after the third step."""
    timeout_minutes: float = 60.0
    """How long a rank waits for the others in one collective operation, preprocessing included."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def workload(self) -> Workload:
        """The part of the config that decides memory and time."""
        shared = {f.name for f in dataclasses.fields(Workload)} & {f.name for f in dataclasses.fields(self)}
        return Workload(**{name: getattr(self, name) for name in shared - {"clip"}}, clip=self.clip or None)

    def to_yaml(self) -> str:
        """The resolved configuration: every key, also those left at their default."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


_HINTS = get_type_hints(TrainConfig)
_ABOVE_ZERO = (
    "lora_rank", "seq_len", "micro_batch", "accumulate", "max_steps", "log_every", "keep", "base_batch",
    "stream_block",
)  # fmt: skip
_NOT_NEGATIVE = ("weight_decay", "warmup_steps", "clip", "eval_every", "checkpoint_every")


def _check(config: TrainConfig) -> None:
    """Hold every field to its range; raises UserError that names the key, the value and what would be
    right."""
    for name in _ABOVE_ZERO:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"{name}={value}: it must be at least 1")
    for name in _NOT_NEGATIVE:
        if getattr(config, name) < 0:
            raise UserError(f"{name}={getattr(config, name)}: it must not be negative")
    if not config.learning_rate > 0:
        raise UserError(f"learning_rate={config.learning_rate}: it must be above zero")
    if not config.data:
        raise UserError("data is empty: name a .jsonl or .txt file, several of them, or a hub id")
    if config.data_weights and (len(config.data_weights) != len(config.data) or min(config.data_weights) <= 0):
        raise UserError(f"data_weights={','.join(f'{weight:g}' for weight in config.data_weights)}: give one weight above "
                        f"zero for each of the {len(config.data)} entries of data")
    if not 0 < config.eval_fraction < 1:
        raise UserError(f"eval_fraction={config.eval_fraction}: it must lie between 0 and 1")
    if (config.max_steps is None) == (config.epochs is None):
        both = ", not both" if config.epochs is not None else ""
        raise UserError(f"give either max_steps or epochs{both}")
    if config.epochs is not None and not config.epochs > 0:
        raise UserError(f"epochs={config.epochs}: it must be above zero")
    if config.streaming and config.max_steps is None:
        raise UserError("streaming=true needs max_steps: what is not read as a whole has no known end")
    if config.streaming and config.eval_every and not config.eval_data:
        raise UserError("streaming=true sets no share of the data aside: give eval_data, or eval_every=0")
    if config.scale_lr != "none" and config.base_batch is None:
        raise UserError(f"scale_lr={config.scale_lr} needs base_batch, the global batch that "
                        "learning_rate was tuned for")
    if not config.timeout_minutes > 0:
        raise UserError(f"timeout_minutes={config.timeout_minutes}: it must be above zero")


def _convert(key: str, value: Any, hint: Any) -> Any:
    """`value` as the field's type, from YAML and command-line text alike. Raises UserError naming the key."""
    origin = get_origin(hint)
    if origin is Literal:
        choices = get_args(hint)
        text = "none" if value is None and "none" in choices else value
        if value is False and "off" in choices:
            text = "off"  # YAML reads a bare `off` as false
        if text not in choices:
            raise UserError(f"{key}={value!r} is not one of {', '.join(choices)}")
        return text
    if origin in (Union, UnionType):
        inner = next(a for a in get_args(hint) if a is not NoneType)
        return None if value is None else _convert(key, value, inner)
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if get_args(hint)[0] is float:
            given = items if isinstance(items, (list, tuple)) else [items]
            return tuple(_convert(key, item, float) for item in given)
        if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
            raise UserError(f"{key}={value!r}: it must be a path, or a list of paths")
        return tuple(item.strip() for item in items if item.strip())
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    if hint in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number) and (hint is float or number.is_integer()):
            return hint(number)
    kind = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[hint]
    raise UserError(f"{key}={value!r}: it must be {kind}")


def from_mapping(values: Mapping[str, Any], source: str = "the configuration") -> TrainConfig:
    """A config from plain values.

    Raises:
        UserError: an unknown key (with the nearest known one), a missing key, a value of the wrong kind or
        range.
    """
    fields = {f.name: f for f in dataclasses.fields(TrainConfig)}
    for key in values:
        if key not in fields:
            raise UserError(f"unknown key {key!r} in {source}{nearest(str(key), fields)}")
    required = [name for name, field in fields.items()
                if field.default is dataclasses.MISSING and values.get(name) in (None, "")]
    if required:
        raise UserError(f"{source} lacks {', '.join(required)}")
    return TrainConfig(**{key: _convert(key, value, _HINTS[key]) for key, value in values.items()})


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"config file {str(path)!r} does not exist") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise UserError(f"config file {str(path)!r} is not YAML{where}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"config file {str(path)!r} must hold key: value pairs, one a line")
    return values


def parse_arguments(arguments: Sequence[str]) -> TrainConfig:
    """A config from a command line: `--config FILE.yaml [key=value | --key value | --key=value ...]`.

    Later values win over earlier ones, and all of them over the file. Raises UserError.
    """
    files: list[Path] = []
    overrides: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals and not word.startswith("--"):
            raise UserError(f"argument {word!r} is not understood; write key=value, --key value "
                            "or --config FILE")
        if not equals:
            if not rest:
                raise UserError(f"{word} needs a value")
            text = rest.pop(0)
        key = key.replace("-", "_")
        if key == "config":
            files.append(Path(text))
            continue
        try:
            overrides[key] = yaml.safe_load(text) if text else None
        except yaml.YAMLError:
            overrides[key] = text
        if isinstance(overrides[key], dict):
            overrides[key] = text
    values: dict[str, Any] = {}
    for file in files:
        values.update(_read_yaml(file))
    for given, other in (("max_steps", "epochs"), ("epochs", "max_steps")):
        if overrides.get(given) is not None and other not in overrides:
            values.pop(other, None)
    source = ", ".join(str(file) for file in files) or "the command line (--config FILE.yaml is missing)"
    return from_mapping({**values, **overrides}, source)
