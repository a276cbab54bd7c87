"""A model's layers and sizes, from its config alone, for the rules that need them."""

from __future__ import annotations

from collections import Counter

from toolkit.specs import ModelSpec, Workload
from toolkit.specs.load import max_positions
from toolkit.strategies.fsdp.blocks import block_classes
from toolkit.strategies.zero.autos import hidden_size_of
from toolkit.training.check.finding import ModelFacts


def model_facts(spec: ModelSpec) -> ModelFacts:
    """Build the model on the meta device and count its layers.

    Raises:
        UserError: the config does not build a model.
    """
    from toolkit.timeline.build import build_meta

    model, _, _ = build_meta(spec, Workload(), "eager")
    classes = Counter(type(module).__name__ for module in model.modules())
    blocks = block_classes(model)
    return ModelFacts(
        name=spec.name,
        config=spec.config,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        hidden_size=hidden_size_of(spec.config),
        blocks=blocks,
        layers=sum(classes[name] for name in blocks),
        classes=classes,
        max_positions=max_positions(spec),
    )
