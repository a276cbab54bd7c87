"""What every strategy says of itself, and what it renders to: an Accelerate YAML, a DeepSpeed JSON, a
command.

Each family (`single`, `ddp`, `fsdp`, `zero`) fills these types in its `launch.py`; `toolkit.strategies` joins
them. Nothing here imports torch or accelerate.
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from toolkit.errors import UserError
from toolkit.specs import Cluster, Plan, Workload
from toolkit.specs.plan import Offload, OffloadTo, StrategyName
from toolkit.specs.workload import Precision

Sharded = Literal["parameters", "gradients", "optimizer"]
DistributedType = Literal["NO", "MULTI_GPU", "FSDP", "DEEPSPEED"]

DEEPSPEED_FILE = "ds_config.json"
ACCELERATE_FILE = "accelerate.yaml"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""torch reads the first; the others are its older names (c10/core/AllocatorConfig)."""
ALLOCATOR_SETTING = "expandable_segments:True"
"""Shards of many sizes leave holes in fixed segments; segments that grow leave almost none."""


@dataclass(frozen=True, kw_only=True)
class StrategyInfo:
    """One strategy's line in every table, and the choices it allows."""

    name: StrategyName
    family: Literal["single", "ddp", "fsdp", "zero"]
    engine: DistributedType
    """Accelerate's distributed type that runs it on GPUs."""
    summary: str
    """What it does, in one line."""
    when: str
    """When to take it, in one line."""
    shards: tuple[Sharded, ...] = ()
    """What a rank holds only its part of, from the end of one step to the end of the next."""
    min_world: int = 1
    """Fewest processes it makes sense on."""
    offloads: tuple[Offload, ...] = ("none",)
    offload_to: tuple[OffloadTo, ...] = ()
    axes: tuple[Literal["tp", "cp", "sp"], ...] = ()
    """Degrees it can be combined with."""
    needs: str = ""
    """What must be there besides the GPUs; empty: nothing."""
    excludes: str = ""
    """What it can't be combined with, besides what the fields above leave out."""

    @property
    def stage(self) -> int:
        """DeepSpeed's ZeRO stage; 0 for other engines."""
        return int(self.name[-1]) if self.family == "zero" else 0


@dataclass(frozen=True, kw_only=True)
class Found:
    """What configuration files say. None: they leave it to the script."""

    plan: Plan
    precision: Precision | None = None
    accumulate: int | None = None
    """Micro-batches per optimizer step."""
    micro_batch: int | None = None
    """Samples per rank and forward pass."""
    clip: float | None = None
    """Maximum gradient norm; 0: never clip."""
    processes: int | None = None
    """Ranks of the whole job."""
    nodes: int = 1
    notes: tuple[str, ...] = ()
    """What the files ask for and the toolkit does not model or carry over, a sentence each."""


@dataclass(frozen=True, kw_only=True)
class LaunchFiles:
    """A plan as the files and the command that launch it."""

    plan: Plan
    accelerate: dict[str, Any]
    deepspeed: dict[str, Any] | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    """The recipe's keys that the plan decides: what Accelerate's file has no key for, or the recipe owns."""
    nodes: int = 1

    def command(self, run_dir: str | Path, script: str, config: str | Path) -> list[str]:
        """The words of the launch command; on several nodes some are shell variables (see `shell`).

        Args:
            run_dir: the folder that `write` wrote to.
            script: the training script.
            config: the recipe's configuration file.
        """
        words = ["accelerate", "launch", "--config_file", str(Path(run_dir) / ACCELERATE_FILE)]
        if self.nodes > 1:
            words += ["--machine_rank", "$MACHINE_RANK", "--main_process_ip", "$MAIN_PROCESS_IP"]
        return [*words, script, "--config", str(config)]

    def shell(self, run_dir: str | Path, script: str, config: str | Path) -> str:
        """A shell script that launches the run, with the environment it wants unless the user set another."""
        lines = ["#!/bin/sh", "set -eu"]
        if self.nodes > 1:
            lines.append(
                f"# Run this on each of the {self.nodes} nodes: MACHINE_RANK is 0 on the main node, then "
                "1, 2, ...;"
            )
            lines.append("# MAIN_PROCESS_IP is the main node's address on every node.")
            lines.append(': "${MACHINE_RANK:?number of this node, 0 on the main node}"')
            lines.append(': "${MAIN_PROCESS_IP:?address of the main node}"')
        variables = "".join("${" + name + ":-}" for name in ALLOCATOR_VARIABLES)
        lines.append(f'[ -n "{variables}" ] || export {ALLOCATOR_VARIABLES[0]}={ALLOCATOR_SETTING}')
        words = [
            f'"{w}"' if w.startswith("$") else shlex.quote(w) for w in self.command(run_dir, script, config)
        ]
        return "\n".join([*lines, "exec " + " ".join(words) + ' "$@"']) + "\n"

    def accelerate_yaml(self, deepspeed_path: str | Path = DEEPSPEED_FILE) -> str:
        """The Accelerate file's text; `deepspeed_path` is where the training processes find the JSON."""
        content = dict(self.accelerate)
        if self.deepspeed is not None:
            content["deepspeed_config"] = {
                **content["deepspeed_config"],
                "deepspeed_config_file": str(deepspeed_path),
            }
        return yaml.safe_dump(content, sort_keys=False)

    def deepspeed_json(self) -> str | None:
        """The DeepSpeed file's text, or None when the engine is another."""
        return None if self.deepspeed is None else json.dumps(self.deepspeed, indent=2) + "\n"

    def write(self, folder: str | Path) -> list[Path]:
        """Write `accelerate.yaml` and, for DeepSpeed, `ds_config.json` into a folder, each whole or not at
        all.

        The path of the JSON inside the YAML is absolute: Accelerate looks for it from wherever a run is
        started.

        Raises:
            UserError: the folder can't be written to.
        """
        folder = Path(folder)
        written = []
        if (text := self.deepspeed_json()) is not None:
            written.append(write_whole(folder / DEEPSPEED_FILE, text))
        path = write_whole(
            folder / ACCELERATE_FILE, self.accelerate_yaml((folder / DEEPSPEED_FILE).resolve())
        )
        return [path, *written]


class Family(Protocol):
    """A `launch` module of one engine family."""

    STRATEGIES: tuple[StrategyInfo, ...]

    @staticmethod
    def check(plan: Plan, workload: Workload, cluster: Cluster) -> None:
        """Raise UserError when the engine can't run the workload so."""

    @staticmethod
    def render(plan: Plan, workload: Workload, cluster: Cluster) -> LaunchFiles:
        """The files of a plan that was checked."""

    @staticmethod
    def read(
        accelerate: Mapping[str, Any], deepspeed: Mapping[str, Any] | None, hidden_size: int | None
    ) -> Found:
        """The plan of files that ask for this engine."""

    @staticmethod
    def observe(accelerator: Any) -> Plan:
        """The plan of a live Accelerator that runs this engine."""

    @staticmethod
    def canonical(plan: Plan, cluster: Cluster) -> Plan:
        """The plan as `read` gives it back: one spelling of each thing, rendering's choices filled in."""


def accelerate_base(engine: DistributedType, cluster: Cluster) -> dict[str, Any]:
    """The keys every Accelerate file has; precision and accumulation are the recipe's, not the file's."""
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": engine,
        "num_machines": cluster.nodes,
        "num_processes": cluster.world_size,
    }
    if cluster.nodes > 1:
        # The rank of the node and the main node's address differ per node or per run: the command gives them.
        # (The launcher takes neither rdzv_backend nor same_network from a file.)
        content["main_process_port"] = 29500
    return content


def launch_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that a training process wants before it imports torch, where the user has set none."""
    if any(environ.get(name) for name in ALLOCATOR_VARIABLES):
        return {}
    return {ALLOCATOR_VARIABLES[0]: ALLOCATOR_SETTING}


def recipe_keys(plan: Plan) -> dict[str, Any]:
    """The recipe's keys that the plan decides whatever the engine is."""
    return {"checkpointing": plan.checkpointing} if plan.checkpointing != "none" else {}


def as_bool(value: Any, key: str) -> bool:
    """A truth value as Accelerate's launcher understands it (its `str_to_bool`).

    Raises:
        UserError: names the key and the value.
    """
    text = str(value).strip().lower()
    if text in ("y", "yes", "t", "true", "on", "1"):
        return True
    if text in ("n", "no", "f", "false", "off", "0", "none", ""):
        return False
    raise UserError(f"{key} is {value!r}; it must be true or false")


def as_int(value: Any, key: str) -> int:
    """A whole number that may be written as text or as 5e8.

    Raises:
        UserError: names the key and the value.
    """
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
        if number != int(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{key} is {value!r}; it must be a whole number") from None
    return int(value) if isinstance(value, int) else int(number)


def mixed_precision(accelerate: Mapping[str, Any]) -> Precision | None:
    """The precision an Accelerate file asks for; None: it does not say.

    Raises:
        UserError: a value Accelerate does not know.
    """
    value = accelerate.get("mixed_precision")
    if value is None:
        return None
    known: dict[str, Precision] = {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16"}
    text = str(value).lower()
    if text not in known:
        raise UserError(f"mixed_precision is {value!r}; the toolkit knows no, bf16 and fp16")
    return known[text]


def processes(accelerate: Mapping[str, Any]) -> int | None:
    """The number of ranks an Accelerate file asks for; None: `--num_processes` gives it."""
    value = accelerate.get("num_processes")
    count = None if value is None else as_int(value, "num_processes")
    return count if count is None or count > 0 else None


def write_whole(path: Path, text: str) -> Path:
    """Write a text file whole or not at all: beside its place, then renamed over it.

    Raises:
        UserError: the folder can't be made or written to.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise UserError(f"{str(path)!r} can't be written: {error.strerror or error}") from None
    return path
