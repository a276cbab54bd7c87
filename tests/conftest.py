"""What tests share: a tiny model with a real tokenizer, small data, and a launcher that runs the recipe for real."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
QUESTIONS = [
    ("What does len do?", "It returns the number of items of a container."),
    ("What does sorted do?", "It returns a new list with the items in ascending order."),
    ("What does zip do?", "It walks several iterables in step and yields tuples."),
    ("What does any do?", "It is true when one item of the iterable is true."),
    ("What does all do?", "It is true when every item of the iterable is true, also when there is none at all."),
    ("What does abs do?", "It returns the absolute value."),
    ("What does map do?", "It calls a function with every item and yields what comes back."),
    ("What does id do?", "It returns a number that is the object's own while the object lives."),
]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator([text for pair in QUESTIONS for text in pair], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a two-layer Llama of about 100,000 parameters, its tokenizer and chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def chat_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 short conversations, with answers of different lengths."""
    records = []
    for index in range(64):
        question, answer = QUESTIONS[index % len(QUESTIONS)]
        answer = " ".join([answer] * (1 + index // len(QUESTIONS) % 3))
        records.append(
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        )
    return write_jsonl(tmp_path_factory.mktemp("data") / "chat.jsonl", records)


@dataclass(frozen=True)
class Run:
    """What a launched recipe left."""

    folder: Path
    status: int
    output: str

    def steps(self) -> list[dict[str, Any]]:
        """The records of optimizer steps."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [record for record in map(json.loads, lines) if "loss" in record]

    def evaluations(self) -> list[dict[str, Any]]:
        """The records of evaluations."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [record for record in map(json.loads, lines) if "eval_loss" in record]

    def json(self, name: str) -> Any:
        """One of the run folder's JSON files."""
        return json.loads((self.folder / name).read_text(encoding="utf-8"))


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch_recipe(folder: Path, model: Path, data: Path, strategy: str, *, processes: int | None = None,
                  flags: tuple[str, ...] = (), env: dict[str, str] | None = None, file_limit: int | None = None,
                  script: Path = ROOT / "recipes" / "train.py", **keys: Any) -> Run:
    """Run the recipe, or another script that takes its keys, by way of `accelerate launch` in `folder`; `file_limit`
    bounds every file it writes, in KiB."""
    file = Path(strategy) if strategy.endswith(".yaml") else ROOT / "recipes" / "accelerate" / f"{strategy}.yaml"
    number = processes or (1 if strategy == "single" else 2)
    values = {
        "model": model, "data": data, "output": folder, "seq_len": 64, "micro_batch": 2, "max_steps": 3,
        "precision": "fp32", "learning_rate": 1e-3, "tracker": "none", "export": False, **keys,
    }  # fmt: skip
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), "--num_processes",
             str(number), "--main_process_port", str(free_port()), *flags, str(script)]
    words += [f"{key}={'null' if value is None else value}" for key, value in values.items()]
    if file_limit is not None:
        words = ["bash", "-c", f'ulimit -f {file_limit}; exec "$@"', "bash", *words]
    done = subprocess.run(words, env={**os.environ, **ENVIRONMENT, **(env or {})}, cwd=ROOT,
                          capture_output=True, text=True, timeout=400)
    return Run(Path(values["output"]), done.returncode, done.stdout + done.stderr)


@pytest.fixture
def launch(tiny_model: Path, chat_data: Path, tmp_path: Path) -> Callable[..., Run]:
    """`launch(strategy, folder=..., key=value, ...)`: see `launch_recipe`."""

    def start(strategy: str = "single", *, folder: str | None = None, **options: Any) -> Run:
        keys = {"model": tiny_model, "data": chat_data, **options}
        model, data = keys.pop("model"), keys.pop("data")
        return launch_recipe(tmp_path / (folder or Path(strategy).stem), model, data, strategy, **keys)

    return start


@pytest.fixture(scope="session")
def launch_shared(tiny_model: Path, chat_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """As `launch`, for runs that several tests look at."""

    def start(strategy: str, **options: Any) -> Run:
        keys = {"model": tiny_model, "data": chat_data, **options}
        model, data = keys.pop("model"), keys.pop("data")
        folder = tmp_path_factory.mktemp("runs") / Path(strategy).stem
        return launch_recipe(folder, model, data, strategy, **keys)

    return start
