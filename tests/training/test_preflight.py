"""Pre-flight: a run that does not fit ends before its weights are loaded, with exit status 3 and commands that fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from toolkit.errors import NothingFits
from toolkit.specs import detect
from toolkit.specs.plan import Plan
from toolkit.training.config import from_mapping
from toolkit.training.preflight import Preflight
from toolkit.units import MIB

MODEL = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2)


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Preflight, list[str]]]:
    """A pre-flight of a small model on a machine with so many bytes of RAM, and what it says."""
    monkeypatch.setattr("sys.argv", ["recipes/train.py", "--config", "my run.yaml"])

    def start(ram: int, **keys: Any) -> tuple[Preflight, list[str]]:
        monkeypatch.setattr(detect, "host_ram", lambda: ram)
        said: list[str] = []
        values = {"model": "m", "data": "d.jsonl", "output": str(tmp_path), "max_steps": 1, "precision": "fp32", "seq_len": 128,
                  "micro_batch": 8, **keys}
        accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1, is_main_process=True,
                                      state=SimpleNamespace(deepspeed_plugin=None))
        return Preflight(from_mapping(values), MODEL, accelerator, SimpleNamespace(say=said.append)), said  # type: ignore[arg-type]

    return start


def test_a_run_that_fits_is_one_line_and_one_estimate(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    preflight, said = look(1 << 34)
    estimates = []
    real = preflight.estimator.estimate
    monkeypatch.setattr(preflight.estimator, "estimate", lambda *a, **k: estimates.append(a) or real(*a, **k))
    before = torch.get_rng_state()
    preflight.check()
    assert len(said) == 1 and said[0].startswith("pre-flight: ") and "of 16 GiB per process at" in said[0]
    predicted = preflight.predicted(Plan())
    assert len(estimates) == 1 and predicted["peak_allocated"] == preflight.made.memory.peak_allocated
    assert sum(predicted["timeline"]["between"].values()) == predicted["resident"]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_that_does_not_fit_stops_with_commands_that_do(look: Any) -> None:
    preflight, said = look(15 * MIB)
    with pytest.raises(NothingFits, match="does not fit.*preflight=warn"):
        preflight.check()
    lighter = [line for line in said if "lighter: " in line]
    assert 1 <= len(lighter) <= 3 and not any("still too much" in line for line in lighter)
    assert "micro-batch 4, the same global batch" in lighter[0]
    assert lighter[0].endswith("accelerate launch recipes/train.py --config 'my run.yaml' micro_batch=4 accumulate=2")
    follow, _ = look(15 * MIB, micro_batch=4, accumulate=2)
    follow.check()


def test_warn_goes_on_and_off_does_not_look(look: Any) -> None:
    preflight, said = look(15 * MIB, preflight="warn")
    preflight.check()
    assert any("does not fit" in line for line in said)
    preflight, said = look(15 * MIB, preflight="off")
    preflight.check()
    assert said == [] and preflight.predicted(Plan())["peak_allocated"] > 15 * MIB


def test_off_is_off_in_yaml_too() -> None:
    values = {"model": "m", "data": "d.jsonl", "output": "o", "max_steps": 1}
    assert from_mapping({**values, "preflight": False}).preflight == "off"


def test_a_fault_of_the_estimate_does_not_hold_up_the_run(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    preflight, said = look(1 << 34)
    monkeypatch.setattr(preflight.estimator, "estimate", lambda *a, **k: 1 / 0)
    preflight.check()
    assert preflight.predicted(Plan()) is None and "not predicted (ZeroDivisionError" in said[0]


@pytest.mark.slow
def test_a_launched_run_stops_before_its_weights(launch: Callable[..., Any], tmp_path: Path, tiny_model: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text(encoding="utf-8"))
    big = tmp_path / "big"
    big.mkdir()
    for file in tiny_model.glob("*token*"):
        (big / file.name).write_bytes(file.read_bytes())
    (big / "chat_template.jinja").write_bytes((tiny_model / "chat_template.jinja").read_bytes())
    config |= {"hidden_size": 32768, "intermediate_size": 65536, "num_hidden_layers": 4, "num_attention_heads": 256}
    (big / "config.json").write_text(json.dumps(config), encoding="utf-8")
    run = launch("ddp", model=f"config:{big}", timeout_minutes=2)
    assert run.status != 0 and "exitcode  : 3" in run.output, run.output
    assert run.output.count("error: this run does not fit") == 1, run.output
    assert "lighter: " in run.output and "recipes/train.py\", line" not in run.output  # the traceback is the launcher's
    assert "pre-flight: " in run.output and not (run.folder / "metrics.jsonl").exists()


def test_utilisation_follows_the_speed_and_is_not_claimed_on_a_cpu(look: Any) -> None:
    preflight, _ = look(1 << 40)
    assert preflight.mfu(1000.0) is None
    preflight.made = SimpleNamespace(time=SimpleNamespace(mfu=0.4, tokens_per_second=2000.0))
    assert preflight.mfu(1000.0) == pytest.approx(0.2)
