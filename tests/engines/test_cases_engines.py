"""INIT, HANG, NDP and PREC: what went wrong in public with loading, experts, meshes and sums, on the real engines. cases.yaml
lists the reports."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.errors import UserError
from toolkit.training.accelerator import check_mesh

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny_experts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """`config:DIR` of a Mixtral with more experts than a short row reaches."""
    folder = tmp_path_factory.mktemp("experts")
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    old = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 64,
              "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 16,
              "num_experts_per_tok": 1, "max_position_embeddings": 256,
              **{name: old[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return f"config:{folder}"


def test_hang_experts_that_no_token_of_a_rank_reaches_do_not_hold_the_others_up(
    launch: Callable[..., Any], sharded_zero3: str, tiny_experts: str, tmp_path: Path
) -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/1931, and beside it https://github.com/deepspeedai/DeepSpeed/issues/1800: a
    file that asks for sums of gradients in fp32 has them."""
    file = yaml.safe_load(Path(sharded_zero3).read_text(encoding="utf-8"))
    settings = json.loads(Path(file["deepspeed_config"]["deepspeed_config_file"]).read_text(encoding="utf-8"))
    settings["data_types"] = {"grad_accum_dtype": "fp32"}
    (tmp_path / "zero3.json").write_text(json.dumps(settings), encoding="utf-8")
    file["deepspeed_config"]["deepspeed_config_file"] = str(tmp_path / "zero3.json")
    (tmp_path / "experts.yaml").write_text(yaml.safe_dump(file), encoding="utf-8")
    run = launch(str(tmp_path / "experts.yaml"), model=tiny_experts, precision="bf16", accumulate=2, micro_batch=1, seq_len=16,
                 timeout_minutes=1)
    assert run.status == 0, run.output
    assert len(run.steps()) == 3 and "gradients of 2 micro-batches summed in fp32" in run.output


@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "fp32"), ("fsdp", "bf16"), ("zero2", "bf16")])
def test_prec_the_log_says_in_what_gradients_of_micro_batches_are_summed(
    bf16_run: Callable[[str], Any], strategy: str, kind: str
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/1800"""
    assert f"gradients of 2 micro-batches summed in {kind}" in bf16_run(strategy).output


def test_ndp_a_mesh_of_one_copy_trains_as_one_process_does_and_one_of_single_shards_is_refused(
    fp32_run: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/pytorch/pytorch/issues/154888"""
    file = yaml.safe_load((ROOT / "recipes" / "accelerate" / "hsdp.yaml").read_text(encoding="utf-8"))
    file["parallelism_config"] |= {"parallelism_config_dp_replicate_size": 1, "parallelism_config_dp_shard_size": 2}
    (tmp_path / "one-copy.yaml").write_text(yaml.safe_dump(file), encoding="utf-8")
    run, single = fp32_run(str(tmp_path / "one-copy.yaml")), fp32_run("single")
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in run.steps()] == pytest.approx([step[name] for step in single.steps()], rel=1e-5)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="2 copies of the model with one process each"):
        check_mesh({"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1"})


MEASURED = """
import os
from accelerate import Accelerator

def highest():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0]) * 1024, int(lines["VmRSS"].split()[0]) * 1024

import toolkit.training.model as model
build, prepare, before = model.build_model, Accelerator.prepare, []

def build_model(*given, **named):
    before.append(highest()[1])
    return build(*given, **named)

def prepared(self, *given, **named):
    result = prepare(self, *given, **named)
    print(f"rank {os.environ['RANK']} grew by {highest()[0] - before[0]}", flush=True)
    return result

model.build_model, Accelerator.prepare = build_model, prepared
import runpy
runpy.run_path(os.environ["RECIPE"], run_name="__main__")
"""


def test_init_only_the_main_process_reads_the_whole_model_into_memory(
    launch: Callable[..., Any], tiny_model: Path, tmp_path: Path
) -> None:
    """https://github.com/pytorch/pytorch/issues/104755, https://github.com/huggingface/transformers/issues/43749"""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "larger"
    shutil.copytree(tiny_model, folder)
    config = LlamaConfig.from_pretrained(folder)
    config.update({"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
                   "num_key_value_heads": 8, "head_dim": 64})
    LlamaForCausalLM(config).save_pretrained(folder)
    whole = (folder / "model.safetensors").stat().st_size
    (tmp_path / "measured.py").write_text(MEASURED, encoding="utf-8")
    run = launch("fsdp", model=folder, max_steps=1, script=tmp_path / "measured.py", profile=False, preflight="off",
                 env={"RECIPE": str(ROOT / "recipes" / "train.py"), "PYTHONPATH": str(ROOT)})
    assert run.status == 0, run.output
    grew = {int(rank): int(size) for rank, size in re.findall(r"rank (\d) grew by (\d+)", run.output)}
    assert grew[0] > 0.9 * whole  # What is measured is what is read.
    assert grew[1] < 0.8 * grew[0] and grew[0] < 2 * whole
