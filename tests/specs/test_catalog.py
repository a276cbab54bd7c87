"""The catalogs: every GPU with its figures and source, every model with the parameters that its config really has."""

from __future__ import annotations

import pytest

from toolkit.errors import UserError
from toolkit.specs import Workload
from toolkit.specs.catalog import gpu, gpus, model, models
from toolkit.specs.load import load_model_spec, max_positions
from toolkit.timeline.build import build_meta
from toolkit.units import GIB

GPUS = [
    "t4", "v100-16gb", "v100-32gb", "a10", "a10g", "l4", "l40s", "a40", "a6000", "rtx-3090", "rtx-4090", "rtx-5090",
    "a100-40gb-pcie", "a100-40gb-sxm", "a100-80gb-pcie", "a100-80gb-sxm", "h100-pcie", "h100-sxm", "h200", "b200", "mi250x",
    "mi300x",
]  # fmt: skip
SOLD_AS = {"t4": 16, "v100-16gb": 16, "v100-32gb": 32, "a10": 24, "l40s": 48, "rtx-4090": 24, "a100-40gb-sxm": 40,
           "a100-80gb-sxm": 80, "h100-sxm": 80, "h200": 141, "b200": 192, "mi250x": 64, "mi300x": 192}  # fmt: skip
"""GB on the box; the driver reports somewhat less."""
WITHOUT_SDPA = ("bloom", "gemma2")
"""Families that transformers offers eager attention only."""


def test_the_gpus_are_those_of_the_contract() -> None:
    assert list(gpus()) == GPUS


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_has_every_figure_and_its_source(name: str) -> None:
    row = gpus()[name]
    assert row.name == name and not row.is_cpu
    assert 14 * GIB < row.memory < 200 * GIB
    assert row.fp16_flops and 5e13 < row.fp16_flops < 5e15
    assert row.bf16_flops is None or row.bf16_flops == row.fp16_flops
    assert 5e12 < row.fp32_flops <= row.fp16_flops
    assert 1e11 < row.bandwidth < 1e13
    assert 1e10 < row.link_bandwidth < 1e12 and 1e10 <= row.pcie_bandwidth < 1e11
    assert (row.link == "pcie") == (row.link_bandwidth == row.pcie_bandwidth)
    assert row.architecture and len(row.source) > 5


@pytest.mark.parametrize(("name", "gigabytes"), SOLD_AS.items())
def test_memory_is_what_the_driver_reports_of_what_is_sold(name: str, gigabytes: int) -> None:
    assert 0.9 * gigabytes * 10**9 < gpus()[name].memory < gigabytes * GIB


def test_gpus_without_bf16_units_say_so() -> None:
    assert {g.name for g in gpus().values() if g.bf16_flops is None} == {"t4", "v100-16gb", "v100-32gb"}


def test_a_gpu_is_found_in_any_case_and_a_slip_names_the_nearest() -> None:
    assert gpu("H100-SXM") is gpus()["h100-sxm"]
    with pytest.raises(UserError, match="gpu 'a100-80gb' is not in the catalog; did you mean 'a100-80gb-"):
        gpu("a100-80gb")


def test_a_model_is_found_by_name_and_by_hub_id() -> None:
    assert model("llama-3.1-8b") is model("meta-llama/Llama-3.1-8B") is models()["llama-3.1-8b"]
    assert model("no-such-model") is None


def test_names_and_hub_ids_are_unique_and_lower_case() -> None:
    assert len({m.hub.lower() for m in models().values()}) == len(models()) >= 60
    assert all(name == name.lower() and " " not in name for name in models())
    assert all(m.source == f"https://huggingface.co/{m.hub}" for m in models().values())


@pytest.mark.parametrize("name", models())
def test_a_model_has_the_parameters_that_were_published(name: str) -> None:
    """Built on the meta device from the config alone: no weights, no memory."""
    spec = load_model_spec(name)
    attention = "eager" if spec.config["model_type"] in WITHOUT_SDPA else "sdpa"
    built, _, _ = build_meta(spec, Workload(), attention)
    assert sum(p.numel() for p in built.parameters()) == models()[name].parameters == spec.published_parameters
    assert all(p.is_meta for p in built.parameters())


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2", "t5-small", "bloom-560m", "bert-base"])
def test_positions_are_known_where_the_model_limits_them(name: str) -> None:
    limits = {"llama-3.1-8b": 131072, "gpt2": 1024, "t5-small": None, "bloom-560m": None, "bert-base": 512}
    assert max_positions(load_model_spec(name)) == limits[name]
