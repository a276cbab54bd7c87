"""When a run is out of memory: told once, with the cause, the state of the process, and what to try next."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.profiling.oom import PostMortem, examine
from toolkit.training.accelerator import launch_file
from toolkit.training.lighter import Lighter, lighter_or_none
from toolkit.training.run_folder import write_json
from toolkit.training.start import on_out_of_memory, rank, world_size
from toolkit.units import format_size

if TYPE_CHECKING:
    from toolkit.training.memory import MemoryWatch
    from toolkit.training.preflight import Preflight

LESS = 0.9
"""What is proposed next is predicted to take at most this share of what this run was predicted to take."""


def explain_out_of_memory(preflight: Preflight, memory: MemoryWatch) -> None:
    """From here on a failed allocation of this process is explained instead of shown as a traceback."""

    def explain(error: BaseException) -> tuple[str, list[str]]:
        model = memory.model
        found = examine(error, memory.device, model)
        where = f"{memory.phase} of step {len(memory.peaks) + 1}" if memory.phase != "load" else "loading the model"
        if memory.phase == "between":
            where = f"step {len(memory.peaks) + 1}"
        lines = [*found.lines(), *_predicted(preflight, memory)]
        _keep(Path(preflight.config.output), {"where": where, "rank": rank(), "predicted": preflight.figures, **found.to_json()})
        # The planner needs memory too: what the failed call holds can go now.
        error.__traceback__ = None
        memory.model = model = None
        gc.collect()
        lines += [f"  try next      {option}" for option in _next(preflight, found)]
        asked = f", {format_size(found.asked)} more were asked for" if found.asked else ""
        at = f" ({found.module})" if found.module else ""
        held = f"{format_size(found.allocated)} of tensors"
        who = f" on rank {rank()} of {world_size()}" if world_size() > 1 else ""
        return f"out of memory{who} in {where}{at}: {held} were alive{asked}", lines

    on_out_of_memory(explain)


def _predicted(preflight: Preflight, memory: MemoryWatch) -> list[str]:
    if not preflight.figures:
        return []
    claim = preflight.figures["peak_allocated"]
    seen = max([*memory.peaks, memory.highest, memory.counter.peak() - memory.start])
    return [f"  predicted     {format_size(claim)} of tensors at the peak; {format_size(seen)} were reached"]


def _next(preflight: Preflight, state: PostMortem) -> list[Lighter]:
    """What is predicted to take clearly less than this run, and less than there was."""
    if preflight.plan is None:
        return []
    limits = [int(preflight.figures["peak_total"] * LESS)] if preflight.figures else []
    limits += [state.capacity - (state.outside or 0)] if state.capacity else []
    found = lighter_or_none(preflight.spec, preflight.workload, preflight.plan, preflight.cluster, launch_file(),
                            min(limits, default=None))
    return [option for option in found if option.fits][:3]


def _keep(folder: Path, record: dict[str, Any]) -> None:
    """out_of_memory.json in the run folder; a run folder that can't be written is no reason to say less."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "out_of_memory.json", {"schema": 1, **record})
    except OSError:
        return
