"""`toolkit profile`: run a training command and report what it really used."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli import options as o
from toolkit.errors import ToolkitError, UserError

EPILOG = ("Example: toolkit profile -- accelerate launch --num_processes 2 train.py. Exit status: 0 it trained and ended well, "
          "2 bad input or no training, 1 the command failed.")
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def register(app: typer.Typer) -> None:
    app.command("profile", epilog=EPILOG, context_settings=SETTINGS)(profile)


def profile(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="Any command that trains with torch.")],
    output: Annotated[Path | None, typer.Option("--output", help="Folder of the records; default: toolkit-profile/TIME.",
                                                rich_help_panel=o.OUT)] = None,
    json: o.Json = False,
) -> int:
    """Run a training command as it is, count its memory on every rank, and report per rank, the worst first."""
    from toolkit.profiling.command import profile_command, where_output_goes

    if command[0].startswith("-"):
        raise UserError(f"{command[0]} is no option of toolkit profile; write toolkit profile [OPTIONS] -- COMMAND...")
    folder = output or Path("toolkit-profile") / time.strftime("%Y%m%d-%H%M%S")
    found = profile_command(command, folder, stdout=where_output_goes(json))
    if json:
        print(json_module.dumps(found.to_json()))
    else:
        from toolkit.report.profiled import show_profile

        show_profile(found)
    how = f"ended with status {found.status}" if found.status >= 0 else f"was ended by signal {-found.status}"
    kept = f"what was recorded is in {folder}"
    if found.killed:
        raise ToolkitError(f"{found.killed}; {kept}")
    if found.status and not found.steps:
        raise ToolkitError(f"the command {how} before its first optimizer step; {kept}")
    if found.status:
        raise ToolkitError(f"the command {how} after step {found.steps}; {kept}")
    if not found.steps:
        raise UserError(f"the command ended without one step of a torch optimizer: nothing to report; {kept}")
    return 0
