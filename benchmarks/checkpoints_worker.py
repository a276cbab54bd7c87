"""One rank of `checkpoints.py`: `accelerate launch ... checkpoints_worker.py SPEC`, where SPEC is JSON with `do` (rate, make or
load), `folder`, `model` (a LlamaConfig's keys) and what the function of that name reads. The main process writes `answer`."""

from __future__ import annotations

import ctypes
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLOCK = 64 << 20
STEPS = 3
CLIP = 1.0


class Trainer:
    """A model on an engine, with data that are a function of the step, and the two ways of keeping its state."""

    def __init__(self, spec: dict[str, Any], rows: int = 4, length: int = 32) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from toolkit.training.accelerator import build_accelerator, without_sharded_init
        from toolkit.training.checkpoint import Checkpoints, Identity
        from toolkit.training.config import from_mapping

        self.folder, self.rows, self.length = Path(spec["folder"]), rows, length
        world = int(os.environ.get("WORLD_SIZE", "1"))
        config = from_mapping({"model": "m", "data": "d", "output": str(self.folder), "max_steps": 1, "precision": "fp32",
                               "micro_batch": rows // world, "clip": CLIP})  # fmt: skip
        self.accelerator = build_accelerator(config)
        torch.manual_seed(0)
        with without_sharded_init(self.accelerator):
            model = LlamaForCausalLM(LlamaConfig(**spec["model"]))
        self.vocabulary = model.config.vocab_size
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        identity = Identity(strategy=spec["engine"], processes=world, method="full", optimizer="adamw", data="same", rows=rows)
        self.checkpoints = Checkpoints(self.folder / "ours", self.accelerator, identity, 1, lambda line: None)

    def train(self, first: int) -> list[float]:
        """Losses of the global batches of steps `first` to `first + STEPS - 1`."""
        import torch

        rank, world, losses = self.accelerator.process_index, self.accelerator.num_processes, []
        for step in range(first, first + STEPS):
            torch.manual_seed(step)
            ids = torch.randint(self.vocabulary, (self.rows, self.length))[rank :: world]
            loss = self.model(input_ids=ids, labels=ids).loss
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)  # DeepSpeed clips by itself.
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(self.accelerator.reduce(loss.detach().float(), "mean")))
        return losses

    def save_ours(self) -> None:
        from toolkit.training.checkpoint import Progress

        problem = self.checkpoints.save(Progress(step=STEPS))
        if problem:
            raise RuntimeError(problem)

    def load_ours(self, path: Path) -> None:
        self.checkpoints.load(self.checkpoints.find(str(path)) or path)

    def save_theirs(self) -> None:
        self.accelerator.save_state(str(self.folder / "theirs"))

    def load_theirs(self, path: Path) -> None:
        self.accelerator.load_state(str(path))


def resident(what: str) -> int:
    """Bytes of this process, from /proc."""
    return int(re.findall(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def files_of(path: Path) -> Iterator[Path]:
    """All files at or below it."""
    yield from (file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())


def to_disk(path: Path) -> None:
    """Have every file on the disk."""
    for file in files_of(path):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def forget(path: Path) -> None:
    """Drop it from the system's cache, so that reading it reads the disk."""
    for file in files_of(path):
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def new_as_in_a_resumed_run(optimizer: Any) -> None:
    """No optimizer state yet, and no memory from earlier that the process could use again."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    optimizer.state.clear()
    ctypes.CDLL(None).malloc_trim(0)


def plain_write(path: Path, size: int) -> None:
    """One file of `size` bytes, block after block, and on the disk."""
    block = os.urandom(1 << 20) * (BLOCK >> 20)
    with path.open("wb", buffering=0) as file:
        for at in range(0, size, BLOCK):
            file.write(memoryview(block)[: min(BLOCK, size - at)])
        os.fsync(file.fileno())


def plain_read(path: Path) -> None:
    """The file, block after block, into one buffer."""
    buffer = bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def read_like(path: Path, begin: int, end: int) -> None:
    """A part of the file into memory that is new, as an optimizer's state is when a run goes on."""
    import torch

    memory = memoryview(torch.empty(end - begin, dtype=torch.uint8).numpy())
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while memory and (got := file.readinto(memory[:BLOCK])):
            memory = memory[got:]


def rate(spec: dict[str, Any]) -> dict[str, Any]:
    """Times, bytes and memory of saving and loading, ours and theirs, alternating with plain writes and reads of as many bytes as
    ours has."""
    import torch
    from accelerate.utils import gather_object

    trainer = Trainer(spec)
    main, plain = trainer.accelerator.is_main_process, trainer.folder / "plain"
    trainer.train(0)
    ours, theirs = trainer.folder / "ours", trainer.folder / "theirs"
    told: dict[str, list[Any]] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        trainer.accelerator.wait_for_everyone()
        Path("/proc/self/clear_refs").write_text("5")
        before, started = resident("VmRSS"), time.perf_counter()
        yield
        trainer.accelerator.wait_for_everyone()
        seconds, grown = time.perf_counter() - started, resident("VmHWM") - before
        told.setdefault(name, []).append([seconds, max(gather_object([grown]))])

    def on_main(work: Callable[..., None], *arguments: Any) -> None:
        if main:
            work(*arguments)

    trainer.save_ours()  # The first of each makes folders, and warms what is made once.
    trainer.save_theirs()
    size = sum(file.stat().st_size for file in files_of(ours))
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    part = (0, size) if spec["engine"] == "ddp" else (size * rank // world, size * (rank + 1) // world)
    for _ in range(spec["rounds"]):
        for path in (ours, theirs, plain):
            on_main(to_disk, path)
        with timed("plain_write"):
            on_main(plain_write, plain, size)
        with timed("ours_save"):
            trainer.save_ours()
        with timed("theirs_save"):
            trainer.save_theirs()
        with timed("theirs_to_disk"):
            on_main(to_disk, theirs)
        for path in (ours, theirs, plain):
            on_main(forget, path)
        with timed("plain_read"):
            on_main(plain_read, plain)
        on_main(forget, plain)
        with timed("like_read"):
            read_like(plain, *part)
        new_as_in_a_resumed_run(trainer.optimizer)
        with timed("ours_load"):
            trainer.load_ours(next(ours.glob("step-*")))
        with timed("theirs_load"):
            trainer.load_theirs(theirs)
    return {
        "measured": told, "ours_bytes": size, "torch": torch.__version__,
        "theirs_bytes": sum(file.stat().st_size for file in files_of(theirs)),
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters()),
    }  # fmt: skip


def make(spec: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of each kind after STEPS steps, and the losses that follow."""
    trainer = Trainer(spec)
    trainer.train(0)
    trainer.save_ours()
    trainer.save_theirs()
    return {"expected": trainer.train(STEPS)}


def load(spec: dict[str, Any]) -> dict[str, Any]:
    """The losses that follow each of the checkpoints `ours`, and the one `theirs`."""
    trainer, found = Trainer(spec), {}
    for name, path in spec["ours"].items():
        trainer.load_ours(next(Path(path).glob("step-*")))
        found[name] = trainer.train(STEPS)
    for name, path in spec["theirs"].items():
        trainer.load_theirs(Path(path))
        found[name] = trainer.train(STEPS)
    return {"found": found}


def main(arguments: list[str]) -> None:
    spec = json.loads(arguments[0])
    answer = {"rate": rate, "make": make, "load": load}[spec["do"]](spec)
    if os.environ.get("RANK", "0") == "0":
        Path(spec["answer"]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    from toolkit.training.start import run

    run(main)
