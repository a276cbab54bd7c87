"""Which classes of a model are its layers: the units that FSDP should gather one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def block_classes(model: nn.Module) -> tuple[str, ...]:
    """The layer classes of a model.

    Its own hints first (`_no_split_modules`, as far as the model has them); without hints the classes that
    stand several times in a list of the model, outermost lists only: a layer's experts are inside the layer.
    """
    present = {type(module).__name__ for module in model.modules()}
    hints = getattr(model, "_no_split_modules", None) or ()
    hinted = tuple(sorted(name for name in hints if name in present))
    return hinted or tuple(dict.fromkeys(_repeated(model)))


def _repeated(module: nn.Module) -> Iterator[str]:
    from torch import nn

    for child in module.children():
        names = [type(item).__name__ for item in child.children()]
        layers = isinstance(child, (nn.ModuleList, nn.Sequential)) and len(names) > 1
        # A layer has parts; a list of plain Linears is a part itself.
        whole = [n for n, item in zip(names, child.children(), strict=True) if next(item.children(), None) is not None]
        if layers and whole and len(whole) > len(set(whole)):
            yield from (name for name in whole if whole.count(name) > 1)
        else:
            yield from _repeated(child)
