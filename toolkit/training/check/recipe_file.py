"""Rules for a recipe's configuration: every unknown key, and values out of range."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from toolkit.errors import UserError
from toolkit.training.check.accelerate_file import unknown
from toolkit.training.check.finding import Findings, ModelFacts
from toolkit.training.config import TrainConfig, from_mapping

KEYS = frozenset(field.name for field in dataclasses.fields(TrainConfig))


def check_recipe(content: Mapping[str, Any], model: ModelFacts | None, out: Findings) -> TrainConfig | None:
    """Report what is wrong with the keys; the configuration if they make one."""
    unknown(content, KEYS, "", out, "refused by the recipe")
    try:
        config = from_mapping({key: value for key, value in content.items() if key in KEYS}, out.file)
    except UserError as error:
        out.error("", str(error))
        return None
    if model is not None and model.max_positions is not None and config.seq_len > model.max_positions:
        out.error("seq_len", f"is {config.seq_len}, above the {model.max_positions} positions of {model.name}")
    return config
