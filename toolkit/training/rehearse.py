"""Somebody else's training script on CPU processes, with the engine that the launch file names.

    accelerate launch --config_file recipes/accelerate/fsdp.yaml -m toolkit.training.rehearse SCRIPT.py [ARGUMENTS...]

On a machine with GPUs a launch file works with any script that uses Accelerate, Hugging Face's Trainer and TRL's trainers
included, and `-m toolkit.training.rehearse` is not needed. Without GPUs Accelerate runs something else than what the file asks
for, and says nothing; here it runs that engine, so that a script can be tried before a GPU is paid for. It stays as it is.
"""

from __future__ import annotations

import runpy
import sys
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.training.start import run


def engage_for_others() -> None:
    """Have whoever asks Accelerate for its state first get that of the launched engine, on CPU processes; on a machine with
    GPUs nothing is changed."""
    import torch
    from accelerate.state import PartialState

    from toolkit.training.accelerator import check_launch, engage_on_cpu, requested_engine

    check_launch()
    engine = requested_engine()
    if torch.accelerator.is_available() or engine == "single":
        return
    original = PartialState.__init__

    @wraps(original)
    def begin(self: Any, cpu: bool = False, **settings: Any) -> None:
        if PartialState._shared_state == {} and not engaging:
            engaging.append(engine)
            engage_on_cpu(engine, settings.get("timeout", timedelta(minutes=30)))
            engaging.clear()
        original(self, cpu, **settings)

    engaging: list[str] = []
    PartialState.__init__ = begin


def main(arguments: list[str]) -> None:
    """Run the script that the first word names, with the other words as its command line.

    Raises:
        UserError: no script is named, or there is none.
    """
    if not arguments or not Path(arguments[0]).is_file():
        named = f"{arguments[0]!r} is no file" if arguments else "no script is named"
        raise UserError(f"{named}; write: accelerate launch --config_file FILE -m toolkit.training.rehearse SCRIPT.py WORDS...")
    engage_for_others()
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    run(main)
