"""`toolkit profile`: any command, every rank, and what it says of commands that never train or die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli.main import main
from toolkit.profiling.command import Profiled, Rank, explain_kill, read_ends, read_records
from toolkit.profiling.killed import Watch
from toolkit.report.profiled import warnings_of

LOOP = """
import os, signal, sys
import torch
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
kept = []
for step in range(1, {steps} + 1):
    model(torch.ones(8, 1000)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    {after}
"""
WEIGHTS = 4 * (1000 * 1000 + 1000)
Profile = Callable[..., Any]


@pytest.fixture
def profile(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Profile:
    """`profile(*command)`: exit status, the JSON, stderr."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def start(*command: object, options: tuple[str, ...] = ("--json",)) -> tuple[int, Any, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["profile", "--output", str(tmp_path / "out"), *options, "--", *map(str, command)])
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), json.loads(out) if out.startswith("{") else out, err

    return start


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    def write(steps: int, after: str = "pass") -> Path:
        path = tmp_path / "loop.py"
        path.write_text(LOOP.format(steps=steps, after=after), encoding="utf-8")
        return path

    return write


def test_a_bare_loop_to_the_byte(profile: Profile, script: Any, tmp_path: Path) -> None:
    status, found, err = profile(sys.executable, script(4, "print('its own output')"))
    assert status == 0 and "its own output" in err
    (rank,) = found["ranks"]
    assert rank["counter"] == "allocations" and rank["steps"] == found["steps"] == 4 and rank["ended"]
    held = rank["resident_by_category"]
    assert (held["parameters"], held["gradients"]) == (WEIGHTS, WEIGHTS) and held["optimizer_states"] == 2 * (WEIGHTS + 4)
    assert sum(held.values()) == rank["resident"] and held["other"] < 40_000  # the input and the output
    assert rank["peaks"] == [rank["peak"]] * 4 and rank["peak"] >= rank["resident"] + WEIGHTS  # a temporary of the update
    assert json.loads((tmp_path / "out" / "profile.json").read_text(encoding="utf-8")) == found


def test_the_table_and_memory_that_rises(profile: Profile, script: Any) -> None:
    status, out, _ = profile(sys.executable, script(8, "kept.append(torch.empty(1 << 18))"), options=())
    assert status == 0 and "rank" in out and "yes" in out and "Rank 0 holds 1 MiB more after every step" in out


def test_a_command_that_fails_keeps_what_was_recorded(profile: Profile, script: Any) -> None:
    status, found, err = profile(sys.executable, script(9, "if step == 5: sys.exit(3)"))
    assert status == 1 and "ended with status 3 after step 5; what was recorded is in" in err and found["steps"] == 5


def test_a_killed_rank_is_named_with_the_hosts_memory(profile: Profile, script: Any) -> None:
    body = "if step == 3 and os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n    import time; time.sleep(0.2)"
    status, found, err = profile(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", 0,
                                 script(8, body))
    last = err.strip().splitlines()[-1]
    assert status == 1 and last.startswith("toolkit: rank 1 was killed by signal 9; ") and "of host memory were left" in last
    assert "it held" in last and "all 3 processes" in last  # the launcher imports torch too
    assert {rank["rank"]: rank["signal"] for rank in found["ranks"]}[1] == 9


@pytest.mark.parametrize(("command", "status", "said"), [
    (["no-such-command"], 2, "command 'no-such-command' does not exist"),
    ([sys.executable, "-c", "pass"], 2, "without one step of a torch optimizer"),
    ([sys.executable, "-c", "import torch.optim, sys; sys.exit(7)"], 1, "ended with status 7 before its first optimizer step"),
    ([sys.executable, "-c", "import os; os.kill(os.getpid(), 15)"], 1, "was ended by signal 15 before its first optimizer step"),
])  # fmt: skip
def test_bad_commands_are_one_line(command: list[str], status: int, said: str, profile: Profile) -> None:
    got, _, err = profile(*command)
    assert got == status and said in err and err.count("\n") == 1


def test_nothing_to_run_and_options_after_the_separator_are_the_commands(profile: Profile, capfd: Any) -> None:
    assert profile()[0] == 2
    status, _, err = profile(sys.executable, "-c", "import sys; sys.exit(len(sys.argv) - 1)", "--json", "--output", "x")
    assert status == 1 and "status 3" in err


def test_another_sitecustomize_still_runs(profile: Profile, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins; builtins.seen = True", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    status, found, _ = profile(sys.executable, script(2, "import builtins; kept.append(builtins.seen)"))
    assert status == 0 and found["steps"] == 2


def test_processes_that_the_command_starts_are_reported_each(profile: Profile, tmp_path: Path) -> None:
    code = """
import subprocess, sys
if len(sys.argv) == 1:
    sys.exit(max(p.wait() for p in [subprocess.Popen([sys.executable, __file__, str(n)]) for n in (1, 3)]))
import torch
model = torch.nn.Linear(100 * int(sys.argv[1]), 100)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.ones(5, model.in_features)).sum().backward()
    optimizer.step()
"""
    (tmp_path / "spawns.py").write_text(code, encoding="utf-8")
    status, found, err = profile(sys.executable, tmp_path / "spawns.py")
    assert status == 0, err
    large, small = found["ranks"]
    assert large["steps"] == small["steps"] == 4 and large["peak"] > 2 * small["peak"] and large["pid"] != small["pid"]


def test_a_signal_to_the_profiler_is_the_commands_and_what_was_recorded_is_reported(script: Any, tmp_path: Path) -> None:
    last = tmp_path / "stepped"
    body = f"if step == 3: open({str(last)!r}, 'w').close()\n    import time; time.sleep(0.1 if step < 4 else 60)"
    words = [sys.executable, "-m", "toolkit", "profile", "--output", str(tmp_path / "out"), "--", sys.executable]
    quiet = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*words, script(5, body)], **pipes, text=True, env=quiet) as profiler:
        end = time.monotonic() + 60
        while not last.exists() and time.monotonic() < end:
            time.sleep(0.05)
        profiler.terminate()
        out, err = profiler.communicate(timeout=30)
    assert profiler.returncode == 1 and "the command was ended by signal 15 after step " in err and "rank" in out, err


def test_half_a_line_of_a_killed_rank_is_left_out(tmp_path: Path) -> None:
    lines = [{"start": 1, "rank": 3}, {"step": 1, "peak": 10, "live": 4, "counter": "cuda"}]
    (tmp_path / "77.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 2, "pe', encoding="utf-8")
    (rank,) = read_records(tmp_path, {77: 9})
    assert (rank.rank, rank.peak, rank.counter, rank.signal, rank.ended) == (3, 10, "cuda", 9, False)


def test_who_was_killed_is_read_from_the_order_of_ends(tmp_path: Path) -> None:
    def killed(status: int, *ends: tuple[int, int, float]) -> str:
        for pid in (1, 2, 3):
            (tmp_path / f"{pid}.jsonl").write_text(f'{{"start": 1, "rank": {pid}}}\n{{"step": 1, "peak": 1}}\n')
        lines = [f"{pid} {status} {when}\n" for pid, status, when in ends]
        (tmp_path / "ends").write_text("".join(lines) + "2 -9")  # where the disk was full
        found = Profiled([], tmp_path, status, read_records(tmp_path, {}))
        return explain_kill(found, read_ends(tmp_path), Watch([])).partition(";")[0]

    assert killed(1, (9, -9, 1.0), (1, -15, 1.1), (3, -9, 1.2)) == "rank 3 was killed by signal 9"  # process 9 is no rank
    assert killed(1, (2, 1, 5.0), (3, -9, 35.2)) == ""  # the launcher's own doing
    assert killed(1, (2, 1, 5.0), (3, -9, 5.0)) == "rank 3 was killed by signal 9"  # rank 2 missed it
    assert killed(137) == "a process of the command was killed by signal 9"


def test_a_shell_between_the_command_and_its_rank(profile: Profile, script: Any) -> None:
    body = "if step == 3: os.kill(os.getpid(), signal.SIGKILL)"
    status, _, err = profile("bash", "-c", f"{sys.executable} {script(5, body)}; exit $?")
    assert status == 1 and err.strip().splitlines()[-1].startswith("toolkit: rank 0 was killed by signal 9; ")


def test_reserved_memory_that_is_not_used_is_flagged() -> None:
    rank = Rank(0, 1, "cuda", [{"step": 1, "peak": 50, "live": 10, "reserved": 100}])
    assert "expandable_segments" in warnings_of(rank)[0]
    assert warnings_of(Rank(0, 1, "cuda", [{"step": 1, "peak": 90, "live": 10, "reserved": 100}])) == []


@pytest.mark.slow
def test_the_hugging_face_trainer_under_accelerate_launch(profile: Profile, tiny_model: Path, tmp_path: Path) -> None:
    code = f"""
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained({str(tiny_model)!r})
rows = [dict(input_ids=list(range(32)), labels=list(range(32)))] * 16
arguments = TrainingArguments(output_dir={str(tmp_path / 'hf')!r}, max_steps=4, per_device_train_batch_size=2, report_to=[],
                              use_cpu=True, save_strategy="no", disable_tqdm=True)
Trainer(model=model, args=arguments, train_dataset=rows).train()
"""
    (tmp_path / "hf.py").write_text(code, encoding="utf-8")
    status, found, err = profile(sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", 1,
                                 tmp_path / "hf.py")
    assert status == 0, err
    (rank,) = found["ranks"]
    assert rank["steps"] == 4 and rank["peak"] > rank["resident"] > 0 and rank["resident_by_category"]["parameters"] > 0
