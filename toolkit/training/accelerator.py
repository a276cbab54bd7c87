"""The one place that turns the launch environment into a running engine, and holds the engine to what was
asked for.

`accelerate launch --config_file FILE` tells its processes by environment variables which engine is meant.
On a machine without an accelerator device, Accelerate reads the same variables and silently runs something
else: an FSDP request becomes unconnected processes, or plain data parallelism with ACCELERATE_USE_CPU. Here
the process group is made first (gloo), the state's distributed type is set to the GPU-like one that the
FSDP code asks for, and then the Accelerator is built, so that the launch files for GPUs also serve a
rehearsal on a CPU. Nothing else in the toolkit knows about this.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from toolkit.errors import UserError
from toolkit.specs import Plan
from toolkit.strategies.fsdp.launch import STEPS_SHARDS
from toolkit.training import rollcall
from toolkit.training.builds import check_builds
from toolkit.training.config import TrainConfig
from toolkit.training.start import end_now, world_size

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

Engine = Literal["single", "ddp", "fsdp", "deepspeed"]
_kept: list[Any] = []
"""Engines live until the process ends: one that is taken down waits for the threads of its communication, and these may wait
for the interpreter's lock, which the waiting thread holds."""
_FILE_ENGINES: dict[str, Engine] = {
    "NO": "single", "MULTI_CPU": "ddp", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed",
}  # fmt: skip


def requested_engine() -> Engine:
    """The engine the launcher's environment asks for."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        return "deepspeed"
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        return "fsdp"
    return "ddp" if world_size() > 1 else "single"


def launch_file() -> Path | None:
    """The `--config_file` of the `accelerate launch` that started this process, where the system lets us
    see it."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")
        folder = Path(f"/proc/{os.getppid()}/cwd").readlink()
    except (OSError, UnicodeDecodeError):
        return None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--config_file":
            return folder / (value if equals else words[index + 1])
        if word.endswith(".py") and "accelerate" not in word:
            break  # The script and its own arguments begin here.
    return None


def check_launch() -> None:
    """Hold the environment to the launch file: a launcher flag can silently replace the engine that the
    file names.

    Raises:
        UserError: says what the file asks for and what was launched.
    """
    file = launch_file()
    if file is None or not file.is_file():
        return
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError):
        return
    wanted = _FILE_ENGINES.get(str(content.get("distributed_type", "")).upper())
    launched = requested_engine()
    if wanted == "ddp" and launched == "single":
        return  # One process of data parallelism is the same thing.
    if wanted is not None and wanted != launched:
        raise UserError(f"{file} asks for {wanted} but {launched} was launched ({world_size()} processes); "
                        "drop the launcher flag that overrides the file, or name the file that you mean")


def build_accelerator(config: TrainConfig) -> Accelerator:
    """The Accelerator for the engine that was launched, on GPUs or in a CPU rehearsal.

    Raises:
        UserError: the launch environment contradicts itself or the config.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs

    check_launch()
    engine = requested_engine()
    timeout = timedelta(minutes=config.timeout_minutes)
    on_cpu = not torch.accelerator.is_available()
    check_mesh(os.environ)
    if engine == "deepspeed":
        check_builds()
    rollcall.begin(timeout.total_seconds(), end_now)
    mixed = config.precision if config.precision in ("bf16", "fp16") else "no"
    if config.precision == "fp16" and on_cpu:
        raise UserError("precision=fp16 needs a GPU; use bf16 or fp32 on a CPU")
    if engine == "fsdp" and config.optimizer not in STEPS_SHARDS:
        raise UserError(f"optimizer={config.optimizer} does not step FSDP2's sharded tensors; use {' or '.join(STEPS_SHARDS)}, "
                        "or a launch file of ddp or ZeRO")
    plugins: dict[str, Any] = {}
    if engine == "deepspeed":
        plugins["deepspeed_plugin"] = _deepspeed_plugin(config)
    elif engine == "fsdp":
        plugins["fsdp_plugin"] = _fsdp_plugin(on_cpu)
    if on_cpu:
        engage_on_cpu(engine, timeout)
    accelerator = Accelerator(
        mixed_precision=mixed,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=config.accumulate,
            sync_with_dataloader=False,
            sync_each_batch=config.sync_each_micro_batch,
        ),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        log_with=tracker_of(config),
        project_dir=config.output,
        **plugins,
    )
    if engine == "fsdp" and mixed != "no":
        # Accelerate also casts what the outermost module returns; the loss is a sum over thousands of
        # tokens, which 8 bits of mantissa cannot hold. Inner modules compute in the low precision already.
        plugin = accelerator.state.fsdp_plugin
        plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)
    return accelerator


def check_mesh(environ: Mapping[str, str]) -> None:
    """Hold the degrees of the launch file to what FSDP can do with them.

    Raises:
        UserError: no two processes would share a copy of the model.
    """
    degrees = {name: int(environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", 1)) for name in ("DP_REPLICATE", "DP_SHARD", "CP")}
    if requested_engine() == "fsdp" and degrees["DP_REPLICATE"] > 1 and degrees["DP_SHARD"] * degrees["CP"] == 1:
        raise UserError(f"the launch file asks for {degrees['DP_REPLICATE']} copies of the model with one process each, so FSDP "
                        "has nothing to shard: use ddp.yaml, or parallelism_config_dp_shard_size of 2 or more")


def gradient_sums(accelerator: Accelerator, model: torch.nn.Module) -> str:
    """The data type in which the prepared model sums the gradients of a step's micro-batches: `fp32`, `bf16` or `fp16`."""
    import torch

    if running_engine(accelerator, model) == "deepspeed":
        kind = model.get_data_types()[1]
    elif running_engine(accelerator, model) == "fsdp":
        policy = accelerator.state.fsdp_plugin.mixed_precision_policy
        own = next(parameter.dtype for parameter in model.parameters() if parameter.requires_grad)
        kind = (policy and (policy.reduce_dtype or policy.param_dtype)) or own
    else:
        kind = next(parameter.dtype for parameter in model.parameters() if parameter.requires_grad)
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[kind]


def tracker_of(config: TrainConfig) -> str | None:
    """The tracker's name, or None when there is none: TensorBoard, the default, is done without where it is not installed.

    Raises:
        UserError: another one was asked for and is not installed; a run of weeks is not to find that out at its end.
    """
    from importlib.util import find_spec

    if config.tracker == "none" or (config.tracker == "tensorboard" and find_spec("tensorboard") is None):
        return None
    if find_spec(config.tracker) is None:
        raise UserError(f"tracker={config.tracker} is not installed: pip install {config.tracker}, or use tracker=tensorboard or "
                        "none (metrics.jsonl has every step in any case)")
    return config.tracker


def engage_on_cpu(engine: Engine, timeout: timedelta) -> None:
    """Join the ranks with gloo and set Accelerate's shared state so that the requested engine engages."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ.pop("ACCELERATE_USE_CPU", None)  # It makes Accelerate ignore FSDP and DeepSpeed.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # Keeps DeepSpeed from probing for devices, and from saying so.
    if engine == "single":
        return
    if engine == "deepspeed":
        # DeepSpeed's CPU communicator reads the number of local ranks under this name.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
        from deepspeed import comm, ops

        # An all-reduce for inference, which DeepSpeed would compile for a minute when it joins CPU ranks.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
        comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, timeout=timeout, verbose=False)
    PartialState(cpu=True, timeout=timeout)
    if engine == "fsdp":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _fsdp_plugin(on_cpu: bool) -> Any:
    """The FSDP2 settings of the environment; pinned host memory only where there is a device to copy to."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin = FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        raise UserError("the launch file asks for FSDP version 1; the recipe trains with fsdp_version: 2")
    if on_cpu and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    return plugin


def _deepspeed_plugin(config: TrainConfig) -> Any:
    """The DeepSpeed settings of the environment, with every value that is the recipe's filled in from its
    config.

    Accelerate clips at 1.0 when the file says nothing of clipping, and DeepSpeed takes the batch sizes from
    its own config: both must be what the recipe says, so that they are said once.

    Raises:
        UserError: the file states another value than the recipe.
    """
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin()
    settings = plugin.deepspeed_config
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "the DeepSpeed settings of the launch file")
    rows = config.micro_batch * config.accumulate * world_size()
    for key, value, name in (
        ("train_micro_batch_size_per_gpu", config.micro_batch, "micro_batch"),
        ("gradient_accumulation_steps", config.accumulate, "accumulate"),
        ("gradient_clipping", config.clip, "clip"),
        ("train_batch_size", rows, "micro_batch x accumulate x ranks"),
    ):
        stated = settings.get(key, "auto")
        # Accelerate writes 1 where the file does not speak of accumulation, so 1 does not count as said.
        unsaid = stated in ("auto", None) or (key == "gradient_accumulation_steps" and stated == 1)
        if not unsaid and float(stated) != float(value):
            raise UserError(f"{file} says {key}={stated} but the recipe's {name} is {value}; "
                            f"write {key}: \"auto\" in the file")
        settings[key] = value
    if "optimizer" in settings or "scheduler" in settings:
        raise UserError(f"{file} has an optimizer or scheduler section; the recipe brings its own: delete it")
    for name in ("fp16", "bf16"):
        stated = settings.get(name, {}).get("enabled", "auto")
        if stated not in ("auto", config.precision == name):
            raise UserError(f"{file} says {name}.enabled={stated} but the recipe's precision is "
                            f"{config.precision}; write enabled: \"auto\" in the file")
    if config.precision == "bf16-pure":
        raise UserError("precision=bf16-pure has no master weights, DeepSpeed keeps them: "
                        "use precision=bf16, or ddp or fsdp")
    return plugin


@contextmanager
def without_sharded_init(accelerator: Accelerator) -> Iterator[None]:
    """Within it a model is built whole on every rank, as it is under every engine but ZeRO-3.

    ZeRO-3's init context draws a parameter's random numbers from another state, so that a random model would start
    from other weights than elsewhere. transformers enters that context whenever it knows of a ZeRO-3 config;
    Accelerate's own switch for it (`zero3_init_context_manager`) leaves transformers' knowledge as it is.
    """
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is None:
        yield
        return
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(plugin.dschf)


def running_engine(accelerator: Accelerator, model: torch.nn.Module) -> str:
    """What really runs, from the type of the prepared model."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    kind = type(model)
    if any(base.__name__ == "DeepSpeedEngine" for base in kind.__mro__):
        return "deepspeed"
    if isinstance(getattr(model, "_orig_mod", model), FSDPModule):
        return "fsdp"
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    return "single" if accelerator.num_processes == 1 else "unconnected processes"


def verify_engine(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Stop when the engine that runs is not the one that was asked for.

    Raises:
        UserError: names both, and the state that Accelerate reports.
    """
    _kept.append(model)
    requested, actual = requested_engine(), running_engine(accelerator, model)
    joined = accelerator.num_processes == world_size()
    if requested == "ddp" and world_size() == 1:
        requested = "single"
    if requested != actual or not joined:
        raise UserError(f"{requested} on {world_size()} processes was asked for, but {actual} on "
                        f"{accelerator.num_processes} runs (Accelerate says {accelerator.distributed_type}); "
                        "check the launch file and the installed versions")


def running_plan(accelerator: Accelerator, model: torch.nn.Module, config: TrainConfig) -> Plan:
    """The plan as the live engine has it, with the recipe's own part of it.

    Raises:
        UserError: the launch file asks for another strategy, offload or degree than what runs.
    """
    from toolkit.strategies import mismatch, observe, read
    from toolkit.strategies.zero.autos import hidden_size_of

    plan = observe(accelerator, model).with_(checkpointing=config.checkpointing)
    file = launch_file()
    if file is not None and file.is_file():
        width = hidden_size_of(accelerator.unwrap_model(model).config.to_dict())
        differing = mismatch(read(file, hidden_size=width).plan, plan)
        if differing:
            raise UserError(f"{file}: {differing}")
    return plan
