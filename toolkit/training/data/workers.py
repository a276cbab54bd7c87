"""Encodes batches in several processes where there is enough to do, in the order in which they came."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from toolkit.training.data.encode import Encoded, Encoder, Reading
from toolkit.training.data.read import Item

AT_ONCE = 1000
"""Records of one batch."""
_ALONE = 4
"""So many batches are done here before others are called in: less data than that is done sooner than they are ready."""

Job = tuple[int, Reading, list[Item]]


class Encoding:
    """Used as a context; `run` gives what becomes of each job, in order."""

    def __init__(self, tokenizer: Any, workers: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.workers = workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        self._pool: Any = None

    def __enter__(self) -> Encoding:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.terminate()

    def run(self, jobs: Iterator[Job]) -> Iterator[tuple[int, Encoded]]:
        """(number, samples) of every job. Raises UserError as `Encoder` does, at the first line that is wrong."""
        encode = _Encoders(self.tokenizer)
        for _, job in zip(range(_ALONE), jobs, strict=False):
            yield encode(job)
        waiting: deque[Any] = deque()
        if self.workers > 1:
            for job in jobs:
                waiting.append(self._ready().apply_async(_encode, (job,)))
                # Enough that nobody waits, few enough that the data is not read into memory as a whole.
                if len(waiting) > 2 * self.workers:
                    yield waiting.popleft().get()
        while waiting:
            yield waiting.popleft().get()
        for job in jobs:
            yield encode(job)

    def _ready(self) -> Any:
        if self._pool is None:
            # Copies of this process have the tokenizer already; they do nothing else, and end with the data.
            kind = "fork" if sys.platform.startswith("linux") else "spawn"
            self._pool = multiprocessing.get_context(kind).Pool(self.workers, _begin, (self.tokenizer, os.getpid()))
        return self._pool


class _Encoders:
    """One encoder for each reading that comes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.encoder: Encoder | None = None

    def __call__(self, job: Job) -> tuple[int, Encoded]:
        number, reading, items = job
        if self.encoder is None or self.encoder.reading != reading:
            self.encoder = Encoder(self.tokenizer, reading)
        return number, self.encoder(items)


_of_this_process: list[_Encoders] = []


def _begin(tokenizer: Any, parent: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _of_this_process[:] = [_Encoders(tokenizer)]
    end_with(parent)


def _encode(job: Job) -> tuple[int, Encoded]:
    return _of_this_process[0](job)


def end_with(parent: int) -> None:
    """Have this process end when its parent has: one that was killed can't say so."""
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
