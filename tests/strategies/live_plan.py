"""Run by `accelerate launch`: prepare a tiny model, take one step, and write what the live Accelerator says it runs."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.strategies import observe
from toolkit.training.accelerator import build_accelerator, verify_engine
from toolkit.training.config import TrainConfig


def main(output: str) -> None:
    """One step on a two-layer Llama; rank 0 writes the plan and the gradient norm to `output`."""
    config = TrainConfig(model="none", data=("none",), output=str(Path(output).parent), precision="fp32", max_steps=1,
                         clip=0.5, accumulate=2, tracker="none")  # fmt: skip
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    accelerator = build_accelerator(config)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    verify_engine(accelerator, prepared)
    ids = torch.arange(32, device=accelerator.device).reshape(2, 16)
    losses = []
    for _ in range(config.accumulate):
        with accelerator.accumulate(prepared):
            loss = prepared(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    if accelerator.is_main_process:
        plan = dataclasses.asdict(observe(accelerator, prepared))
        result = {"plan": plan, "processes": accelerator.num_processes, "loss": losses[0]}
        Path(output).write_text(json.dumps(result), encoding="utf-8")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
    # As the recipe leaves: threads of the communication libraries can abort a process that is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
