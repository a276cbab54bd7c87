"""Every subcommand explains itself: its options and an example."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from toolkit import __version__
from toolkit.cli.main import COMMANDS

Run = Callable[..., Any]
PRESENT = [name for name in COMMANDS if find_spec(f"toolkit.cli.{name}") is not None]
WORKLOAD = ("--method --lora-rank --lora-targets --seq-len --micro-batch --accumulate --precision --weights-dtype --optimizer "
            "--optimizer-impl --attention --loss --compile")  # fmt: skip
CLUSTER = "--gpu --gpus --nodes --gpu-memory --host-memory --margin"
PLAN = ("--strategy --checkpointing --offload --offload-to --tp --cp --sp --bucket --persist --shard-size --accelerate-config "
        "--ds-config")  # fmt: skip
OPTIONS = {
    "recommend": f"{WORKLOAD} {CLUSTER} --prefer --engine --global-batch --tokens --allow-offload --write --all --json",
    "estimate": f"{WORKLOAD} {CLUSTER} {PLAN} --json",
    "check": "--model --json",
    "catalog": "--json",
    "doctor": "--json",
}


@pytest.mark.parametrize("command", PRESENT)
def test_help_has_a_sentence_options_and_an_example(command: str, run: Run) -> None:
    done = run(command, "--help")
    assert done.status == 0 and done.err == ""
    assert f"Usage: toolkit {command}" in done.out
    assert f"Example: toolkit {command}" in " ".join(done.out.split())
    assert "--help" in done.out


@pytest.mark.parametrize("command", OPTIONS)
def test_the_options_of_the_contract_are_there(command: str, run: Run) -> None:
    shown = set(re.findall(r"--[a-z][a-z0-9-]*", run(command, "--help").out))
    assert not set(OPTIONS[command].split()) - shown


def test_values_that_are_allowed_are_listed(run: Run) -> None:
    text = " ".join(run("estimate", "--help").out.replace("│", " ").split())
    for values in ("single, ddp, fsdp, fsdp-grad, hsdp, zero1, zero2 or zero3", "full, lora or qlora", "none, selective or full",
                   "eager, sdpa or flash", "standard, chunked or fused"):  # fmt: skip
        assert values in text


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_without_a_command_there_is_the_list_of_them(words: tuple[str, ...], run: Run) -> None:
    done = run(*words)
    assert done.status == 0 and done.err == ""
    assert all(re.search(rf"│ {name}\s", done.out) for name in PRESENT)
    assert "Start with: toolkit recommend" in done.out


def test_the_version_is_one_line(run: Run) -> None:
    done = run("--version")
    assert (done.status, done.out, done.err) == (0, f"{__version__}\n", "")
