"""What training waits for when a checkpoint is saved in the background, against a save that it waits for.

    python benchmarks/async_save.py [--mib 1024] [--rounds 5] [--folder DIR] [--json]

One process, a model of so many MiB with AdamW's moments (three times that on the disk), saves of both kinds in turn, steps while
one is written. Told: seconds until `save` returns, seconds of the calls at the step boundaries, and the host memory of the copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))


def resident() -> int:
    """Bytes of host memory that this process holds."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="of the weights, fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk that is meant")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    import torch
    from accelerate import Accelerator

    from toolkit.training.checkpoint import Checkpoints
    from toolkit.training.identity import Identity, Progress

    accelerator = Accelerator(cpu=arguments.device == "cpu")
    width = 1024
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(arguments.mib // 4)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    state = 3 * sum(p.numel() * p.element_size() for p in model.parameters())

    def step() -> float:
        started = time.perf_counter()
        model(torch.ones(1, width, device=accelerator.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    step()
    identity = Identity(strategy="single", processes=1, method="full", optimizer="adamw", data="none", rows=1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        both = {mode: Checkpoints(Path(name) / mode, accelerator, identity, 1, mode=mode) for mode in ("sync", "async")}
        for round_ in range(arguments.rounds + 1):
            for mode, checkpoints in both.items():
                plain, before, started = step(), resident(), time.perf_counter()
                if checkpoints.save(Progress(step=round_ + 1)) is not None:
                    raise SystemExit("the save failed")
                stall, held, boundaries, during = time.perf_counter() - started, resident() - before, 0.0, []
                while checkpoints._saving is not None:
                    during.append(step())
                    started = time.perf_counter()
                    checkpoints.advance(int(checkpoints.busy))
                    boundaries += time.perf_counter() - started
                rows.append({"round": round_, "mode": mode, "save": stall, "boundaries": boundaries, "copy_bytes": held,
                             "step": plain, "steps_while_writing": during})  # fmt: skip
    copy = next(row["copy_bytes"] for row in rows if row["mode"] == "async")
    rows = [row for row in rows if row["round"]]  # The first pays for memory and folders.

    def median(mode: str, *names: str) -> float:
        return statistics.median(sum(row[name] for name in names) for row in rows if row["mode"] == mode)

    sync, waited = median("sync", "save"), median("async", "save", "boundaries")
    result = {
        "schema": 1, "device": str(accelerator.device), "state_bytes": state, "rounds": arguments.rounds, "sync_seconds": sync,
        "async_stall_seconds": waited, "ratio": waited / sync, "sync_bytes_per_second": state / sync,
        "copy_bytes": copy, "rows": rows,
    }  # fmt: skip
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"state {state / 2**20:,.0f} MiB; a save that training waits for {sync:.2f} s, in the background {waited:.2f} s "
              f"({waited / sync:.1%}); the copy takes {result['copy_bytes'] / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
