"""The console script: finds the subcommand, runs it, turns what goes wrong into one line and an exit status."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import typer

from toolkit import __version__
from toolkit.errors import ToolkitError

COMMANDS = ("recommend", "estimate", "scaling", "profile", "report", "check", "checkpoint", "data", "catalog", "doctor")
"""Modules of `toolkit.cli` in the order in which `--help` lists them; each has `register(app)`."""

BadCommandLine: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""What a wrong command line raises: click's, or that of the copy of click that newer versions of typer carry."""


def _version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


def build_app() -> typer.Typer:
    """The application with every subcommand that is there."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)

    @app.callback(
        epilog="Start with: toolkit recommend llama-3.1-8b --gpu a100-80gb-sxm --gpus 8"
    )
    def root(
        version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    ) -> None:
        """Will it fit, what is the lightest strategy that fits, how do I launch it, and what did it really use?"""

    for name in COMMANDS:
        if find_spec(f"toolkit.cli.{name}") is not None:
            import_module(f"toolkit.cli.{name}").register(app)
    return app


def main(arguments: list[str] | None = None) -> None:
    """Run and exit: 0 done (and it fits), 3 nothing fits, 2 bad input (one line), 1 a fault of the toolkit."""
    gc.set_threshold(100_000, 20, 100)  # A trace makes millions of small objects and few cycles: by default a fifth of the time.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    command = typer.main.get_command(build_app())
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        status = command.main(args=arguments or ["--help"], prog_name="toolkit", standalone_mode=False)
    except ToolkitError as error:
        _say(str(error))
        sys.exit(error.exit_code)
    except BadCommandLine as error:  # a missing argument, an unknown option or command
        context = getattr(error, "ctx", None)
        name = context.command_path if context is not None else "toolkit"
        _say(f"{' '.join(error.format_message().split()).rstrip('.')}; see {name} --help")
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        _say("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        if os.environ.get("TOOLKIT_DEBUG"):
            raise
        _say(f"a fault of the toolkit: {type(error).__name__}: {' '.join(str(error).split())[:300]} "
             "(TOOLKIT_DEBUG=1 shows where; please report it)")
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)


def _say(message: str) -> None:
    print(f"toolkit: {message}", file=sys.stderr)


if __name__ == "__main__":
    main()
