"""Where a run says how it goes: metrics.jsonl, a tracker, and the terminal. The main process only."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from toolkit.training import rollcall
from toolkit.training.heartbeat import Heartbeat
from toolkit.training.step import Diverged
from toolkit.units import format_duration, format_size

if TYPE_CHECKING:
    from accelerate import Accelerator

_OVERFLOWS = 50
"""So many steps that an overflow undid in a row end the run: a loss scale is found in fewer, or never."""

_SHOWN: dict[str, Callable[[Any], str]] = {
    "loss": "loss {:.4f}".format, "learning_rate": "lr {:.2e}".format, "grad_norm": "norm {:.3f}".format,
    "tokens_per_second": "{:,.0f} tok/s".format, "memory_peak": format_size,
}  # fmt: skip
"""What of a step's record a line of the log shows."""


def plain(value: Any) -> Any:
    """A number that JSON can hold: NaN and infinities become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Log:
    """Lines for people: a bar on a terminal, plain lines in a file. Silent on all but the main process."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.main = accelerator.is_main_process
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.bar: Progress | None = None

    def say(self, text: str) -> None:
        """One line."""
        if not self.main:
            return
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        else:
            self.console.print(text, highlight=False, markup=False)
        sys.stdout.flush()

    def facts(self, rows: list[tuple[str, str]]) -> None:
        """A short table of what is about to run."""
        for name, text in rows:
            self.say(f"  {name:<11} {text}")


class Spikes:
    """Tells values that stand far above those of the last 50 steps."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.last: deque[float] = deque(maxlen=50)
        self.quiet = 0

    def seen(self, value: float) -> str | None:
        """What is to be said of this value, or None. One spike makes one line, however long it lasts below ten steps.

        Far above: beyond the median by six standard deviations (from the median deviation, which a few outliers leave as it
        is) and by half of the median.
        """
        if not math.isfinite(value):
            return None
        text = None
        if len(self.last) >= 10:
            middle = statistics.median(self.last)
            spread = 1.4826 * statistics.median(abs(item - middle) for item in self.last)
            if value > middle + max(6 * spread, 0.5 * abs(middle)) and not self.quiet:
                text = f"{self.name} {value:.4g} is far above the last {len(self.last)} steps (median {middle:.4g})"
                self.quiet = 10
        self.quiet = max(0, self.quiet - 1)
        self.last.append(value)
        return text


class Metrics:
    """metrics.jsonl and the tracker, the progress of the loop, and a voice when it goes wrong."""

    def __init__(self, log: Log, accelerator: Accelerator, file: Path, *, total: int, first: int,
                 log_every: int) -> None:
        self.log, self.accelerator, self.log_every, self.total = log, accelerator, log_every, total
        self.started = time.monotonic()
        self.task: Any = None
        self.file = None
        self.heartbeat = Heartbeat(accelerator.process_index, accelerator.num_processes)
        rollcall.at_step(first - 1)
        self.spikes = (Spikes("loss"), Spikes("grad_norm"))
        self.skipped = self.skipped_in_a_row = self.tracker_failures = 0
        self.unwritten = False
        if not log.main:
            return
        _keep_before(file, first)
        self.file = file.open("a", encoding="utf-8", buffering=1)
        if log.console.is_terminal:
            log.bar = Progress(
                TextColumn("[bold]step"), BarColumn(bar_width=24), MofNCompleteColumn(),
                TextColumn("{task.description}"), TimeRemainingColumn(), console=log.console,
            )  # fmt: skip
            self.task = log.bar.add_task("", total=total, completed=first - 1)
            log.bar.start()

    def step(self, record: dict[str, Any]) -> None:
        """One optimizer step: step, loss, grad_norm, step_seconds, and whatever else there is to write.

        Raises:
            Diverged: gradients have overflowed in so many steps that nothing is learned.
        """
        self.heartbeat.beat(record["step"], record["step_seconds"])
        rollcall.at_step(record["step"])
        self._write(record)
        self._watch_overflow(record["step"])
        for text in filter(None, [spikes.seen(record[spikes.name]) for spikes in self.spikes]):
            self.log.say(f"warning: step {record['step']}: {text}")
        if not self.log.main:
            return
        text = "  ".join(write(record[name]) for name, write in _SHOWN.items() if name in record)
        if self.log.bar is not None:
            self.log.bar.update(self.task, completed=record["step"], description=text)
        elif record["step"] % self.log_every == 0 or record["step"] == self.total:
            left = statistics.median(self.heartbeat.seconds) * (self.total - record["step"])
            ahead = f"  {format_duration(left)} left" if left else ""
            self.log.say(f"step {record['step']}/{self.total}  {text}{ahead}")

    def evaluation(self, step: int, loss: float, tokens: int) -> None:
        """One evaluation."""
        self.heartbeat.beat()
        self._write({"step": step, "eval_loss": loss, "eval_tokens": tokens})
        self.log.say(f"eval at step {step}: loss {loss:.4f} over {tokens:,} tokens")

    def _watch_overflow(self, step: int) -> None:
        """Count the steps that a gradient overflow undid; all ranks count alike. Raises Diverged after 50 in a row."""
        if not self.accelerator.optimizer_step_was_skipped:
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.log.say(f"step {step} changed nothing: the gradients overflowed ({self.skipped:,} such steps so far)")
        if self.skipped_in_a_row >= _OVERFLOWS:
            raise Diverged(f"the gradients overflowed in each of the last {_OVERFLOWS} steps, up to step {step}: fp16 does not "
                           "hold this model's gradients; use precision=bf16 or fp32")

    def _write(self, record: dict[str, Any]) -> None:
        clean = {key: plain(value) for key, value in record.items()}
        if self.file is not None:
            try:
                self.file.write(json.dumps(clean) + "\n")
            except OSError as error:  # A full disk. What is not written yet stays in the file's buffer, and is tried again.
                if not self.unwritten:
                    self.log.say(f"warning: {self.file.name} cannot be written ({error.strerror or error})")
                self.unwritten = True
        if self.accelerator.trackers:
            numbers = {k: v for k, v in clean.items() if k != "step" and isinstance(v, (int, float))}
            try:
                self.accelerator.log(numbers, step=record["step"])
            except Exception as error:  # noqa: BLE001 - a server that is away for a while is no reason to end the run
                if not self.tracker_failures:
                    told = " ".join(str(error).split())[:120]
                    self.log.say(f"warning: step {record['step']}: the tracker does not take it ({told}); metrics.jsonl does")
                self.tracker_failures += 1

    def __enter__(self) -> Metrics:
        self.heartbeat.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.heartbeat.__exit__()
        if self.log.bar is not None:
            self.log.bar.stop()
            self.log.bar = None
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.close()
        if kind is None:
            self.log.say(f"trained in {format_duration(time.monotonic() - self.started)}")


def _keep_before(file: Path, first: int) -> None:
    """Drop what a resumed run will write again: the records of step `first` and later (evaluations before
    it stay)."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # A run that was killed can leave half a line.
        if record.get("step", 0) < first:
            kept.append(line)
    file.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
