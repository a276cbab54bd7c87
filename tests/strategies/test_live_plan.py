"""Shipped files, launched for real: the Accelerator that runs says of itself what the file asked for."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.specs import FsdpSettings, Plan, ZeroSettings
from toolkit.strategies import mismatch, read
from toolkit.strategies.ship import SHIPPED, Shipped

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("live_plan.py")
NAMES = ("ddp", "zero3", "hsdp", "fsdp-offload-all")
"""One of each engine; tests/engines/test_every_engine.py holds what the recipe reads back to every file."""
HERE = [shipped for shipped in SHIPPED if shipped.name in NAMES]


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launch_words(config: Path, output: Path, *options: str) -> list[str]:
    """The command line of one launcher."""
    program = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--config_file",
        str(config),
    ]
    return [*program, *options, str(SCRIPT), str(output)]


def environment() -> dict[str, str]:
    """A CPU rehearsal: no GPU to be seen, one thread a process, nothing of Accelerate's from outside."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_"))}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": str(ROOT)}  # fmt: skip


def plan_of(result: dict[str, Any]) -> Plan:
    """The plan of a result file."""
    fields = dict(result["plan"])
    fields["fsdp"] = FsdpSettings(**{**fields["fsdp"], "wrap_classes": tuple(fields["fsdp"]["wrap_classes"])})
    fields["zero"] = ZeroSettings(**fields["zero"])
    del fields["ddp"]
    return Plan(**fields)


@pytest.mark.slow
@pytest.mark.parametrize("shipped", HERE, ids=[shipped.name for shipped in HERE])
def test_the_running_engine_is_the_one_of_the_file(shipped: Shipped, tmp_path: Path) -> None:
    config, output = ROOT / f"recipes/accelerate/{shipped.name}.yaml", tmp_path / "live.json"
    words = launch_words(config, output, "--main_process_port", str(free_port()))
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["processes"] == shipped.processes
    # One seed, one model: the first loss does not depend on the strategy.
    assert result["loss"] == pytest.approx(4.17, abs=0.05)
    live, asked = plan_of(result), read(config).plan
    assert mismatch(asked, live) is None
    assert live.checkpointing == "full"
    assert (live.bucket, live.persist, live.shard_size) == (asked.bucket, asked.persist, asked.shard_size)
    if asked.strategy.startswith("zero"):
        assert live.zero == dataclasses.replace(asked.zero, gradient_clipping=0.5)
    else:
        found: dict[str, Any] = {"sync_each_micro_batch": live.fsdp.sync_each_micro_batch}
        if asked.strategy != "ddp":
            # The plugin names the state dict it chose where the file is silent, and the layer class it found.
            found |= {"state_dict": "sharded", "wrap_classes": ("LlamaDecoderLayer",)}
        assert live.fsdp == dataclasses.replace(asked.fsdp, **found)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_two_nodes_of_one_process_join(strategy: str, tmp_path: Path) -> None:
    """Two launchers on this machine stand for two nodes; the second learns its rank from the command line."""
    from toolkit.specs import Cluster, Gpu, Workload
    from toolkit.strategies import STRATEGIES, render

    gpu = Gpu(name="cpu", memory=2**33, bf16_flops=None, fp16_flops=None, fp32_flops=1e11, bandwidth=1e10, link="memory",
              link_bandwidth=1e9, pcie_bandwidth=1e9)  # fmt: skip
    files = render(Plan(strategy=STRATEGIES[strategy].name), Workload(), Cluster(gpu=gpu, gpus_per_node=1, nodes=2))
    config, output, port = files.write(tmp_path)[0], tmp_path / "live.json", str(free_port())
    options = ["--main_process_ip", "127.0.0.1", "--main_process_port", port, "--machine_rank"]
    nodes = [subprocess.Popen(launch_words(config, output, *options, rank), cwd=ROOT, env=environment(),
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for rank in ("0", "1")]  # fmt: skip
    try:
        ends = [node.communicate(timeout=240) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], ends[0][1][-3000:]
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["processes"] == 2 and result["plan"]["strategy"] == strategy
