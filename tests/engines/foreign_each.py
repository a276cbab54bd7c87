"""Do what the environment lists (ACTIONS, as JSON), in one launch of an engine: the recipe's keys as arguments.

An action is [what, names of folders below the run folder]. The main process leaves told.json: `losses`, for every `train` those
of each step, and what was seen on the way (`facts`). Engines save and load by their own means.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.training.config import TrainConfig, parse_arguments
from toolkit.training.start import run

FIRST, LAST = 4, 8


class OwnAdamW(torch.optim.AdamW):
    """A user's own optimizer."""


class Collectives(TorchDispatchMode):
    """Counts the bytes that ranks exchange."""

    moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.moved += sum(t.numel() * t.element_size() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


class Launch:
    """The running engine, and where it stands."""

    def __init__(self, config: TrainConfig) -> None:
        from toolkit.training.accelerator import build_accelerator, running_plan
        from toolkit.training.assets import write_assets
        from toolkit.training.checkpoint import Checkpoints, Identity
        from toolkit.training.data.prepare import prepare_data
        from toolkit.training.model import build_model, find_source, isolates_by_position, load_config, load_tokenizer
        from toolkit.training.optimizer import build_optimizer

        self.config, self.folder = config, Path(config.output)
        self.accelerator = accelerator = build_accelerator(config)
        source = find_source(config, accelerator)
        tokenizer, model_config = load_tokenizer(config, source), load_config(config, source)
        self.data = prepare_data(config, tokenizer, model_config, accelerator, isolates=isolates_by_position(model_config))
        model = build_model(config, source, model_config, tokenizer, accelerator)
        optimizer = build_optimizer(config, model)
        optimizer.__class__ = OwnAdamW
        if os.environ.get("COMPILE"):
            model = torch.compile(model, backend=os.environ["COMPILE"])
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        identity = Identity(strategy=running_plan(accelerator, self.model, config).label, processes=accelerator.num_processes,
                            method=config.method, optimizer=config.optimizer, data=self.data.facts["fingerprint"],
                            rows=self.data.train.rows_per_step)  # fmt: skip
        if accelerator.is_main_process:
            write_assets(self.folder / "model", accelerator.unwrap_model(self.model), tokenizer, model_config)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", accelerator, identity, 9, lambda line: None,
                                       record={"config": asdict(config)})
        self.step = 0
        self.facts: dict[str, Any] = {"optimizer": type(self._innermost()).__name__,
                                      "compiled": any("_orig_mod" in name for name, _ in self.model.named_parameters())}

    def _innermost(self) -> Any:
        inner = self.optimizer
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        return inner

    def note(self, name: str, value: float) -> None:
        """Keep the largest of all ranks."""
        from accelerate.utils import gather_object

        self.facts[name] = max([self.facts.get(name, 0), *gather_object([value])])

    def train(self) -> list[float]:
        """Go on to the next multiple of FIRST; the loss of each step."""
        from resume_each import train

        last = FIRST if self.step < FIRST else LAST
        steps = range(self.step + 1, last + 1)
        losses = [train(self.accelerator, self.model, self.optimizer, self.config, self.data, step)[0] for step in steps]
        self.step = last
        return losses

    def save_ours(self, name: str) -> None:
        """A checkpoint of this toolkit."""
        from toolkit.training.checkpoint import Progress

        with Collectives() as seen:
            assert self.checkpoints.save(Progress(step=self.step)) is None
        self.note("bytes moved by saving", seen.moved)
        if self.accelerator.is_main_process:
            (self.checkpoints.folder / f"step-{self.step:08d}").rename(self.folder / name)

    def load_ours(self, name: str) -> None:
        """One, however it came about."""
        from toolkit.training.state import loading

        found = self.checkpoints.find(str(self.folder / name))
        assert found is not None
        read, really = [0], loading._take

        def counted(file: Any, offset: int, tensor: torch.Tensor, dtype: torch.dtype, *rest: Any) -> None:
            read[0] += tensor.numel() * dtype.itemsize  # Without what it only holds to a checksum.
            really(file, offset, tensor, dtype, *rest)

        loading._take = counted
        self.step = self.checkpoints.load(found).step
        loading._take = really
        self.note("bytes read by loading", read[0])

    def gather(self) -> None:
        """What an export of the running model moves, for comparison."""
        from toolkit.training.export import whole_parameters

        with Collectives() as seen:
            whole_parameters(self.accelerator, self.model, torch.float32, trainable_only=False)
        self.note("bytes moved by gathering", seen.moved)

    def save_theirs(self, name: str) -> None:
        """What the engine's users write."""
        if hasattr(self.model, "save_checkpoint"):
            self.model.save_checkpoint(str(self.folder / name))
        else:
            self.accelerator.save_state(str(self.folder / name))

    def load_theirs(self, name: str) -> None:
        """What the engine's users read."""
        self.step = FIRST
        if not hasattr(self.model, "load_checkpoint"):
            self.accelerator.load_state(str(self.folder / name), load_kwargs=None)
            return
        universal = (self.folder / name / "latest_universal").exists()
        self.model._config.load_universal_checkpoint = universal
        tag = (self.folder / name / "latest_universal").read_text().strip() if universal else None
        path, _ = self.model.load_checkpoint(str(self.folder / name), tag=tag)
        assert path is not None
        assert self.model.global_steps == FIRST, self.model.global_steps

    def _dcp(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer.optimizer)
        return {"model": model, "optim": optimizer}

    def save_dcp(self, name: str) -> None:
        """torch's own distributed checkpoint of model and optimizer."""
        import torch.distributed.checkpoint as dcp

        dcp.save(self._dcp(), checkpoint_id=str(self.folder / name))

    def load_dcp(self, name: str) -> None:
        """As torch's tutorial does it."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._dcp()
        dcp.load(state, checkpoint_id=str(self.folder / name))
        set_state_dict(self.model, self.optimizer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = FIRST

    def convert(self, source: str, target: str, to: str = "toolkit", model: str | None = None) -> None:
        """As the command does it, on the main process."""
        if self.accelerator.is_main_process:
            from toolkit.training.convert.read import hold
            from toolkit.training.convert.write import convert

            convert(hold(self.folder / source), self.folder / target, to, model=self.folder / model if model else None)

    def to_universal(self, source: str, target: str) -> None:
        """By DeepSpeed's own tool."""
        if self.accelerator.is_main_process:
            tag = (self.folder / source / "latest").read_text()
            words = ["--input_folder", str(self.folder / source / tag), "--output_folder", str(self.folder / target / tag),
                     "--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
            words = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words]
            done = subprocess.run(words, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr


def main(arguments: list[str]) -> None:
    launch, losses = Launch(parse_arguments(arguments)), {}
    for what, *names in json.loads(os.environ["ACTIONS"]):
        if what == "train":
            losses[names[0]] = launch.train()
        else:
            getattr(launch, what)(*names)
            launch.accelerator.wait_for_everyone()
    if launch.accelerator.is_main_process:
        told = {"losses": losses, "facts": launch.facts}
        (launch.folder / "told.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    run(main)
