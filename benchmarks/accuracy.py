"""How far the estimates are from the real engines, side by side with what people reach for otherwise.

    python benchmarks/accuracy.py [--measure] [--json]

Recorded rows are in benchmarks/data/engine_cpu.jsonl; `--measure` runs each of them again on this machine. The table and
its figures go to benchmarks/results/accuracy.json, with versions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft")
sys.path.insert(0, str(HERE))

from engine_truth import measure  # noqa: E402

from toolkit.estimate.engine import Estimator  # noqa: E402
from toolkit.estimate.result import Estimate  # noqa: E402
from toolkit.specs import Cluster, ModelSpec, Plan, Workload  # noqa: E402


def rows() -> list[dict[str, Any]]:
    """The recorded measurements."""
    return [json.loads(line) for line in (HERE / "data" / "engine_cpu.jsonl").read_text().splitlines()]


def model_spec(name: str) -> ModelSpec:
    """One of the small models of the measurements."""
    return ModelSpec(name=name, config=json.loads((HERE / "data" / "models" / f"{name}.json").read_text()))


def request(row: dict[str, Any]) -> tuple[Workload, Plan, Cluster]:
    """The workload, plan and cluster of a measured row."""
    from toolkit.specs.detect import make_cluster

    workload = Workload(
        method="lora" if row["lora_rank"] else "full", lora_rank=row["lora_rank"] or 16, seq_len=row["seq_len"],
        micro_batch=row["micro_batch"], accumulate=row["accumulate"], precision=row["precision"], weights_dtype="fp32",
        optimizer=row["optimizer"], attention=row["attention"],
    )  # fmt: skip
    plan = Plan(strategy=row["strategy"], checkpointing=row["checkpointing"], tp=row.get("tp", 1), sp=row.get("sp", 1),
                shard_size=row.get("shard_size"))
    if row["strategy"].startswith("zero") and row["bucket"]:
        plan = plan.with_(bucket=row["bucket"], persist=row["persist"] if row["strategy"] == "zero3" else None)
    return workload, plan, make_cluster(gpu="cpu", gpus=row["world"])


def held_by_the_script(row: dict[str, Any], estimate: Estimate) -> int:
    """Bytes that the measuring script kept alive besides the engine (see benchmarks/data/README.md)."""
    return estimate.model.trainable_parameters * 4 if row.get("held_references") else 0


def others(row: dict[str, Any], estimate: Estimate) -> dict[str, float]:
    """What other estimators say of the row, in bytes per rank.

    accelerate estimate-memory (accelerate/commands/estimate.py): the largest of its terms, 4 x the model for Adam, not
    divided by ranks. DeepSpeed (runtime/zero/stage_1_and_2.py and stage3.py, estimate_zero{2,3}_model_states_mem_needs,
    no offload): 4 P + 16 P / N, and 4 x the largest layer + 18 P / N. The rule of thumb: 18 bytes per parameter over N.
    """
    parameters, world, strategy = estimate.model.parameters, row["world"], row["strategy"]
    said: dict[str, float] = {"accelerate estimate-memory": 16.0 * parameters, "18 B/parameter over N": 18.0 * parameters / world}
    largest = estimate.model.vocab_size * estimate.model.hidden_size
    if strategy in ("zero1", "zero2"):
        said["DeepSpeed's estimator"] = 4.0 * parameters + 16.0 * parameters / world
    elif strategy == "zero3":
        said["DeepSpeed's estimator"] = 4.0 * largest + 18.0 * parameters / world
    return said


def compare(measured_again: bool) -> dict[str, Any]:
    """Every row with its error, and the summary."""
    estimators: dict[str, Estimator] = {}
    table, errors, resident_errors, close = [], [], [], 0
    rivals: dict[str, list[float]] = {}
    for row in rows():
        if measured_again:
            found = measure(row)
            row = {**row, "steady_peak": max(found["peaks"][2:]), "resident": found["resident"][2], "held_references": False}
        estimator = estimators.setdefault(row["model"], Estimator(model_spec(row["model"])))
        estimate = estimator.estimate(*request(row))
        held = held_by_the_script(row, estimate)
        predicted = estimate.memory.peak_allocated + held
        error = abs(predicted - row["steady_peak"]) / row["steady_peak"]
        errors.append(error)
        resident_errors.append(abs(estimate.memory.resident + held - row["resident"]) / row["resident"])
        close += abs(predicted - row["steady_peak"]) <= 4096
        table.append({**row, "predicted": predicted, "difference": predicted - row["steady_peak"], "error": error})
        for name, said in others(row, estimate).items():
            rivals.setdefault(name, []).append(abs(said - row["steady_peak"]) / row["steady_peak"])
    return {
        "rows": table,
        "measured": "on this machine" if measured_again else "recorded",
        "toolkit": {"n": len(errors), "median": statistics.median(errors), "worst": max(errors), "within_4_KiB": close,
                    "resident_worst": max(resident_errors)},
        "others": {name: {"n": len(e), "median": statistics.median(e), "worst": max(e)} for name, e in rivals.items()},
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Peak of a steady step against the real engines ({result['measured']})")
    for name in ("strategy", "model", "ranks", "batch x tokens", "precision", "ckpt", "measured", "difference"):
        table.add_column(name, justify="right" if name in ("ranks", "measured", "difference") else "left")
    for row in result["rows"]:
        model = row["model"] + (f" lora {row['lora_rank']}" if row["lora_rank"] else "")
        table.add_row(row["strategy"], model, str(row["world"]),
                      f"{row['micro_batch']} x {row['seq_len']}" + (f" x {row['accumulate']}" if row["accumulate"] > 1 else ""),
                      row["precision"], row["checkpointing"], f"{row['steady_peak']:,}", f"{row['difference']:+,}")
    console = Console(width=120)
    console.print(table)
    summary = Table(title="Error of the peak")
    for name in ("estimator", "rows", "median", "worst"):
        summary.add_column(name, justify="left" if name == "estimator" else "right")
    ours = result["toolkit"]
    summary.add_row("this toolkit", str(ours["n"]), f"{ours['median']:.4%}", f"{ours['worst']:.2%}")
    for name, figures in result["others"].items():
        summary.add_row(name, str(figures["n"]), f"{figures['median']:.0%}", f"{figures['worst']:.0%}")
    console.print(summary)
    console.print(f"{ours['within_4_KiB']} of {ours['n']} within 4 KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="run the engines again instead of taking the recorded figures")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    result = compare(arguments.measure)
    target = HERE / "results" / ("accuracy-here.json" if arguments.measure else "accuracy.json")
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
