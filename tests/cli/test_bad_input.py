"""Bad input is status 2 and exactly one line on stderr that says what is wrong; nothing on stdout, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Run = Callable[..., Any]
SHORT = ("--seq-len", "64", "--gpu", "a100-80gb-sxm")
TWO = ("--gpus", "2")

# What is said beside the model and SHORT, and what the line on stderr must say.
OPTIONS = [
    (("--gpu", "h1000"), "gpu 'h1000' is not in the catalog; did you mean 'h"),
    (("--gpu", ""), "gpu '' is not in the catalog"),
    (("--gpus", "0"), "gpus is 0; it must be at least 1"),
    (("--gpus", "-1"), "gpus is -1"),
    (("--gpus", "two"), "'--gpus'"),
    (("--gpus", "1000000000"), "nothing that large is meant"),
    (("--nodes", "0"), "nodes is 0"),
    (("--gpu-memory", "lots"), "size 'lots' is not understood; write 80GiB"),
    (("--gpu-memory", "0"), "size '0' must be above zero"),
    (("--gpu-memory", "80XB"), "size '80XB' is not understood"),
    (("--gpu-memory", "1e400"), "size '1e400' is not understood"),
    (("--gpu-memory", "1e50"), "larger than any machine"),
    (("--gpu-memory", "-5GiB"), "size '-5GiB' is not understood"),
    (("--host-memory", "nonsense"), "size 'nonsense' is not understood"),
    (("--host-memory", ""), "size '' is not understood"),
    (("--margin", "-0.1"), "margin is -0.1; it must be a share from 0 to 0.9"),
    (("--margin", "2"), "margin is 2.0"),
    (("--margin", "nan"), "margin is nan"),
    (("--margin", "some"), "'--margin'"),
    (("--seq-len", "0"), "seq-len is 0; it must be a whole number of at least 1"),
    (("--seq-len", "-5"), "seq-len is -5"),
    (("--seq-len", "abc"), "'--seq-len'"),
    (("--seq-len", "1.5"), "'--seq-len'"),
    (("--seq-len", "513"), "seq-len 513 is above the 512 positions of tiny; use at most 512"),
    (("--seq-len", "99999999999999999999"), "nothing that large is meant"),
    (("--micro-batch", "0"), "micro-batch is 0"),
    (("--accumulate", "0"), "accumulate is 0"),
    (("--precision", "bf17"), "precision 'bf17' is not one of fp32, bf16, fp16, bf16-pure; did you mean 'bf16'"),
    (("--weights-dtype", "int8"), "weights-dtype 'int8' is not one of auto, fp32, bf16"),
    (("--method", "dora"), "method 'dora' is not one of full, lora, qlora"),
    (("--method", "lora", "--lora-rank", "0"), "lora-rank is 0"),
    (("--method", "lora", "--lora-targets", "nope_proj"), "lora-targets 'nope_proj' does not fit the model"),
    (("--optimizer", "adam"), "did you mean 'adamw'"),
    (("--optimizer-impl", "x"), "optimizer-impl 'x' is not one of default, foreach, fused, loop"),
    (("--attention", "x"), "attention 'x' is not one of eager, sdpa, flash"),
    (("--loss", "x"), "loss 'x' is not one of standard, chunked, fused"),
    (("--task", "x"), "task 'x' is not one of auto, causal-lm"),
    (("--bogus",), "No such option: --bogus"),
    (("another",), "unexpected extra argument"),
    (("--gpus",), "requires an argument"),
    (("--json=yes",), "does not take a value"),
]  # fmt: skip
ESTIMATE = [
    (("--strategy", "fdsp", *TWO), "did you mean 'fsdp'"),
    (("--strategy", ""), "strategy '' is not one of single"),
    (("--strategy", "ddp"), "ddp needs at least 2 GPUs, the cluster has 1"),
    (("--strategy", "single", *TWO), "single and 2 GPUs exclude each other"),
    (("--strategy", "ddp", *TWO, "--offload", "all"), "offload all and ddp exclude each other"),
    (("--strategy", "zero3", *TWO, "--precision", "bf16-pure"), "exclude each other"),
    (("--offload", "some"), "offload 'some' is not one of none, optimizer, all"),
    (("--offload-to", "tape"), "offload-to 'tape' is not one of cpu, nvme"),
    (("--checkpointing", "half"), "checkpointing 'half' is not one of none, selective, full"),
    (("--strategy", "fsdp", "--gpus", "4", "--tp", "3"), "tp 3 does not divide 4 GPUs"),
    (("--strategy", "fsdp", "--gpus", "4", "--cp", "3"), "cp 3 does not divide 4 GPUs"),
    (("--strategy", "zero3", "--gpus", "4", "--sp", "3"), "sp 3 does not divide 4 GPUs"),
    (("--tp", "0"), "tp is 0"),
    (("--strategy", "zero2", *TWO, "--bucket", "0"), "bucket is 0"),
    (("--strategy", "zero3", *TWO, "--persist", "-1"), "persist is -1"),
    (("--gpu", "cpu", "--method", "qlora"), "method qlora and gpu cpu exclude each other"),
    (("--ds-config", "x.json"), "--ds-config goes with --accelerate-config"),
    (("--accelerate-config", "gone.yaml"), "'gone.yaml' can't be read"),
    (("--accelerate-config", "broken.yaml"), "'broken.yaml' is not YAML"),
    (("--accelerate-config", "slip.yaml"), "distributed_type is 'FSPD'; did you mean 'FSDP'"),
    (("--accelerate-config", "good.yaml", "--ds-config", "gone.json"), "'gone.json' can't be read"),
    (("--accelerate-config", "good.yaml", "--strategy", "fsdp"), "--strategy and --accelerate-config exclude each other"),
    (("--accelerate-config", "good.yaml", "--offload", "all"), "--offload and --accelerate-config exclude each other"),
]  # fmt: skip
RECOMMEND = [
    (("--prefer", "best"), "prefer 'best' is not one of lightest, fastest, fewest-gpus"),
    (("--engine", "horovod"), "engine 'horovod' is not one of any, fsdp, deepspeed"),
    (("--allow-offload", "tape"), "allow-offload 'tape' is not one of none, cpu, nvme"),
    (("--global-batch", "0"), "global-batch is 0"),
    (("--global-batch", "3", "--micro-batch", "2"), "micro-batch 2 does not divide"),
    (("--tokens", "0"), "tokens is 0"),
    (("--base-batch", "0"), "base-batch is 0"),
    (("--learning-rate", "-1"), "learning-rate is -1.0"),
    (("--learning-rate", "nan"), "learning-rate is nan"),
    (("--write", "a-file"), "a-file is a file; name a folder"),
    (("--write", "a-file/inside"), "a-file is a file; name a folder"),
    (("--strategy", "fsdp"), "No such option: --strategy"),
]
MODELS = [
    ("gone", "is no directory, no file and no name of the catalog"),
    ("gpt3", "did you mean 'gpt2'"),
    ("llama-3.1-8x", "did you mean 'llama-3.1-8b'"),
    ("./gone", "does not exist"),
    ("gone.json", "does not exist"),
    ("", "model is empty"),
    ("empty", "is a directory without a config.json"),
    ("a-file", "is not JSON"),
    ("not-json", "is not JSON"),
    ("binary", "is not JSON"),
    ("a-list", "holds a list"),
    ("no-type", "has no model_type"),
    ("slip", "transformers does not know model type 'lama'"),
    ("words", "its config is not right"),
    ("uneven", "its config is not right"),
    ("no-layers", "num_hidden_layers 0"),
    ("remote", "refused unless --trust-remote-code"),
    ("bad.gguf", "is not a GGUF file"),
]
OTHERS = [
    (("nonsense",), "No such command 'nonsense'"),
    (("recomend", "gpt2"), "Did you mean 'recommend'"),
    (("--nonsense",), "No such option: --nonsense"),
    (("estimate",), "Missing argument 'MODEL'"),
    (("recommend",), "Missing argument 'MODEL'"),
    (("catalog",), "Missing argument"),
    (("catalog", "cars"), "catalog 'cars' is not one of gpus, models, strategies, optimizers"),
    (("catalog", "gpus", "x"), "unexpected extra argument"),
    (("checkpoint", "inspect"), "see toolkit checkpoint inspect --help"),
    (("scaling", "tiny", "--max-gpus", "0", *SHORT), "max-gpus is 0; it must be at least 1"),
    (("doctor", "x"), "unexpected extra argument"),
    (("check",), "Missing argument 'FILE...'"),
    (("check", "gone.yaml"), "'gone.yaml' can't be read"),
    (("check", "good.yaml", "--model", "gpt3"), "did you mean 'gpt2'"),
]


@pytest.fixture
def place(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tiny model and everything that is wrong."""
    folder = tiny.parent
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    contents: dict[str, str | bytes] = {
        "not-json": "{oops", "binary": b"\xff\xfe\x00", "a-list": "[1]", "no-type": '{"hidden_size": 64}',
        "slip": json.dumps({**config, "model_type": "lama"}), "remote": json.dumps({**config, "auto_map": {"AutoModel": "m.M"}}),
        "words": json.dumps({**config, "hidden_size": "big"}), "uneven": json.dumps({**config, "num_attention_heads": 7}),
        "no-layers": json.dumps({**config, "num_hidden_layers": 0}),
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "empty").mkdir()
    for name, text in {"a-file": "text", "bad.gguf": "text", "broken.yaml": "distributed_type: [oops",
                       "slip.yaml": "distributed_type: FSPD\n", "good.yaml": "distributed_type: DEEPSPEED\nnum_processes: 2\n"
                       "deepspeed_config: {zero_stage: 2}\n"}.items():  # fmt: skip
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    return folder


def check(done: Any, says: str) -> None:
    assert done.status == 2, done
    assert done.out == ""
    lines = done.err.splitlines()
    assert len(lines) == 1 and done.err.endswith("\n"), done.err
    assert lines[0].startswith("toolkit: ") and says in lines[0], lines[0]
    assert "Traceback" not in done.err and "a fault of the toolkit" not in done.err
    assert len(lines[0]) < 500


def named(case: Any) -> str:
    return " ".join(case) or "empty" if isinstance(case, tuple) else ""


@pytest.mark.parametrize("command", ["estimate", "recommend"])
@pytest.mark.parametrize(("words", "says"), OPTIONS, ids=named)
def test_shared_options(command: str, words: tuple[str, ...], says: str, run: Run, place: Path) -> None:
    check(run(command, "tiny", *SHORT, *words), says)


@pytest.mark.parametrize(("words", "says"), ESTIMATE, ids=named)
def test_estimate(words: tuple[str, ...], says: str, run: Run, place: Path) -> None:
    check(run("estimate", "tiny", *SHORT, *words), says)


@pytest.mark.parametrize(("words", "says"), RECOMMEND, ids=named)
def test_recommend(words: tuple[str, ...], says: str, run: Run, place: Path) -> None:
    check(run("recommend", "tiny", *SHORT, *words), says)


@pytest.mark.parametrize("command", ["estimate", "recommend"])
@pytest.mark.parametrize(("model", "says"), MODELS)
def test_models(command: str, model: str, says: str, run: Run, place: Path) -> None:
    check(run(command, model, *SHORT), says)


@pytest.mark.parametrize(("words", "says"), OTHERS, ids=named)
def test_other_commands(words: tuple[str, ...], says: str, run: Run, place: Path) -> None:
    check(run(*words), says)


def test_machine_output_does_not_change_it(run: Run, place: Path) -> None:
    check(run("estimate", "gone", "--json"), "is no directory")
    check(run("recommend", "tiny", *SHORT, "--gpu", "h1000", "--json"), "is not in the catalog")


@pytest.mark.parametrize("words", [("--write", "out"), ("--write", "out", "--json")])
def test_nothing_is_written_when_the_input_is_bad(words: tuple[str, ...], run: Run, place: Path) -> None:
    check(run("recommend", "tiny", *SHORT, "--gpus", "0", *words), "gpus is 0")
    assert not (place / "out").exists()


def test_the_console_script_does_the_same(place: Path) -> None:
    """In a process of its own, without a network: what libraries print at import would show here."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "toolkit", "estimate", "nobody/nothing", *SHORT]
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("toolkit: model 'nobody/nothing' is no directory, no file, no name of the catalog")
