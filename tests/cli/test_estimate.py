"""`toolkit estimate`: the contract of its JSON and its exit status."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.specs.catalog import gpus
from toolkit.units import GIB, format_size

ROOT = Path(__file__).parents[2]
Run = Callable[..., Any]
SHORT = ("--seq-len", 64, "--gpu", "a100-80gb-sxm")
PLANS = {"single": (1, 1), "ddp": (2, 1), "fsdp": (2, 1), "fsdp-grad": (2, 1), "hsdp": (2, 2), "zero1": (2, 1), "zero2": (2, 1),
         "zero3": (2, 1)}  # fmt: skip
"""Strategy: GPUs per node, nodes."""
TOP = {"schema", "model", "workload", "cluster", "plan", "memory", "time"}
MEMORY = {"peak_allocated", "peak_reserved", "outside_allocator", "peak_total", "capacity", "headroom", "fits", "first_step_peak",
          "resident", "at_peak", "breakdown", "host", "nvme"}  # fmt: skip
BREAKDOWN = {"parameters", "gradients", "master_weights", "optimizer_states", "activations", "logits_and_loss", "communication",
             "temporaries"}  # fmt: skip
TIME = {"step_seconds", "tokens_per_second", "tokens_per_second_per_gpu", "mfu", "communication_share"}


def sizes(memory: dict[str, Any]) -> list[Any]:
    names = ("peak_allocated", "peak_reserved", "outside_allocator", "peak_total", "capacity", "headroom", "first_step_peak",
             "resident", "nvme")  # fmt: skip
    return [*(memory[name] for name in names), *memory["breakdown"].values(), memory["host"]["peak"], memory["host"]["pinned"]]


@pytest.mark.parametrize("strategy", PLANS)
@pytest.mark.parametrize("gpu", ["a100-80gb-sxm", "cpu"])
def test_the_json_is_the_contract(strategy: str, gpu: str, run: Run, tiny: Path) -> None:
    gpus_per_node, nodes = PLANS[strategy]
    machines = ("--gpu", gpu, "--gpus", gpus_per_node, "--nodes", nodes)
    done = run("estimate", tiny, "--seq-len", 64, *machines, "--strategy", strategy, "--json")
    assert done.status == 0 and done.err == ""
    found = done.json
    memory = found["memory"]
    assert set(found) == TOP and found["schema"] == 1
    assert set(memory) >= MEMORY and set(memory["breakdown"]) == BREAKDOWN
    assert {"peak", "pinned", "capacity", "fits"} == set(memory["host"])
    assert all(type(size) is int for size in sizes(memory))
    assert sum(memory["breakdown"].values()) == memory["peak_allocated"]
    assert memory["peak_total"] == memory["peak_reserved"] + memory["outside_allocator"]
    assert memory["headroom"] == memory["capacity"] - memory["peak_total"]
    assert memory["fits"] is (memory["headroom"] >= 0 and memory["host"]["fits"]) is True
    assert 0 < memory["resident"] <= memory["peak_allocated"] <= memory["peak_reserved"]
    assert memory["at_peak"]["phase"] in ("forward", "loss", "backward", "optimizer") and "module" in memory["at_peak"]
    assert found["model"]["parameters"] == found["model"]["trainable_parameters"] > 50_000
    assert found["plan"]["strategy"] == strategy
    assert found["cluster"]["gpu"]["name"] == gpu and found["cluster"]["world_size"] == gpus_per_node * nodes
    assert found["workload"]["seq_len"] == 64 and found["workload"]["precision"] == "bf16"


@pytest.mark.parametrize("gpu", ["a100-80gb-sxm", "t4", "cpu"])
def test_time_is_whole_or_null(gpu: str, run: Run, tiny: Path) -> None:
    time = run("estimate", tiny, "--seq-len", 64, "--gpu", gpu, "--json").json["time"]
    if time is not None:
        assert set(time) >= TIME
        assert time["step_seconds"] > 0 and 0 <= time["communication_share"] <= 1
        assert time["tokens_per_second"] == pytest.approx(64 / time["step_seconds"])
        assert time["mfu"] is None or 0 < time["mfu"] < 1


def test_it_fits_by_comparison_of_bytes(run: Run, tiny: Path) -> None:
    total = run("estimate", tiny, *SHORT, "--json").json["memory"]["peak_total"]
    exact = run("estimate", tiny, *SHORT, "--gpu-memory", total, "--json")
    short = run("estimate", tiny, *SHORT, "--gpu-memory", total - 1, "--json")
    assert (exact.status, exact.json["memory"]["headroom"], exact.json["memory"]["fits"]) == (0, 0, True)
    assert (short.status, short.json["memory"]["headroom"], short.json["memory"]["fits"]) == (3, -1, False)
    assert short.err == ""


def test_a_margin_is_policy_and_changes_the_status_not_the_estimate(run: Run, tiny: Path) -> None:
    total = run("estimate", tiny, *SHORT, "--json").json["memory"]["peak_total"]
    memory = ("--gpu-memory", int(total * 1.1))
    free, kept = (run("estimate", tiny, *SHORT, *memory, "--margin", margin, "--json") for margin in (0, 0.2))
    assert (free.status, kept.status) == (0, 3)
    assert free.json == kept.json


def test_host_memory_counts_too(run: Run, tiny: Path) -> None:
    words = ("estimate", tiny, *SHORT, "--gpus", 2, "--strategy", "zero3", "--offload", "all")
    need = run(*words, "--json").json["memory"]["host"]
    assert need["peak"] > 0 and need["capacity"] is None and need["fits"] is True
    done = run(*words, "--host-memory", need["peak"] - 1, "--json")
    assert done.status == 3 and done.json["memory"]["host"]["fits"] is done.json["memory"]["fits"] is False
    assert "the host needs" in run(*words, "--host-memory", need["peak"] - 1).out
    assert run(*words, "--host-memory", need["peak"], "--json").status == 0


@pytest.mark.parametrize(
    ("text", "size"), [("20GiB", 20 * GIB), ("20GB", 20 * 10**9), (str(20 * GIB), 20 * GIB), ("0.5 tib", 512 * GIB)]
)
def test_sizes_are_written_in_three_ways(text: str, size: int, run: Run, tiny: Path) -> None:
    assert run("estimate", tiny, *SHORT, "--gpu-memory", text, "--json").json["memory"]["capacity"] == size


def test_without_a_size_the_catalogs_holds(run: Run, tiny: Path) -> None:
    assert run("estimate", tiny, *SHORT, "--json").json["memory"]["capacity"] == gpus()["a100-80gb-sxm"].memory


def test_a_name_a_directory_and_a_config_file_are_one_model(run: Run, tiny: Path) -> None:
    first, second = (run("estimate", path, *SHORT, "--json").json for path in (tiny, tiny / "config.json"))
    assert first == second
    assert first["model"]["name"] == "tiny"
    assert run("estimate", "gpt2", *SHORT, "--json").json["model"]["parameters"] == 124439808


def test_adapters_train_few_parameters(run: Run, tiny: Path) -> None:
    full, lora = (run("estimate", tiny, *SHORT, "--method", method, "--json").json for method in ("full", "lora"))
    assert lora["model"]["trainable_parameters"] < full["model"]["trainable_parameters"]
    assert lora["memory"]["breakdown"]["optimizer_states"] < full["memory"]["breakdown"]["optimizer_states"]


def test_for_people_it_says_what_the_json_says(run: Run, tiny: Path) -> None:
    words = ("estimate", tiny, *SHORT, "--gpu-memory", "1GiB")
    text, memory = run(*words), run(*words, "--json").json["memory"]
    assert text.status == 0 and text.err == ""
    assert f"It fits: {format_size(memory['peak_total'])} of 1 GiB" in text.out
    assert f"It does not fit: {format_size(memory['peak_total'])} of 1 MiB" in run(*words[:-1], "1MiB").out


def test_a_plan_is_read_from_launch_files(run: Run, tiny: Path) -> None:
    words = ("estimate", tiny, *SHORT, "--json")
    file = ROOT / "recipes" / "accelerate" / "zero2.yaml"
    found = run(*words, "--accelerate-config", file).json
    assert found["plan"]["strategy"] == "zero2"
    assert found["cluster"]["gpus_per_node"] == 2, "the file's num_processes"
    assert run(*words, "--accelerate-config", file, "--gpus", 4).json["cluster"]["gpus_per_node"] == 4
    json_file = ROOT / "ds_configs" / "zero3.json"
    assert run(*words, "--accelerate-config", file, "--ds-config", json_file).json["plan"]["strategy"] == "zero3"


def test_what_the_files_say_of_the_batch_holds(run: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, '
        '"bf16": {"enabled": true}}', encoding="utf-8",
    )  # fmt: skip
    (tmp_path / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 4\nnum_machines: 2\ndeepspeed_config: {deepspeed_config_file: ds.json}\n",
        encoding="utf-8",
    )
    found = run("estimate", tiny, *SHORT, "--json", "--accelerate-config", tmp_path / "a.yaml").json
    assert (found["workload"]["micro_batch"], found["workload"]["accumulate"]) == (3, 2)
    assert (found["cluster"]["gpus_per_node"], found["cluster"]["nodes"]) == (2, 2)


def test_checkpointing_is_the_files_or_the_options(run: Run, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    section = "fsdp_version: 2, fsdp_activation_checkpointing: true, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
    file.write_text(f"distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {{{section}}}\n", encoding="utf-8")
    words = ("estimate", tiny, *SHORT, "--json", "--accelerate-config")
    assert run(*words, file).json["plan"]["checkpointing"] == "full"
    shipped = ROOT / "recipes" / "accelerate" / "fsdp.yaml"
    assert run(*words, shipped).json["plan"]["checkpointing"] == "none"
    assert run(*words, shipped, "--checkpointing", "full").json["plan"]["checkpointing"] == "full"


def test_a_knob_without_effect_is_said_and_not_in_the_way_of_the_json(run: Run, tiny: Path) -> None:
    done = run("estimate", tiny, *SHORT, "--gpus", 2, "--strategy", "ddp", "--bucket", 1000, "--json")
    assert done.status == 0 and done.json["plan"]["bucket"] is None
    assert done.err == "toolkit: note: --bucket has no effect under ddp\n"


def test_the_same_question_has_the_same_answer(run: Run, tiny: Path) -> None:
    words = ("estimate", tiny, *SHORT, "--gpus", 2, "--strategy", "fsdp", "--json")
    assert run(*words).out == run(*words).out
