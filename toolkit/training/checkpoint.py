"""Checkpoints of a run: written whole or not at all, pruned, found again, and loaded into any engine.

A checkpoint is a folder `step-00000010`. All ranks write their share into a scratch folder beside it; when every rank's
files are on the disk, a manifest with their sizes and checksums is written last, and the folder gets its name. A folder
without a manifest that fits is no checkpoint. docs/checkpoints.md describes the files, `toolkit/training/state/` reads
and writes them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit.errors import ToolkitError, UserError
from toolkit.training.assets import FOLDER, carry_assets
from toolkit.training.identity import Identity, Progress
from toolkit.training.run_folder import versions, write_json
from toolkit.training.state.manifest import (
    FORMAT,
    MANIFEST,
    SHARD,
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

    from toolkit.training.state.share import HostRoom, Share

_SCRATCH = ".saving-"


class Damaged(UserError):
    """A checkpoint of which not all is as it was written."""


class NotSaved(ToolkitError):
    """A checkpoint could not be written, and the run was told to end then."""


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
        keep: how many complete ones are kept.
        say: takes a line for the log.
        record: what state.json tells of the run beside its state (config, plan).
        mode: `sync` writes before training goes on. `async` copies this rank's share to host memory, and writes the copy in a
            thread; `advance` between steps and `wait` at the end belong to it.
        on_error: after a save that failed, `warn` and go on, or `stop` with NotSaved.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, identity: Identity, keep: int,
                 say: Callable[[str], None] = print, record: dict[str, Any] | None = None, *,
                 mode: Literal["sync", "async"] = "sync", on_error: Literal["warn", "stop"] = "warn") -> None:
        self.folder, self.accelerator, self.identity, self.keep = folder, accelerator, identity, keep
        self.say, self.record, self.mode, self.on_error = say, record or {}, mode, on_error
        self.saved: int | None = None
        """Step of the newest checkpoint that this object wrote, or went on from."""
        self.resumed: Path | None = None
        """The checkpoint that this object went on from."""
        self._left: list[Path] = []
        """Where else to go on from, should the one that `find` gave turn out to be broken; newest first."""
        self._verified: Path | None = None
        self._room: HostRoom | None = None
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: tuple[Generator[Future[Any], Any, str | None], Future[Any]] | None = None
        """The stages of the save that goes on, and what runs in the background."""
        self._step = 0

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        return newest_in(self.folder)

    def find(self, resume: str) -> Path | None:
        """The checkpoint that `resume` (auto, never, or a path) means. Every rank must call it.

        `auto` passes over broken ones and says so by name. Files are held to their checksums, a share by each rank: the small
        ones here, the others while `load` reads them.

        Raises:
            UserError: a path that is no complete checkpoint, or one of another method, optimizer, global batch or
            data.
        """
        from accelerate.utils import broadcast_object_list

        if resume == "never":
            return None
        candidates = [Path(resume)] if resume != "auto" else list(reversed(named(self.folder)))
        [self._left] = broadcast_object_list([candidates])  # Ranks must not choose by what each of them sees.
        return self._next_sound(resume)

    def _next_sound(self, resume: str) -> Path | None:
        while self._left:
            path = self._left.pop(0)
            # When the last one is broken too, the run starts anew, with the weights that are there now.
            last = resume == "auto" and not self._left
            problem = self._together({}, damage(path, self._rank, contents="all" if last else "small"))[1]
            if problem is None:
                self.identity.check(path, read_manifest(path)["identity"])
                self._verified = path if last else None
                return path
            if resume != "auto":
                newest = newest_in(path / "checkpoints")
                hint = f"; did you mean {newest}?" if newest else f" ({problem})"
                raise UserError(f"resume={resume}: there is no complete checkpoint{hint}")
            self.say(f"warning: {path.name} is passed over: {problem}")
        return None

    @property
    def _rank(self) -> tuple[int, int]:
        return self.accelerator.process_index, self.accelerator.num_processes

    def load(self, path: Path) -> Progress:
        """Put weights, optimizer state and random states of every rank back. Every rank must call it.

        Files are held to their checksums while they are read, a share by each rank.

        Raises:
            Damaged: not all is as it was written; by then weights and optimizer state hold some of it.
            UserError: it is a checkpoint of another model.
        """
        from toolkit.training.state.live import fill, live_state
        from toolkit.training.state.scaler import restore_scaler
        from toolkit.training.state.store import Reader

        state, files = read_state(path), read_manifest(path)["files"]
        done, live = Progress(**state["progress"]), live_state(self.accelerator)
        reader = Reader(path, [name for name in files if name.startswith(SHARD)])
        rank, world = self._rank
        held = {name: files[name]["xxh3"] for name in reader.files
                if path != self._verified and int(name.split("-")[1]) % world == rank}  # fmt: skip
        problem, failure = None, None
        try:
            problem = fill(live, reader, held)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
            problem, failure = damage(path, self._rank), error  # What is damaged may be why.
        reader.close()
        self._agree(problem, failure)
        live.settle(done.step, done.skipped)
        self.resumed = path
        restore_scaler(self.accelerator, state["scaler"])
        self._restore_random(path, state["identity"], done.step)
        made, now = state["identity"], self.identity
        if (made["strategy"], made["processes"]) != (now.strategy, now.processes):
            self.say(f"note: {path.name} was made by {made['strategy']} on {made['processes']} processes, this is {now.strategy} "
                     f"on {now.processes}: weights, optimizer state and the position in the data are carried over")
        models = [told.get("config", {}).get("model") for told in (state, self.record)]
        if None not in models and models[0] != models[1]:
            self.say(f"note: {path.name} was made with model={models[0]}, this run has {models[1]}: what was trained is carried "
                     "over, what is frozen is this one's")
        if path.parent == self.folder:
            self.saved = done.step
        return done

    def _agree(self, problem: str | None, failure: Exception | None) -> None:
        """Raise on every rank what went wrong on any."""
        from toolkit.training.state.share import told

        problem = self._together({}, problem)[1]
        failed = self._together({}, told(failure) if failure else None)[1]
        if problem:
            raise Damaged(problem)
        if failure or failed:
            raise failure or ToolkitError(f"another rank could not load: {failed}")

    def _restore_random(self, path: Path, made: dict[str, Any], step: int) -> None:
        import torch
        from accelerate.utils import set_seed
        from safetensors.torch import load_file

        from toolkit.training.state.rng import restore_random_states
        from toolkit.training.state.share import random_file

        if made["processes"] == self.identity.processes:
            restore_random_states(load_file(path / random_file(self.accelerator.process_index)))
            return
        self.say(f"note: random states of {made['processes']} ranks do not fit {self.identity.processes}; every rank draws "
                 "anew from the seed and the step (dropout masks will differ)")
        set_seed((torch.initial_seed() + 1_000_003 * step) % 2**32)

    def begin(self, found: Path | None) -> Progress:
        """Go on from `found`, or from an older one if it is broken (with resume=auto), or start anew, with whatever else is
        there moved aside. Every rank must call it.

        Raises:
            UserError: it is a checkpoint of another model, or none is sound and what is in memory is no start either.
        """
        while found is not None:
            try:
                return self.load(found)
            except Damaged as error:
                if not self._left:
                    raise
                self.say(f"warning: {found.name} is passed over: {error}")
                found = self._next_sound("auto")
                if found is None:
                    raise UserError(f"{self.folder} has no checkpoint that is sound; start anew with resume=never") from None
        if self.accelerator.is_main_process and named(self.folder):
            number = 1
            while (aside := self.folder.with_name(f"{self.folder.name}-before-{number}")).exists():
                number += 1
            self.folder.rename(aside)
        self.accelerator.wait_for_everyone()
        return Progress(step=0)

    def save(self, progress: Progress) -> str | None:
        """Write a checkpoint, or begin to (mode `async`), after the one that is still being written. Every rank must call it.

        Returns None, or what went wrong, which then was said too; the older checkpoints are as they were.

        Raises:
            NotSaved: the save failed, or the one before, and the run is to end then.
        """
        from toolkit.training.state.live import live_state
        from toolkit.training.state.scaler import scaler_state
        from toolkit.training.state.share import HostRoom, Share, told

        self.wait()
        self._step, scratch = progress.step, self._place(progress.step, scratch=True)
        share, own = None, self._prepare(scratch) if self.accelerator.is_main_process else None
        try:
            share = Share.of(live_state(self.accelerator), self.accelerator.process_index)
            if self.mode == "async":
                self._room = self._room or HostRoom()
                share = share.copied(self._room)
        except Exception as error:  # noqa: BLE001 - an engine whose state cannot be read trains on all the same
            own = own or told(error)
        _, problem = self._together({}, own)
        if problem or share is None:
            return self._conclude(problem)
        stages = self._stages(scratch, self._state(progress, scaler_state(self.accelerator)), share)
        self._saving = stages, next(stages)
        return self.wait() if self.mode == "sync" else None

    @property
    def busy(self) -> bool:
        """Whether this rank is writing in the background."""
        return self._saving is not None and not self._saving[1].done()

    def advance(self, busy: int) -> None:
        """Take the save in the background a stage further, once no rank is `busy`. Every rank must call it between steps, with
        the number of busy ranks on which all have agreed.

        Raises:
            NotSaved: the save failed, and the run is to end then.
        """
        if self._saving is not None and not busy:
            self._next(*self._saving)

    def wait(self) -> str | None:
        """Have the save in the background done. Every rank must call it. Returns and raises as `save` does."""
        problem = None
        while self._saving is not None:
            problem = self._next(*self._saving)
        return problem

    def secure(self, progress: Progress) -> tuple[Path | None, str | None]:
        """(the checkpoint of this very step, or None before the first; what went wrong): before the run is ended from outside.

        Every rank must call it.
        """
        problem = self.wait()
        if progress.step and self.saved != progress.step:
            problem = self.save(progress) or self.wait()
        return self._place(progress.step) if progress.step else None, problem

    def _next(self, stages: Generator[Future[Any], Any, str | None], work: Future[Any]) -> str | None:
        try:
            self._saving = stages, stages.send(work.result())
        except StopIteration as end:
            return self._conclude(end.value)
        return None

    def _stages(self, scratch: Path, state: dict[str, Any], share: Share) -> Generator[Future[Any], Any, str | None]:
        """One save. It yields what runs in the background, and goes on with its result when it has run on every rank: only here,
        in the training thread, do ranks speak to each other."""
        files, own = yield self._background.submit(share.write, scratch)
        del share
        files, problem = self._together(files, own)
        finish = self.accelerator.is_main_process
        own = yield self._background.submit(self._finish, scratch, state, files, problem) if finish else _nothing()
        return problem or self._together({}, own)[1]

    def _conclude(self, problem: str | None) -> str | None:
        self._saving = None
        if problem is None:
            self.saved = self._step
            return None
        text = f"no checkpoint at step {self._step} ({problem}); the older ones are kept"
        if self.on_error == "stop":
            raise NotSaved(f"{text}, and on_save_error=stop ends the run; the last good one is {self.newest()}")
        self.say(f"warning: {text}")
        return problem

    def _together(self, files: dict[str, Any], problem: str | None) -> tuple[dict[str, Any], str | None]:
        """(the files of all ranks, the first problem of any)."""
        from accelerate.utils import gather_object

        told: list[tuple[dict[str, Any], str | None]] = gather_object([(files, problem)])
        return {name: facts for part, _ in told for name, facts in part.items()}, next(filter(None, (p for _, p in told)), None)

    def _place(self, step: int, *, scratch: bool = False) -> Path:
        return self.folder / f"{_SCRATCH if scratch else ''}step-{step:08d}"

    def _state(self, progress: Progress, scaler: dict[str, Any] | None) -> dict[str, Any]:
        """What state.json will say."""
        from toolkit.training.state.share import random_file

        return {
            "progress": asdict(progress),
            "schedule": {"position": progress.step - progress.skipped},
            "data": {"rows": progress.step * self.identity.rows, "fingerprint": self.identity.data},
            "random": {str(rank): random_file(rank) for rank in range(self.identity.processes)},
            "scaler": scaler, "identity": asdict(self.identity), "versions": versions(), **self.record,
        }  # fmt: skip

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

    def _finish(self, scratch: Path, state: dict[str, Any], files: dict[str, Any], problem: str | None) -> str | None:
        """state.json, the manifest, and the name; then the oldest are removed. After a problem, nothing is left."""
        from toolkit.training.state.share import told
        from toolkit.training.state.store import checksum

        try:
            if problem is None:
                files.update(carry_assets(self.folder.parent / FOLDER, scratch))
                write_json(scratch / STATE, state)
                flush(scratch / STATE)
                files[STATE] = {"bytes": (scratch / STATE).stat().st_size, "xxh3": checksum(scratch / STATE)}
                step = state["progress"]["step"]
                write_json(scratch / MANIFEST, {"version": FORMAT, "step": step, "identity": state["identity"],
                                                "files": dict(sorted(files.items()))})
                flush(scratch / MANIFEST)
                flush(scratch)
                self._name(scratch, self._place(step))
                self._prune()
                return None
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
            problem = told(error)
        shutil.rmtree(scratch, ignore_errors=True)
        return problem

    def _name(self, scratch: Path, final: Path) -> None:
        if final.is_dir():
            before = self.folder / f"{_SCRATCH}before-{final.name}"
            final.rename(before)
            scratch.rename(final)
            shutil.rmtree(before, ignore_errors=True)
        else:
            scratch.rename(final)
        flush(self.folder)

    def _prune(self) -> None:
        """Remove what is older than the newest `keep` complete ones; a broken one never counts as kept."""
        complete = [path for path in named(self.folder) if is_complete(path)]
        oldest = complete[-self.keep :][0]
        for path in named(self.folder):
            if path < oldest:
                shutil.rmtree(path, ignore_errors=True)


def _nothing() -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(None)
    return done


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
