"""The run folder: what a run was told, what it ran with, and what makes it repeatable."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError
from toolkit.specs import Plan
from toolkit.training.accelerator import gradient_sums, tracker_of
from toolkit.training.assets import FOLDER, write_assets
from toolkit.training.config import TrainConfig
from toolkit.training.lock import hold
from toolkit.units import format_count, format_duration, format_size

if TYPE_CHECKING:
    from accelerate import Accelerator

    from toolkit.training.data.prepare import Data

_PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "peft", "safetensors", "numpy",
             "memory-scaling-toolkit")


def write_text(path: Path, text: str) -> None:
    """Replace a file whole: readers see the old text or the new one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file whole."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")


def check_output(config: TrainConfig) -> None:
    """Raises UserError when the run folder cannot be made or written to. Creates nothing."""
    path = Path(config.output)
    if path.exists() and not path.is_dir():
        raise UserError(f"output={config.output}: it is a file; name a folder")
    existing = path
    while not existing.exists():
        existing = existing.absolute().parent
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"output={config.output}: {existing} cannot be written to")


def check_room(config: TrainConfig, parameters: int, trainable: int) -> None:
    """Hold the disk against what the run will write: the checkpoints it keeps, one being written, and the
    export.

    A careful guess before the first save: fp32 weights and the optimizer's fp32 states of what is trained.

    Raises:
        UserError: there is too little space.
    """
    states = {"sgd": 0, "adafactor": 1, "lion": 1}.get(config.optimizer, 2)
    one = trainable * 4 * (1 + states)
    checkpoints = (config.keep + 1) * one if config.checkpoint_every else 0
    export = (parameters if config.method == "full" else trainable) * 4 if config.export else 0
    if checkpoints + export == 0:
        return
    folder = Path(config.output).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < checkpoints + export:
        raise UserError(f"{config.keep + 1} checkpoints and the export need {format_size(checkpoints + export)}, but "
                        f"{existing} has {format_size(free)} free; make room, name another output, or set keep=1, "
                        "checkpoint_every=0 or export=false")


def versions() -> dict[str, str]:
    """The versions of what a run depends on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit(folder: Path) -> dict[str, Any] | None:
    """The commit of the code in `folder` and whether it was changed since; None outside a repository."""
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, text=True,
                              timeout=20).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


class RunFolder:
    """The folder of one run. The main process writes; the others only know the path."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator) -> None:
        self.config, self.accelerator = config, accelerator
        self.path = Path(config.output)
        self.sums = ""
        """The data type in which gradients of micro-batches are summed, once the engine is known."""

    def write(self, plan: Plan, model: Any, data: Data, tokenizer: Any, model_config: Any) -> None:
        """Create the folder with config.yaml, plan.json, run.json and the small files of the model, hold it, and start
        the tracker. Every rank must call it.

        Raises:
            UserError: another run holds the folder.
        """
        hold(self.path, self.accelerator)
        self._start_tracker()
        self.sums = gradient_sums(self.accelerator, model)
        if self.accelerator.is_main_process:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self.path / "config.yaml", self.config.to_yaml())
            write_json(self.path / "plan.json", {**asdict(plan), "label": plan.label})
            write_json(self.path / "run.json", self._record(model, data))
            write_assets(self.path / FOLDER, self.accelerator.unwrap_model(model), tokenizer, model_config)
        self.accelerator.wait_for_everyone()

    def told(self, plan: Plan) -> dict[str, Any]:
        """What a checkpoint tells of the run that made it: the resolved config, and the plan."""
        return {"config": asdict(self.config), "plan": {**asdict(plan), "label": plan.label}}

    def _start_tracker(self) -> None:
        """Raises UserError when the one that was asked for can't be started: no account, no server, no network."""
        name = tracker_of(self.config)
        if name is None:
            return
        settings = {key: value if isinstance(value, (int, float, str, bool)) else str(value)
                    for key, value in asdict(self.config).items()}
        try:
            self.accelerator.init_trackers("tensorboard" if name == "tensorboard" else self.path.name, config=settings)
        except Exception as error:  # Each of them raises its own kinds.
            raise UserError(f"tracker={name} cannot be started: {' '.join(str(error).split())[:200]}; set it up, or use "
                            "tracker=tensorboard or none") from None

    def _record(self, model: Any, data: Data) -> dict[str, Any]:
        """Everything beside the config and the plan that makes a run repeatable."""
        inner = self.accelerator.unwrap_model(model)
        return {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": sys.orig_argv,
            "processes": self.accelerator.num_processes,
            "device": self.device,
            "versions": versions(),
            "git": git_commit(Path(__file__).parent),
            "model": {"name": self.config.model, "revision": getattr(inner.config, "_commit_hash", None)},
            "data": data.facts,
        }

    @property
    def device(self) -> str:
        """The device's name as the driver gives it, or the kind of CPU run."""
        if self.accelerator.device.type == "cuda":
            import torch

            return torch.cuda.get_device_name(self.accelerator.device)
        return f"{platform.machine()} CPU"

    def write_memory(self, predicted: dict[str, Any] | None, measured: dict[str, Any]) -> None:
        """memory.json: predicted and measured side by side, in bytes."""
        if self.accelerator.is_main_process:
            with contextlib.suppress(OSError):  # A full disk: the log has the figures, and the run is worth more than the file.
                write_json(self.path / "memory.json", {"predicted": predicted, "measured": measured})

    def description(self, plan: Plan, parameters: int, trainable: int, data: Data, total_steps: int,
                    predicted: dict[str, Any] | None, found: Path | None) -> list[tuple[str, str]]:
        """What is about to run, in ten lines."""
        config, facts, world = self.config, data.facts, self.accelerator.num_processes
        rows = data.train.rows_per_step
        share = "" if trainable == parameters else f", {format_count(trainable)} of them trained"
        engine = {"NO": "one process"}.get(str(self.accelerator.distributed_type.value),
                                           str(self.accelerator.distributed_type.value))
        return [
            ("model", f"{config.model}: {format_count(parameters)} parameters{share}"),
            ("data", f"read as {facts['kind']}, trained on {facts['train_on']}: "
                     f"{'streamed, of which the first ' if 'streamed' in facts else ''}{facts['train_samples']:,} samples in "
                     f"{facts['train_rows']:,} rows of {config.seq_len}, {format_count(facts['train_tokens'])} tokens, "
                     f"{format_count(facts['train_targets'])} of them targets" + self._asides(facts)),
            ("evaluation", f"{facts['eval_samples']:,} samples every {config.eval_every} steps"
                           if data.evaluation else "none"),
            ("steps", f"{total_steps:,}{self._epochs(data, total_steps)}, "
                      f"{config.schedule} from {config.learning_rate:g} after {config.warmup_steps} of warm-up"
                      + (", which this run does not get through" if config.warmup_steps >= total_steps else "")),
            ("batch", f"{rows} rows = {config.micro_batch} x {config.accumulate} accumulated x {world} processes, "
                      f"{rows * config.seq_len:,} tokens at most"),
            ("engine", f"{plan.label} ({engine}) on {world} x {self.device}"),
            ("precision", f"{config.precision}, attention {config.attention}, loss {config.loss}, "
                          f"checkpointing {config.checkpointing}"
                          + (f", gradients of {config.accumulate} micro-batches summed in {self.sums}"
                             if config.accumulate > 1 else "")),
            ("memory", self._prediction(predicted, total_steps)),
            ("folder", str(self.path)),
            ("start", f"resumes from {found}" if found else "from the model as given"),
        ]

    @staticmethod
    def _epochs(data: Data, steps: int) -> str:
        return "" if "streamed" in data.facts else f" ({steps / data.train.steps_per_epoch:.2f} epochs)"

    @staticmethod
    def _prediction(predicted: dict[str, Any] | None, steps: int) -> str:
        if predicted is None:
            return "no prediction"
        step = predicted["step_seconds"]
        time = (f"time {format_duration(step)} a step, {format_duration(step * steps)} in all" if step
                else "the time on a CPU is not")
        return f"{format_size(predicted['peak_allocated'])} predicted; {time}"

    @staticmethod
    def _asides(facts: dict[str, Any]) -> str:
        notes = [f"{facts[name]:,} {text}" for name, text in (("truncated", "cut at the row's end"),
                                                              ("dropped", "dropped: too long, or nothing in them is trained"),
                                                              ("skipped", "bad lines skipped"))
                 if facts.get(name)]
        return f" ({', '.join(notes)})" if notes else ""
