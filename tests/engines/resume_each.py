"""Go on from one checkpoint after the other in one launch: the recipe's keys as arguments, the checkpoints in the
environment (RESUME_FROM: name to path, as JSON).

The main process leaves resumed.json in the run folder: for each checkpoint, loss and gradient norm of every step. An
engine that has already trained is a harder place to load into than a new one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from toolkit.training.config import TrainConfig, parse_arguments
from toolkit.training.start import run


def main(arguments: list[str]) -> None:
    config = parse_arguments(arguments)
    from toolkit.training.accelerator import build_accelerator, running_plan
    from toolkit.training.checkpoint import Checkpoints, Identity
    from toolkit.training.data.prepare import prepare_data
    from toolkit.training.model import build_model, find_source, isolates_by_position, load_config, load_tokenizer
    from toolkit.training.optimizer import build_optimizer

    accelerator = build_accelerator(config)
    source = find_source(config, accelerator)
    tokenizer, model_config = load_tokenizer(config, source), load_config(config, source)
    data = prepare_data(config, tokenizer, model_config, accelerator, isolates=isolates_by_position(model_config))
    model = build_model(config, source, model_config, tokenizer, accelerator)
    model, optimizer = accelerator.prepare(model, build_optimizer(config, model))
    identity = Identity(strategy=running_plan(accelerator, model, config).label, processes=accelerator.num_processes,
                        method=config.method, optimizer=config.optimizer, data=data.facts["fingerprint"],
                        rows=data.train.rows_per_step)  # fmt: skip
    checkpoints = Checkpoints(Path(config.output) / "checkpoints", accelerator, identity, config.keep, lambda line: None)
    told: dict[str, list[list[float]]] = {}
    for name, path in json.loads(os.environ["RESUME_FROM"]).items():
        found = checkpoints.find(path)
        assert found is not None
        torch.use_deterministic_algorithms(True, warn_only=True)  # Memory that nothing has filled is NaN.
        done = checkpoints.load(found)
        torch.use_deterministic_algorithms(False)
        check_whole(model, optimizer)
        steps = range(done.step + 1, (config.max_steps or 0) + 1)
        told[name] = [train(accelerator, model, optimizer, config, data, step) for step in steps]
    if accelerator.is_main_process:
        Path(config.output).mkdir(parents=True, exist_ok=True)
        (Path(config.output) / "resumed.json").write_text(json.dumps(told), encoding="utf-8")


def check_whole(model: Any, optimizer: Any) -> None:
    """All of the optimizer's state is filled, DeepSpeed's padding too, and what ZeRO computes with is cast from its masters."""
    inner = getattr(optimizer.optimizer, "optimizer", optimizer.optimizer)
    values = [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
    assert values or type(inner) is torch.optim.SGD
    assert not any(getattr(value, "_local_tensor", value).isnan().any() for value in values)
    if hasattr(optimizer.optimizer, "update_lp_params"):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.optimizer.update_lp_params()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def train(accelerator: Any, model: Any, optimizer: Any, config: TrainConfig, data: Any, step: int) -> list[float]:
    """One step as the recipe takes it; (loss, gradient norm)."""
    from toolkit.training.optimizer import rate_at, set_rate
    from toolkit.training.step import across_ranks, count_batch, gradient_norm

    world, loss, norm = accelerator.num_processes, 0.0, 0.0
    batches = data.train.step(step - 1)
    targets, _tokens = count_batch(accelerator, batches)
    set_rate(optimizer, rate_at(step, config.max_steps or 0, config, world))
    for batch in batches:
        with accelerator.accumulate(model):
            summed = model(**batch.to(accelerator.device))
            loss += float(summed)
            accelerator.backward(summed * (world * config.accumulate / targets))
            if accelerator.sync_gradients:
                norm = gradient_norm(accelerator, model, config.clip)
            optimizer.step()
            optimizer.zero_grad()
    return [across_ranks(accelerator, loss)[0] / targets, norm]


if __name__ == "__main__":
    run(main)
