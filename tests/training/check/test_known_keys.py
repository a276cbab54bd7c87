"""The lists of known keys are those of the installed Accelerate and DeepSpeed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from toolkit.training.check import known


def source_of(package: str) -> str:
    """The text of every Python file of an installed package."""
    import importlib.util

    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    files = sorted(Path(spec.origin).parent.rglob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8") for path in files if "test" not in path.parts[-2])


@pytest.fixture(scope="module")
def accelerate_source() -> str:
    return source_of("accelerate")


def test_top_level_keys_are_the_fields_of_cluster_config() -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    assert {field.name for field in dataclasses.fields(ClusterConfig)} == known.ACCELERATE


def test_section_keys_are_the_launchers_options() -> None:
    from accelerate.commands.launch import launch_command_parser

    options = {action.dest for action in launch_command_parser()._actions}
    # fsdp_ignored_modules has no option; the launcher reads it from the file alone.
    assert {name for name in options if name.startswith("fsdp_")} | {"fsdp_ignored_modules"} == known.FSDP
    assert {name for name in options if name.startswith("parallelism_config_")} == known.PARALLELISM
    assert options >= known.PLUGIN
    assert {name for name in options if name.startswith("deepspeed_")} <= known.PLUGIN


def test_keys_that_belong_in_the_json_are_those_accelerate_refuses(accelerate_source: str) -> None:
    body = accelerate_source[accelerate_source.index("def _deepspeed_config_checks") :]
    names = re.findall(r'"ACCELERATE_(\w+)"', body[: body.index("]")])
    assert {name.replace("DEEPSPEED_", "").lower() for name in names} == known.IN_JSON


def test_zero_keys_are_the_fields_of_deepspeeds_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    assert {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()} == known.ZERO
    assert set(DeepSpeedZeroOffloadParamConfig.model_fields) == known.OFFLOAD["offload_param"]
    assert set(DeepSpeedZeroOffloadOptimizerConfig.model_fields) == known.OFFLOAD["offload_optimizer"]
    assert set(DeepSpeedBF16Config.model_fields) == known.PRECISION["bf16"]
    assert set(DeepSpeedFP16Config.model_fields) == known.PRECISION["fp16"]


def test_top_level_deepspeed_keys_stand_in_its_source() -> None:
    text = source_of("deepspeed")
    missing = {key for key in known.DEEPSPEED if f'"{key}"' not in text and f"'{key}'" not in text}
    # Older versions read these; MS-AMP adds its own section.
    assert missing <= {"msamp", "nebula", "sparse_attention", "disable_allgather"}
    constants = text[text.index("TRAIN_BATCH_SIZE = ") :]
    assert '"train_batch_size"' in constants


def test_variables_stand_in_accelerates_source(accelerate_source: str) -> None:
    for name in known.VARIABLES:
        prefix, _, rest = name.partition("_")
        if prefix == "PARALLELISM":
            rest = rest.removeprefix("CONFIG_")
        assert name in accelerate_source or f'prefix + "{rest}"' in accelerate_source, name
    assert known.SWITCHES <= known.VARIABLES
