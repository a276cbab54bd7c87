"""How much memory this process's tensors take, and the highest point since the last reset.

On CUDA the caching allocator keeps the count. On a CPU torch keeps none, so a small shim (alloc_count.c) is
built once with the system's compiler and preloaded into the process; without a compiler the resident set of
the process stands in, which includes the libraries and is named as such.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.cache import cache_dir

_SOURCE = Path(__file__).with_name("alloc_count.c")
_ENGAGED = "TOOLKIT_ALLOC_COUNT"
_DEVICE_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of NVIDIA, AMD and WSL GPUs."""


@dataclass(frozen=True)
class Counter:
    """Bytes of tensors on this process's device (of the whole process for `rss`)."""

    kind: Literal["cuda", "allocations", "rss"]
    live: Callable[[], int]
    peak: Callable[[], int]
    """Highest value of `live` since the last reset."""
    reset: Callable[[], None]
    disregard: Callable[[], None] = lambda: None
    """Leave out from now on what is alive now, where the counter can."""


def preload() -> None:
    """Start this process anew with the shim in place, when it runs on a CPU and a shim can be had.

    Call it first thing in a script, before torch is imported: the same process (same id) begins again with
    the same arguments. Returns when there is nothing to do, or in the new image.
    """
    if os.environ.pop(_ENGAGED, None):
        # The processes that this one starts (compilers) need not be counted.
        kept = [p for p in os.environ.get("LD_PRELOAD", "").split(":") if p and Path(p).name != _shim_name()]
        os.environ["LD_PRELOAD"] = ":".join(kept)
        if not kept:
            del os.environ["LD_PRELOAD"]
        return
    if not sys.platform.startswith("linux") or has_gpu():
        return
    shim = build_shim()
    if shim is None:
        return
    preloaded = ":".join(filter(None, (str(shim), os.environ.get("LD_PRELOAD"))))
    environment = {**os.environ, "LD_PRELOAD": preloaded, _ENGAGED: "1"}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606


def has_gpu() -> bool:
    """Whether a GPU's driver is there; asked before torch, whose import takes seconds."""
    return any(Path(node).exists() for node in _DEVICE_NODES)


def _shim_name() -> str:
    return f"alloc_count-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]}.so"


def build_shim() -> Path | None:
    """The compiled shim in the user's cache, or None without a C compiler or a place to keep it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    try:
        target = cache_dir("native") / _shim_name()
        if target.exists():
            return target
        if compiler is None:
            return None
        handle, scratch = tempfile.mkstemp(dir=target.parent, suffix=".so")
        os.close(handle)
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", scratch, str(_SOURCE), "-ldl", "-lpthread"],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip
        Path(scratch).chmod(0o755)
        Path(scratch).replace(target)
    except (OSError, subprocess.SubprocessError):
        return None
    return target


def device_counter(device_type: str) -> Counter:
    """The best counter there is for tensors on this type of device."""
    if device_type == "cuda":
        import torch

        cuda = torch.cuda
        return Counter("cuda", cuda.memory_allocated, cuda.max_memory_allocated, cuda.reset_peak_memory_stats)
    library = ctypes.CDLL(None)
    try:
        live, peak, reset = library.toolkit_live_bytes, library.toolkit_peak_bytes, library.toolkit_reset_peak
    except AttributeError:
        return Counter("rss", lambda: _status("VmRSS"), lambda: _status("VmHWM"), _reset_resident_peak)
    live.restype = peak.restype = ctypes.c_longlong
    reset.restype = None
    return Counter("allocations", live, peak, reset, library.toolkit_disregard)


def _status(field: str) -> int:
    """A size of /proc/self/status in bytes; 0 where the system has none."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _reset_resident_peak() -> None:
    """Ask Linux to begin its high-water mark anew (proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return
