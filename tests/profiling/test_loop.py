"""The context manager and the Trainer's callback count what the command does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from toolkit.profiling.loop import MemoryProfile

ROOT = Path(__file__).parents[2]
SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
from toolkit.profiling.counter import preload
preload()
import torch
from toolkit.profiling.loop import MemoryProfile
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
with MemoryProfile() as profile:
    for _ in range(4):
        model(torch.ones(8, 1000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
optimizer.step()
print(json.dumps(profile.rank.to_json()))
"""


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run([sys.executable, str(tmp_path / "loop.py")], capture_output=True, text=True, timeout=100,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    weights = 4 * 1001 * 1000
    assert found["steps"] == 4 and found["ended"] and found["counter"] == "allocations"
    assert 4 * weights <= found["resident"] < 4 * weights + 100_000  # weights, gradients and two states
    assert found["peak"] == found["peaks"][-1] >= 5 * weights


def test_an_optimizer_inside_another_counts_once_and_errors_are_seen() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([weight], lr=0.1)

    class Outer(torch.optim.Optimizer):
        def step(self, closure: object = None) -> None:
            inner.step()

    with pytest.raises(ValueError, match="stop"), MemoryProfile("cpu") as profile:
        Outer([weight], {}).step()
        raise ValueError("stop")
    assert len(profile.rank.steps) == 1 and not profile.rank.ended and profile.rank.counter in ("rss", "allocations")
    inner.step()
    assert len(profile.rank.steps) == 1


@pytest.mark.slow
def test_the_trainers_callback(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from toolkit.profiling.huggingface import MemoryCallback

    callback = MemoryCallback()
    rows = [{"input_ids": list(range(32)), "labels": list(range(32))}] * 8
    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[],
                                  use_cpu=True, save_strategy="no", disable_tqdm=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()
    assert len(callback.profile.rank.steps) == 3 and callback.profile.rank.peak > 0
    assert "memory: peak " in capsys.readouterr().out
