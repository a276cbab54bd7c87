"""The page: well-formed, self-contained, small, told to screen readers too; and what it does with bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli.main import main

VOID = {"meta", "link", "br", "hr", "img", "input"}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}


class Elements(HTMLParser):
    """Every element with its attributes; stops at the first that is closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def elements(page: Path) -> Elements:
    text = page.read_text(encoding="utf-8")
    assert page.stat().st_size < 1_500_000
    assert not re.search(r"https?://|//cdn|@import|url\(", text), "something would be fetched"
    parser = Elements()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    ids = [attributes["id"] for _, attributes in parser.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in parser.found:
        assert not {"src", "srcset", "action"} & set(attributes)
        assert not attributes.get("href", "#").startswith(("http", "//", "file"))
        if tag == "svg":
            assert attributes.get("aria-hidden") == "true"  # the figure around it speaks
        if attributes.get("role") in ("img", "slider", "region"):
            assert attributes["aria-label"]
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("aria-labelledby", ids[0]) in ids
    return parser


def toolkit(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `recommend --write`."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    assert toolkit("recommend", folder / "model", "--seq-len", 64, "--gpu", "t4", "--gpus", 2, "--micro-batch", 1,
                   "--write", folder / "run") == 0
    return folder / "run"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run folder as the recipe leaves it, with names that must be escaped."""
    run = tmp_path / "run"
    run.mkdir()
    memory = {"predicted": {"peak_allocated": 2000, "first_step_peak": 1500, "resident": 900, "capacity": 1 << 30,
                            "outside_allocator": 0},
              "measured": {"peak": 2100, "first_step_peak": 1500, "resident": 900, "peak_by_rank": [2000, 2100],
                           "counter": "allocations"}}
    (run / "memory.json").write_text(json.dumps(memory), encoding="utf-8")
    (run / "plan.json").write_text(json.dumps({"label": "zero2", "strategy": "zero2"}), encoding="utf-8")
    (run / "config.yaml").write_text("model: <b>&me</b>\n", encoding="utf-8")
    steps = [{"step": i, "loss": 1.0, "memory_peak": 2000 + i} for i in range(1, 1001)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)) + '\n{"step": 10', encoding="utf-8")
    return run


def test_recommend_writes_the_page_into_its_folder(written: Path) -> None:
    found = elements(written / "report.html")
    recommendation = json.loads((written / "recommendation.json").read_text(encoding="utf-8"))
    assert str(written / "report.html") in recommendation["files"]
    for heading in ("Memory by plan", "Two steps", "Throughput", "How to run it"):
        assert heading in found.text
    assert recommendation["one_gpu"] in found.text and f"sh {written / 'launch.sh'}" in found.text
    bars = [a["aria-label"] for _, a in found.found if a.get("role") == "img" and "bar" in a.get("class", "")]
    assert len(bars) == len(recommendation["candidates"]) and all("parameters" in label for label in bars)
    sliders = [a for _, a in found.found if a.get("role") == "slider"]
    assert len(sliders) == 1 and sliders[0]["tabindex"] == "0" and "(the peak)" in sliders[0]["aria-valuetext"]
    assert "prefers-color-scheme:dark" in (written / "report.html").read_text(encoding="utf-8")


def test_every_bar_is_split_into_the_terms_of_its_own_peak(written: Path) -> None:
    for candidate in json.loads((written / "recommendation.json").read_text(encoding="utf-8"))["candidates"]:
        breakdown = candidate["memory"]["breakdown"]
        assert sum(breakdown.values()) == candidate["memory"]["peak_allocated"] and min(breakdown.values()) >= 0


def test_the_folder_gives_the_same_page_again_without_the_model(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "run")
    (tmp_path / "run" / "train.yaml").unlink()
    assert toolkit("report", tmp_path / "run", "--html", tmp_path / "again.html") == 0
    assert (tmp_path / "again.html").read_bytes() == (written / "report.html").read_bytes()


def test_a_run_folder(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert toolkit("report", run_folder, "--html", tmp_path / "run.html", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["bytes"] == (tmp_path / "run.html").stat().st_size
    found = elements(tmp_path / "run.html")
    assert "<b>&me</b> under zero2" in found.text and "-4.76%" in found.text and "rank 1" in found.text
    labels = [a.get("aria-label", "") for _, a in found.found]
    assert any(label.startswith("Measured peak of 334 steps, at most 2.93 KiB") for label in labels)


def test_the_json_of_estimate_and_of_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(CONFIG), encoding="utf-8")
    for words in (("estimate", model, "--gpu", "t4", "--seq-len", 64),
                  ("scaling", model, "--gpu", "t4", "--seq-len", 64, "--max-gpus", 2)):
        capsys.readouterr()
        assert toolkit(*words, "--json") == 0
        (tmp_path / "out.json").write_text(capsys.readouterr().out, encoding="utf-8")
        assert toolkit("report", tmp_path / "out.json", "--html", tmp_path / "out.html") == 0
        found = elements(tmp_path / "out.html")
        assert ("Memory by plan" in found.text) == (words[0] == "estimate")
        assert ("Throughput" in found.text) == (words[0] == "scaling")


@pytest.mark.parametrize(("content", "said"), [
    (None, "there is no such file"), ("{", "not JSON"), ("[1]", "holds no object"), ('{"schema": 9}', "another version"),
    ('{"schema": 1}', "not the JSON of"),
])  # fmt: skip
def test_bad_input_is_one_line(content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "in.json").write_text(content, encoding="utf-8")
    assert toolkit("report", tmp_path / "in.json", "--html", tmp_path / "out.html") == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not (tmp_path / "out.html").exists()


def test_folders_that_are_none_and_places_that_cannot_be_written(run_folder: Path, tmp_path: Path,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert toolkit("report", tmp_path / "empty", "--html", tmp_path / "out.html") == 2
    assert toolkit("report", run_folder, "--html", tmp_path) == 2
    assert toolkit("report", run_folder, "--html", run_folder / "plan.json" / "out.html") == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_a_run_that_failed_and_a_profiled_command(run_folder: Path, tmp_path: Path) -> None:
    failed = {"schema": 1, "where": "forward of step 2", "rank": 1, "module": "model.norm", "asked": 1 << 20,
              "allocated": 1 << 30, "groups": [["parameters", 1 << 29]], "reserved": None}
    (run_folder / "out_of_memory.json").write_text(json.dumps(failed), encoding="utf-8")
    assert toolkit("report", run_folder, "--html", tmp_path / "out.html") == 0
    found = elements(tmp_path / "out.html")
    assert "Out of memory" in found.text and "Rank 1, forward of step 2, model.norm." in found.text and "512 MiB" in found.text
    rank = {"rank": 3, "steps": 2, "peak": 2048, "first_step_peak": 1024, "resident": 512, "peaks": [1024, 2048]}
    profile = {"schema": 1, "command": ["python", "<my>.py"], "ranks": [rank]}
    (tmp_path / "profile.json").write_text(json.dumps(profile), encoding="utf-8")
    assert toolkit("report", tmp_path / "profile.json", "--html", tmp_path / "out.html") == 0
    found = elements(tmp_path / "out.html")
    assert "python '<my>.py'" in found.text and "rank 3" in found.text and "Peak of each step" in found.text


def test_a_broken_part_is_named_and_the_rest_is_shown(run_folder: Path, tmp_path: Path) -> None:
    (run_folder / "memory.json").write_text("{", encoding="utf-8")
    assert toolkit("report", run_folder, "--html", tmp_path / "out.html") == 0
    found = elements(tmp_path / "out.html")
    assert "memory.json: it is not JSON" in found.text and "Peak of each step" in found.text


@pytest.mark.parametrize(("memory", "named"), [
    ({"predicted": 5, "measured": [1]}, "was it written by another version?"),
    ({"predicted": {"breakdown": {"x": 1}}, "measured": {"peak": 1, "worst": {"breakdown": {}}}}, "can't be read (KeyError"),
])  # fmt: skip
def test_a_record_of_another_version_costs_its_part_alone(memory: Any, named: str, run_folder: Path, tmp_path: Path) -> None:
    (run_folder / "memory.json").write_text(json.dumps(memory), encoding="utf-8")
    assert toolkit("report", run_folder, "--html", tmp_path / "out.html") == 0
    found = elements(tmp_path / "out.html")
    assert named in found.text and "Peak of each step" in found.text


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
               os.environ.get("TOOLKIT_TEST_BROWSER"))


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="no headless browser: install Chromium, or name one in TOOLKIT_TEST_BROWSER")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_in_a_headless_browser(width: int, dark: bool, written: Path, tmp_path: Path) -> None:
    """Drawn without a word on the console, with the cursor at the peak; a picture comes out."""
    picture = tmp_path / "page.png"
    words = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr",
             f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1600", "--virtual-time-budget=1000"]
    words += ["--blink-settings=preferredColorScheme=0"] if dark else []
    page = (written / "report.html").as_uri()
    done = subprocess.run([*words, f"--screenshot={picture}", page], capture_output=True, timeout=60)
    assert done.returncode == 0 and b"CONSOLE" not in done.stderr, done.stderr[-2000:]
    assert picture.stat().st_size > 20_000
    dom = subprocess.run([*words, "--dump-dom", page], capture_output=True, timeout=60).stdout.decode()
    cursor: Any = re.search(r'class="cursor" style="left: ([0-9.]+)%', dom)
    assert cursor is not None and 0 < float(cursor[1]) <= 100


