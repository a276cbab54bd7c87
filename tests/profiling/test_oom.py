"""A failed allocation: recognised whichever library raised it, and the process's state told from what is alive."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from toolkit.profiling.oom import PostMortem, asked_for, examine, is_out_of_memory, live_groups, module_of
from toolkit.units import GIB, MIB

ROOT = Path(__file__).parents[2]
CPU = ("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate {} "
       "bytes. Error code 12")
CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.10 GiB is free."


@pytest.mark.parametrize(("error", "asked"), [
    (torch.OutOfMemoryError(CUDA), 5 * GIB // 2), (RuntimeError(CPU.format(8 * MIB)), 8 * MIB), (MemoryError(), None),
    (RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB."), 20 * MIB),
])  # fmt: skip
def test_it_is_recognised_also_behind_another_error(error: Exception, asked: int | None) -> None:
    assert is_out_of_memory(error) and asked_for(error) == asked
    try:
        try:
            raise error
        except type(error) as cause:
            raise ValueError("the engine failed") from cause
    except ValueError as outer:
        assert is_out_of_memory(outer) and asked_for(outer) == asked


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("out of memory"), OSError(12, "x"), None])
def test_other_errors_are_not(error: Exception | None) -> None:
    assert not is_out_of_memory(error)


class Greedy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_the_innermost_module_is_named() -> None:
    model = Greedy()
    model.inner[1].forward = lambda x: torch.empty(1 << 50)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as failed:
        model(torch.zeros(1, 4))
    assert is_out_of_memory(failed.value) and asked_for(failed.value) == 1 << 52
    assert module_of(failed.value, model) == "inner.1"
    found = examine(failed.value, "cpu", model)
    assert found.module == "inner.1" and found.asked == 1 << 52 and found.host["total"] > found.host["available"] > 0
    json.dumps(found.to_json())


def test_live_tensors_are_told_apart() -> None:
    model = torch.nn.Linear(300, 500, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    held = torch.empty(1000, 777)
    groups = dict(live_groups(1 << 40, "cpu", most=100))
    assert groups["parameters"] >= 600_000 and groups["gradients"] >= 600_000 and groups["optimizer states"] >= 1_200_000
    assert groups["float32 tensors of 1000 x 777"] == held.nbytes
    assert sum(groups.values()) == 1 << 40


def test_fragmentation_is_named_when_it_is_large() -> None:
    state = PostMortem("cuda", 4 * GIB, 40 * GIB, 70 * GIB, GIB, 80 * GIB, "", [])
    assert state.fragmentation == 30 * GIB and any("expandable_segments" in line for line in state.lines())
    assert not any("expandable" in line for line in PostMortem("cuda", 1, 69 * GIB, 70 * GIB, GIB, 80 * GIB, "").lines())


@pytest.mark.slow
def test_a_launched_run_says_it_once(tiny_model: Path, tmp_path: Path) -> None:
    """Two ranks, each with an address space that is too small for the scores of eager attention."""
    model = tmp_path / "long"
    model.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}), encoding="utf-8")
    text = "\n\n".join(f"The fox number {i} jumps over the dog." for i in range(12000))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "recipes/accelerate/ddp.yaml"),
             "--num_processes", "2", "--main_process_port", "0", str(ROOT / "recipes/train.py"), f"model=config:{model}",
             f"data={tmp_path / 'text.txt'}", f"output={tmp_path / 'run'}", "seq_len=8192", "micro_batch=8", "attention=eager",
             "max_steps=1", "precision=fp32", "tracker=none", "preflight=warn", "timeout_minutes=2",
             "memory_snapshot=true"]
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    limited = ["bash", "-c", 'ulimit -v 8000000; exec "$@"', "bash", *words]
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, timeout=200, env=quiet)
    output = done.stdout + done.stderr
    said = re.findall("error: out of memory on rank [01] of 2 in forward of step 1", output)
    assert done.returncode != 0 and len(said) == 1, output
    assert "(model.layers.0.self_attn)" in output and "  asked for " in output and "  predicted  " in output
    assert "can't allocate" not in output and output.count("memory_snapshot has no effect on a CPU") == 1
    assert output.count("  try next  ") >= 1 and "micro_batch=" in output.split("  try next  ", 1)[1]
    record = json.loads((tmp_path / "run" / "out_of_memory.json").read_text(encoding="utf-8"))
    assert record["asked"] > GIB and record["predicted"]["peak_total"] > record["capacity"]
