"""Predicted throughput against published figures: rows of any CSV with the columns of data/throughput.csv.

    python benchmarks/throughput.py FILE.csv [--json] [--rows]

`A`: rows whose configuration is stated in full; errors in percent of the measured tokens per second. `pairs`: two plans for
one model, method, sequence and hardware whose measured speeds differ by more than 5%: is the faster one predicted to be
faster? `scaling`: efficiency of a series against its smallest GPU count, in percentage points. Pairs and series leave out
grade C, figures whose conditions are not known.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from throughput_rows import COLUMNS, Case, Inexpressible, case_of, cells

from toolkit.errors import ToolkitError
from toolkit.estimate.engine import Estimator
from toolkit.estimate.time import step_time
from toolkit.specs import ModelSpec
from toolkit.timeline.scale import same_path, scaled_facts
from toolkit.timeline.trace import ModelTrace

DISTINCT = 0.05
"""Two measurements nearer than this are taken for equal."""


@lru_cache(maxsize=8)
def _estimator(key: str) -> Estimator:
    config = json.loads(key)
    return Estimator(ModelSpec(name=config.pop("_name"), config=config))


def _trace(case: Case, checkpointing: str) -> ModelTrace:
    """The trace at the row's micro-batch, from those at 1 and 2, which many rows share."""
    estimator = _estimator(json.dumps({"_name": case.model.name, **case.model.config}, sort_keys=True))
    plan = case.plan.with_(checkpointing=checkpointing)
    work = case.workload
    one, two = (estimator.trace(work.with_(micro_batch=m, accumulate=1), plan, case.cluster) for m in (1, 2))
    if work.micro_batch <= 2 or not same_path(one, two):
        return estimator.trace(work.with_(accumulate=1), plan, case.cluster)
    return scaled_facts(one, two, work.micro_batch)


def predict(case: Case) -> float:
    """Tokens per second and GPU."""
    def seconds(checkpointing: str) -> tuple[float, float]:
        trace = _trace(case, checkpointing)
        time = step_time(trace, case.workload, case.plan.with_(checkpointing=checkpointing), case.cluster,
                         software=case.software)
        return time.step_seconds, time.tokens_per_second_per_gpu * time.step_seconds

    whole, tokens = seconds(case.plan.checkpointing)
    if case.checkpointed < 1:
        whole = case.checkpointed * whole + (1 - case.checkpointed) * seconds("none")[0]
    return tokens / whole


def run(rows: Sequence[Mapping[str, str | None]], say: Any) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """(rows with predicted and measured, rows that can't be said with the reason)."""
    done, left = [], []
    order = sorted(map(cells, rows), key=lambda r: (r["model"], r["seq_len"], r["precision"], r["activation_checkpointing"]))
    for at, row in enumerate(order):
        say(f"{at + 1}/{len(rows)} {row['id']}")
        try:
            case = case_of(row)
            predicted = predict(case)
        except (Inexpressible, ToolkitError) as error:
            left.append((row["id"], str(error)[:160]))
            continue
        except Exception as error:  # what the tracer can't take must not cost the other rows their figures
            left.append((row["id"], f"{type(error).__name__}: {str(error)[:140]}"))
            continue
        done.append({"id": row["id"], "grade": row["grade"], "measured": case.tokens_per_second_per_gpu, "predicted": predicted,
                     "error": 100 * abs(predicted / case.tokens_per_second_per_gpu - 1), "row": row})
    return done, left


def score(done: list[dict[str, Any]], total: int) -> dict[str, Any]:
    """The figures that the module's docstring explains."""
    errors = sorted(r["error"] for r in done if r["grade"] == "A")
    groups, series = defaultdict(list), defaultdict(list)
    for r in done:
        row = r["row"]
        if r["grade"] == "C":  # a figure whose conditions are not known, or that its source calls unsteady
            continue
        groups[tuple(row[k] for k in ("model", "method", "gpu", "num_gpus", "seq_len", "interconnect"))].append(r)
        if row["series"]:
            series[row["series"]].append((int(row["num_gpus"]), r))
    right = pairs = 0
    for members in groups.values():
        for a, b in itertools.combinations(members, 2):
            if abs(a["measured"] / b["measured"] - 1) > DISTINCT:
                pairs += 1
                right += (a["measured"] > b["measured"]) == (a["predicted"] > b["predicted"])
    points = []
    for members in series.values():
        if len({count for count, _ in members}) > 1:
            base = min(members, key=lambda m: m[0])[1]
            points += [100 * abs(r["predicted"] / base["predicted"] - r["measured"] / base["measured"])
                       for _, r in members if r is not base]
    return {
        "rows": total,
        "expressed": len(done),
        "A": {"n": len(errors), "median": round(statistics.median(errors), 2) if errors else None,
              "p90": round(errors[int(0.9 * (len(errors) - 1))], 2) if errors else None},
        "pairs": {"n": pairs, "right": right},
        "scaling": {"n": len(points), "worst_points": round(max(points), 2) if points else None,
                    "median_points": round(statistics.median(points), 2) if points else None},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=Path(__file__).parent / "data" / "throughput.csv")
    parser.add_argument("--json", action="store_true", help="the scores alone, as JSON")
    parser.add_argument("--rows", action="store_true", help="every row with its error")
    arguments = parser.parse_args()
    try:
        with arguments.file.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        print(f"error: {arguments.file} can't be read as a table: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        return 2
    if absent := [name for name in COLUMNS if name not in (table.fieldnames or ())]:
        print(f"note: {arguments.file} has no columns {', '.join(absent)}; they are taken as empty", file=sys.stderr)
    done, left = run(rows, lambda text: print(f"\r{text:<40}", end="", file=sys.stderr, flush=True))
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    result = score(done, len(rows))
    if arguments.json:
        print(json.dumps(result))
        return 0
    if arguments.rows:
        for r in sorted(done, key=lambda r: r["id"]):
            row = r["row"]
            print(f"{r['id']:<16}{r['grade']} {row['model'][:22]:<23}{row['strategy'][:24]:<25}{row['gpu'][:14]:<15}"
                  f"{row['num_gpus']:>4} {row['micro_batch_per_gpu']:>3}x{row['seq_len']:<7}"
                  f"{row['activation_checkpointing'][:9]:<10}"
                  f"{r['measured']:>9.0f}{r['predicted']:>9.0f}{100 * (r['predicted'] / r['measured'] - 1):>+7.0f}%")
    for reason, count in Counter(reason for _, reason in left).most_common():
        print(f"not expressed, {count}: {reason}")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
