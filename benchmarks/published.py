"""How far the estimates are from figures that others published from real GPUs.

    python benchmarks/published.py [FILE.csv] [--json] [--processes N] [--only TEXT]

Each row (columns as in benchmarks/data/gpu_rows.csv) becomes a model spec, workload, cluster and plan and is compared with
the quantity that it measured. Rows that can't be expressed are listed with the reason. Errors are in percent of the
measured figure; `median` and `p90` of the absolute error. The result goes to benchmarks/results/published.json.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from published_rows import NotExpressible  # noqa: E402
from published_workload import case_of  # noqa: E402

from toolkit.errors import UserError  # noqa: E402
from toolkit.estimate.engine import Estimator  # noqa: E402
from toolkit.units import GIB  # noqa: E402

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft")
Result = dict[str, Any]


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows; missing cells are empty."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{k: (v or "") for k, v in row.items() if k} for row in csv.DictReader(file)]


def evaluate(row: dict[str, str], estimators: dict[Any, Estimator]) -> Result:
    """One row against its estimate; a row that can't be expressed says why. Never raises."""
    out: Result = {"id": row.get("id", ""), "source": row.get("source", ""), "grade": row.get("grade", "")}
    try:
        case = case_of(row)
        key = (case.spec.name, json.dumps(dict(case.spec.config), sort_keys=True, default=str))
        estimator = estimators.setdefault(key, Estimator(case.spec))
        detail = case.metric != "peak_allocated"
        memory = estimator.estimate(case.workload, case.plan, case.cluster, detail=detail).memory
    except NotExpressible as reason:
        return {**out, "reason": str(reason)}
    except UserError as error:
        return {**out, "reason": f"refused by the estimate: {error}"[:300]}
    except Exception as error:  # noqa: BLE001 - one odd row of an unseen file must not end the run
        return {**out, "reason": f"{type(error).__name__}: {error}"[:300]}
    out |= {"metric": case.metric, "plan": case.plan.label, "at": f"{memory.at_peak.phase}: {memory.at_peak.module}"}
    highest = max(memory.peak_allocated, memory.first_step_peak, memory.load_peak)
    allocated_more = highest - memory.peak_allocated
    if case.metric == "fits":
        return {**out, "measured": row["outcome"], "predicted": bool(memory.fits),
                "predicted_gib": round(memory.peak_total / GIB, 3), "right": memory.fits == row["outcome"].startswith("fits")}
    predicted = {"peak_allocated": highest, "peak_reserved": memory.peak_reserved,
                 "peak_total": memory.peak_total}[case.metric]
    try:
        measured = float(row["value_gib"])
    except ValueError:
        return {**out, "reason": f"the row's figure {row['value_gib']!r} is no number"}
    return {**out, "measured": measured, "predicted": round(predicted / GIB, 3),
            "above_steady_gib": round(allocated_more / GIB, 3),
            "error": round(100 * (predicted / GIB - measured) / measured, 2)}


def _group(rows: list[dict[str, str]]) -> list[Result]:
    estimators: dict[Any, Estimator] = {}
    return [evaluate(row, estimators) for row in rows]


def run(rows: list[dict[str, str]], processes: int = 2, progress: bool = True) -> list[Result]:
    """All rows, those of one model together so that they share traces, in at most two processes."""
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        groups[row.get("model", "") + row.get("seq_len", "")].append(row)
    order = sorted(groups.values(), key=len, reverse=True)
    results: list[Result] = []
    started = time.monotonic()

    def note(part: list[Result]) -> None:
        results.extend(part)
        if progress:
            print(f"\r{len(results)}/{len(rows)} rows, {time.monotonic() - started:.0f} s", end="", file=sys.stderr, flush=True)

    if min(processes, 2) < 2:
        for group in order:
            note(_group(group))
    else:
        with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=20) as pool:
            for part in pool.imap_unordered(_group, order):
                note(part)
    if progress:
        print(file=sys.stderr)
    places = {row.get("id", ""): i for i, row in enumerate(rows)}
    return sorted(results, key=lambda r: places.get(r["id"], 0))


def _figures(results: list[Result]) -> dict[str, Any]:
    errors = sorted(abs(r["error"]) for r in results)
    if not errors:
        return {"n": 0, "median": None, "p90": None}
    return {"n": len(errors), "median": round(statistics.median(errors), 2),
            "p90": round(errors[min(len(errors) - 1, int(0.9 * len(errors)))], 2)}


def summary(results: list[Result]) -> dict[str, Any]:
    """The figures of the contract; grade C rows are outcomes only."""
    numbers = [r for r in results if "error" in r]
    outcomes = [r for r in results if "right" in r]
    a = [r for r in numbers if r["grade"] == "A"]
    return {
        "rows": len(results),
        "expressed": sum("reason" not in r for r in results),
        "A_allocated": _figures([r for r in a if r["metric"] == "peak_allocated"]),
        "A_other": _figures([r for r in a if r["metric"] != "peak_allocated"]),
        "B": _figures([r for r in numbers if r["grade"] == "B"]),
        "outcomes": {"n": len(outcomes), "right": sum(r["right"] for r in outcomes)},
    }


def show(results: list[Result], figures: dict[str, Any]) -> None:
    """The table by source, what could not be expressed, and the figures."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140)
    table = Table(title="Error by source (percent of the measured figure)")
    for name in ("source", "metric", "rows", "median", "nine in ten", "mean, signed"):
        table.add_column(name, justify="left" if name in ("source", "metric") else "right")
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for result in results:
        if "error" in result:
            groups[result["source"], result["metric"]].append(result["error"])
    for (source, metric), errors in sorted(groups.items()):
        size = sorted(map(abs, errors))
        table.add_row(source, metric, str(len(errors)), f"{statistics.median(size):.1f}",
                      f"{size[min(len(size) - 1, int(0.9 * len(size)))]:.1f}", f"{statistics.fmean(errors):+.1f}")
    console.print(table)
    for result in results:
        if "reason" in result:
            console.print(f"not expressed {result['id']}: {result['reason']}", highlight=False)
        elif result.get("right") is False:
            said = f"{result['measured']}, estimated {result['predicted_gib']} GiB"
            console.print(f"outcome {result['id']}: {said}", highlight=False)
    console.print(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=HERE / "data" / "gpu_rows.csv",
                        help="a CSV file with the columns of benchmarks/data/gpu_rows.csv")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.add_argument("--processes", type=int, default=2, help="1 or 2")
    parser.add_argument("--only", default="", help="only rows whose id or source contains this; nothing is written then")
    arguments = parser.parse_args()
    rows = [r for r in read_rows(arguments.file) if arguments.only in r.get("id", "") + r.get("source", "")]
    results = run(rows, arguments.processes)
    figures = summary(results)
    if not arguments.only and arguments.file.resolve() == (HERE / "data" / "gpu_rows.csv").resolve():
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        target = HERE / "results" / "published.json"
        target.write_text(json.dumps({**figures, "versions": versions, "results": results}, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(figures))
    else:
        show(results, figures)


if __name__ == "__main__":
    main()
