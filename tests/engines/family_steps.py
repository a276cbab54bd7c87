"""Run three real training steps of each model of a JSON file and print the peak of the last one in bytes.

`family_steps.py FILE`

Every allocation is counted (the shim is preloaded). One process for all of them: a step takes a fraction of a second.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from toolkit.profiling.counter import device_counter
from toolkit.specs import ModelSpec
from toolkit.timeline.build import AUTO_CLASSES, load_config, model_kind


def peak_of(config: dict[str, Any], batch: int, length: int, checkpointing: bool) -> int:
    """Bytes at the peak of the third step."""
    spec = ModelSpec(name="model", config=config)
    counter = device_counter("cpu")
    gc.collect()
    start = counter.live()
    kind = model_kind(spec)
    model = getattr(transformers, AUTO_CLASSES[kind]).from_config(load_config(spec), dtype=torch.float32)
    model.config.use_cache = False
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(3, 60, (batch, length))
    labels = torch.zeros(batch, dtype=torch.long) if kind == "sequence-classification" else ids
    for _ in range(3):
        gc.collect()
        counter.reset()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    return counter.peak() - start


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    peak_of(rows[0]["config"], 1, 8, False)  # kernels that keep a few kilobytes from their first call on
    print(json.dumps([peak_of(row["config"], row["batch"], row["length"], row["checkpointing"]) for row in rows]))
