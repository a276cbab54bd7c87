"""`toolkit checkpoint`: what is in a checkpoint, whether it is sound, a model out of it, other formats from and to it."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Any

import typer

from toolkit.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the subcommands."""
    sentence = "What is in a training checkpoint, whether it is sound, and the model out of it."
    group = typer.Typer(no_args_is_help=True, help=sentence, epilog="Example: toolkit checkpoint verify runs/first")
    epilog = "Example: toolkit checkpoint {0} runs/first (the newest one), or runs/first/checkpoints/step-00000010"
    group.command("inspect", epilog=epilog.format("inspect"))(inspect)
    group.command("verify", epilog=epilog.format("verify") + ". Exit status: 0 sound, 2 not sound or bad input.")(verify)
    group.command("export", epilog="Example: toolkit checkpoint export runs/first exported --dtype bf16")(export)
    epilog = "Example: toolkit checkpoint convert global_step500 runs/next/checkpoints/step-00000500"
    group.command("convert", epilog=epilog)(convert)
    app.add_typer(group, name="checkpoint")


PATH = typer.Argument(..., metavar="PATH", help="A checkpoint, a run folder, or its checkpoints folder.")
OUT = typer.Argument(..., metavar="OUT", help="The folder to make.")
DTYPE = typer.Option("auto", "--dtype", help="fp32, bf16, fp16, or auto: as the run was told, else as the model's config says.")
MERGE = typer.Option(False, "--merge", help="Of adapters: the model with them in it instead of the adapters alone.")
SHARD = typer.Option("5GB", "--max-shard-size", help="Files of at most this size: 5GB, 500MB, ...")
TO = typer.Option("toolkit", "--to", help="toolkit, deepspeed, deepspeed-universal, accelerate-fsdp or dcp.")
DS_CONFIG = typer.Option(None, "--ds-config", help="With --to deepspeed: the DeepSpeed config that will load it (stage, "
                         "sub_group_size, bf16); by default the stage that wrote the checkpoint.")
PROCESSES = typer.Option(None, "--processes", min=1, help="With --to deepspeed: how many processes will load it; by default as "
                         "many as wrote it.")
MODEL = typer.Option(None, "--model", help="A folder with the model's config and tokenizer (to merge: the base, with weights), "
                     "for a checkpoint that does not say of what model it is.")


def inspect(path: Path = PATH, json: o.Json = False) -> int:
    """What is in it: step, strategy, sizes by kind of state. Reads headers only."""
    from toolkit.training.state import examine

    found = examine.inspect(path)
    if json:
        typer.echo(json_module.dumps(found))
    else:
        _show(found)
    return 0


def verify(path: Path = PATH, json: o.Json = False) -> int:
    """Whether every file is what was written, every tensor whole, and no value NaN or infinite."""
    from toolkit.training.state import examine

    found = examine.verify(path)
    typer.echo(json_module.dumps(found) if json else f"{found['path']}: sound, {found['tensors']} tensors")
    return 0


def export(
    path: Path = PATH,
    out: Path = OUT,
    dtype: str = DTYPE,
    merge: bool = MERGE,
    max_shard_size: str = SHARD,
    model: Path | None = MODEL,
    json: o.Json = False,
) -> int:
    """Write its weights as a Hugging Face directory: safetensors, config, generation config, tokenizer.

    Only a stretch of a tensor is in memory at a time."""
    from dataclasses import asdict

    from toolkit.training.convert import directory
    from toolkit.training.convert.read import hold
    from toolkit.units import format_size, parse_size

    written = directory.export(hold(path), out, dtype=dtype, merge=merge, shard_bytes=parse_size(max_shard_size), source=model)
    if json:
        typer.echo(json_module.dumps({"schema": 1, **asdict(written)}, default=str))
        return 0
    for note in written.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{written.folder}: {written.tensors} tensors, {format_size(written.bytes)} in {written.dtype}, "
               f"{len(written.files)} file{'s' if len(written.files) > 1 else ''}")
    return 0


def convert(
    path: Path = PATH, out: Path = OUT, to: str = TO, model: Path | None = MODEL, ds_config: Path | None = DS_CONFIG,
    processes: int | None = PROCESSES, json: o.Json = False,
) -> int:
    """Turn it into another format, or another format into a checkpoint of this toolkit: weights, optimizer state, step."""
    from dataclasses import asdict

    from toolkit.training.convert import write
    from toolkit.training.convert.read import hold
    from toolkit.units import format_count

    held = hold(path)
    engine = write.engine_of(held, ds_config, processes) if to == "deepspeed" else None
    done = write.convert(held, out, to, model=model, engine=engine)
    if json:
        typer.echo(json_module.dumps({"schema": 1, **asdict(done)}, default=str))
        return 0
    for note in done.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{done.folder}: {done.target} from {done.source}, step {done.step:,}, {', '.join(done.kinds)} of "
               f"{format_count(done.parameters)} parameters")
    return 0


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    from toolkit.report.terminal import console
    from toolkit.units import format_count, format_size

    if "kinds" not in found:
        typer.echo(f"{found['path']}: {found['what']}; {found['way']}")
        return
    files = f" in {len(found['files'])} files" if "files" in found else ""
    tokens = f"{format_count(found['tokens'])} tokens, " if found["tokens"] else ""
    typer.echo(f"{found['path']}: {found['what']}, step {found['step']:,}, {tokens}{format_size(found['bytes'])}{files}")
    for line in _about(found):
        typer.echo(line)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("kind", "tensors", "elements", "bytes", "dtype"):
        table.add_column(column, justify="left" if column in ("kind", "dtype") else "right")
    for name, kind in found["kinds"].items():
        counts = f"{kind['tensors']:,}", f"{kind['elements']:,}"
        table.add_row(name, *counts, format_size(kind["bytes"]), ", ".join(kind["dtypes"]))
    console().print(table)


def _about(found: dict[str, Any]) -> list[str]:
    """Who made it, of what, with which settings and versions."""
    made, model, lines = found["identity"], found["model"], []
    parts = [f"made by {made['strategy']} on {made['processes']} processes" if made.get("processes") else "",
             *(str(made[name]) for name in ("method", "optimizer") if made.get(name)),
             f"{made['rows']} rows a step" if made.get("rows") else "",
             f"converted from {found['source']['format']}" if found.get("source") else ""]
    lines.append(", ".join(filter(None, parts)))
    if model:
        base = f", adapters of {model['base']}" if model["base"] else ""
        lines.append(f"model: {model['architecture']}, vocabulary of {model['vocabulary']:,}{base}"
                     + ("" if model["tokenizer"] else ", no tokenizer"))
    for name in ("plan", "config", "versions"):
        shown = {key: value for key, value in (found.get(name) or {}).items()
                 if value not in (None, "") and key != "platform" and not isinstance(value, (dict, list))}
        if shown:
            lines.append(f"{name}: " + ", ".join(f"{key} {value}" for key, value in shown.items()))
    return [line for line in lines if line]
