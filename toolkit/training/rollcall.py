"""Ends every rank, with the missing one named, when the ranks have waited for it as long as they may.

Every rank tells the others once a second where it stands, through the store of the launcher: the last optimizer step that ended,
the phase, and for how long its main thread has not moved. A rank that has waited in one place for `timeout_minutes` asks the
store who is not there, says so in one line and ends; the others see that and end too. A collective operation that breaks off
sooner, because a rank has died, is explained in the same way.

Without this the ranks would end at a time-out of the communication library, each with its own trace and none with the name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from toolkit.training.heartbeat import Place, footprint, place_of, stack_of

_MAY_WAIT = ("backward", "optimizer", "gradient norm", "summing the loss", "counting the batch")
"""Phases in which a rank can wait for the others without a sign of it in Python: device streams and C++ threads do."""
_OF_COMMUNICATION = ("gloo", "NCCL", "ProcessGroup", "TCPStore", "onnection closed", "onnection reset")
"""What stands in the errors of a collective operation that broke off."""
_NAMED = 4
Waits = Literal["yes", "perhaps", "no"]
"""Ranks that one line names."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a rank tells the others."""

    beats: int
    """Counts up while the rank lives."""
    step: int
    """The last optimizer step that ended."""
    phase: str
    line: str
    waits: Waits
    seconds: float
    """For how long its main thread has not moved."""
    ended: str = ""
    """How it ended; empty while it runs."""

    @property
    def text(self) -> str:
        """Where it stands, for people."""
        if self.ended:
            return f"{self.ended} {self.when}"
        return f"stood {self.when} in {self.phase} ({self.line}), for {self.seconds:,.0f} s"

    @property
    def when(self) -> str:
        """Between which steps."""
        return f"after step {self.step}" if self.step else "before the first step ended"


class RollCall:
    """One rank's part. `end` gets the line and ends the process.

    Args:
        rank, world: which process this is, and of how many.
        limit: seconds that a rank may wait in one place.
        store: makes a client of the store that all ranks reach; it is used by this object alone.
        end: takes the line, and does not return.
    """

    def __init__(self, rank: int, world: int, limit: float, store: Callable[[], Any], end: Callable[[str], None]) -> None:
        self.rank, self.world, self.limit, self.end = rank, world, limit, end
        # Hundreds of ranks ask one store.
        self.poll = min(max(1.0, world / 256), limit / 20)
        self.step = 0
        self._open = store
        self._store: Any = None
        self._watched = threading.get_ident()
        self._ended = threading.Event()
        self._beats, self._print, self._since = 0, 0, time.monotonic()
        self._broken_off: Place | None = None
        self._thread = threading.Thread(target=self._watch, name="roll call", daemon=True)

    def start(self) -> None:
        """Watch the calling thread from here on."""
        self._thread.start()

    def leave(self, how: str) -> None:
        """Tell the others how this rank ended, and watch no more."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._tell(self.standing(how))

    def standing(self, ended: str = "") -> Standing:
        """Where this rank stands now."""
        self._beats += 1
        now = time.monotonic()
        frames = [] if self._broken_off else stack_of(self._watched)
        if frames and (seen := footprint(frames)) != self._print:
            self._print, self._since = seen, now
        place = self._broken_off or (place_of(frames) if frames else Place("its end", "", "-"))
        waits: Waits = "yes" if place.collective else "perhaps" if place.phase in _MAY_WAIT else "no"
        return Standing(beats=self._beats, step=self.step, phase=place.phase, line=place.line, waits=waits,
                        seconds=now - self._since, ended=ended)

    def broke_off(self, error: BaseException) -> None:
        """A collective operation has ended with this error: what counts is where it did."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if frames:
            self._broken_off = place_of(frames)

    def missing(self) -> str | None:
        """The line that names who is not there, or None when that cannot be told. Takes a few looks' time."""
        if self._store is None:
            return None
        try:
            before = self._all()
            for _ in range(4):
                time.sleep(self.poll)
                self._tell(self.standing())
            return who_is_missing(before, self._all(), self.limit)
        except Exception:  # noqa: BLE001 - the store is gone, and with it whoever held it
            return f"the launcher that holds the ranks together is gone; rank {self.rank} {self.standing().text}"

    def _watch(self) -> None:
        try:
            self._store = self._open()
        except Exception:  # noqa: BLE001 - a launcher with another kind of store: the library's own time-outs remain
            return
        # A collective operation has the same limit: be there first.
        limit = self.limit - 6 * self.poll
        while not self._ended.wait(self.poll):
            try:
                own = self.standing()
                self._tell(own)
                over = self._store.check(["end"])
            except Exception:  # noqa: BLE001 - the store is gone: the run ends by itself, or goes on without a roll call
                return
            line = self._store.get("end").decode() if over else None
            if line is None and own.waits != "no" and own.seconds > limit:
                line = self.missing()
                if line is not None and self.standing().seconds < limit:
                    continue  # It got on after all.
            if line is not None:
                self._store.set("end", line)
                time.sleep(3 * self.poll)  # Without a launcher the store ends with rank 0: let the others see it.
                self.end(line)

    def _tell(self, standing: Standing) -> None:
        self._store.set(f"rank {self.rank}", json.dumps(asdict(standing)))

    def _all(self) -> dict[int, Standing | None]:
        names = {rank: f"rank {rank}" for rank in range(self.world)}
        return {rank: Standing(**json.loads(self._store.get(name))) if self._store.check([name]) else None
                for rank, name in names.items()}


def who_is_missing(before: dict[int, Standing | None], now: dict[int, Standing | None], limit: float) -> str | None:
    """The line that names the ranks for which the others wait, from two looks between which every living rank has told of
    itself. None when they all wait in one place: then it is the network between them."""
    world = len(now)
    silent = {rank: f"has told nothing since it {was.text}" for rank, was in before.items()
              if was is not None and was == now[rank] and not was.ended}
    silent |= {rank: "has not begun" for rank, told in now.items() if told is None}
    told = {rank: standing for rank, standing in now.items() if standing is not None and rank not in silent}
    groups: list[dict[int, str]] = [
        {rank: one.text for rank, one in told.items() if one.ended and one.ended != _DONE},
        silent,
        {rank: one.text for rank, one in told.items() if one.ended},
        {rank: one.text for rank, one in told.items() if one.waits == "no"},
        {rank: one.text for rank, one in told.items() if one.waits == "perhaps"},
        _odd_ones(told),
    ]
    absent = next((group for group in groups if 0 < len(group) < world), None)
    if absent is None:
        return None
    waiting = [one for rank, one in told.items() if rank not in absent and not one.ended]
    names = "; ".join(f"rank {rank} of {world} {text}" for rank, text in list(absent.items())[:_NAMED])
    more = f"; and {len(absent) - _NAMED} more" if len(absent) > _NAMED else ""
    longest = max(waiting, key=lambda one: one.seconds, default=None)
    if longest is None:
        return f"{names}{more}"
    return (f"{names}{more}; the others waited {longest.seconds:,.0f} s {longest.when} in {longest.phase} "
            f"(timeout_minutes={limit / 60:g})")


def _odd_ones(told: dict[int, Standing]) -> dict[int, str]:
    """Those that wait elsewhere than most do, or, where no place has most, those that are furthest behind."""
    places: dict[tuple[int, str], list[int]] = {}
    for rank, one in told.items():
        places.setdefault((one.step, one.phase), []).append(rank)
    if len(places) < 2:
        return {}
    most = max(places.values(), key=len)
    alone = sum(len(ranks) == len(most) for ranks in places.values()) == 1
    behind = min(step for step, _ in places)
    chosen = [rank for rank in told if (rank not in most if alone else told[rank].step == behind)]
    # All of one step, and each elsewhere: every place is worth a look.
    return {rank: told[rank].text for rank in chosen[: len(told) - 1]}


_DONE = "left the run"
_active: list[RollCall] = []


def begin(limit: float, end: Callable[[str], None]) -> None:
    """Have the ranks of this run tell each other where they stand, once per process. `limit` in seconds, as in `RollCall`."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or _active or "MASTER_ADDR" not in os.environ:
        return
    name = f"roll call {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    _active.append(RollCall(int(os.environ["RANK"]), world, limit, lambda: store_at(*address, name=name), end))
    _active[0].start()


def store_at(host: str, port: str, *, name: str) -> Any:
    """A client of its own of the store that all ranks reach, its keys apart from others' by `name`."""
    from datetime import timedelta

    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    return PrefixStore(name, store)


def at_step(step: int) -> None:
    """The optimizer step that has ended."""
    for call in _active:
        call.step = step


def leave(how: str = _DONE) -> None:
    """This rank ends, in this way."""
    for call in _active:
        call.leave(how)


def missing_after(error: BaseException) -> str | None:
    """The line for an error of a collective operation that broke off; None for other errors, and when nobody is missing."""
    if not _active or not any(sign in str(error) for sign in _OF_COMMUNICATION):
        return None
    with contextlib.suppress(ValueError):  # Not the main thread.
        # The launcher ends everybody as soon as it sees that one is gone; it kills those that don't, half a minute later.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _active[0].broke_off(error)
    return _active[0].missing()
