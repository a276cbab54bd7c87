"""Checkpoints of a run: written whole or not at all, pruned, found again, and loaded into the same engine.

A checkpoint is a folder `step-00000010`. All ranks write into a scratch folder beside it; when every rank
is done, its files are flushed to the disk, a manifest with their sizes is written last, and the folder gets
its name. A folder without a manifest that fits is no checkpoint. What the ranks write is the engine's own
format.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import UserError
from toolkit.training.config import TrainConfig
from toolkit.training.run_folder import write_json
from toolkit.units import format_size

if TYPE_CHECKING:
    from accelerate import Accelerator

MANIFEST = "manifest.json"
_SCRATCH = ".saving-"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands after an optimizer step. With the order of the data a function of the step, this
    is all."""

    step: int
    """Optimizer steps done."""
    skipped: int = 0
    """Of these, steps that a gradient overflow (fp16) undid."""
    tokens: int = 0
    """Tokens seen so far, all ranks."""

    def after(self, tokens: int, *, skipped: bool) -> Progress:
        """One optimizer step later."""
        return Progress(step=self.step + 1, skipped=self.skipped + skipped, tokens=self.tokens + tokens)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a checkpoint in an engine's own format can be loaded into."""

    strategy: str
    processes: int
    method: str
    data: str
    """The data's fingerprint: with other data, the position in it means nothing."""


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, accelerator: Accelerator, identity: Identity, keep: int) -> None:
        self.folder, self.accelerator, self.identity, self.keep = folder, accelerator, identity, keep

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        return next((path for path in reversed(_named(self.folder)) if is_complete(path)), None)

    def find(self, resume: str) -> Path | None:
        """The checkpoint that `resume` (auto, never, or a path) means.

        Raises:
            UserError: a path that is no complete checkpoint, or one of another engine, world size, method
            or data.
        """
        if resume == "never":
            return None
        path = self.newest() if resume == "auto" else Path(resume)
        if path is None:
            return None
        if not is_complete(path):
            inner = Path(resume) / "checkpoints"
            hint = f"; did you mean {newest_in(inner)}?" if newest_in(inner) else ""
            raise UserError(f"resume={resume}: there is no complete checkpoint{hint}")
        made = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["identity"]
        for name, value in asdict(self.identity).items():
            if made.get(name) != value:
                raise UserError(f"{path} was made with {name} {made.get(name)}, this run has {name} {value}; launch "
                                "it alike, give another output, or start anew with resume=never")
        return path

    def load(self, path: Path) -> Progress:
        """Put weights, optimizer state and random states of every rank back. Every rank must call it."""
        self.accelerator.load_state(str(path / "state"))
        done = Progress(**json.loads((path / MANIFEST).read_text(encoding="utf-8"))["progress"])
        _replay_bias_correction(self.accelerator, done.step - done.skipped)
        return done

    def set_aside(self) -> None:
        """Move the checkpoints of an earlier run out of the way of one that starts anew."""
        if self.accelerator.is_main_process and _named(self.folder):
            number = 1
            while (aside := self.folder.with_name(f"{self.folder.name}-before-{number}")).exists():
                number += 1
            self.folder.rename(aside)
        self.accelerator.wait_for_everyone()

    def save(self, progress: Progress) -> str | None:
        """Write a checkpoint; every rank must call it.

        Returns None, or what went wrong; then the older checkpoints are as they were.
        """
        final = self.folder / f"step-{progress.step:08d}"
        scratch = self.folder / f"{_SCRATCH}{final.name}"
        main = self.accelerator.is_main_process
        problem = self._prepare(scratch) if main else None
        if self._any(problem):
            return problem or "the main process could not begin to write"
        try:
            self.accelerator.save_state(str(scratch / "state"))
        except Exception as error:  # noqa: BLE001 - whatever a format's writer raises, training goes on without it
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        failed = self._any(problem)
        if main:
            if not failed:
                problem = self._finish(scratch, final, progress)
            if failed or problem:
                shutil.rmtree(scratch, ignore_errors=True)
        if self._any(problem):
            return problem or "another rank could not write"
        return None

    def _any(self, problem: str | None) -> bool:
        from toolkit.training.step import across_ranks

        return across_ranks(self.accelerator, float(problem is not None))[0] > 0

    def _prepare(self, scratch: Path) -> str | None:
        """Make room: drop leftovers, and see that what the last checkpoint took is free."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(f"{_SCRATCH}*"):
                shutil.rmtree(left, ignore_errors=True)
            before = self.newest()
            needed = _size(before) if before else 0
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                return f"{format_size(needed)} needed, {format_size(free)} free"
            (scratch / "state").mkdir(parents=True)
        except OSError as error:
            return str(error)
        return None

    def _finish(self, scratch: Path, final: Path, progress: Progress) -> str | None:
        try:
            files = [path for path in sorted(scratch.rglob("*")) if path.is_file()]
            for path in files:
                _flush(path)
            sizes = {str(path.relative_to(scratch)): path.stat().st_size for path in files}
            write_json(scratch / MANIFEST, {"version": 1, "progress": asdict(progress),
                                            "identity": asdict(self.identity), "files": sizes})
            _flush(scratch / MANIFEST)
            if final.exists():
                shutil.rmtree(final)
            scratch.rename(final)
            _flush(self.folder)
            for old in _named(self.folder)[: -self.keep]:
                shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            return str(error)
        return None


def _replay_bias_correction(accelerator: Accelerator, steps: int) -> None:
    """Bring DeepSpeed's CPU Adam where it was to the last bit.

    Its native part keeps the powers of the betas as a running product and no checkpoint has them; after a resume it
    would take them from `pow`, which rounds otherwise.
    """
    import torch

    for wrapped in accelerator._optimizers:
        inner = wrapped
        while inner is not None and not hasattr(inner, "ds_opt_adam"):
            inner = getattr(inner, "optimizer", None)
        if inner is None:
            continue
        empty = [torch.empty(0) for _ in range(4)]
        group = inner.param_groups[0]
        for step in range(1, steps + 1):
            inner.ds_opt_adam.adam_update(inner.opt_id, step, group["lr"], *group["betas"], group["eps"],
                                          group["weight_decay"], group["bias_correction"], *empty)


def _named(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def newest_in(folder: Path) -> Path | None:
    """The newest complete checkpoint of a `checkpoints` folder."""
    return next((path for path in reversed(_named(folder)) if is_complete(path)), None)


def is_complete(path: Path) -> bool:
    """Whether the manifest is there and every file has the size it states."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        return all((path / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _flush(path: Path) -> None:
    """Have the system write a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_room(config: TrainConfig, parameters: int, trainable: int) -> None:
    """Hold the disk against what the run will write: the checkpoints it keeps, one being written, and the
    export.

    A careful guess before the first save: fp32 weights and the optimizer's fp32 states.

    Raises:
        UserError: there is too little space.
    """
    states = {"sgd": 0, "adafactor": 1, "lion": 1}.get(config.optimizer, 2)
    one = parameters * 4 + trainable * 4 * states
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
