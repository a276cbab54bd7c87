"""What the recipe's profiler costs, as ratios of step times within one process.

    python benchmarks/profiler.py [--rounds 6] [--json]

Runs a training step of a small Llama (fp32, AdamW, one thread) in turn in three ways: without hooks, with the hooks that tell
the phases (every step of a run with profile=true), and with every allocation recorded (its third step). The order changes from
round to round; the figure is the median over rounds of the ratio to the bare step of the same round, in CPU seconds of the
process, so that other load on the machine counts for little. `bare again` is a second bare step: what a ratio of 1 looks like.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit.profiling.counter import preload

WAYS = ("bare", "bare again", "phases", "recorded")


def measure(rounds: int, hidden: int, layers: int, tokens: int) -> dict[str, Any]:
    """Median ratios to the bare step, with the seconds of one bare step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from toolkit.training.memory import STEADY_FROM, MemoryWatch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=4096, hidden_size=hidden, intermediate_size=hidden * 3, num_hidden_layers=layers,
                         num_attention_heads=8, num_key_value_heads=4)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 4096, (2, tokens))

    def step(memory: MemoryWatch | None) -> float:
        started = time.process_time()
        if memory is not None:
            memory.begin_step()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if memory is not None:
            memory.end_step()
        return time.process_time() - started

    def watch(steps_done: int) -> MemoryWatch:
        memory = MemoryWatch("cpu")
        memory.follow(model, optimizer)
        memory.peaks = [0] * steps_done
        return memory

    for _ in range(2):
        step(None)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    order = list(WAYS)
    draw = random.Random(0)
    for _ in range(rounds):
        draw.shuffle(order)
        for way in order:
            memory = None if way.startswith("bare") else watch(STEADY_FROM - (way == "recorded"))
            gc.collect()
            seconds[way].append(step(memory))
            if memory is not None:
                memory.leave()
    ratios = {way: statistics.median(a / b for a, b in zip(seconds[way], seconds["bare"], strict=True)) for way in WAYS[1:]}
    return {"bare step, seconds": round(statistics.median(seconds["bare"]), 4), **{w: round(r, 4) for w, r in ratios.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = {"cores": os.cpu_count(), "load before": round(os.getloadavg()[0], 2), "rounds": arguments.rounds,
              "hidden 512, 6 layers, 2 x 256 tokens": measure(arguments.rounds, 512, 6, 256)}
    print(json.dumps(result, indent=None if arguments.json else 1))


if __name__ == "__main__":
    preload()
    main()
