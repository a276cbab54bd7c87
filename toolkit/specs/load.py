"""MODEL on the command line becomes a model spec: a directory, a config.json, a GGUF file, a catalog name, a hub id."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, nearest
from toolkit.specs.catalog import model as catalog_model
from toolkit.specs.catalog import models as catalog_models
from toolkit.specs.model import ModelSpec

_MAX_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_UNLIMITED = ("t5", "mt5", "umt5", "bloom", "falcon")
"""Positions are relative, or computed: any length runs."""


def _special_float(values: dict[str, Any]) -> Any:
    """Infinity as transformers writes it, {"__float__": "Infinity"} (configuration_utils.py, _encode_special_floats)."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


def _config_file(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}, not a model's config")
    return values


def _gguf(path: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name).to_dict()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"{path} is not a GGUF file that transformers reads: {' '.join(str(error).split())[:200]}") from None


def _from_hub(name: str, trust_remote_code: bool) -> ModelSpec:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code).to_dict()
    except (OSError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0][:160]
        raise UserError(f"model {name!r} is no directory, no file, no name of the catalog, and the hub did not give its config "
                        f"({first}){nearest(name, catalog_models())}") from None
    return ModelSpec(name=name, config=config, source=f"hub:{name}", trust_remote_code=trust_remote_code)


def load_model_spec(model: str, *, trust_remote_code: bool = False) -> ModelSpec:
    """The spec of what `model` names; only a config is read, never weights.

    Raises:
        UserError: nothing of that name, or a config that is no model's.
    """
    if not model.strip():
        raise UserError("model is empty; name a directory, a config.json, a hub id or a model of the catalog")
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"model {model!r} is a directory without a config.json")
        return _checked(ModelSpec(name=path.resolve().name, config=_config_file(path / "config.json"), source=str(path),
                                  trust_remote_code=trust_remote_code))
    if path.is_file():
        config = _gguf(path) if path.suffix == ".gguf" else _config_file(path)
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return _checked(ModelSpec(name=name, config=config, source=str(path), trust_remote_code=trust_remote_code))
    known = catalog_model(model)
    if known is not None:
        return ModelSpec(name=known.name, config=known.config, source=f"catalog:{known.name}",
                         published_parameters=known.parameters, trust_remote_code=trust_remote_code)
    if model.startswith((".", "/", "~")) or model.endswith((".json", ".gguf")):
        raise UserError(f"model {model!r} does not exist")
    if not re.fullmatch(r"[\w.\-]+/[\w.\-]+", model):
        raise UserError(f"model {model!r} is no directory, no file and no name of the catalog{nearest(model, catalog_models())}")
    return _checked(_from_hub(model, trust_remote_code))


def _checked(spec: ModelSpec) -> ModelSpec:
    if not spec.text_config.get("model_type") and not spec.config.get("model_type"):
        raise UserError(f"{spec.source}: the config has no model_type, so it is no model's config.json")
    return spec


def max_positions(spec: ModelSpec) -> int | None:
    """Tokens that the model's position embeddings reach; None: no limit is stated."""
    config = spec.text_config
    if config.get("model_type") in _UNLIMITED:
        return None
    for key in _MAX_POSITIONS:
        if isinstance(config.get(key), int):
            return int(config[key])
    return None


def check_length(spec: ModelSpec, seq_len: int) -> None:
    """Raise UserError when a sequence is longer than the model's positions."""
    limit = max_positions(spec)
    if limit is not None and seq_len > limit:
        raise UserError(f"seq-len {seq_len} is above the {limit} positions of {spec.name}; use at most {limit}")
