"""`toolkit checkpoint`: what is in a checkpoint, and whether it is sound."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Any

import typer

from toolkit.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the subcommands."""
    sentence = "What is in a training checkpoint, and whether it is sound."
    group = typer.Typer(no_args_is_help=True, help=sentence, epilog="Example: toolkit checkpoint verify runs/first")
    epilog = "Example: toolkit checkpoint {0} runs/first (the newest one), or runs/first/checkpoints/step-00000010"
    group.command("inspect", epilog=epilog.format("inspect"))(inspect)
    group.command("verify", epilog=epilog.format("verify") + ". Exit status: 0 sound, 2 not sound or bad input.")(verify)
    app.add_typer(group, name="checkpoint")


PATH = typer.Argument(..., metavar="PATH", help="A checkpoint, a run folder, or its checkpoints folder.")


def inspect(path: Path = PATH, json: o.Json = False) -> int:
    """What is in it: step, strategy, sizes by kind of state. Reads headers only."""
    from toolkit.training.state import examine

    found = examine.inspect(examine.find_checkpoint(path))
    if json:
        typer.echo(json_module.dumps(found))
    else:
        _show(found)
    return 0


def verify(path: Path = PATH, json: o.Json = False) -> int:
    """Whether every file is what was written, every tensor whole, and no value NaN or infinite."""
    from toolkit.training.state import examine

    found = examine.verify(examine.find_checkpoint(path))
    typer.echo(json_module.dumps(found) if json else f"{found['path']}: sound, {found['tensors']} tensors")
    return 0


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    from toolkit.report.terminal import console
    from toolkit.units import format_count, format_size

    progress, identity = found["progress"], found["identity"]
    out = console()
    out.print(f"{found['path']}: step {progress['step']:,}, {format_count(progress['tokens'])} tokens, "
              f"{format_size(found['bytes'])} in {len(found['files'])} files")
    out.print(f"made by {identity['strategy']} on {identity['processes']} processes, {identity['method']}, "
              f"{identity['optimizer']}, {identity['rows']} rows a step")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("kind", "tensors", "elements", "bytes", "dtype"):
        table.add_column(column, justify="left" if column in ("kind", "dtype") else "right")
    for name, kind in found["kinds"].items():
        counts = f"{kind['tensors']:,}", f"{kind['elements']:,}"
        table.add_row(name, *counts, format_size(kind["bytes"]), ", ".join(kind["dtypes"]))
    out.print(table)
