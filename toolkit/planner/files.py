"""The folder that `recommend --write` makes: everything that launches the plan, and why it was chosen."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.planner.recommendation import Recommendation
from toolkit.planner.search import Evaluated
from toolkit.strategies.base import write_whole


def scaled_rate(chosen: Evaluated, base_batch: int, rate: float) -> tuple[float, str]:
    """(rate, why) for the plan's global batch: square root for Adam-like optimizers, linear for SGD."""
    work = chosen.candidate.workload
    batch = work.micro_batch * work.accumulate * chosen.candidate.data_ranks
    if work.optimizer == "sgd":
        return rate * batch / base_batch, f"linear in the global batch of {batch}, with warm-up"
    return rate * (batch / base_batch) ** 0.5, f"square root of the global batch of {batch}"


def recipe_config(chosen: Evaluated, model: str, folder: Path, learning_rate: float) -> dict[str, Any]:
    """The keys of recipes/train.py that the plan and the workload decide."""
    work, plan = chosen.candidate.workload, chosen.candidate.plan
    config: dict[str, Any] = {
        "model": model,
        "data": "data.jsonl",
        "output": str(folder),
        "method": work.method,
        "seq_len": work.seq_len,
        "micro_batch": work.micro_batch,
        "accumulate": work.accumulate,
        "precision": work.precision,
        "attention": work.attention,
        "loss": work.loss,
        "checkpointing": plan.checkpointing,
        "optimizer": work.optimizer,
        "learning_rate": learning_rate,
        "epochs": 1,
    }
    if work.method != "full":
        config |= {"lora_rank": work.lora_rank, "lora_targets": work.lora_targets}
    return config


def write_files(
    recommendation: Recommendation, folder: Path, model: str, *, base_batch: int | None = None, learning_rate: float = 2e-5
) -> Recommendation:
    """Write accelerate.yaml, ds_config.json where needed, train.yaml, launch.sh, recommendation.json and a README.

    Raises:
        UserError: the folder can't be written.
    """
    import yaml

    from toolkit.strategies import render

    chosen = recommendation.chosen
    if chosen is None:
        return recommendation
    candidate = chosen.candidate
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--write {folder}: it is a file; name a folder")
    launch = render(candidate.plan, candidate.workload, candidate.cluster)
    rate, how = (learning_rate, "")
    if base_batch is not None:
        rate, how = scaled_rate(chosen, base_batch, learning_rate)
    local = Path(model)
    config = recipe_config(chosen, str(local.resolve()) if local.exists() else model, folder, rate) | dict(launch.recipe)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = launch.write(folder)
    except OSError as error:
        raise UserError(f"--write {folder}: {error.strerror or error}") from None
    header = f"# What is trained. The plan it was made for: {candidate.name}; change `data` and the learning rate freely.\n"
    if how:
        header += f"# learning_rate: {learning_rate:g} was tuned for {base_batch} samples; scaled by the {how}.\n"
    train = folder / "train.yaml"
    write_whole(train, header + yaml.safe_dump(config, sort_keys=False))
    script = folder / "launch.sh"
    write_whole(script, launch.shell(folder, "recipes/train.py", train))
    script.chmod(0o755)
    jobs = []
    if candidate.cluster.nodes > 1:
        jobs.append(folder / "launch.sbatch")
        write_whole(jobs[0], _sbatch(folder, candidate.cluster.nodes, candidate.cluster.gpus_per_node))
    write_whole(folder / "README.md", _readme(recommendation, folder))
    names = [str(p) for p in (*written, train, script, *jobs, folder / "README.md", folder / "recommendation.json")]
    result = replace(recommendation, files=list(dict.fromkeys(names)))
    write_whole(folder / "recommendation.json", json.dumps(result.to_json(), indent=1))
    return result


def _sbatch(folder: Path, nodes: int, gpus: int) -> str:
    """A Slurm job: one launcher a node, which starts a process per GPU."""
    name = shlex.quote(folder.name)
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --signal=TERM@300
# Five minutes before the time is over every rank gets SIGTERM: it finishes its step, saves and ends. Submit again to go on.
# TORCH_ELASTIC_SHUTDOWN_TIMEOUT: the seconds that the launchers leave the ranks to do so.
# Time, partition and account are yours to add: sbatch --time=... {shlex.quote(str(folder / "launch.sbatch"))}
set -eu
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${{TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240}}"
export MAIN_PROCESS_IP="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
srun --kill-on-bad-exit=1 bash -c 'MACHINE_RANK="$SLURM_NODEID" exec sh "$0"' {shlex.quote(str(folder / "launch.sh"))}
"""


def _readme(recommendation: Recommendation, folder: Path) -> str:
    chosen = recommendation.chosen
    lines = [f"# {chosen.candidate.name if chosen else ''}", "", recommendation.one_gpu, "", recommendation.reason + ".", ""]
    if chosen and chosen.estimate:
        memory = chosen.estimate.memory
        lines += [f"Predicted peak per device: {memory.peak_total:,} bytes of {memory.capacity:,}, at {memory.at_peak.phase} "
                  f"({memory.at_peak.module or 'the model itself'}).", ""]
    lines += ["Set `data` in train.yaml, then:", "", f"    sh {shlex.quote(str(folder / 'launch.sh'))}", "",
              "`recommendation.json` holds every plan that was tried, with its figures.", ""]
    return "\n".join(lines)
