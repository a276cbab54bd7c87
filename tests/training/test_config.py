"""The recipe's configuration: files and overrides, and one line for every mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.errors import UserError
from toolkit.training.config import TrainConfig, from_mapping, parse_arguments

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
NEEDED = ["model=m", "data=d.jsonl", "output=o"]


def test_overrides_win_over_files_and_later_ones_over_earlier(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: a\ndata: d.jsonl\noutput: o\nmax_steps: 5\nseed: 1\n", encoding="utf-8")
    config = parse_arguments(["--config", str(file), "seed=2", "--model", "b", "--seq-len=16", "seed=3"])
    assert (config.model, config.seed, config.seq_len, config.max_steps) == ("b", 3, 16, 5)


def test_epochs_on_the_command_line_replace_max_steps_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: a\ndata: d\noutput: o\nmax_steps: 5\n", encoding="utf-8")
    config = parse_arguments(["--config", str(file), "epochs=2"])
    assert config.max_steps is None and config.epochs == 2.0


def test_text_becomes_the_type_of_its_key() -> None:
    config = parse_arguments([*NEEDED, "max_steps=1e3", "learning_rate=3e-4", "packing=false", "data=a.jsonl, b.jsonl",
                              "checkpointing=none", "base_batch=null"])  # fmt: skip
    assert config.max_steps == 1000 and isinstance(config.max_steps, int)
    assert config.learning_rate == 3e-4 and config.packing is False
    assert config.data == ("a.jsonl", "b.jsonl") and config.checkpointing == "none" and config.base_batch is None


def test_what_is_written_down_reads_back_equal(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config(data=["a.jsonl", "b.txt"], precision="fp32", clip=0.5)
    assert from_mapping(yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["max_steps=1", "mikro_batch=2"], "did you mean 'micro_batch'"),
        (["max_steps=1", "micro_batch=0"], "micro_batch=0: it must be at least 1"),
        (["max_steps=1", "seq_len=-4"], "seq_len=-4: it must be at least 1"),
        (["max_steps=1", "seq_len=many"], "it must be a whole number"),
        (["max_steps=1.5"], "it must be a whole number"),
        (["max_steps=1", "packing=2"], "it must be true or false"),
        (["max_steps=1", "learning_rate=0"], "it must be above zero"),
        (["max_steps=1", "clip=-1"], "it must not be negative"),
        (["max_steps=1", "schedule=step"], "is not one of cosine, linear, constant"),
        (["max_steps=1", "epochs=1"], "not both"),
        ([], "give either max_steps or epochs"),
        (["max_steps=1", "data="], "lacks data"),
        (["max_steps=1", "scale_lr=linear"], "needs base_batch"),
        (["max_steps=1", "wrong"], "argument 'wrong' is not understood"),
        (["max_steps"], "is not understood"),
        (["--max_steps"], "needs a value"),
        (["max_steps=1", "--config=nowhere.yaml"], "'nowhere.yaml' does not exist"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_arguments([*NEEDED, *arguments])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_numbers_that_are_none_are_refused() -> None:
    for value in ("learning_rate=.nan", "learning_rate=.inf", "clip=.nan", "weight_decay=.inf", "epochs=.inf",
                  "warmup_steps=.nan"):
        steps = [] if value.startswith("epochs") else ["max_steps=1"]
        with pytest.raises(UserError):
            parse_arguments([*NEEDED, *steps, value])


@pytest.mark.parametrize("text", ["a: [", "- a\n- b", "just words"])
def test_a_file_that_is_no_configuration(text: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"c\.yaml"):
        parse_arguments(["--config", str(file)])


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_are_complete_and_name_no_strategy(file: Path) -> None:
    config = parse_arguments(["--config", str(file)])
    assert config.output.startswith("runs/")
    words: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert not {"strategy", "distributed_type", "offload", "fsdp_config", "deepspeed_config"} & set(words)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_and_tensorboard_left_out(
    make_config: Callable[..., TrainConfig], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import util

    from toolkit.training.accelerator import tracker_of

    monkeypatch.setattr(util, "find_spec", lambda wanted: None)
    with pytest.raises(UserError, match=f"tracker={name} is not installed: pip install {name}"):
        tracker_of(make_config(tracker=name))
    assert tracker_of(make_config(tracker="tensorboard")) is None and tracker_of(make_config(tracker="none")) is None
    monkeypatch.setattr(util, "find_spec", lambda wanted: object())
    assert tracker_of(make_config(tracker=name)) == name
