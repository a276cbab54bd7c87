"""Training state as DeepSpeed reads it: in the files of ZeRO's ranks, or as a universal checkpoint, which every stage and any
number of ranks reads (`"checkpoint": {"load_universal": true}` in the DeepSpeed config)."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import UserError
from toolkit.training.convert.held import Group, Held
from toolkit.training.convert.zero_read import parts_of_stage3
from toolkit.training.state.store import Lazy

TAG = "pytorch_model"
"""The name under which `accelerator.load_state` looks for it; `engine.load_checkpoint` reads it from `latest`."""
_ALIGNMENT = 2
"""Elements: stages 1 and 2 pad a group to a multiple of this times the ranks (`nccl_start_alignment_factor`)."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The engine that will load it."""

    stage: int
    ranks: int
    sub_group: int = 10**9
    """Elements: stage 3 cuts a parameter group into parts of this size."""
    bf16: bool = False
    """It computes in bf16, which is in the names of the files."""


def write_universal(held: Held, groups: list[Group], folder: Path) -> None:
    """Raises UserError: there is no optimizer state that DeepSpeed could take."""
    tag = folder / TAG
    _needs_moments(held)
    for (kind, name), tensor in held.tensors.items():
        if kind == "buffers":
            continue
        if Path(name).name != name:
            raise UserError(f"{held.path}: {name} cannot be the name of a folder, as this format needs")
        place = tag / "zero" / name
        place.mkdir(parents=True, exist_ok=True)
        whole = tensor.whole()
        stem = "fp32" if kind == "weights" else kind
        torch.save({"param": whole.float(), "cat_dim": 0} if tensor.shape or kind == "weights" else whole, place / f"{stem}.pt")
    first = groups[0].settings
    common = {key: value for key, value in first.items() if all(group.settings.get(key) == value for group in groups)}
    step = _step(held, groups[0].names)
    torch.save({
        "ds_version": _version(), "param_groups": [{**group.settings, "params": []} for group in groups],
        # Stage 3 gives every group the settings of the first: only what they have in common is said.
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": [common]},
    }, tag / "zero" / "optimizer_state.pt")  # fmt: skip
    state = {**_model_state(held, groups, 1, {}), "universal_checkpoint_info": {"universal_checkpoint_version": 0.4}}
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        torch.save(state, tag / name)
    for name in ("latest_universal", "latest"):
        (folder / name).write_text(TAG, encoding="utf-8")


def write_zero(held: Held, groups: list[Group], folder: Path, engine: Engine, aliases: dict[str, str]) -> None:
    """The files of one stage and number of ranks. Holds one rank's share in memory.

    Raises:
        UserError: DeepSpeed is not installed, or there is no optimizer state that it could take.
    """
    try:
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.utils.tensor_fragment import fragment_address
    except ImportError:
        raise UserError("DeepSpeed's own classes are in its files, and it is not installed; install it, or write a universal "
                        "checkpoint: --to deepspeed-universal") from None
    _needs_moments(held)
    tag = folder / TAG
    tag.mkdir()
    weights, prefix = held.of("weights"), "bf16_" if engine.bf16 else ""
    cut = _cut(groups, weights, engine)
    for rank in range(engine.ranks):
        flats: list[torch.Tensor] = []
        mappings, paddings, states = [], [], {}
        for number, (_, names) in enumerate(cut):
            shapes = {name: weights[name].shape for name in names}
            parts = list(parts_of_stage3(shapes, rank, engine.ranks) if engine.stage == 3 else _parts(shapes, rank, engine.ranks))
            length = _length(shapes, engine)
            flats.append(_flat(weights, parts, length))
            states[number] = {kind: _flat(held.of(kind), parts, length) if held.tensors[kind, names[0]].shape else
                              held.tensors[kind, names[0]].whole() for kind in held.states_of(names[0])}
            paddings.append(max(0, engine.ranks * length - _total(shapes)) if rank == engine.ranks - 1 else 0)
            mappings.append(OrderedDict((name, fragment_address(numel, at)) for name, at, _, numel in parts if numel))
        of_group = [[number for number, (owner, _) in enumerate(cut) if owner == index] for index in range(len(groups))]
        base = {"state": states, "param_groups": [{**group.settings, "bias_correction": True, "params": flats_of}
                                                  for group, flats_of in zip(groups, of_group, strict=True)]}
        content: dict[str, Any] = {"zero_stage": engine.stage, "overflow": False, "ds_version": _version()}
        if engine.stage == 3:
            content |= {"loss_scaler": LossScaler(1), "dynamic_loss_scale": False, "partition_count": engine.ranks,
                        "optimizer_state_dict": base, "fp32_flat_groups": flats}
        else:
            lean = [flat[: flat.numel() - padding].clone() for flat, padding in zip(flats, paddings, strict=True)]
            content |= {"base_optimizer_state": base, "single_partition_of_fp32_groups": lean, "group_paddings": paddings,
                        "partition_count": [engine.ranks] * len(cut), "param_slice_mappings": mappings}
        torch.save({"optimizer_state_dict": content, "ds_config": {}, "ds_version": _version()},
                   tag / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    _write_models(held, [Group(names, groups[owner].settings) for owner, names in cut], tag, engine, aliases)
    (folder / "latest").write_text(TAG, encoding="utf-8")


def _write_models(held: Held, groups: list[Group], tag: Path, engine: Engine, aliases: dict[str, str]) -> None:
    weights, buffers = held.of("weights"), {name: tensor.whole() for name, tensor in held.of("buffers").items()}
    if engine.stage == 3:
        empty = {name: torch.empty(0) for name in (*weights, *aliases)}
        for rank in range(engine.ranks):
            torch.save(_model_state(held, groups, engine.ranks, {**empty, **buffers}, aliases),
                       tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        return
    module = {name: tensor.whole() for name, tensor in weights.items()}
    module |= {alias: module[name] for alias, name in aliases.items()}
    torch.save(_model_state(held, groups, engine.ranks, {**module, **buffers}, aliases), tag / "mp_rank_00_model_states.pt")


def _model_state(held: Held, groups: list[Group], ranks: int, module: dict[str, torch.Tensor],
                 aliases: dict[str, str] | None = None) -> dict[str, Any]:
    weights = held.of("weights")
    return {
        "module": OrderedDict(module), "buffer_names": [name for name in held.of("buffers") if name in module], "optimizer": None,
        "param_shapes": [OrderedDict((name, torch.Size(weights[name].shape)) for name in group.names) for group in groups],
        "frozen_param_shapes": OrderedDict(), "shared_params": aliases or {}, "frozen_param_fragments": OrderedDict(),
        "lr_scheduler": None, "data_sampler": None, "random_ltd": None, "skipped_steps": held.skipped, "global_steps": held.step,
        "dp_world_size": ranks, "mp_world_size": 1, "ds_config": {}, "ds_version": _version(),
    }  # fmt: skip


def _needs_moments(held: Held) -> None:
    weights = held.of("weights")
    name = next(iter(weights))
    states = held.states_of(name)
    lacking = next((name for name in weights if held.states_of(name).keys() != states.keys()), None)
    if not states or lacking:
        raise UserError(f"{held.path} has no optimizer state" + (f" of {lacking}" if lacking else "") + ", which DeepSpeed's "
                        "format needs for every parameter; export the weights instead: toolkit checkpoint export")
    odd = next((kind for kind, tensor in states.items() if tensor.shape not in ((), weights[name].shape)), None)
    if odd:
        raise UserError(f"{held.path}: {odd} does not belong to single elements, as DeepSpeed's flat partitions need; only "
                        "optimizers like AdamW, SGD and Lion can be carried there")


def _step(held: Held, names: list[str]) -> Any:
    step = held.tensors.get(("step", names[0]))
    return torch.tensor(float(held.step - held.skipped)) if step is None else step.whole()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return "0.19.0"


def _total(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _length(shapes: dict[str, tuple[int, ...]], engine: Engine) -> int:
    """Elements of one rank's flat tensor."""
    if engine.stage == 3:
        return sum(-(-math.prod(shape) // engine.ranks) for shape in shapes.values())
    unit = _ALIGNMENT * engine.ranks
    return -(-_total(shapes) // unit) * unit // engine.ranks


def _parts(shapes: dict[str, tuple[int, ...]], rank: int, ranks: int) -> list[tuple[str, int, int, int]]:
    """(parameter, position in the rank's flat tensor, position in the parameter, elements) of what a rank has, stages 1 and 2."""
    length = _length(shapes, Engine(stage=1, ranks=ranks))
    begin, end, at, found = rank * length, (rank + 1) * length, 0, []
    for name, shape in shapes.items():
        first, last = max(begin, at), min(end, at + math.prod(shape))
        if first < last:
            found.append((name, first - begin, first - at, last - first))
        at += math.prod(shape)
    return found


def _flat(tensors: dict[str, Lazy], parts: list[tuple[str, int, int, int]], length: int) -> torch.Tensor:
    flat = torch.zeros(length, dtype=torch.float32)
    for name, at, start, numel in parts:
        if numel:
            flat[at : at + numel] = tensors[name].read(start, numel)
    return flat


def _cut(groups: list[Group], weights: dict[str, Lazy], engine: Engine) -> list[tuple[int, list[str]]]:
    """(parameter group, names) of each flat tensor; for stage 3 as `_create_fp16_sub_groups` of its optimizer cuts them."""
    if engine.stage < 3:
        return [(index, group.names) for index, group in enumerate(groups)]
    found = []
    for index, group in enumerate(groups):
        sizes = {name: -(-math.prod(weights[name].shape) // engine.ranks) for name in group.names}
        names: list[str] = []
        size, cuts = 0, engine.sub_group < sum(sizes.values())
        for name in group.names:
            names.append(name)
            size += sizes[name]
            if (cuts and size >= engine.sub_group) or name == group.names[-1]:
                found.append((index, names))
                names, size = [], 0
    return found
