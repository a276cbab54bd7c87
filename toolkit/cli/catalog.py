"""`toolkit catalog`: the GPUs, models, strategies and optimizers that the toolkit knows, with their sources."""

from __future__ import annotations

import dataclasses
import json as json_module
from typing import Any, get_args

import typer

from toolkit.cli import options as o
from toolkit.errors import UserError


def register(app: typer.Typer) -> None:
    app.command("catalog", epilog="Example: toolkit catalog gpus")(catalog)


def _gpus() -> list[dict[str, Any]]:
    from toolkit.specs.catalog import gpus

    return [dataclasses.asdict(g) for g in gpus().values()]


def _models() -> list[dict[str, Any]]:
    from toolkit.specs.catalog import models

    return [{"name": m.name, "hub": m.hub, "parameters": m.parameters, "source": m.source} for m in models().values()]


def _strategies() -> list[dict[str, Any]]:
    from toolkit.strategies import STRATEGIES

    return [dataclasses.asdict(s) for s in STRATEGIES.values()]


def _optimizers() -> list[dict[str, Any]]:
    from toolkit.specs.workload import Optimizer
    from toolkit.timeline.optimizers import OptimizerTensor, state_bytes

    tensor = OptimizerTensor(1 << 20, 4, (1024, 1024))
    kept = {name: sum(state_bytes(name, tensor, "cuda", "foreach")[0]) for name in get_args(Optimizer)}
    return [{"name": name, "state_bytes_per_parameter": round(size / tensor.numel, 3)} for name, size in kept.items()]


TABLES = {"gpus": _gpus, "models": _models, "strategies": _strategies, "optimizers": _optimizers}


def catalog(
    what: str = typer.Argument(..., metavar="gpus|models|strategies|optimizers", help="Which list."), json: o.Json = False
) -> int:
    """List what is known: GPUs, models, strategies or optimizers."""
    if what not in TABLES:
        raise UserError(f"catalog {what!r} is not one of {', '.join(TABLES)}")
    rows = TABLES[what]()
    if json:
        print(json_module.dumps(rows))
        return 0
    from toolkit.report.terminal import show_rows

    show_rows(what, rows)
    return 0
