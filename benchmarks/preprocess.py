"""Preprocessing beside `datasets.map`: the same samples, tokenizer and number of processes, in turns within one run.

    python benchmarks/preprocess.py --model DIR_OF_A_TOKENIZER [--samples 40000] [--rounds 3] [--workers 2]

Ours is everything from the file to the tokens that a run maps into memory: digest, reading, recognising, rendering, tokenising,
the marks of what is trained on, writing. `datasets.map` is held to less: it starts with the table in its own format, tokenises
(plain text) or renders and tokenises (conversations), and writes; no mark says what is an answer. The ratio is its time over
ours: 0.8 is the aim, above 1 ours is quicker. Time is the processor's, of all processes together, since the machine may have
other work; the ratio by the clock is told beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "preprocess.json"
WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you "
    "were all her she there would their we him been has when who will no more if out so up said what its about than into "
    "them can only other time new some could these two may first then do any like my now over such our man me even most "
    "made after also did many before must well back through years where much your way down should because long each just "
    "state those people too mister how little good world make very year still see own work men day get here old life both "
    "between being under three never know same last another while us might great go come since against right came take used "
    "himself few house use place during without again "
)


def write(folder: Path, samples: int) -> dict[str, Path]:
    """A file of plain text and one of conversations, of about 300 words a sample."""
    drawn, words = random.Random(7), WORDS.split()

    def text(length: int) -> str:
        return " ".join(drawn.choices(words, k=length)).capitalize() + "."

    def chat() -> list[dict[str, str]]:
        return [{"role": role, "content": text(length)} for role, length in (
            ("user", 40), ("assistant", drawn.randint(60, 200)), ("user", 20), ("assistant", drawn.randint(40, 120)))]

    makers: dict[str, Callable[[], Any]] = {
        "text": lambda: {"text": text(drawn.randint(100, 500))}, "messages": lambda: {"messages": chat()},
    }  # fmt: skip
    files = {}
    for name, make in makers.items():
        files[name] = folder / f"{name}.jsonl"
        with files[name].open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(make()) + "\n" for _ in range(samples))
    return files


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """(seconds of the processor, seconds of the clock), children included."""
    def used() -> float:
        parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(part.ru_utime + part.ru_stime for part in parts)

    cpu, clock = used(), time.perf_counter()
    call()
    return used() - cpu, time.perf_counter() - clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="preprocess-"))
    os.environ |= {"TOOLKIT_CACHE": str(folder / "own"), "HF_DATASETS_CACHE": str(folder / "theirs"),
                   "TOKENIZERS_PARALLELISM": "false"}
    import datasets
    from transformers import AutoTokenizer

    from toolkit.training.data.encode import Reading
    from toolkit.training.data.tokenize import get

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    files = write(folder, given.samples)
    theirs: dict[str, Callable[[dict[str, Any]], Any]] = {
        "text": lambda batch: tokenizer(batch["text"]),
        "messages": lambda batch: tokenizer.apply_chat_template(batch["messages"], return_dict=True),
    }
    rows: dict[str, Any] = {}
    for name, file in files.items():
        table = datasets.load_dataset("json", data_files=str(file), split="train")
        times: dict[str, list[tuple[float, float]]] = {"own": [], "theirs": []}
        for _ in range(given.rounds):
            shutil.rmtree(folder / "own", ignore_errors=True)
            times["own"].append(timed(lambda: get((str(file),), tokenizer, Reading(seq_len=4096), given.workers)))  # noqa: B023
            times["theirs"].append(timed(lambda: table.map(  # noqa: B023
                theirs[name], batched=True, remove_columns=table.column_names, load_from_cache_file=False,  # noqa: B023
                num_proc=given.workers)))
        middle = {who: [statistics.median(part) for part in zip(*pairs, strict=True)] for who, pairs in times.items()}
        rows[name] = {"own_cpu_s": middle["own"][0], "theirs_cpu_s": middle["theirs"][0], "own_s": middle["own"][1],
                      "theirs_s": middle["theirs"][1], "ratio_cpu": middle["theirs"][0] / middle["own"][0],
                      "ratio_wall": middle["theirs"][1] / middle["own"][1]}
        print(f"{name:9} ours {middle['own'][0]:.2f} s of the processor, datasets.map {middle['theirs'][0]:.2f} s: "
              f"ratio {rows[name]['ratio_cpu']:.2f} (by the clock {rows[name]['ratio_wall']:.2f})")
    shutil.rmtree(folder)
    record = {"samples": given.samples, "workers": given.workers, "rounds": given.rounds, "vocabulary": len(tokenizer),
              "datasets": datasets.__version__, "machine": f"{platform.machine()}, {os.cpu_count()} cores", "rows": rows}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
