"""What the formats of others need beside the tensors: how the optimizer groups parameters, and with which settings."""

from __future__ import annotations

from typing import Any

import torch

from toolkit.errors import UserError
from toolkit.training.config import TrainConfig, from_mapping
from toolkit.training.convert.held import Group, Held
from toolkit.training.optimizer import build_optimizer, rate_at


def groups_of(held: Held, notes: list[str]) -> list[Group]:
    """The groups as the checkpoint has them; of the recipe's checkpoints, as the recipe makes them; every setting that torch's
    optimizer of that kind has."""
    config = _config(held)
    weights = held.of("weights")
    if config is not None and held.groups is None:
        model = _Shapes({name: tensor.shape for name, tensor in weights.items()})
        names = {id(p): name for name, p in zip(weights, model.parameters(), strict=True)}
        rate = rate_at(max(1, held.step - held.skipped), config.max_steps or held.step + 1, config,
                       int(held.identity.get("processes") or 1))
        return [Group([names[id(p)] for p in group["params"]], {**_settings(group), "lr": rate})
                for group in build_optimizer(config, model).param_groups]
    plain = _settings(torch.optim.AdamW([torch.zeros(1)]).param_groups[0])
    if held.groups is not None:
        return [Group(group.names, {**plain, **group.settings}) for group in held.groups]
    notes.append("the checkpoint does not say how its optimizer groups parameters: one group with the defaults of torch's AdamW "
                 "is written; set learning rate and weight decay after loading")
    return [Group(list(weights), plain)]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _config(held: Held) -> TrainConfig | None:
    try:
        return from_mapping(dict(held.config)) if held.config else None
    except UserError:  # Keys of another version: the groups are not known then.
        return None


class _Shapes(torch.nn.Module):
    """Parameters without memory, in the order of their names."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.held = torch.nn.ParameterList(torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes.values())
