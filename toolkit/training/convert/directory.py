"""A checkpoint as a Hugging Face directory, written a stretch of a tensor at a time.

The model is built without memory (on meta) from its config, and tells what it expects: names, shapes, what is tied, and how
transformers names and cuts its weights in files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import UserError
from toolkit.training.assets import SMALL
from toolkit.training.convert.held import Held
from toolkit.training.convert.merge import adapter_config, adapter_weights, find_base, merged
from toolkit.training.export import DTYPES, NAMES
from toolkit.training.run_folder import write_json
from toolkit.training.state.live import difference
from toolkit.training.state.store import Lazy, write_tensors
from toolkit.units import format_size


@dataclass(frozen=True)
class Written:
    """What an export wrote."""

    folder: Path
    files: list[str]
    tensors: int
    bytes: int
    dtype: str
    notes: list[str]


@contextmanager
def whole_or_nothing(folder: Path) -> Iterator[Path]:
    """A scratch folder that gets the name `folder` when nothing goes wrong, and is gone otherwise.

    Raises:
        UserError: there is something at `folder`, or it cannot be made.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} is there already; name a new folder")
    scratch = folder.absolute().with_name(f".{folder.absolute().name}-writing")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        yield scratch
        if folder.is_dir():
            folder.rmdir()
        scratch.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def export(held: Held, out: Path, *, dtype: str = "auto", merge: bool = False, shard_bytes: int = 5 * 10**9,
           source: Path | None = None) -> Written:
    """Write the weights of a checkpoint to `out`, in safetensors, with config, generation config and tokenizer; of adapters, the
    adapter alone, or (`merge`) the model with them in it.

    `source` is a folder with the model's config and tokenizer (and, to merge, its weights) where the checkpoint has none.
    Memory: a stretch of one tensor, or one group of tensors that transformers cuts otherwise in files.

    Raises:
        UserError: the checkpoint is of another model than its config, lacks something, or `out` cannot be written.
    """
    assets = source or held.assets
    if assets is None:
        raise UserError(f"{held.path} does not say of what model it is: name a folder with its config.json and tokenizer by "
                        "--model")
    if merge and not held.is_adapter:
        raise UserError(f"{held.path} holds no adapters: export it without --merge")
    notes: list[str] = []
    alone = held.is_adapter and not merge
    if alone:
        adapter_config(assets)
    config = config_of(assets) if not alone or (assets / "config.json").is_file() else None
    target = _dtype(dtype, config, held)
    if alone:
        tensors = _cast(adapter_weights(held), target)
    elif merge:
        tensors = _cast(_merged(held, config, assets, source), target)
    else:
        tensors = _full(held, config, target, notes)
    empty = next((name for name, tensor in tensors.items() if tensor.numel() == 0), None)
    if empty:
        raise UserError(f"{held.path}: {empty} is empty")
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    _check_room(out, size)
    with whole_or_nothing(out) as scratch:
        files = _write(scratch, "adapter_model" if alone else "model", tensors, shard_bytes)
        _write_rest(scratch, assets, None if alone else config, target)
    return Written(out, files, len(tensors), size, NAMES[str(target).removeprefix("torch.")], notes)


def _cast(tensors: dict[str, Lazy], dtype: torch.dtype) -> dict[str, Lazy]:
    return {name: tensor.to(dtype) if tensor.dtype.is_floating_point and tensor.dtype != dtype else tensor
            for name, tensor in tensors.items()}


def _merged(held: Held, config: Any, assets: Path, source: Path | None) -> dict[str, Lazy]:
    has = next((folder for folder in (held.assets, assets) if folder and (folder / "adapter_config.json").is_file()), assets)
    settings = adapter_config(has)
    base = source or find_base(settings)
    rows, there = (config_of(folder).get_text_config().vocab_size for folder in (held.assets or assets, base))
    if rows != there:
        raise UserError(f"{held.path} was trained with a vocabulary of {rows} rows, {base} has {there}: the added rows were "
                        "not trained and are in no file; resize the base to the run's tokenizer, then name its folder by --model")
    return merged(held, empty_model(config), settings, base)


def config_of(assets: Path) -> Any:
    """The model's config in a folder. Raises UserError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(assets)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"{assets / 'config.json'}: {' '.join(str(error).split())[:300]}") from None


def _dtype(asked: str, config: Any, held: Held) -> torch.dtype:
    """As asked, else as the model's config names it, else as it was trained."""
    if asked not in ("auto", *DTYPES):
        raise UserError(f"--dtype {asked}: there are auto, {', '.join(DTYPES)}")
    for name in (asked, held.config.get("export_dtype")):
        if name in DTYPES:
            return DTYPES[name]
    stated = NAMES.get(str(getattr(config, "dtype", "")).removeprefix("torch."))
    if stated is not None:
        return DTYPES[stated]
    trained = {"bf16": "bf16", "bf16-pure": "bf16", "fp16": "fp16"}.get(str(held.config.get("precision")))
    return DTYPES[trained] if trained else next(iter(held.of("weights").values())).dtype


def empty_model(config: Any) -> Any:
    """The model of a config without memory. Raises UserError."""
    import transformers

    kind = getattr(transformers, (config.architectures or [""])[0], None)
    try:
        with torch.device("meta"):
            if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
                return kind(config)
            return transformers.AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, ImportError, AttributeError) as error:
        raise UserError(f"the model cannot be built from its config: {' '.join(str(error).split())[:300]}") from None


def _full(held: Held, config: Any, dtype: torch.dtype, notes: list[str]) -> dict[str, Lazy]:
    """Name in the files to tensor, for a model that was trained whole."""
    weights = held.of("weights")
    model = fitting_model(held, config, notes)
    parameters = dict(model.named_parameters())
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
    problem = difference({name: tuple(p.shape) for name, p in parameters.items()},
                         {name: tensor.shape for name, tensor in weights.items() if name not in tied})
    if problem:
        raise UserError(f"{held.path} is of another model than its config: {problem}; name a folder with its own "
                        "config by --model")
    kept = _cast({name: weights[name] for name in parameters}, dtype)
    buffers = held.of("buffers")
    kept |= {name: buffers[name] for name in model.state_dict() if name in buffers}
    return in_files(model, kept)


def fitting_model(held: Held, config: Any, notes: list[str]) -> Any:
    """The config's model; with the rows that the embedding has, and untied where the checkpoint has two different matrices."""
    weights = held.of("weights")
    model = empty_model(config)
    inputs = model.get_input_embeddings().weight
    name = next(name for name, p in model.named_parameters() if p is inputs)
    rows = weights[name].shape[0] if name in weights and weights[name].shape else inputs.shape[0]
    if rows != inputs.shape[0] and weights[name].shape[1:] == tuple(inputs.shape[1:]):
        notes.append(f"the vocabulary has {rows} rows in the checkpoint, {inputs.shape[0]} in the config, which now says {rows}")
        config.get_text_config().vocab_size = rows
        model = empty_model(config)
    outputs = next((other for other, source in getattr(model, "all_tied_weights_keys", {}).items() if source == name), None)
    if outputs in weights and not _equal(weights[outputs], weights[name]):
        notes.append(f"{outputs} and {name} differ though the config ties them; they are written apart, and the config says so")
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        model = empty_model(config)
    return model


def _equal(one: Lazy, other: Lazy) -> bool:
    return one.shape == other.shape and all(torch.equal(a, b) for a, b in zip(one.parts(), other.parts(), strict=True))


def in_files(model: Any, tensors: dict[str, Lazy]) -> dict[str, Lazy]:
    """The tensors as transformers names and cuts them in files (experts that a model holds in one block, for instance)."""
    from transformers.core_model_loading import revert_weight_conversion

    def convert(group: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(revert_weight_conversion(model, dict(group)))

    metas = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in convert(metas).items()}
    for group_of in (_itself, _block, _all):
        groups: dict[str, list[str]] = {}
        for name in metas:
            groups.setdefault(group_of(name), []).append(name)
        cut = {key: convert({name: metas[name] for name in names}) for key, names in groups.items()}
        if {name: tuple(tensor.shape) for part in cut.values() for name, tensor in part.items()} == shapes:
            break
    found = {}
    for key, names in groups.items():
        if len(names) == 1 and len(cut[key]) == 1 and tensors[names[0]].shape == tuple(next(iter(cut[key].values())).shape):
            [renamed] = cut[key]
            found[renamed] = tensors[names[0]]
        else:
            found |= _converted(convert, {name: tensors[name] for name in names}, cut[key])
    return found


def _itself(name: str) -> str:
    return name


def _block(name: str) -> str:
    """A repeated layer: everything up to the first number."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])


def _all(name: str) -> str:
    return ""


def _converted(convert: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]], tensors: dict[str, Lazy],
               results: dict[str, torch.Tensor]) -> dict[str, Lazy]:
    """Results that come from several or otherwise cut tensors: made together, and kept until the last is written."""
    kept: dict[str, torch.Tensor] = {}

    def read(name: str) -> torch.Tensor:
        if name not in kept:
            kept.update(convert({source: tensor.whole() for source, tensor in tensors.items()}))
        return kept.pop(name).contiguous().view(-1)

    return {name: Lazy(meta.dtype, tuple(meta.shape), lambda start, numel, name=name: read(name)[start : start + numel],  # type: ignore[misc]
                       at_once=True) for name, meta in results.items()}


def _check_room(out: Path, size: int) -> None:
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < size:
        raise UserError(f"{out} needs {format_size(size)}, but {place} has {format_size(free)} free")


def _write(folder: Path, prefix: str, tensors: dict[str, Lazy], shard_bytes: int) -> list[str]:
    from huggingface_hub import split_torch_state_dict_into_shards

    metas = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    pattern = f"{prefix}{{suffix}}.safetensors"
    split = split_torch_state_dict_into_shards(metas, filename_pattern=pattern, max_shard_size=shard_bytes)
    for file, names in split.filename_to_tensors.items():
        write_tensors(folder / file, [(name, tensors[name]) for name in names], {"format": "pt"})
    if split.is_sharded:
        write_json(folder / f"{prefix}.safetensors.index.json",
                   {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))})
    return sorted(split.filename_to_tensors)


def _write_rest(folder: Path, assets: Path, config: Any, dtype: torch.dtype) -> None:
    """Everything beside the weights: the tokenizer, and the model's config with the dtype of the export; without it, an
    adapter's."""
    own = {"config.json", "generation_config.json"} if config is None else {"config.json", "adapter_config.json"}
    for file in sorted(path for pattern in SMALL for path in assets.glob(pattern)):
        if file.name not in own and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    if config is not None:
        config.dtype = dtype
        config.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)
