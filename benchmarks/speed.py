"""How fast the toolkit answers, on this machine, side by side with the work that it spares.

    python benchmarks/speed.py [--json]

Measured in one process each: the first estimate of a 70B model under every strategy, all strategies together, a thousand plans on
one traced workload, the memory of that process; and the whole command from a cold start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad", "hsdp")
COMMANDS = {
    "help": ["--help"],
    "recommend 8B on 8": ["recommend", "llama-3.1-8b", "--gpu", "h100-sxm", "--gpus", "8", "--json"],
    "recommend 70B on 64": ["recommend", "llama-3.1-70b", "--gpu", "h100-sxm", "--gpus", "8", "--nodes", "8", "--json"],
}


def in_process(model: str) -> dict[str, Any]:
    """Seconds of estimates after the imports."""
    from toolkit.estimate.engine import Estimator
    from toolkit.specs import Plan, Workload
    from toolkit.specs.detect import make_cluster
    from toolkit.specs.load import load_model_spec

    node, one = make_cluster("h100-sxm", 8, 2), make_cluster("h100-sxm", 1)
    work = Workload(seq_len=4096, loss_only=True)
    small = Estimator(load_model_spec("smollm2-135m"))
    small.estimate(work, Plan(strategy="single"), one)  # imports that the first trace brings
    estimator = Estimator(load_model_spec(model))
    found: dict[str, Any] = {"first": {}}
    started = time.perf_counter()
    for strategy in STRATEGIES:
        before = time.perf_counter()
        estimator.estimate(work, Plan(strategy=strategy), node if strategy != "single" else one, detail=False)  # type: ignore[arg-type]
        found["first"][strategy] = round(time.perf_counter() - before, 3)
    found["all strategies"] = round(time.perf_counter() - started, 3)
    variants = itertools.cycle(
        (Plan(strategy=s, bucket=b if s.startswith("zero") else None), work.with_(accumulate=a))  # type: ignore[arg-type]
        for a in range(1, 9) for b in (10**7, 10**8, 10**9) for s in STRATEGIES if s != "single")
    started = time.perf_counter()
    for plan, variant in itertools.islice(variants, 1000):
        estimator.estimate(variant, plan, node, detail=False)
    found["1000 plans"] = round(time.perf_counter() - started, 3)
    found["peak RSS MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return found


def cold(words: list[str]) -> float:
    """Seconds of the command from a cold start, the better of two."""
    best = float("inf")
    for _ in range(2):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "toolkit", *words], capture_output=True, check=False)
        best = min(best, time.perf_counter() - started)
    return round(best, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = {"cores": os.cpu_count(), "load before": os.getloadavg()[0], "llama-3.1-70b": in_process("llama-3.1-70b"),
              "cold start": {name: cold(words) for name, words in COMMANDS.items()}}
    print(json.dumps(result, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
