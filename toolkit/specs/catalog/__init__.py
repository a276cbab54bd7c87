"""The catalogs: GPUs and well-known models as data with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any

from toolkit.errors import UserError, nearest
from toolkit.specs.cluster import Gpu
from toolkit.units import GIB


@dataclass(frozen=True)
class CatalogModel:
    """One well-known model: the values of its config.json that matter, and its published parameter count."""

    name: str
    hub: str
    """Hub id; it names the model too."""
    parameters: int
    """Elements, tied ones once."""
    config: Mapping[str, Any] = field(repr=False)
    source: str = ""


def _read(name: str) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((files("toolkit.specs.catalog") / name).read_text(encoding="utf-8"), Loader=loader)  # noqa: S506


@lru_cache(maxsize=1)
def gpus() -> dict[str, Gpu]:
    """Every GPU by name."""
    tera, giga = 1e12, 1e9
    return {
        name: Gpu(
            name=name,
            memory=int(row["memory"] * GIB),
            bf16_flops=row["bf16"] * tera if row["bf16"] else None,
            fp16_flops=row["fp16"] * tera if row["fp16"] else None,
            fp32_flops=row["fp32"] * tera,
            bandwidth=row["bandwidth"] * giga,
            link=row["link"],
            link_bandwidth=row["link_bandwidth"] * giga,
            pcie_bandwidth=row["pcie"] * giga,
            architecture=row["architecture"],
            source=row["source"],
        )
        for name, row in _read("gpus.yaml")["gpus"].items()
    }


def gpu(name: str) -> Gpu:
    """One GPU. Raises UserError with the nearest names."""
    found = gpus().get(name.lower())
    if found is None:
        raise UserError(f"gpu {name!r} is not in the catalog{nearest(name, [*gpus(), 'auto', 'cpu'])}")
    return found


@lru_cache(maxsize=1)
def models() -> dict[str, CatalogModel]:
    """Every model by name; a row may start from another one (`like`) and change some values."""
    rows = _read("models.yaml")["models"]
    configs: dict[str, dict[str, Any]] = {}

    def config(name: str) -> dict[str, Any]:
        if name not in configs:
            row = rows[name]
            base = dict(config(row["like"])) if "like" in row else {}
            configs[name] = {**base, **row.get("config", {})}
        return configs[name]

    return {
        name: CatalogModel(name, row["hub"], int(row["parameters"]), config(name), f"https://huggingface.co/{row['hub']}")
        for name, row in rows.items()
    }


@lru_cache(maxsize=1)
def _by_hub() -> dict[str, CatalogModel]:
    return {m.hub.lower(): m for m in models().values()}


def model(name: str) -> CatalogModel | None:
    """A model by its name or hub id; None when the catalog has none."""
    return models().get(name.lower()) or _by_hub().get(name.lower())
