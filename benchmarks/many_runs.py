"""Runs of the recipe one after the other, each in processes of its own, without the libraries' imports each time; with faults.

The process that this file is forks the ranks of a run from itself, with the environment that `accelerate launch` would give
them. It reads a run a line as JSON from standard input and answers with a line of JSON; `Runner` is the other end.

A fault happens in one rank, at the `point`-th of the places where a save or a step can be cut (a file begun, half written,
synced, renamed or removed; a step begun), or `seconds` after the first step began: a signal to itself, or an error of the system.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parent.parent
GRACE = 60.0
"""Seconds after the end of a rank in which the others must have ended by themselves; then they count as hung."""


class Runner:
    """Starts runs; `with Runner() as runner: runner.run("ddp", keys)`."""

    def __init__(self, niceness: int = 0) -> None:
        self.niceness = niceness

    def __enter__(self) -> Runner:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
                       "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}  # fmt: skip
        self.process = subprocess.Popen(["nice", "-n", str(self.niceness), sys.executable, __file__], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.communicate(timeout=60)

    def run(self, strategy: str, keys: dict[str, Any], *, processes: int | None = None,
            faults: list[dict[str, Any]] | None = None, script: str = "recipes/train.py",
            environment: dict[str, str] | None = None, limit: float = 120.0) -> dict[str, Any]:
        """One run. `strategy` is a shipped one or a launch file. Returns `statuses` (of each rank: its exit status, or minus the
        signal that ended it), `hung` (ranks that had to be ended), `seconds`, `output`."""
        to, back = self.process.stdin, self.process.stdout
        if to is None or back is None:
            raise RuntimeError("use it in a with statement")
        file = strategy if strategy.endswith(".yaml") else str(ROOT / "recipes" / "accelerate" / f"{strategy}.yaml")
        number = processes or (1 if strategy == "single" else 2)
        to.write(json.dumps({"file": file, "keys": {name: str(value) for name, value in keys.items()}, "processes": number,
                             "faults": faults or [], "script": script, "limit": limit,
                             "environment": environment or {}}) + "\n")  # fmt: skip
        to.flush()
        answer = back.readline()
        if not answer:
            raise RuntimeError("the process that starts the runs has ended; its last words are above")
        return dict(json.loads(answer))


def engine_environment(file: str, processes: int) -> dict[str, str]:
    """What `accelerate launch` puts into the environment for this file, beside the place of a rank."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    words = ["--config_file", file, "--num_processes", str(processes), "recipes/train.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        return dict(prepare_deepspeed_cmd_env(args)[1])
    return dict(prepare_multi_gpu_env(args) if processes > 1 or args.use_fsdp else prepare_simple_launcher_cmd_env(args)[1])


def serve() -> None:
    """Fork run after run until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no answer.
    import accelerate.utils  # noqa: F401
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import toolkit.estimate.engine
    import toolkit.training.data.prepare
    import toolkit.training.preflight  # noqa: F401

    _places()  # A name that is gone is an error here and not a rank that its neighbours wait for.
    gc.freeze()  # Collections in the ranks need not walk through the libraries.
    known: dict[tuple[str, int], dict[str, str]] = {}
    for line in sys.stdin:
        run = json.loads(line)
        place = (run["file"], run["processes"])
        if place not in known:
            known[place] = engine_environment(*place)
        answers.write(json.dumps(_one(run, known[place])) + "\n")
        answers.flush()


def _one(run: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    from torch.distributed.elastic.utils.distributed import get_free_port

    started, port = time.monotonic(), get_free_port()
    folder = Path(tempfile.mkdtemp(prefix="run-"))
    ranks = {}
    for rank in range(run["processes"]):
        pid = os.fork()
        if pid == 0:
            _rank(run, environment, rank, port, folder)
        ranks[pid] = rank
    statuses: list[int | None] = [None] * run["processes"]
    hung: list[int] = []
    deadline = started + run["limit"]
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            statuses[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
            deadline = min(deadline, time.monotonic() + GRACE)
        elif not pid:
            if time.monotonic() > deadline:
                hung = hung or sorted(ranks.values())
                for number in (signal.SIGUSR2, signal.SIGKILL):  # Where it hangs goes to its output.
                    for left in ranks:
                        os.kill(left, number)
                    time.sleep(0.2)
            time.sleep(0.02)
    output = (folder / "output").read_text(encoding="utf-8", errors="replace")
    shutil.rmtree(folder)
    return {"statuses": statuses, "hung": hung, "seconds": time.monotonic() - started, "output": output}


def _rank(run: dict[str, Any], environment: dict[str, str], rank: int, port: int, folder: Path) -> None:
    """Become a rank; does not return."""
    from toolkit.profiling import counter

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing is left when the parent dies
    log = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update({**environment, **run["environment"], counter._ENGAGED: "1",  # The shim wants a process of its own.
                       "TORCHELASTIC_ERROR_FILE": str(folder / str(rank) / "error.json")})  # fmt: skip
    (folder / str(rank)).mkdir()
    if run["processes"] > 1 or "ACCELERATE_USE_FSDP" in environment or "ACCELERATE_USE_DEEPSPEED" in environment:
        number = str(run["processes"])
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number,
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})  # fmt: skip
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    sys.argv = sys.orig_argv = [run["script"], *(f"{name}={value}" for name, value in run["keys"].items())]
    for fault in run["faults"]:
        if fault["rank"] == rank:
            arm(fault)
    import runpy

    try:
        runpy.run_path(str(ROOT / run["script"]), run_name="__main__")
    except BaseException:  # noqa: BLE001 - as an interpreter ends, without the parent's clean-up
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def arm(fault: dict[str, Any]) -> None:
    """Have `fault` happen in this process: {"point" or "seconds", and "signal", "errno" or "fill" (a file that takes the room
    of its whole disk)}, `only` for points of that name; or {"count"}, a file that gets the points passed and the seconds."""
    passed = 0
    begun: list[float] = []

    def happen() -> None:
        if "errno" in fault:
            raise OSError(fault["errno"], os.strerror(fault["errno"]))
        if "fill" in fault:
            with contextlib.suppress(OSError), Path(fault["fill"]).open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            return
        os.kill(os.getpid(), getattr(signal, fault["signal"]))

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal passed
            if name == "step" and not begun:
                begun.append(time.monotonic())
                if "seconds" in fault:
                    threading.Timer(fault["seconds"], happen).start()
            if name in fault["only"] if "only" in fault else begun:
                passed += 1
                if "count" in fault:
                    with Path(fault["count"]).open("w") as file:
                        file.write(f"{passed} {time.monotonic() - begun[0]}")
                if passed == fault.get("point"):
                    happen()
            return function(*args, **options)

        return call

    for owner, attribute, name, function in _places():
        setattr(owner, attribute, watched(name, function))


def _places() -> list[tuple[Any, str, str, Callable[..., Any]]]:
    """What is watched: (where it is kept, as what, the name of its points, the function)."""
    from toolkit.training import step
    from toolkit.training.state import store

    owners: list[tuple[Any, str, str]] = [
        (step, "count_batch", "step"), (step, "evaluate", "evaluation"), (store, "write_tensors", "file"),
        (store, "bytes_of", "tensor"), (os, "fsync", "sync"), (Path, "rename", "name"), (Path, "replace", "name"),
        (shutil, "rmtree", "remove"),
    ]  # fmt: skip
    return [(owner, attribute, name, getattr(owner, attribute)) for owner, attribute, name in owners]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    serve()
