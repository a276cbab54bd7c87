"""`toolkit check`: what is wrong in Accelerate, DeepSpeed and recipe configurations."""

from __future__ import annotations

import json as json_module
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from toolkit.training.check import Checked, ModelFacts

EPILOG = (
    "Example: toolkit check recipes/accelerate/zero2.yaml train.yaml --model llama-3.1-8b. "
    "Exit status: 0 no errors, 2 errors or bad input."
)
STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
KINDS = {"accelerate": "Accelerate", "deepspeed": "DeepSpeed", "recipe": "recipe", "unknown": "unknown"}


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("check", epilog=EPILOG)(check)


def check(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Accelerate YAML, DeepSpeed JSON, recipe YAML, or run folders."),
    ],
    model: Annotated[
        str | None, typer.Option("--model", help="Hold layer classes and sizes to this model, by its config alone.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run model code that comes with the config.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Machine output on stdout, nothing else on stdout.")] = False,
) -> int:
    """Find what is wrong in configuration files before a run does: unknown, ignored and contradictory keys."""
    from toolkit.training.check import check_files

    facts = _facts(model, trust_remote_code) if model is not None else None
    checked = check_files(files, facts, os.environ)
    if json:
        typer.echo(json_module.dumps(_object(checked), indent=2))
    else:
        _show(checked)
    return 2 if checked.count("error") else 0


def _facts(model: str, trust_remote_code: bool) -> ModelFacts:
    from toolkit.specs.load import load_model_spec
    from toolkit.training.check.facts import model_facts

    return model_facts(load_model_spec(model, trust_remote_code=trust_remote_code))


def _object(checked: Checked) -> dict[str, object]:
    import dataclasses

    plan = None if checked.plan is None else {**dataclasses.asdict(checked.plan), "label": checked.plan.label}
    return {
        "schema": 1,
        "files": [{"file": file, "kind": kind} for file, kind in checked.files],
        "plan": plan,
        "errors": checked.count("error"),
        "warnings": checked.count("warning"),
        "findings": [finding.to_json() for finding in checked.findings],
    }


def _show(checked: Checked) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for file, kind in checked.files:
        label = checked.plan.label if kind == "accelerate" and checked.plan is not None else ""
        table.add_row(file, KINDS[kind], label)
    console.print(table)
    for finding in checked.findings:
        console.print(Text(f"{finding.level:8}", STYLES[finding.level]) + Text(finding.text), soft_wrap=True)
    counts = [(checked.count(level), level) for level in ("error", "warning")]
    words = ", ".join(f"{number} {level}" + ("s" if number != 1 else "") for number, level in counts if number)
    console.print(words or "nothing wrong found")
