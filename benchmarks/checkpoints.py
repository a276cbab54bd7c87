"""Checkpoints of this toolkit beside `accelerator.save_state` (DeepSpeed: `engine.save_checkpoint`), on two CPU processes.

    python benchmarks/checkpoints.py [--json] [--only rate|cross]

Times are ratios to the disk's plain sequential write (with fsync) and read of as many bytes, measured in the same run and in
turn; files are dropped from the system's cache before they are read. A second plain read is like a load: each rank reads what
it holds (its part; under ddp everything) into memory that is new. Ours begins as a run that goes on does, without optimizer
state. Memory is the growth of resident memory at its peak, the largest of the ranks. Cross-resumes count as working when the
next three losses are equal within 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "checkpoints.json"
ENGINES = ("ddp", "fsdp", "zero2", "zero3")
TARGETS = (("single", 1), *((engine, 2) for engine in ENGINES), *((engine, 1) for engine in ("fsdp", "zero2", "zero3")))
"""(engine, processes) that go on from each checkpoint of two processes."""
ROUNDS = 8
LARGE = {"vocab_size": 16000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12,
         "num_key_value_heads": 12, "tie_word_embeddings": True}  # fmt: skip
SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "tie_word_embeddings": True}  # fmt: skip
TOLERANCE = 1e-5
_RAISED = re.compile(r"\b\w+(Error|Exception)\b(:|$)")


def launch(engine: str, processes: int, timeout: int = 600, **spec: Any) -> dict[str, Any] | str:
    """The worker's answer, or why there is none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answer = Path(spec["folder"]) / "answer.json"
    answer.parent.mkdir(parents=True, exist_ok=True)
    answer.unlink(missing_ok=True)
    file = HERE.parent / "recipes" / "accelerate" / f"{engine}.yaml"
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), "--num_processes", str(processes),
             "--main_process_port", str(port), str(HERE / "checkpoints_worker.py"),
             json.dumps({**spec, "engine": engine, "answer": str(answer)})]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false",
                   "PYTHONPATH": str(HERE.parent)}  # fmt: skip
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"nothing within {timeout} s"
    if done.returncode or not answer.is_file():
        told = [line for line in done.stderr.splitlines() if _RAISED.search(line) and "subprocess." not in line]
        return (told or ["no answer"])[0].split("]:", 1)[-1].strip().replace(str(Path(spec["folder"]).parent), "...")[:140]
    return dict(json.loads(answer.read_text()))


def rates(folder: Path) -> dict[str, Any]:
    """Per engine: seconds (medians), ratios to the disk, bytes and memory."""
    found = {}
    for engine in ENGINES:
        told = launch(engine, 2, do="rate", folder=str(folder / engine), rounds=ROUNDS, model=LARGE)
        if isinstance(told, str):
            raise SystemExit(f"{engine}: {told}")
        shutil.rmtree(folder / engine)
        found[engine] = summary(told)
    return found


def summary(told: dict[str, Any]) -> dict[str, Any]:
    """Medians of one engine's rounds; ratios are medians of each round's ratio."""
    rounds = told["measured"]
    seconds = {name: [value[0] for value in values] for name, values in rounds.items()}
    on_disk = [save + flush for save, flush in zip(seconds["theirs_save"], seconds["theirs_to_disk"], strict=True)]
    scale = told["theirs_bytes"] / told["ours_bytes"]

    def ratio(plain: list[float], own: list[float], factor: float = 1.0) -> float:
        return round(statistics.median(factor * a / b for a, b in zip(plain, own, strict=True)), 3)

    middle = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
    return {
        "parameters": told["parameters"], "seconds": {**middle, "theirs_on_disk": round(statistics.median(on_disk), 3)},
        "bytes": {"ours": told["ours_bytes"], "theirs": told["theirs_bytes"]},
        "peak_memory": {name: round(statistics.median(value[1] for value in rounds[name]))
                        for name in ("ours_save", "theirs_save", "ours_load", "theirs_load")},
        "rate_over_disk": {
            "ours_save": ratio(seconds["plain_write"], seconds["ours_save"]),
            "theirs_save": ratio(seconds["plain_write"], on_disk, scale),
            "ours_load": ratio(seconds["plain_read"], seconds["ours_load"]),
            "theirs_load": ratio(seconds["plain_read"], seconds["theirs_load"], scale),
        },
        "load_over_like": {
            "ours": ratio(seconds["like_read"], seconds["ours_load"]),
            "theirs": ratio(seconds["like_read"], seconds["theirs_load"], scale),
        },
    }  # fmt: skip


def crosses(folder: Path) -> dict[str, Any]:
    """Source engine to target (engine x processes) to {"ours", "theirs"}: "works", or what went wrong."""
    expected: dict[str, list[float]] = {}
    for engine in ENGINES:
        told = launch(engine, 2, do="make", folder=str(folder / engine), model=SMALL)
        if isinstance(told, str):
            raise SystemExit(f"{engine}: {told}")
        expected[engine] = told["expected"]
    found: dict[str, Any] = {engine: {} for engine in ENGINES}
    for engine, processes in TARGETS:
        target, place = f"{engine} x{processes}", str(folder / "target")
        ours = launch(engine, processes, do="load", folder=place, model=SMALL, theirs={},
                      ours={name: str(folder / name / "ours") for name in ENGINES})
        for source in ENGINES:
            theirs = launch(engine, processes, timeout=120, do="load", folder=place, model=SMALL, ours={},
                            theirs={source: str(folder / source / "theirs")})
            found[source][target] = {"ours": verdict(ours, source, expected), "theirs": verdict(theirs, source, expected)}
    return found


def verdict(told: dict[str, Any] | str, source: str, expected: dict[str, list[float]]) -> str:
    """What came of going on from `source`."""
    if isinstance(told, str):
        return told
    pairs = zip(told["found"][source], expected[source], strict=True)
    off = max(abs(a - b) / abs(b) for a, b in pairs)
    return "works" if off <= TOLERANCE else f"goes on with other losses (up to {off:.1e})"


def show(result: dict[str, Any]) -> None:
    """Tables for people."""
    for engine, row in result.get("rate", {}).items():
        seconds, memory, over = row["seconds"], row["peak_memory"], row["rate_over_disk"]
        print(f"{engine}: {row['parameters'] / 1e6:.0f} M parameters")
        print(f"  a load over a plain read like it: ours {row['load_over_like']['ours']:.2f}, "
              f"theirs {row['load_over_like']['theirs']:.2f}")
        for name in ("ours", "theirs"):
            save = seconds["ours_save" if name == "ours" else "theirs_on_disk"]
            load = seconds[f"{name}_load"]
            print(f"  {name:7} {row['bytes'][name] / 2**20:6.0f} MiB"
                  f"   save {save:6.2f} s ({over[f'{name}_save']:.2f} of the disk), +{memory[f'{name}_save'] / 2**20:5.0f} MiB"
                  f"   load {load:6.2f} s ({over[f'{name}_load']:.2f} of the disk), +{memory[f'{name}_load'] / 2**20:5.0f} MiB")
    for source, targets in result.get("cross", {}).items():
        for target, row in targets.items():
            print(f"{source} x2 -> {target:9}  ours: {row['ours']:6}  theirs: {row['theirs']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--only", choices=("rate", "cross"), help="one half")
    options = parser.parse_args()
    from toolkit.training.run_folder import versions

    result: dict[str, Any] = json.loads(RESULTS.read_text()) if options.only and RESULTS.is_file() else {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        if options.only != "cross":
            result["rate"] = rates(Path(folder) / "rate")
        if options.only != "rate":
            result["cross"] = crosses(Path(folder) / "cross")
    result["versions"] = versions()
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result)) if options.json else show(result)


if __name__ == "__main__":
    main()
