"""What run a checkpoint is of, and where in it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError
from toolkit.specs import Plan
from toolkit.training.assets import FOLDER
from toolkit.training.config import TrainConfig

if TYPE_CHECKING:
    from toolkit.training.data.prepare import Data


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands after an optimizer step. With the order of the data a function of the step, this
    is all."""

    step: int
    """Optimizer steps done."""
    skipped: int = 0
    """Of these, steps that a gradient overflow (fp16) undid."""
    tokens: int = 0
    """Tokens seen so far, all ranks."""

    def after(self, tokens: int, *, skipped: bool) -> Progress:
        """One optimizer step later."""
        return Progress(step=self.step + 1, skipped=self.skipped + skipped, tokens=self.tokens + tokens)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What run a checkpoint is of. Strategy and processes may change between save and resume, the rest may not."""

    strategy: str
    processes: int
    method: str
    optimizer: str
    data: str
    """The data's fingerprint: with other data, the position in it means nothing."""
    rows: int
    """Rows of the global batch: the position in the data is `step x rows`."""
    tokenizer: str | None = None
    """The vocabulary's fingerprint, where it is known."""

    @classmethod
    def of(cls, config: TrainConfig, plan: Plan, data: Data, tokenizer: Any, processes: int) -> Identity:
        """A recipe's run."""
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
        return cls(strategy=plan.label, processes=processes, method=config.method, optimizer=config.optimizer,
                   data=data.facts["fingerprint"], rows=data.train.rows_per_step,
                   tokenizer=hashlib.sha256(vocabulary).hexdigest()[:16])

    def check(self, path: Path, made: dict[str, Any]) -> None:
        """Hold the identity that the manifest of the checkpoint at `path` states to this run's.

        Raises:
            UserError: says what differs, and what would be right.
        """
        if made["rows"] not in (self.rows, None):
            raise UserError(f"{path} was made with a global batch of {made['rows']} rows, this run has {self.rows}; "
                            f"set micro_batch and accumulate so that micro_batch x accumulate x processes is {made['rows']}, "
                            "give another output, or start anew with resume=never")
        tokenizers = {made.get("tokenizer"), self.tokenizer} - {None}
        if len(tokenizers) > 1:
            raise UserError(f"{path} was made with another tokenizer (it is in {path / FOLDER}); name the model it was made "
                            "with, give another output, or start anew with resume=never")
        for name in ("method", "optimizer", "data"):
            value = getattr(self, name)
            if made[name] not in (value, None):  # A converted checkpoint does not know all of them.
                raise UserError(f"{path} was made with {name} {made[name]}, this run has {name} {value}; launch "
                                "it alike, give another output, or start anew with resume=never")
