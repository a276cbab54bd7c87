"""The shipped files are what the toolkit renders, and every rendered file is taken by the engine itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.errors import UserError
from toolkit.specs import Cluster, Plan, Workload
from toolkit.strategies import STRATEGIES, launch_environment, read, render
from toolkit.strategies.base import ALLOCATOR_VARIABLES
from toolkit.strategies.ship import PAGE, SHIPPED, Shipped, main, texts, with_table
from toolkit.strategies.zero.autos import autos, resolve
from toolkit.strategies.zero.defaults import KNOWN, engine_defaults

ROOT = Path(__file__).parents[2]
Make = Callable[..., Cluster]
each_shipped = pytest.mark.parametrize("shipped", SHIPPED, ids=[s.name for s in SHIPPED])


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No variable of Accelerate's or FSDP's from outside, and none left behind."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    yield monkeypatch
    for name in set(os.environ) - set(before):
        del os.environ[name]


def launcher_environment(path: Path) -> tuple[Any, dict[str, str]]:
    """The arguments and variables that `accelerate launch --config_file path` hands to its processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    arguments = launch_command_parser().parse_args(["--config_file", str(path), "--main_process_port=0", "train.py"])
    arguments, defaults, precision = _validate_launch_command(arguments)
    assert not precision, "the file says nothing of precision"
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        return arguments, prepare_deepspeed_cmd_env(arguments)[1]
    return arguments, prepare_multi_gpu_env(arguments)


# -- what is in the repository ----------


def test_the_repository_holds_what_is_rendered() -> None:
    for path, text in texts().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path}: run python -m toolkit.strategies.ship"


def test_the_pages_table_is_the_registry() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert with_table(page) == page, "run python -m toolkit.strategies.ship"
    for name in STRATEGIES:
        assert f"| `{name}` |" in page
    with pytest.raises(UserError, match="lacks the marks"):
        with_table("# No marks")


def test_the_folders_hold_nothing_else() -> None:
    found = {f"{folder}/{p.name}" for folder in ("recipes/accelerate", "ds_configs") for p in (ROOT / folder).iterdir()}
    assert found == set(texts())


def test_every_strategy_is_shipped_under_its_name() -> None:
    names = {shipped.name for shipped in SHIPPED}
    assert set(STRATEGIES) <= names
    assert {
        "fsdp-offload-all",
        "zero2-offload-optimizer",
        "zero3-offload-optimizer",
        "zero3-offload-all",
    } <= names


def test_every_file_has_a_line_in_its_readme() -> None:
    for folder in ("recipes/accelerate", "ds_configs"):
        text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
        listed = set(re.findall(r"^\| \[`([^`]+)`\]", text, re.MULTILINE))
        assert listed == {p.name for p in (ROOT / folder).iterdir() if p.suffix in (".yaml", ".json")}


def test_the_generator_writes_them(tmp_path: Path) -> None:
    main(tmp_path)
    written = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert written == set(texts())


@each_shipped
def test_no_hyperparameter_in_a_strategy_file(shipped: Shipped) -> None:
    content = yaml.safe_load(shipped.accelerate_text())
    said = set(content) | set(content.get("deepspeed_config", {})) | set(content.get("fsdp_config", {}))
    owned = {
        "mixed_precision",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "fsdp_activation_checkpointing",
    }
    assert not said & owned
    assert "main_process_ip" not in content and "machine_rank" not in content


@each_shipped
def test_a_shipped_file_reads_back_as_its_plan(shipped: Shipped, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # From anywhere: the JSON is found from the root that the YAML's own folder lies in.
    monkeypatch.chdir(tmp_path)
    found = read(ROOT / f"recipes/accelerate/{shipped.name}.yaml")
    assert found.plan.label == shipped.name
    assert found.plan.bucket == shipped.plan.bucket and found.plan.persist == shipped.plan.persist
    assert found.clip is None and found.precision is None and found.notes == ()


# -- the engine takes them ----------


@each_shipped
def test_the_launcher_takes_it(shipped: Shipped, clean_environment: pytest.MonkeyPatch) -> None:
    clean_environment.chdir(ROOT)
    info = STRATEGIES[shipped.plan.strategy]
    arguments, environment = launcher_environment(Path(f"recipes/accelerate/{shipped.name}.yaml"))
    assert arguments.num_processes == shipped.processes
    assert bool(arguments.use_deepspeed) == (info.engine == "DEEPSPEED")
    assert bool(arguments.use_fsdp) == (info.engine == "FSDP")
    assert bool(arguments.multi_gpu) == (info.engine == "MULTI_GPU")
    assert (environment.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true") == (shipped.plan.strategy == "hsdp")


@pytest.mark.parametrize("shipped", [s for s in SHIPPED if s.files.accelerate["distributed_type"] == "FSDP"],
                         ids=lambda s: s.name)  # fmt: skip
def test_the_fsdp_plugin_has_what_the_file_says(shipped: Shipped, clean_environment: pytest.MonkeyPatch) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    _, environment = launcher_environment(ROOT / f"recipes/accelerate/{shipped.name}.yaml")
    for name, value in environment.items():
        if name.startswith("FSDP_"):
            clean_environment.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    section = shipped.files.accelerate["fsdp_config"]
    assert plugin.fsdp_version == section["fsdp_version"] == 2
    assert plugin.reshard_after_forward is section["fsdp_reshard_after_forward"]
    assert plugin.cpu_ram_efficient_loading is section["fsdp_cpu_ram_efficient_loading"]
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    assert (type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy") == section.get("fsdp_offload_params", False)
    assert plugin.activation_checkpointing is False
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"


WITH_JSON = [s for s in SHIPPED if s.files.deepspeed is not None]


@pytest.mark.parametrize("shipped", WITH_JSON, ids=[s.name for s in WITH_JSON])
def test_deepspeed_takes_the_json(shipped: Shipped, clean_environment: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    content = json.loads((ROOT / f"ds_configs/{shipped.name}.json").read_text(encoding="utf-8"))
    resolved = resolve(content, hidden_size=None, micro_batch=2, accumulate=4, ranks=1, clip=0.5, precision="bf16")
    assert not list(autos(resolved))
    config = DeepSpeedConfig(resolved)
    assert config.zero_optimization_stage == STRATEGIES[shipped.plan.strategy].stage
    assert config.gradient_clipping == 0.5 and config.gradient_accumulation_steps == 4
    zero = config.zero_config
    assert zero.reduce_bucket_size == zero.allgather_bucket_size == shipped.plan.bucket
    devices = [None if part is None else str(getattr(part.device, "value", part.device))
               for part in (zero.offload_optimizer, zero.offload_param)]  # fmt: skip
    target = shipped.plan.offload_to
    assert devices == {"none": [None, None], "optimizer": [target, None], "all": [target, target]}[shipped.plan.offload]
    if shipped.plan.strategy == "zero3":
        assert zero.gather_16bit_weights_on_model_save, "without it an export fails after the training"
        assert zero.param_persistence_threshold == shipped.plan.persist


@pytest.mark.parametrize("shipped", WITH_JSON, ids=[s.name for s in WITH_JSON])
def test_the_deepspeed_plugin_takes_both_files(shipped: Shipped, clean_environment: pytest.MonkeyPatch) -> None:
    """Accelerate refuses a YAML that repeats what the JSON says (`_deepspeed_config_checks`)."""
    from accelerate.utils import DeepSpeedPlugin

    clean_environment.chdir(ROOT)
    _, environment = launcher_environment(Path(f"recipes/accelerate/{shipped.name}.yaml"))
    for name, value in environment.items():
        if name.startswith("ACCELERATE_"):
            clean_environment.setenv(name, value)
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == STRATEGIES[shipped.plan.strategy].stage
    assert plugin.deepspeed_config["gradient_clipping"] == "auto"
    for precision in ("bf16", "fp16"):
        plugin.deepspeed_config[precision]["enabled"] = "auto"
    plugin.set_mixed_precision("bf16")
    assert plugin.deepspeed_config["bf16"]["enabled"] is True
    assert plugin.deepspeed_config["fp16"]["enabled"] is False


def test_deepspeed_defaults_are_those_of_the_installed_class() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    fields = {(field.alias or name): field.default for name, field in DeepSpeedZeroConfig.model_fields.items()}
    fields["pin_memory"] = DeepSpeedZeroOffloadOptimizerConfig().pin_memory
    assert DeepSpeedZeroOffloadParamConfig().pin_memory == fields["pin_memory"]
    found = engine_defaults()
    assert {key: fields[key] for key in KNOWN} == dict(found)


def test_ddp_defaults_are_those_of_torch_and_accelerate() -> None:
    import inspect

    from accelerate.utils import DistributedDataParallelKwargs
    from torch.nn.parallel import DistributedDataParallel

    from toolkit.strategies.ddp.launch import DEFAULTS

    theirs, torchs = (
        DistributedDataParallelKwargs(),
        inspect.signature(DistributedDataParallel.__init__).parameters,
    )
    for name, value in vars(DEFAULTS).items():
        assert getattr(theirs, name) == value
        default = torchs[name].default
        assert default == value or (name == "bucket_cap_mb" and default is None), "None: torch's own 25 MiB"


# -- writing and launching ----------


def test_written_files_point_at_each_other_from_anywhere(tmp_path: Path, make_cluster: Make) -> None:
    files = render(Plan(strategy="zero3", offload="all", bucket=10**6), Workload(), make_cluster(4))
    written = files.write(tmp_path / "runs" / "one")
    assert [p.name for p in written] == ["accelerate.yaml", "ds_config.json"]
    content = yaml.safe_load(written[0].read_text(encoding="utf-8"))
    assert Path(content["deepspeed_config"]["deepspeed_config_file"]).is_absolute()
    assert read(written[0]).plan.bucket == 10**6
    assert sorted(p.name for p in written[0].parent.iterdir()) == ["accelerate.yaml", "ds_config.json"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, make_cluster: Make) -> None:
    (tmp_path / "file").write_text("here", encoding="utf-8")
    with pytest.raises(UserError, match="can't be written"):
        render(Plan(strategy="ddp"), Workload(), make_cluster()).write(tmp_path / "file" / "run")


def fake_accelerate(folder: Path) -> dict[str, str]:
    """An environment whose `accelerate` prints its words and the allocator's variables."""
    program = folder / "accelerate"
    names = " ".join(f'"{name}=${{{name}:-}}"' for name in ALLOCATOR_VARIABLES)
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" {names}\n', encoding="utf-8")
    program.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
    return {**kept, "PATH": f"{folder}:{kept['PATH']}"}


@pytest.mark.parametrize(
    "own", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "backend:native"}]
)
def test_the_launch_sets_the_allocator_unless_the_user_did(own: dict[str, str], tmp_path: Path, make_cluster: Make) -> None:
    script = tmp_path / "launch.sh"
    text = render(Plan(strategy="fsdp"), Workload(), make_cluster()).shell("my run", "recipes/train.py", "my run/train.yaml")
    script.write_text(text, encoding="utf-8")
    environment = {**fake_accelerate(tmp_path), **own}
    done = subprocess.run(["sh", str(script), "max_steps=3"], env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[:-3] == ["launch", "--config_file", "my run/accelerate.yaml", "recipes/train.py", "--config",
                          "my run/train.yaml", "max_steps=3"]  # fmt: skip
    expected = own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert {k: v for k, _, v in (w.partition("=") for w in words[-3:]) if v} == expected
    assert launch_environment(own) == ({} if own else expected)


def test_several_nodes_take_their_rank_from_the_environment(tmp_path: Path, make_cluster: Make) -> None:
    files = render(Plan(strategy="zero2"), Workload(), make_cluster(8, 2))
    assert files.accelerate["num_processes"] == 16 and files.accelerate["num_machines"] == 2
    assert files.accelerate["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"
    script = tmp_path / "launch.sh"
    script.write_text(files.shell("RUN", "recipes/train.py", "RUN/train.yaml"), encoding="utf-8")
    environment = fake_accelerate(tmp_path)
    missing = subprocess.run(["sh", str(script)], env=environment, capture_output=True, text=True)
    assert missing.returncode != 0 and "MACHINE_RANK" in missing.stderr
    environment |= {"MACHINE_RANK": "1", "MAIN_PROCESS_IP": "10.0.0.7"}
    done = subprocess.run(["sh", str(script)], env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[words.index("--machine_rank") + 1] == "1" and words[words.index("--main_process_ip") + 1] == "10.0.0.7"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp", "zero3"])
def test_the_launcher_takes_files_of_several_nodes(
    strategy: str, tmp_path: Path, make_cluster: Make, clean_environment: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    written = render(Plan(strategy=STRATEGIES[strategy].name), Workload(), make_cluster(4, 2)).write(tmp_path)
    words = [
        "--config_file",
        str(written[0]),
        "--machine_rank",
        "1",
        "--main_process_ip",
        "10.0.0.7",
        "train.py",
    ]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert (arguments.num_machines, arguments.num_processes, int(arguments.machine_rank)) == (2, 8, 1)
    assert arguments.main_process_port == 29500 and arguments.rdzv_backend == "static"
