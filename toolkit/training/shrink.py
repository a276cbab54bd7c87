"""`on_oom: shrink`: all ranks begin anew with a smaller micro-batch when one of them is out of memory.

The rank that fails leaves what is to be tried next in the launcher's store; the others see it there, whatever they wait for.
Then each of them executes itself anew with two more arguments: the same process to the launcher, which notices nothing. They
meet at another port, because the launcher's store still holds the addresses at which the ranks met before.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.training import rollcall
from toolkit.training.state.manifest import newest_in

if TYPE_CHECKING:
    from toolkit.training.config import TrainConfig

_STARTED, _TRY, _STORE = "TOOLKIT_RUN_STARTED", "TOOLKIT_TRY", "TOOLKIT_LAUNCHER_STORE"
"""When the first try began, which one this is, and where the launcher's store is: kept in the environment."""
_NEXT, _PORT = "next", "port"
SECONDS = 1.0
"""Between two looks whether another rank has failed."""


def smaller(micro_batch: int, accumulate: int) -> tuple[int, int] | None:
    """(micro_batch, accumulate) of the next try: half the rows, or the next smaller number that keeps the global batch whole;
    None below one row."""
    divisor = next((n for n in range(2, micro_batch + 1) if micro_batch % n == 0), None)
    return (micro_batch // divisor, accumulate * divisor) if divisor else None


class Shrink:
    """One rank's part of it. Only one of `ask` and `follow` takes effect, and neither returns when it does."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        os.environ.setdefault(_STARTED, str(time.time()))
        self.number = int(os.environ.setdefault(_TRY, "1"))
        self._lock = threading.Lock()
        self._store: Any = None
        self.why_not = ""
        """Why no rank can begin anew; empty where they can."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return
        if _STORE not in os.environ:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                self.why_not = "shrink needs accelerate launch or torchrun, whose store outlives the ranks"
                return
            os.environ[_STORE] = f"{os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}"
        self._store = rollcall.store_at(*os.environ[_STORE].split(), name=f"try {self.number}")
        threading.Thread(target=self._watch, name="shrink", daemon=True).start()

    def ask(self, line: str, detail: Sequence[str]) -> None:
        """This rank is out of memory: say so unless another one was first, and begin anew. Returns where there is nothing left
        to halve."""
        found = smaller(self.config.micro_batch, self.config.accumulate)
        if found is None or self.why_not:
            return
        mine = json.dumps({"micro_batch": found[0], "accumulate": found[1], "by": os.environ.get("RANK", "0")})
        with self._lock:
            if self._store is None or self._store.compare_set(_NEXT, "", mine).decode() == mine:
                text = (f"on_oom=shrink: try {self.number + 1} {self._from()}: micro_batch={found[0]} accumulate={found[1]}, "
                        "the same global batch")
                print("\n".join([f"warning: {line}", *detail, text]), file=sys.stderr, flush=True)
            self._again(mine)

    def follow(self) -> None:
        """Begin anew when another rank has asked for it."""
        if self._store is None:
            return
        with self._lock:
            if self._store.check([_NEXT]):
                self._again(self._store.get(_NEXT).decode())

    def _watch(self) -> None:
        with contextlib.suppress(Exception):  # the launcher is gone, and the run with it
            while True:
                time.sleep(SECONDS)
                self.follow()

    def _newest(self) -> Path | None:
        """The newest checkpoint that this run has written itself, in whichever try."""
        found = newest_in(Path(self.config.output) / "checkpoints")
        return found if found is not None and found.stat().st_mtime >= float(os.environ[_STARTED]) else None

    def _from(self) -> str:
        found = self._newest()
        return f"from {found.name}" if found is not None else "from where this one began"

    def _again(self, told: str) -> None:
        """Execute this process anew; the caller holds the lock."""
        found = json.loads(told)
        words = [sys.executable, *sys.orig_argv[1:], f"micro_batch={found['micro_batch']}", f"accumulate={found['accumulate']}"]
        if self._newest() is not None:
            words.append("resume=auto")
        if self._store is not None:
            os.environ |= {"MASTER_PORT": self._port(), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        os.environ[_TRY] = str(self.number + 1)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, words)  # noqa: S606

    def _port(self) -> str:
        """Where the ranks of the next try meet: rank 0 listens there, and chooses."""
        if os.environ["RANK"] == "0":
            with socket.socket() as free:
                free.bind(("", 0))
                self._store.set(_PORT, str(free.getsockname()[1]))
        return str(self._store.get(_PORT).decode())
