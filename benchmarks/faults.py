"""Kill a rank at a random moment, resume, and hold what comes out to the run that was never stopped; again and again.

    nice python benchmarks/faults.py [--seeds 50] [--first 0] [--json]

Each seed draws an engine, sync or async saves, the rank, and the moment: at half of the seeds one of the places where a file of a
save is begun, half written, synced, renamed or removed (so most of them fall into a save), at the others a time. After the kill,
every folder that is named as a checkpoint is held to its checksums, and the newest one to the steps that were logged. The run is
killed once more at every fifth seed, on its way back. In the end every loss, gradient norm and learning rate, and every byte of
the last checkpoint, must be those of the uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from many_runs import Runner

from toolkit.training.state.manifest import damage, named

STRATEGIES = ("ddp", "fsdp", "zero2", "single", "zero3")
EVERY, STEPS = 2, 8
KEYS: dict[str, Any] = {"seq_len": 64, "micro_batch": 2, "max_steps": STEPS, "learning_rate": 1e-3, "warmup_steps": 2,
                        "precision": "fp32", "tracker": "none", "export": False, "preflight": "off", "profile": False,
                        "checkpoint_every": EVERY}  # fmt: skip


def tiny(folder: Path) -> dict[str, Any]:
    """A model with dropout and data to train it on: the keys that name them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({f"w{index}": index for index in range(256)}, unk_token="w0"))  # noqa: S106
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w1", pad_token="w1").save_pretrained(folder / "model")  # noqa: S106
    LlamaConfig(vocab_size=256, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=128, attention_dropout=0.1, tie_word_embeddings=True,
                bos_token_id=1, eos_token_id=1, pad_token_id=1).save_pretrained(folder / "model")  # fmt: skip
    draw = random.Random(0)
    rows = (json.dumps({"text": " ".join(f"w{draw.randrange(2, 256)}" for _ in range(40))}) for _ in range(200))
    (folder / "data.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return {"model": f"config:{folder / 'model'}", "data": folder / "data.jsonl"}


def outcome(run: Path) -> tuple[list[Any], dict[str, bytes]]:
    """What a finished run leaves: its steps, and the bytes of its last checkpoint."""
    steps = [[record[name] for name in ("step", "loss", "grad_norm", "learning_rate", "tokens")] for record in logged(run)]
    last = run / "checkpoints" / f"step-{STEPS:08d}"
    return steps, {file.name: file.read_bytes() for file in last.glob("*.safetensors")}


def logged(run: Path) -> list[dict[str, Any]]:
    """The records of the steps that were logged; a killed run can leave half a line."""
    found = []
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if (run / "metrics.jsonl").exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def examine(run: Path, mode: str) -> dict[str, Any]:
    """What a killed run left: checkpoints with damage, and whether a save that had ended is gone."""
    folders = named(run / "checkpoints")[-2:]
    sound = [int(path.name[5:]) for path in folders if damage(path) is None]
    steps = max((record["step"] for record in logged(run)), default=0)
    # A step is logged when every save before it has ended; in the background, at the latest when the next save has begun.
    ended = (steps - 1) // EVERY * EVERY if mode == "sync" else (steps - EVERY - 1) // EVERY * EVERY
    return {"logged": steps, "newest": max(sound, default=0), "in_save": any((run / "checkpoints").glob(".saving-*")),
            "broken": [path.name for path in folders if damage(path) and path == folders[-1]],
            "lost": max(sound, default=0) < ended}  # fmt: skip


def one(seed: int, start: Callable[..., Any], whole: Callable[[str, str], Any], folder: Path) -> dict[str, Any]:
    """One seed: a kill (or two), what was left, and how it went on."""
    draw = random.Random(seed)
    strategy, mode = STRATEGIES[seed % len(STRATEGIES)], draw.choice(["sync", "async"])
    steps, weights, points, seconds = whole(strategy, mode)
    row: dict[str, Any] = {"seed": seed, "strategy": strategy, "mode": mode, "kills": []}
    run = folder / f"seed-{seed}"
    for _ in range(2 if seed % 5 == 4 else 1):
        rank = draw.randrange(len(points))
        when = {"point": draw.randrange(1, points[rank] + 1)} if seed % 2 else {"seconds": round(draw.uniform(0, seconds), 3)}
        went = start(strategy, run, mode, [{"rank": rank, "signal": "SIGKILL", **when}])
        row["kills"].append({"rank": rank, **when, "killed": went["statuses"][rank] == -9, "hung": went["hung"],
                             **examine(run, mode)})  # fmt: skip
    went = start(strategy, run, mode, [])
    row["resumed"] = set(went["statuses"]) == {0}
    row["equal"] = row["resumed"] and outcome(run) == (steps, weights)
    if not row["equal"]:
        row["output"] = went["output"][-2000:]
    shutil.rmtree(run, ignore_errors=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="every seed, and the sums")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Runner(niceness=10) as runner:
        folder = Path(name)
        keys = {**KEYS, **tiny(folder)}

        def start(strategy: str, run: Path, mode: str, faults: list[dict[str, Any]]) -> Any:
            return runner.run(strategy, {**keys, "output": run, "checkpoint_mode": mode}, faults=faults)

        @cache
        def whole(strategy: str, mode: str) -> tuple[list[Any], dict[str, bytes], list[int], float]:
            """Of the uninterrupted run: steps, last checkpoint, the points that each rank passes, seconds of the loop."""
            run, ranks = folder / f"whole-{strategy}-{mode}", range(1 if strategy == "single" else 2)
            went = start(strategy, run, mode, [{"rank": rank, "count": str(folder / f"count-{rank}")} for rank in ranks])
            if set(went["statuses"]) != {0}:
                raise SystemExit(went["output"])
            counts = [(folder / f"count-{rank}").read_text(encoding="utf-8").split() for rank in ranks]
            return *outcome(run), [int(points) for points, _ in counts], float(counts[0][1])

        rows = []
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            rows.append(one(seed, start, whole, folder))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    kills = [kill for row in rows for kill in row["kills"]]
    sums = {
        "seeds": len(rows), "kills": sum(kill["killed"] for kill in kills), "in_a_save": sum(kill["in_save"] for kill in kills),
        "broken_taken_for_whole": sum(bool(kill["broken"]) for kill in kills), "lost": sum(kill["lost"] for kill in kills),
        "hung": sum(bool(kill["hung"]) for kill in kills), "resumed": sum(row["resumed"] for row in rows),
        "equal_to_the_last_bit": sum(row["equal"] for row in rows),
    }  # fmt: skip
    if arguments.json:
        print(json.dumps({"schema": 1, "sums": sums, "rows": rows}, indent=1))
    else:
        print("\n".join(f"{name:<24}{value:>6}" for name, value in sums.items()))


if __name__ == "__main__":
    main()
