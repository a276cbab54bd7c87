"""`toolkit doctor`: what this machine has, and what is missing."""

from __future__ import annotations

import importlib.metadata
import json as json_module
import shutil
import sys

import typer

from toolkit.cli import options as o

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "peft", "safetensors", "tensorboard", "plotly",
            "bitsandbytes", "ninja")
OPTIONAL = {"tensorboard": "metrics to TensorBoard (extra: track)", "plotly": "pictures (extra: report)",
            "bitsandbytes": "qlora and 8-bit optimizers, on GPUs", "ninja": "building DeepSpeed's CPU optimizer (offload)"}


def register(app: typer.Typer) -> None:
    app.command("doctor", epilog="Example: toolkit doctor. Exit status: 0 nothing is missing, 2 a package is.")(doctor)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def doctor(json: o.Json = False) -> int:
    """What this machine has, what is missing, and what for."""
    from toolkit import __version__
    from toolkit.specs.detect import cores, detect_gpus, host_ram

    gpus = detect_gpus()
    packages = {name: _version(name) for name in PACKAGES}
    missing = [name for name, version in packages.items() if version is None and name not in OPTIONAL]
    compiler = shutil.which("c++") or shutil.which("g++")
    facts = {
        "toolkit": __version__,
        "python": sys.version.split()[0],
        "cores": cores(),
        "host_memory": host_ram(),
        "gpus": [{"name": g.name, "memory": g.memory} for g in gpus],
        "packages": packages,
        "compiler": compiler,
        "missing": missing,
        "free_disk": shutil.disk_usage(".").free,
    }
    if json:
        print(json_module.dumps(facts))
    else:
        from toolkit.report.terminal import show_doctor

        show_doctor(facts, OPTIONAL)
    return 0 if not missing else 2
