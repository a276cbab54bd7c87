"""Loaded by every Python that `toolkit profile` starts, in whichever environment: the standard library only.

When torch's optimizers are imported, hooks on every optimizer's step write one line of JSON per step and rank: the highest
point since the step before, and what is alive after it. A process that never steps leaves its first line alone.
A process that is killed can't write: how it ended is noted by the one that asks the system for it, its launcher.
"""

import atexit
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from typing import Any

TARGET = "torch.optim.optimizer"
CATEGORIES_AT = 3
"""The step after which nothing new is held: categories are counted there."""


def _note_ends(folder: str) -> None:
    """Whoever waits for a process notes how it ended: the system tells that once, and nobody else can be sure to be first."""
    wait = os.waitpid

    def waitpid(pid: int, options: int, /) -> tuple[int, int]:
        ended, status = wait(pid, options)
        try:
            if ended and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
                with open(f"{folder}/ends", "a", encoding="ascii") as file:  # noqa: PTH123
                    file.write(f"{ended} {os.waitstatus_to_exitcode(status)} {time.monotonic()}\n")
        except Exception:
            pass  # a full disk, or an interpreter that is being taken down
        return ended, status

    os.waitpid = waitpid
    early = getattr(sys.modules.get("subprocess"), "_del_safe", None)
    if early is not None:  # it was imported before this file, and keeps the function
        early.waitpid = waitpid


def _chain() -> None:
    """Run the sitecustomize that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib is not worth its import in every process
    places = [p for p in sys.path if os.path.abspath(p or ".") != here]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


class _Record:
    """One process's file."""

    def __init__(self, folder: str) -> None:
        self.steps = 0
        self.depth = 0
        self.peak_of_all = 0
        self.path = os.path.join(folder, f"{os.getpid()}.jsonl")  # noqa: PTH118
        self.pid = os.getpid()
        library = ctypes.CDLL(None)
        self.counter = "none"
        try:
            self._live, self._peak, self._reset = (library.toolkit_live_bytes, library.toolkit_peak_bytes,
                                                   library.toolkit_reset_peak)
            self._live.restype = self._peak.restype = ctypes.c_longlong
            self.counter = "allocations"
        except AttributeError:
            pass
        ranks = {name.lower(): int(os.environ.get(name, default)) for name, default in
                 (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))}
        self.write({"start": time.time(), "pid": self.pid, **ranks, "argv": sys.argv[:3]})

    def write(self, line: dict[str, Any]) -> None:
        try:
            with open(self.path, "a", encoding="utf-8") as file:  # noqa: PTH123
                file.write(json.dumps(line) + "\n")
        except OSError:
            pass  # a full disk must not end somebody's training

    def read(self) -> tuple[int, int, int | None]:
        """(peak, live, reserved) in bytes since the last reading; begins the peak anew."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            self.counter = "cuda"
            found = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved()
            torch.cuda.reset_peak_memory_stats()
            return found
        if self.counter == "allocations":
            found = self._peak(), self._live(), None
            self._reset()
            return found
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            held = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        self.counter = "rss"
        return held, held, None

    def before(self, optimizer: Any, *_: Any) -> None:
        self.depth += 1

    def after(self, optimizer: Any, *_: Any) -> None:
        self.depth -= 1
        if self.depth == 0 and os.getpid() == self.pid:  # an optimizer that steps another one inside counts once
            self.steps += 1
            peak, live, reserved = self.read()
            self.peak_of_all = max(self.peak_of_all, peak)
            line: dict[str, Any] = {"step": self.steps, "peak": peak, "live": live, "time": time.time(), "counter": self.counter}
            if reserved is not None:
                line["reserved"] = reserved
            if self.steps == CATEGORIES_AT:
                line["categories"] = _categories(optimizer, live)
                if self.counter == "cuda":
                    line["capacity"] = sys.modules["torch"].cuda.mem_get_info()[1]
            self.write(line)

    def ended(self) -> None:
        if os.getpid() == self.pid:
            try:
                peak = self.read()[0]
            except Exception:
                peak = 0
            self.write({"end": time.time(), "steps": self.steps, "peak": max(peak, self.peak_of_all), "counter": self.counter})


def _categories(optimizer: Any, live: int) -> dict[str, int]:
    """Bytes of what hangs on the optimizer; `other` is the rest of what is alive."""
    seen: set[int] = set()

    def held(tensors: list[Any]) -> int:
        total = 0
        for tensor in tensors:
            try:
                storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                if storage.data_ptr() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    total += storage.nbytes()
            except Exception:
                continue
        return total

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [v for state in optimizer.state.values() if isinstance(state, dict) for v in state.values()
              if hasattr(v, "untyped_storage")]
    found = {"parameters": held(parameters), "optimizer_states": held(states),
             "gradients": held([p.grad for p in parameters if p.grad is not None])}
    return {**found, "other": max(0, live - sum(found.values()))}


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the real finders find the module, and adds the hooks once it has run."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader = spec.loader if spec is not None else None
        if loader is None:
            return spec
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            record = _Record(os.environ["TOOLKIT_PROFILE"])
            module.register_optimizer_step_pre_hook(record.before)
            module.register_optimizer_step_post_hook(record.after)
            atexit.register(record.ended)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("TOOLKIT_PROFILE"):
    _note_ends(os.environ["TOOLKIT_PROFILE"])
    sys.meta_path.insert(0, _Finder())
    _chain()
