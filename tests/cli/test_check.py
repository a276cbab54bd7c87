"""`toolkit check` as a command: exit status, machine output, and one line for bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
GOOD = ROOT / "recipes" / "accelerate" / "zero2.yaml"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 256,
}


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The console script, as a shell would start it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_"))}
    environment = {**kept, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "200", **environ}
    command = [sys.executable, "-m", "toolkit", "check", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def write(path: Path, content: dict[str, object]) -> str:
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def test_a_good_file_is_status_0_and_follows_the_json() -> None:
    done = run(str(GOOD))
    assert done.returncode == 0 and done.stderr == ""
    assert "ds_configs/zero2.json" in done.stdout and "nothing wrong found" in done.stdout


def test_errors_are_status_2_and_on_stdout(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", {"distributed_type": "FSDP", "fsdp_config": {"fsdp_versoin": 2}})
    done = run(file)
    assert done.returncode == 2 and done.stderr == ""
    assert "error   " in done.stdout and "did you mean 'fsdp_version'" in done.stdout
    assert done.stdout.strip().splitlines()[-1].startswith("1 error, ")


def test_warnings_alone_are_status_0(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}})
    done = run(file)
    assert done.returncode == 0 and "silently clips at 1.0" in done.stdout


def test_json_is_all_there_is_on_stdout(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", {"distributed_type": "FSPD"})
    done = run(file, str(GOOD), "--json")
    assert done.returncode == 2
    content = json.loads(done.stdout)
    assert content["schema"] == 1 and content["errors"] == 1 and content["plan"]["label"] == "zero2"
    assert [f["kind"] for f in content["files"]] == ["accelerate", "accelerate", "deepspeed"]
    assert content["findings"][0]["key"] == "distributed_type" and content["findings"][0]["level"] == "error"


def test_the_environment_is_looked_at() -> None:
    done = run(str(GOOD), FSDP_TRANSFORMER_LAYER_TO_WRAP="X")
    assert done.returncode == 2 and "FSDP_TRANSFORMER_CLS_TO_WRAP" in done.stdout


def test_a_model_gives_its_layer_classes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    section = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "GPT2Block",
    }
    file = write(tmp_path / "a.yaml", {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": section})
    done = run(file, "--model", str(tmp_path), "--json")
    assert done.returncode == 2, done.stderr
    assert "its layers are LlamaDecoderLayer" in json.loads(done.stdout)["findings"][0]["message"]


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    for words in (["gone.yaml"], [str(GOOD), "--model", str(tmp_path / "no-such-model")]):
        done = run(*words)
        assert done.returncode == 2 and done.stdout == ""
        assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr


def test_it_needs_no_torch() -> None:
    code = (
        "import sys\nfrom toolkit.cli.main import main\ntry:\n    main(['check', 'recipes/accelerate/fsdp.yaml'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'accelerate', 'transformers', 'deepspeed'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60)
