"""`toolkit doctor`: what this machine has."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

from toolkit import __version__
from toolkit.specs.detect import cores, host_ram
from toolkit.units import format_size

Run = Callable[..., Any]


def test_the_json_is_what_the_machine_has(run: Run) -> None:
    done = run("doctor", "--json")
    assert done.status == 0 and done.err == ""
    facts = done.json
    assert facts["toolkit"] == __version__
    assert facts["cores"] == cores() and facts["host_memory"] == host_ram() and facts["free_disk"] > 0
    assert facts["missing"] == []
    for name in ("torch", "accelerate", "deepspeed", "transformers"):
        assert facts["packages"][name] == importlib.metadata.version(name)
    assert all(set(gpu) == {"name", "memory"} for gpu in facts["gpus"])


def test_people_read_the_same(run: Run) -> None:
    done = run("doctor")
    assert done.status == 0 and done.err == ""
    assert f"{cores()} cores, {format_size(host_ram())} of RAM" in done.out
    assert importlib.metadata.version("torch") in done.out


def test_what_is_missing_is_said_with_what_it_is_for(run: Run) -> None:
    packages = run("doctor", "--json").json["packages"]
    text = run("doctor").out
    for name, version in packages.items():
        line = next(line for line in text.splitlines() if line.strip().startswith(name + " "))
        assert (version or "missing: ") in line
