"""What lies outside the allocator: the table's figures, and the run that replaces them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli.main import main
from toolkit.errors import UserError
from toolkit.estimate.outside import outside_allocator, read_calibration
from toolkit.specs import Plan
from toolkit.specs.detect import make_cluster
from toolkit.units import MIB


def memory_json(folder: Path, outside: Any, ranks: int = 1) -> Path:
    path = folder / "memory.json"
    path.write_text(json.dumps({"predicted": None, "measured": {"peak_by_rank": [1] * ranks, "outside": outside}}))
    return path


@pytest.mark.parametrize("gpu", ["t4", "a100-80gb-sxm", "h100-sxm", "mi300x"])
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_the_interval_holds_the_figure_and_grows_with_ranks(gpu: str, gpus: int) -> None:
    plan = Plan(strategy="ddp" if gpus > 1 else "single")
    typical, (low, high) = outside_allocator(make_cluster(gpu=gpu, gpus=gpus), plan)
    assert 0 < low <= typical <= high
    alone, _ = outside_allocator(make_cluster(gpu=gpu, gpus=1), Plan())
    assert (typical > alone) is (gpus > 1)


def test_the_communicator_of_a100s_with_nvlink_is_as_it_was_measured() -> None:
    # NVIDIA/nccl#964: 544 MiB for a group of two, 688 MiB for more, on A100s that NVLink joins
    def communicator(gpu: str, gpus: int) -> int:
        ranks, alone = make_cluster(gpu=gpu, gpus=gpus), make_cluster(gpu=gpu, gpus=1)
        return outside_allocator(ranks, Plan(strategy="ddp"))[0] - outside_allocator(alone, Plan())[0]

    assert communicator("a100-80gb-sxm", 2) == 544 * MIB
    assert communicator("a100-80gb-sxm", 4) == 688 * MIB
    assert communicator("a100-80gb-pcie", 2) < 544 * MIB


def test_a_run_of_one_gpu_replaces_the_context_and_leaves_the_communicators(tmp_path: Path) -> None:
    measured = read_calibration(memory_json(tmp_path, 700 * MIB))
    assert measured == (700 * MIB, 1)
    one, eight = (dataclasses.replace(make_cluster(gpu="h100-sxm", gpus=n), outside_measured=measured) for n in (1, 8))
    assert outside_allocator(one, Plan()) == (700 * MIB, (700 * MIB, 700 * MIB))
    typical, (low, high) = outside_allocator(eight, Plan(strategy="ddp"))
    table, interval = outside_allocator(make_cluster(gpu="h100-sxm", gpus=8), Plan(strategy="ddp"))
    context, of_context = outside_allocator(make_cluster(gpu="h100-sxm", gpus=1), Plan())
    assert typical - 700 * MIB == table - context
    assert high - low == interval[1] - interval[0] - (of_context[1] - of_context[0])


def test_a_run_of_several_ranks_holds_the_communicator_of_the_world(tmp_path: Path) -> None:
    memory_json(tmp_path, 1500 * MIB, ranks=8)
    cluster = dataclasses.replace(make_cluster(gpu="h100-sxm", gpus=8), outside_measured=read_calibration(tmp_path))
    assert outside_allocator(cluster, Plan(strategy="fsdp"))[0] == 1500 * MIB
    assert outside_allocator(cluster, Plan(strategy="hsdp"))[0] > 1500 * MIB


@pytest.mark.parametrize(("text", "says"), [
    ("{", "is not JSON"), ("[]", "no measured run"), ('{"measured": {}}', "no measured run"),
    ('{"measured": {"peak_by_rank": [1], "outside": null}}', "on a CPU"),
    ('{"measured": {"peak_by_rank": [1], "outside": "2GiB"}}', "a number of bytes"),
    ('{"measured": {"peak_by_rank": [1], "outside": -5}}', "a number of bytes"),
])
def test_a_bad_calibration_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "memory.json"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as error:
        read_calibration(path)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="can't be read"):
        read_calibration(tmp_path / "nowhere")


def status(arguments: list[str]) -> Any:
    with pytest.raises(SystemExit) as done:
        main(arguments)
    return done.value.code


def test_the_command_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = memory_json(tmp_path, 900 * MIB)
    asked = ["estimate", "gpt2", "--gpu", "a100-80gb-sxm", "--gpus", "1", "--seq-len", "64", "--calibration", str(path), "--json"]
    assert status(asked) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["outside_allocator"] == 900 * MIB
    assert memory["peak_total"] == memory["peak_reserved"] + 900 * MIB
    assert status(["estimate", "gpt2", "--gpu", "cpu", "--calibration", str(path)]) == 2
    assert "nothing lies outside" in capsys.readouterr().err
