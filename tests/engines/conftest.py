"""One launch per engine and precision; every test that asks for it looks at the same run."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Run

ROOT = Path(__file__).parents[2]
PROCESSES = {"single": 1, "hsdp": 4}


@pytest.fixture(scope="session")
def still_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """`config:DIR` of the tiny model without dropout, whose masks would differ among ranks."""
    folder = tmp_path_factory.mktemp("still")
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}), encoding="utf-8")
    return f"config:{folder}"


@pytest.fixture(scope="session")
def sharded_zero3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A launch file for ZeRO-3 that shards even the smallest parameter, which the shipped one keeps whole."""
    folder = tmp_path_factory.mktemp("files")
    settings = json.loads((ROOT / "ds_configs" / "zero3.json").read_text(encoding="utf-8"))
    settings["zero_optimization"] |= {
        "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 10_000, "reduce_bucket_size": 20_000,
    }  # fmt: skip
    (folder / "zero3.json").write_text(json.dumps(settings), encoding="utf-8")
    content = yaml.safe_load((ROOT / "recipes" / "accelerate" / "zero3.yaml").read_text(encoding="utf-8"))
    content["deepspeed_config"]["deepspeed_config_file"] = str(folder / "zero3.json")
    (folder / "sharded.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(folder / "sharded.yaml")


@pytest.fixture(scope="session")
def fp32_run(launch_shared: Callable[..., Any], still_model: str) -> Callable[[str], Any]:
    """`fp32_run(strategy)`: ten steps of one global batch of 8 rows, accumulated, clipped, warmed up, exported."""

    @cache
    def run(strategy: str) -> Any:
        number = PROCESSES.get(strategy, 2)
        done = launch_shared(strategy, processes=number, model=still_model, max_steps=10, micro_batch=4 // number, accumulate=2,
                             clip=0.5, warmup_steps=3, export=True, export_dtype="fp32")  # fmt: skip
        assert done.status == 0, done.output
        return done

    return run


@pytest.fixture(scope="session")
def bf16_run(runs: Any, tiny_model: Path, chat_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """`bf16_run(strategy)`: four steps from weights of a directory, with dropout, a checkpoint every other step."""

    @cache
    def run(strategy: str) -> Any:
        folder = tmp_path_factory.mktemp("bf16") / strategy
        keys = {"model": tiny_model, "data": chat_data, "output": folder, "seq_len": 64, "micro_batch": 2, "learning_rate": 1e-3,
                "tracker": "none", "max_steps": 4, "accumulate": 2, "precision": "bf16", "warmup_steps": 1, "checkpoint_every": 2,
                "eval_every": 2, "export": True, "export_dtype": "fp32"}  # fmt: skip
        done = runs.run(strategy, keys, processes=PROCESSES.get(strategy, 2))
        assert set(done["statuses"]) == {0}, done["output"]
        return Run(folder, 0, done["output"])

    return run


@pytest.fixture(scope="session")
def runs() -> Iterator[Any]:
    """Starts many runs without the libraries' imports each time, and breaks them: see `benchmarks/many_runs.py`."""
    location = importlib.util.spec_from_file_location("many_runs", ROOT / "benchmarks" / "many_runs.py")
    assert location is not None and location.loader is not None
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    with module.Runner() as runner:
        yield runner
