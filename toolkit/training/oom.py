"""When a run is out of memory: told once, with the cause, the state of the process, and what to try next."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.profiling.oom import PostMortem, examine, is_out_of_memory
from toolkit.profiling.snapshot import VIEWER, dump_snapshot, keep_history
from toolkit.training.accelerator import launch_file
from toolkit.training.lighter import Lighter, lighter_or_none
from toolkit.training.run_folder import write_json
from toolkit.training.shrink import Shrink, smaller
from toolkit.training.start import on_failure, on_out_of_memory, rank, world_size
from toolkit.units import format_size

if TYPE_CHECKING:
    from toolkit.training.memory import MemoryWatch
    from toolkit.training.preflight import Preflight

LESS = 0.9
"""What is proposed next is predicted to take at most this share of what this run was predicted to take."""


def explain_out_of_memory(preflight: Preflight, memory: MemoryWatch) -> None:
    """From here on a failed allocation of this process is explained instead of shown as a traceback; with `on_oom: shrink` the
    run begins anew with a smaller micro-batch where that can help."""
    config = preflight.config
    shrink = Shrink(config) if config.on_oom == "shrink" else None
    memory.history = config.memory_snapshot and keep_history(memory.device)
    if config.memory_snapshot and not memory.history:
        preflight.log.say("note: memory_snapshot has no effect on a CPU, whose allocator keeps no history; memory.json has the "
                          "peak by category, phase and module")

    def explain(error: BaseException) -> tuple[str, list[str]]:
        line, lines, found = _state(error, preflight, memory)
        lines += [f"  on_oom        {_no_help(shrink, memory, preflight)}"] if shrink is not None else []
        # The planner needs memory too: what the failed call holds can go now.
        error.__traceback__ = None
        memory.model = None
        gc.collect()
        return line, [*lines, *(f"  try next      {option}" for option in _next(preflight, found))]

    def begin_anew(error: BaseException) -> None:
        if shrink is None:
            return
        if is_out_of_memory(error) and not _no_help(shrink, memory, preflight):
            line, lines, _ = _state(error, preflight, memory)
            shrink.ask(line, lines)
        shrink.follow()

    on_out_of_memory(explain)
    on_failure(begin_anew)


def _state(error: BaseException, preflight: Preflight, memory: MemoryWatch) -> tuple[str, list[str], PostMortem]:
    """(the line that names it, lines of detail, the state of this process), which is kept in the run folder."""
    found = examine(error, memory.device, memory.model)
    where = f"{memory.phase} of step {len(memory.peaks) + 1}" if memory.phase != "load" else "loading the model"
    if memory.phase == "between":
        where = f"step {len(memory.peaks) + 1}"
    _keep(Path(preflight.config.output), {"where": where, "rank": rank(), "predicted": preflight.figures, **found.to_json()})
    details = [*found.lines(), *_predicted(preflight, memory)]
    snapshot = dump_snapshot(Path(preflight.config.output), rank()) if memory.history else None
    if snapshot is not None:
        details.append(f"  snapshot      {snapshot}: open it at {VIEWER}")
    asked = f", {format_size(found.asked)} more were asked for" if found.asked else ""
    at = f" ({found.module})" if found.module else ""
    who = f" on rank {rank()} of {world_size()}" if world_size() > 1 else ""
    line = f"out of memory{who} in {where}{at}: {format_size(found.allocated)} of tensors were alive{asked}"
    return line, details, found


def _no_help(shrink: Shrink, memory: MemoryWatch, preflight: Preflight) -> str:
    """Why a smaller micro-batch is no way out; empty where it may be one."""
    if memory.phase in ("load", "optimizer"):
        what = "the model" if memory.phase == "load" else "the optimizer"
        return f"shrink does not help: what {what} takes is the same for one row"
    if smaller(preflight.config.micro_batch, 1) is None:
        return "shrink has come down to micro_batch=1, and even one row is too much"
    return shrink.why_not


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
