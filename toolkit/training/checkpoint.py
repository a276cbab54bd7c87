"""Checkpoints of a run: written whole or not at all, pruned, found again, and loaded into any engine.

A checkpoint is a folder `step-00000010`. All ranks write their share into a scratch folder beside it; when every rank's
files are on the disk, a manifest with their sizes and checksums is written last, and the folder gets its name. A folder
without a manifest that fits is no checkpoint. docs/checkpoints.md describes the files, `toolkit/training/state/` reads
and writes them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError
from toolkit.training.assets import FOLDER, carry_assets
from toolkit.training.config import TrainConfig
from toolkit.training.run_folder import versions, write_json
from toolkit.training.state.manifest import (
    FORMAT,
    MANIFEST,
    STATE,
    damage,
    flush,
    is_complete,
    named,
    newest_in,
    read_manifest,
    read_state,
)
from toolkit.units import format_size

if TYPE_CHECKING:
    from accelerate import Accelerator

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
    """What run a checkpoint is of. Strategy and processes may change between save and resume, the rest may not."""

    strategy: str
    processes: int
    method: str
    optimizer: str
    data: str
    """The data's fingerprint: with other data, the position in it means nothing."""
    rows: int
    """Rows of the global batch: the position in the data is `step x rows`."""


class Checkpoints:
    """The checkpoints of one run folder. `say` takes a line for the log; `record` is what state.json tells of the run
    beside its state (config, plan)."""

    def __init__(self, folder: Path, accelerator: Accelerator, identity: Identity, keep: int,
                 say: Callable[[str], None] = print, record: dict[str, Any] | None = None) -> None:
        self.folder, self.accelerator, self.identity, self.keep = folder, accelerator, identity, keep
        self.say, self.record = say, record or {}

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        return newest_in(self.folder)

    def find(self, resume: str) -> Path | None:
        """The checkpoint that `resume` (auto, never, or a path) means. Every rank must call it.

        `auto` passes over broken ones and says so by name. All contents are held to their checksums, a share by
        each rank.

        Raises:
            UserError: a path that is no complete checkpoint, or one of another method, optimizer, global batch or
            data.
        """
        from accelerate.utils import broadcast_object_list

        if resume == "never":
            return None
        candidates = [Path(resume)] if resume != "auto" else list(reversed(named(self.folder)))
        [candidates] = broadcast_object_list([candidates])  # Ranks must not choose by what each of them sees.
        for path in candidates:
            problem = self._damage(path)
            if problem is None:
                self._check_identity(path)
                return path
            if resume != "auto":
                newest = newest_in(path / "checkpoints")
                hint = f"; did you mean {newest}?" if newest else f" ({problem})"
                raise UserError(f"resume={resume}: there is no complete checkpoint{hint}")
            self.say(f"warning: {path.name} is passed over: {problem}")
        return None

    def _damage(self, path: Path) -> str | None:
        from accelerate.utils import gather_object

        found = damage(path, (self.accelerator.process_index, self.accelerator.num_processes))
        return next(filter(None, gather_object([found])), None)

    def _check_identity(self, path: Path) -> None:
        made = read_manifest(path)["identity"]
        if made["rows"] not in (self.identity.rows, None):
            raise UserError(f"{path} was made with a global batch of {made['rows']} rows, this run has {self.identity.rows}; "
                            f"set micro_batch and accumulate so that micro_batch x accumulate x processes is {made['rows']}, "
                            "give another output, or start anew with resume=never")
        for name in ("method", "optimizer", "data"):
            value = getattr(self.identity, name)
            if made[name] not in (value, None):  # A converted checkpoint does not know all of them.
                raise UserError(f"{path} was made with {name} {made[name]}, this run has {name} {value}; launch "
                                "it alike, give another output, or start anew with resume=never")

    def load(self, path: Path) -> Progress:
        """Put weights, optimizer state and random states of every rank back. Every rank must call it.

        Raises:
            UserError: it is a checkpoint of another model.
        """
        from toolkit.training.state.live import live_state, load_state
        from toolkit.training.state.scaler import restore_scaler
        from toolkit.training.state.store import Reader

        state, files = read_state(path), read_manifest(path)["files"]
        done = Progress(**state["progress"])
        reader = Reader(path, [name for name in files if name.startswith("rank-")])
        load_state(live_state(self.accelerator), reader, done.step, done.skipped)
        reader.close()
        restore_scaler(self.accelerator, state["scaler"])
        self._restore_random(path, state["identity"], done.step)
        made, now = state["identity"], self.identity
        if (made["strategy"], made["processes"]) != (now.strategy, now.processes):
            self.say(f"note: {path.name} was made by {made['strategy']} on {made['processes']} processes, this is {now.strategy} "
                     f"on {now.processes}: weights, optimizer state and the position in the data are carried over")
        return done

    def _restore_random(self, path: Path, made: dict[str, Any], step: int) -> None:
        import torch
        from accelerate.utils import set_seed
        from safetensors.torch import load_file

        from toolkit.training.state.rng import restore_random_states

        if made["processes"] == self.identity.processes:
            restore_random_states(load_file(path / _random_file(self.accelerator.process_index)))
            return
        self.say(f"note: random states of {made['processes']} ranks do not fit {self.identity.processes}; every rank draws "
                 "anew from the seed and the step (dropout masks will differ)")
        set_seed((torch.initial_seed() + 1_000_003 * step) % 2**32)

    def set_aside(self) -> None:
        """Move the checkpoints of an earlier run out of the way of one that starts anew."""
        if self.accelerator.is_main_process and named(self.folder):
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
        _, problem = self._together({}, self._prepare(scratch) if main else None)
        if problem:
            return problem
        files, own = {}, None
        try:
            files = self._write(scratch)
        except Exception as error:  # noqa: BLE001 - whatever a format's writer raises, training goes on without it
            own = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        files, problem = self._together(files, own)
        if main:
            own = None if problem else self._finish(scratch, final, progress, files)
            if problem or own:
                shutil.rmtree(scratch, ignore_errors=True)
        return problem or self._together({}, own)[1]

    def _together(self, files: dict[str, Any], problem: str | None) -> tuple[dict[str, Any], str | None]:
        """(the files of all ranks, the first problem of any)."""
        from accelerate.utils import gather_object

        told: list[tuple[dict[str, Any], str | None]] = gather_object([(files, problem)])
        return {name: facts for part, _ in told for name, facts in part.items()}, next(filter(None, (p for _, p in told)), None)

    def _write(self, scratch: Path) -> dict[str, Any]:
        """This rank's share."""
        from toolkit.training.state.live import live_state
        from toolkit.training.state.rng import random_states
        from toolkit.training.state.store import write_fragments, write_tensors

        rank, live = self.accelerator.process_index, live_state(self.accelerator)
        fragments = [fragment.share() for fragment in live.fragments()]
        fragments += [scalar.fragment() for scalar in live.scalars() if scalar.owner]
        files = write_fragments(scratch, f"rank-{rank:05d}", fragments)
        name = _random_file(rank)
        files[name] = write_tensors(scratch / name, list(random_states().items()), {})
        return files

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
            scratch.mkdir()
        except OSError as error:
            return str(error)
        return None

    def _finish(self, scratch: Path, final: Path, progress: Progress, files: dict[str, Any]) -> str | None:
        """state.json, the manifest, and the name; then the oldest are removed."""
        from toolkit.training.state.scaler import scaler_state
        from toolkit.training.state.store import checksum

        identity = asdict(self.identity)
        try:
            files.update(carry_assets(self.folder.parent / FOLDER, scratch))
            write_json(scratch / STATE, {
                "progress": asdict(progress),
                "schedule": {"position": progress.step - progress.skipped},
                "data": {"rows": progress.step * self.identity.rows, "fingerprint": self.identity.data},
                "random": {str(rank): _random_file(rank) for rank in range(self.identity.processes)},
                "scaler": scaler_state(self.accelerator), "identity": identity, "versions": versions(), **self.record,
            })  # fmt: skip
            flush(scratch / STATE)
            files[STATE] = {"bytes": (scratch / STATE).stat().st_size, "xxh3": checksum(scratch / STATE)}
            write_json(scratch / MANIFEST, {"version": FORMAT, "step": progress.step, "identity": identity,
                                            "files": dict(sorted(files.items()))})
            flush(scratch / MANIFEST)
            flush(scratch)
            if final.exists():
                shutil.rmtree(final)
            scratch.rename(final)
            flush(self.folder)
            self._prune()
        except OSError as error:
            return str(error)
        return None

    def _prune(self) -> None:
        """Remove what is older than the newest `keep` complete ones; a broken one never counts as kept."""
        complete = [path for path in named(self.folder) if is_complete(path)]
        oldest = complete[-self.keep :][0]
        for path in named(self.folder):
            if path < oldest:
                shutil.rmtree(path, ignore_errors=True)


def _random_file(rank: int) -> str:
    return f"random-{rank:05d}.safetensors"


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


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
