"""Training state into the format that somebody asks for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from toolkit.errors import UserError
from toolkit.training.assets import carry_assets
from toolkit.training.convert.dcp import MODEL, OPTIMIZER, write_folder
from toolkit.training.convert.directory import config_of, fitting_model, whole_or_nothing
from toolkit.training.convert.held import Group, Held
from toolkit.training.convert.kinds import FORMATS
from toolkit.training.convert.settings import groups_of
from toolkit.training.convert.zero_write import Engine, write_universal, write_zero
from toolkit.training.run_folder import versions, write_json
from toolkit.training.state.live import difference
from toolkit.training.state.manifest import FORMAT, MANIFEST, STATE, flush
from toolkit.training.state.store import Fragment, Lazy, checksum, write_fragments

_SHARED_STEP = ("stage 3 of DeepSpeed shares one step counter among all parameter groups after it loads a universal checkpoint, "
                "so that torch's Adam counts too fast; for stage 3 write its own files: --to deepspeed")


@dataclass(frozen=True)
class Converted:
    """What a conversion read and wrote."""

    folder: Path
    source: str
    target: str
    step: int
    parameters: int
    kinds: list[str]
    notes: list[str]


def convert(held: Held, out: Path, to: str, *, model: Path | None = None, engine: Engine | None = None) -> Converted:
    """Write the state of `held` to `out` in the format `to`; `out` is there whole or not at all.

    `model` is a folder with the model's config and tokenizer, where the checkpoint has none; `engine` the one that will load
    ZeRO files.

    Raises:
        UserError: that format cannot hold it, which the line says together with the way round.
    """
    if to not in FORMATS:
        raise UserError(f"--to {to}: there are {', '.join(FORMATS)}")
    if to == held.kind == "toolkit":
        raise UserError(f"{held.path} is a checkpoint of this toolkit already; say by --to what it is to become")
    notes: list[str] = []
    assets = model or held.assets
    aliases = _check(held, assets, to, notes)
    with whole_or_nothing(out) as scratch:
        if to == "toolkit":
            _write_ours(held, scratch, assets)
        else:
            groups = groups_of(held, notes)
            if to == "deepspeed":
                write_zero(held, groups, scratch, engine or engine_of(held, None, None), aliases)
            elif to == "deepspeed-universal":
                write_universal(held, groups, scratch)
                notes.append(_SHARED_STEP)
            elif to == "dcp":
                write_folder(scratch, *_state_dicts(held, groups, aliases, "model", "optim"))
            else:
                write_folder(scratch / MODEL, *_state_dicts(held, groups, aliases, "model", ""))
                if any(kind not in ("weights", "buffers") for kind, _ in held.tensors):
                    write_folder(scratch / OPTIMIZER, *_state_dicts(held, groups, aliases, "", "optimizer"))
    kinds = sorted({kind for kind, _ in held.tensors})
    return Converted(out, held.kind, to, held.step, len(held.of("weights")), kinds, notes)


def _check(held: Held, assets: Path | None, to: str, notes: list[str]) -> dict[str, str]:
    """Hold the state to its model, where that is known; returns the other names of tied parameters."""
    if held.is_adapter:
        if to in ("accelerate-fsdp", "dcp"):
            raise UserError(f"{held.path} holds adapters, and {FORMATS[to]} holds the frozen base as well; write a "
                            "universal checkpoint (--to deepspeed-universal), or export the adapter: toolkit checkpoint export")
        if to == "deepspeed":
            notes.append("the frozen base is not in it: load it with load_module_strict=False")
        return {}
    if assets is None:
        if to != "toolkit" and to != "deepspeed-universal":
            notes.append("the checkpoint does not say of what model it is: a second name of tied weights is not "
                         "written; give a folder with the config by --model where loading misses one")
        return {}
    built = fitting_model(held, config_of(assets), notes)
    parameters = dict(built.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    saved = {name: tensor.shape for name, tensor in held.of("weights").items()}
    frozen = shapes.keys() - saved.keys() if held.of("weights").keys() < shapes.keys() and to == "toolkit" else set()
    problem = difference({name: shape for name, shape in shapes.items() if name not in frozen}, saved)
    if problem:
        raise UserError(f"{held.path} is of another model than {assets / 'config.json'}: {problem}; name its own folder "
                        "by --model")
    first = {id(p): name for name, p in parameters.items()}
    every = built.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if name not in parameters}


def engine_of(held: Held, ds_config: Path | None, processes: int | None) -> Engine:
    """The engine that is to load ZeRO files: from its DeepSpeed config, else as the checkpoint was made.

    Raises:
        UserError: neither says it.
    """
    settings: dict[str, Any] = {}
    if ds_config is not None:
        try:
            settings = yaml.safe_load(ds_config.read_text(encoding="utf-8"))  # JSON is YAML.
            settings["zero_optimization"]["stage"]
        except (OSError, yaml.YAMLError, TypeError, KeyError, UnicodeDecodeError):
            raise UserError(f"{ds_config} is no DeepSpeed config with zero_optimization.stage") from None
    zero = settings.get("zero_optimization", {})
    strategy = str(held.identity.get("strategy", ""))
    stage = int(zero.get("stage", strategy[4:5] if strategy[:4] == "zero" and strategy[4:5].isdigit() else 0))
    ranks = processes or int(held.identity.get("processes") or 0)
    if stage not in (1, 2, 3) or ranks < 1:
        raise UserError(f"{held.path} was not made by ZeRO, and its files differ by stage and number of processes: give "
                        "--ds-config and --processes, or --to deepspeed-universal, which every stage reads")
    enabled = settings.get("bf16", {}).get("enabled", "auto")
    bf16 = held.config.get("precision") == "bf16" if enabled == "auto" else bool(enabled)
    size = zero.get("sub_group_size", 10**9)
    return Engine(stage=stage, ranks=ranks, bf16=bf16, sub_group=10**9 if size == "auto" else int(size))


def _write_ours(held: Held, folder: Path, assets: Path | None) -> None:
    """As `Checkpoints.save` does. What another program's checkpoint does not tell (data, global batch) is left open: the run
    that goes on from it brings its own."""
    fragments = (Fragment(kind, name, 0, tensor.shape, tensor.flat()) for (kind, name), tensor in held.tensors.items())
    files = write_fragments(folder, "rank-00000", fragments)
    if assets is not None:
        files |= carry_assets(assets, folder)
    method = "lora" if held.is_adapter else "full"
    identity = {"strategy": held.identity.get("strategy", held.kind), "processes": 0, "method": method, "optimizer": None,
                "data": None, "rows": None}
    groups = [asdict(group) for group in held.groups] if held.groups else None
    write_json(folder / STATE, {
        "progress": {"step": held.step, "skipped": held.skipped, "tokens": held.tokens},
        "schedule": {"position": held.step - held.skipped}, "data": {"rows": None, "fingerprint": None}, "random": {},
        "scaler": None, "identity": identity, "versions": versions(), "groups": groups,
        "source": {"format": held.kind, "path": str(held.path), "version": held.identity.get("version")},
    })  # fmt: skip
    files[STATE] = {"bytes": (folder / STATE).stat().st_size, "xxh3": checksum(folder / STATE)}
    write_json(folder / MANIFEST, {"version": FORMAT, "step": held.step, "identity": identity,
                                   "files": dict(sorted(files.items()))})
    for file in (folder / STATE, folder / MANIFEST, folder):
        flush(file)


def _state_dicts(held: Held, groups: list[Group], aliases: dict[str, str], model: str,
                 optimizer: str) -> tuple[dict[str, Any], Any]:
    """(nested dict without contents, contents by key), under the names that the two are to have."""
    lazy: dict[str, Lazy] = {}
    content: dict[str, Any] = {}
    if model:
        tensors = held.of("weights") | held.of("buffers")
        tensors |= {alias: tensors[name] for alias, name in aliases.items()}
        content[model] = {name: _empty(tensor) for name, tensor in tensors.items()}
        lazy |= {f"{model}.{name}": tensor for name, tensor in tensors.items()}
    if optimizer:
        state: dict[str, dict[str, Any]] = {}
        for name in held.of("weights"):
            for kind, tensor in held.states_of(name).items():
                state.setdefault(name, {})[kind] = _empty(tensor) if tensor.shape else tensor.whole().reshape(())
                if tensor.shape:
                    lazy[f"{optimizer}.state.{name}.{kind}"] = tensor
        content[optimizer] = {"state": state, "param_groups": [{**group.settings, "params": group.names} for group in groups]}
    return content, lambda key: lazy[key].whole() if key in lazy else None


def _empty(tensor: Lazy) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
