"""`toolkit report`: one HTML page about a run, a recommendation or an estimate."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli import options as o

EPILOG = ("Example: toolkit report runs/llama --html llama.html. Exit status: 0 done, 2 bad input.")


def register(app: typer.Typer) -> None:
    app.command("report", epilog=EPILOG)(report)


def report(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_JSON", help="A run folder, a folder of recommend --write, or the JSON "
                                           "of recommend, estimate, scaling or profile.")],
    html: Annotated[Path, typer.Option("--html", help="The page to write.", rich_help_panel=o.OUT)],
    json: o.Json = False,
) -> int:
    """Write one self-contained page: memory by plan, the timeline, predicted against measured, scaling, the commands."""
    from toolkit.report.page import write_page

    found = write_page(source, html)
    if json:
        print(json_module.dumps({"schema": 1, "page": str(html), "bytes": html.stat().st_size, "notes": found.notes}))
        return 0
    for note in found.notes:
        typer.echo(f"toolkit: note: {note}", err=True)
    typer.echo(f"Written: {html}")
    return 0
