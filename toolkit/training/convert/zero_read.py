"""DeepSpeed's ZeRO checkpoints, as `engine.save_checkpoint` and `accelerator.save_state` write them, read without DeepSpeed.

Stages 1 and 2: each rank's file has one flat partition of each parameter group, and where in it which parameter begins
(`param_slice_mappings`). Stage 3: each rank has an equal part of every parameter, padded at the end, one after the other
(`param_shapes` of the model file gives the order). `deepspeed/utils/zero_to_fp32.py` is the reference for the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import UserError
from toolkit.training.convert.held import Group, Held, Stretch, from_stretches, from_tensor, plain_names
from toolkit.training.convert.unpickle import load
from toolkit.training.state.store import Lazy

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
Shapes = list[dict[str, tuple[int, ...]]]
"""Of each parameter group (stage 3: of each part of one), in the order in which its flat tensors hold them."""
Stretches = dict[tuple[str, str], list[Stretch]]
Numbers = dict[tuple[str, str], float]


def hold_zero(folder: Path) -> Held:
    """A ZeRO checkpoint (the folder of one tag).

    Raises:
        UserError: files are missing, or it is of a kind that is not read: says what can be done.
    """
    models = sorted(folder.glob("*mp_rank_00_model_states.pt"))
    if not models:
        raise UserError(f"{folder} has no *_model_states.pt")
    model = load(models[0])
    files = _optimizer_files(folder, int(model.get("dp_world_size") or 0))
    ranks = [load(file)["optimizer_state_dict"] for file in files]
    for file, rank in zip(files, ranks, strict=True):
        if rank.get("ds_zero_partition_groups"):
            raise UserError(f"{file}: expert-parallel partitions are not read; make a universal checkpoint of it first")
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in model.get("param_shapes") or []]
    if not shapes:
        raise UserError(f"{models[0]} has no param_shapes: without ZeRO, DeepSpeed's optimizer state names no parameters; give "
                        "the model as model=... to start from its weights")
    stage3 = "fp32_flat_groups" in ranks[0]
    found, numbers = _stage3(ranks, shapes) if stage3 else _stage12(ranks, shapes)
    whole = {name: shape for group in shapes for name, shape in group.items()}
    names = plain_names(list(whole))
    tensors = {(kind, names[name]): from_stretches(whole[name], parts, f"{folder}: {kind} of {name}")
               for (kind, name), parts in found.items()}
    tensors |= {(kind, names[name]): from_tensor(torch.tensor(float(value))) for (kind, name), value in numbers.items()}
    tensors |= {("buffers", name): from_tensor(model["module"][name]) for name in model.get("buffer_names") or []
                if model["module"][name].numel()}
    base = ranks[0]["optimizer_state_dict" if stage3 else "base_optimizer_state"]
    return Held(kind="deepspeed", path=folder, tensors=tensors, step=int(model["global_steps"]),
                skipped=int(model.get("skipped_steps", 0)), groups=_groups(base, shapes, names, stage3),
                identity={"strategy": f"zero{3 if stage3 else int(ranks[0].get('zero_stage', 1))}", "processes": len(ranks),
                          "version": model.get("ds_version")})


def _optimizer_files(folder: Path, ranks: int) -> list[Path]:
    """One file of each of at least `ranks` ranks, in order."""
    found = {}
    for file in folder.glob("*zero_pp_rank_*_optim_states.pt"):
        match = _RANK.search(file.name)
        if match and int(match[2]):
            raise UserError(f"{file}: tensor-parallel checkpoints are not read; make a universal checkpoint of it first")
        if match:
            found[int(match[1])] = file
    if not found:
        raise UserError(f"{folder} has no zero_pp_rank_*_optim_states.pt: it holds no ZeRO optimizer state")
    missing = [rank for rank in range(max(ranks, max(found) + 1)) if rank not in found]
    if missing:
        raise UserError(f"{folder} lacks zero_pp_rank_{missing[0]}_mp_rank_00_optim_states.pt, the state of rank {missing[0]}; "
                        "it may be on another node")
    return [found[rank] for rank in sorted(found)]


def _states(base: Any, index: int) -> dict[str, Any]:
    """What the optimizer keeps for one flat tensor: "rigid" as torch's state_dict has it, "elastic" as a list."""
    if isinstance(base, list):
        return dict(base[index])
    states = dict(base["state"].get(index, {}))
    group: dict[str, Any] = next((group for group in base["param_groups"] if index in group["params"]), {})
    if "step" in group and "step" not in states:
        states["step"] = group["step"]
    return states


def _flats(weights: torch.Tensor, states: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """(kind to flat tensor, kind to number)."""
    flats, numbers = {"weights": weights}, {}
    for kind, value in states.items():
        if torch.is_tensor(value) and value.dim() == 1 and value.numel() >= weights.numel():
            flats[kind] = value
        elif isinstance(value, (int, float)) or (torch.is_tensor(value) and value.numel() == 1):
            numbers[kind] = float(value)
    return flats, numbers


def _stage12(ranks: list[dict[str, Any]], shapes: Shapes) -> tuple[Stretches, Numbers]:
    found: Stretches = {}
    numbers: Numbers = {}
    for index in range(len(shapes)):
        reached = dict.fromkeys(shapes[index], 0)
        for rank in ranks:
            flats, counts = _flats(rank["single_partition_of_fp32_groups"][index], _states(rank["base_optimizer_state"], index))
            for name, address in rank["param_slice_mappings"][index].items():
                for kind, flat in flats.items():
                    part = flat[address.start : address.start + address.numel]
                    found.setdefault((kind, name), []).append(Stretch(reached[name], part))
                reached[name] += address.numel
            numbers |= {(kind, name): value for name in shapes[index] for kind, value in counts.items()}
    return found, numbers


def _stage3(ranks: list[dict[str, Any]], shapes: Shapes) -> tuple[Stretches, Numbers]:
    found: Stretches = {}
    numbers: Numbers = {}
    for index, group in enumerate(shapes):
        for number, rank in enumerate(ranks):
            flats, counts = _flats(rank["fp32_flat_groups"][index].detach(), _states(rank["optimizer_state_dict"], index))
            for name, at, start, numel in parts_of_stage3(group, number, len(ranks)):
                for kind, flat in flats.items():
                    found.setdefault((kind, name), []).append(Stretch(start, flat[at : at + numel]))
                numbers |= {(kind, name): value for kind, value in counts.items()}
    return found, numbers


def parts_of_stage3(shapes: dict[str, tuple[int, ...]], rank: int, ranks: int) -> Iterator[tuple[str, int, int, int]]:
    """(parameter, position in the rank's flat tensor, position in the parameter, elements) of what a rank has."""
    at = 0
    for name, shape in shapes.items():
        length = -(-math.prod(shape) // ranks)
        yield name, at, rank * length, max(0, min(length, math.prod(shape) - rank * length))
        at += length


def _groups(base: Any, shapes: Shapes, names: dict[str, str], stage3: bool) -> list[Group] | None:
    if not isinstance(base, dict):
        return None
    found = []
    for number, group in enumerate(base["param_groups"]):
        flats = group["params"] if stage3 else [number]
        settings = {key: value for key, value in group.items() if key not in ("params", "step")}
        found.append(Group([names[name] for flat in flats for name in shapes[flat]], settings))
    return found


def hold_universal(folder: Path) -> Held:
    """A universal checkpoint: one folder of whole tensors for each parameter, as `deepspeed.checkpoint.ds_to_universal` makes it.

    Raises:
        UserError: files are missing or broken.
    """
    zero = folder / "zero"
    model = load(next(iter(sorted(folder.glob("*model_states.pt"))), folder / "mp_rank_00_model_states.pt"))
    shapes = {name: tuple(shape) for group in model.get("param_shapes") or [] for name, shape in group.items()}
    there = {file.parent.relative_to(zero).as_posix(): file.parent for file in sorted(zero.rglob("fp32.pt"))}
    missing = next((name for name in shapes if name not in there), None)
    if missing or not there:
        raise UserError(f"{zero} has no {missing or 'parameter'}/fp32.pt")
    places = [there[name] for name in shapes or there]  # The tool copies what is frozen or tied as well.
    names = plain_names([place.relative_to(zero).as_posix() for place in places])
    tensors: dict[tuple[str, str], Lazy] = {}
    general = load(zero / "optimizer_state.pt")
    for place in places:
        original = place.relative_to(zero).as_posix()
        name, shape = names[original], shapes.get(original)
        for file in sorted(place.glob("*.pt")):
            kind = {"fp32": "weights"}.get(file.stem, file.stem)
            value = load(file)
            if isinstance(value, dict):
                if set(value) & {"cat_dim", "vocab_tensor"} and value.get("vocab_tensor"):
                    raise UserError(f"{file} was cut for tensor parallelism, which is not read")
                value = value["param"]
            if torch.is_tensor(value) and value.numel() > 1:
                if shape is not None and value.numel() != math.prod(shape):
                    raise UserError(f"{file} has {value.numel()} elements, the parameter is {list(shape)}")
                tensors[kind, name] = from_tensor(value.view(shape) if shape is not None else value)
            else:
                tensors[kind, name] = from_tensor(torch.tensor(float(value)))
        steps = [state["step"] for state in _first_states(general) if "step" in state]
        if ("step", name) not in tensors and ("exp_avg", name) in tensors and steps:
            tensors["step", name] = from_tensor(torch.tensor(float(steps[0])))
    return Held(kind="deepspeed-universal", path=folder, tensors=tensors, step=int(model["global_steps"]),
                skipped=int(model.get("skipped_steps", 0)), identity={"version": model.get("ds_version")})


def _first_states(general: Any) -> Iterator[dict[str, Any]]:
    """States of flat tensors that a universal checkpoint's general part still has; stage 3 keeps the step only there."""
    for key in ("optimizer_state_dict", "base_optimizer_state"):
        inner = general.get(key) if isinstance(general, dict) else None
        if isinstance(inner, dict) and isinstance(inner.get("state"), dict):
            yield from inner["state"].values()
