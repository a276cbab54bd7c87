"""How a recipe's process starts and ends: quiet libraries, one line per mistake, the exit status that belongs to it.

A mistake is usually found by every rank at once. The first rank to find it prints the line, the others end
in silence with the same status. `accelerate launch` turns any status of a rank into 1 and adds its own
report below; the rank's status (2 for bad input) and the line stand in that report.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.errors import ToolkitError, UserError
from toolkit.profiling.killed import leave_note
from toolkit.strategies import launch_environment
from toolkit.training import rollcall
from toolkit.training.stop import Stopped, end_with_launcher


def rank() -> int:
    """This process's global rank as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """The number of processes the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def quiet() -> None:
    """Keep the libraries' own notices out of the log: what matters of them, the recipe says itself."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if world_size() == 1 else "false")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore")
    for name in ("DeepSpeed", "torch.distributed", "accelerate", "datasets", "peft"):
        logging.getLogger(name).setLevel(logging.ERROR)


def own_tools_first() -> None:
    """Put the folder of this Python first on PATH, as an activated environment has it.

    DeepSpeed compiles its operators with whichever ninja is found, and another version of ninja compiles them anew.
    """
    own = str(Path(sys.executable).parent)
    if os.environ.get("PATH", "").split(os.pathsep)[0] != own:
        os.environ["PATH"] = os.pathsep.join(filter(None, (own, os.environ.get("PATH"))))


Explanation = Callable[[BaseException], tuple[str, list[str]]]
"""The line that names a failed allocation, and lines of detail."""
_explain: list[Explanation] = []


def on_out_of_memory(explain: Explanation) -> None:
    """Have a failed allocation explained by `explain` when it ends the run."""
    _explain[:] = [explain]


Attempt = Callable[[BaseException], None]
_attempts: list[Attempt] = []


def on_failure(attempt: Attempt) -> None:
    """Have `attempt` called with the error that would end the run, before anything is said of it: it may begin the process
    anew, and returns when it does not."""
    _attempts[:] = [attempt]


def _explained(error: BaseException) -> bool:
    """Tell a failed allocation, once per node; False when the error is none, or nobody can explain it."""
    from toolkit.profiling.oom import is_out_of_memory

    if not _explain or not is_out_of_memory(error):
        return False
    try:
        line, detail = _explain[0](error)
    except Exception:  # noqa: BLE001 - the explanation itself can run out of memory: the bare error is better than another one
        if os.environ.get("TOOLKIT_DEBUG"):
            raise
        return False
    _report(line, 1, detail)
    return True


_WATCHED = "TOOLKIT_WATCHED"


def watch_for_kills() -> None:
    """Have a process of its own watch the ranks of this node: one that signal 9 ends can't say why itself.

    The first rank of a node starts it; it ends with the first rank that does. It is no part of the training, so a system that
    won't start it goes without.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" or not sys.platform.startswith("linux") or _WATCHED in os.environ:
        return
    watched = [str(os.getppid())] if "LOCAL_RANK" in os.environ else [str(os.getppid()), str(os.getpid())]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with contextlib.suppress(OSError):
        subprocess.Popen([sys.executable, "-m", "toolkit.profiling.killed", *watched], env=environment, stdin=subprocess.DEVNULL,
                         stdout=subprocess.DEVNULL, start_new_session=True)
        os.environ[_WATCHED] = str(os.getpid())  # a rank that executes itself anew has its watcher


def run(main: Callable[[list[str]], None]) -> None:
    """Run a recipe's `main` on the command line's arguments and leave the process with its exit status."""
    quiet()
    own_tools_first()
    os.environ.update(launch_environment(os.environ))
    leave_note("started")
    watch_for_kills()
    end_with_launcher()
    status = 0
    ended: BaseException | None = None
    try:
        main(sys.argv[1:])
    except ToolkitError as error:
        # Held until the process ends: the engine in its frames waits for other ranks when it is taken down.
        status, ended = error.exit_code, error
        rollcall.leave(f"ended ({error})")
        _report(str(error), status, kind="stopped" if isinstance(error, Stopped) else "error")
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        status, ended = 1, error
        for attempt in _attempts:
            attempt(error)
        # A rank whose peer left on a mistake fails in whatever it shared with it; the peer has said why.
        claim = _claim()
        told = claim is not None and claim.exists()
        lost = None if told else rollcall.missing_after(error)
        rollcall.leave(f"failed ({type(error).__name__}: {' '.join(str(error).split())[:120]})")
        if told:
            time.sleep(1.0)
        elif lost:
            _report(lost, status)
        elif not _explained(error):
            traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    rollcall.leave()
    leave_note("ended")
    if ended or status:
        # Other ranks may wait in a collective operation for this one: leave without the atexit handlers that
        # wait too.
        os._exit(status)
    _leave_group()
    # Threads that the libraries leave running can abort the process while it is taken down.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


def end_now(line: str) -> None:
    """Say the line and leave the process from any thread: its main thread waits for something that won't come."""
    _report(line, 1)
    leave_note("ended")
    os._exit(1)


def _leave_group() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _claim() -> Path | None:
    """The file by which the first rank of this node to fail claims the report; None without a launcher.

    The launcher gives every rank a folder below one folder of this attempt.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parent.parent / "reported" if error_file else None


def _report(message: str, status: int, detail: Sequence[str] = (), kind: str = "error") -> None:
    """Print the line and its detail if no other rank of this node did, and leave the line for the launcher's report."""
    line = " ".join(message.split())
    claim = _claim()
    if claim is not None:
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            time.sleep(1.0)  # The first rank to fail is the one in the launcher's report: let it leave first.
            return
        except OSError:
            pass
        record = {"message": {"message": line, "errorCode": status, "extraInfo": {"timestamp": int(time.time())}}}
        with contextlib.suppress(OSError):
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(record), encoding="utf-8")
    print("\n".join([f"{kind}: {line}", *detail]), file=sys.stderr, flush=True)


def check_processes() -> None:
    """Refuse more processes than GPUs before any of them waits for the others.

    Raises:
        UserError: names both numbers. On a machine without GPUs any number of processes is a rehearsal.
    """
    import torch

    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices and local > devices:
        raise UserError(f"{local} processes were launched on a machine with {devices} GPUs; "
                        f"launch with --num_processes {devices}")
