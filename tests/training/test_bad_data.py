"""Bad data through the whole recipe, as a new user meets it: one line, exit status 2, no run folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAIR, TEXT = '{"prompt": "x", "completion": "y"}\n', '{"text": "one two three"}\n'
LONG = json.dumps({"prompt": "a " * 400, "completion": "b"}) + "\n"
CHAT = '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n'
FILES = {
    "broken.jsonl": TEXT + '{"text": \n', "no_column.jsonl": '{"a": 1}\n', "empty.jsonl": "", "blank.jsonl": "\n\n",
    "masked.jsonl": '{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}\n', "ids.jsonl": '{"input_ids": [1, 2, 300000]}\n',
    "long.jsonl": LONG, "chat.jsonl": CHAT, "mixed/a.jsonl": TEXT, "mixed/b.jsonl": PAIR, "splits/train.jsonl": TEXT,
    "table.csv": "prompt,completion\nx\n", "latin.jsonl": TEXT, "nothing/readme.md": "x",
}  # fmt: skip
CASES: dict[str, tuple[list[str], str]] = {
    "a broken line": (["data=broken.jsonl"], "broken.jsonl line 2 is not JSON"),
    "a row with too few fields": (["data=table.csv"], "line 2 has 1 fields, the header has 2"),
    "not UTF-8": (["data=latin.jsonl"], "line 1 is not UTF-8 text"),
    "no column": (["data=no_column.jsonl"], "has nothing to train on (keys: a)"),
    "a column that is not there": (["data=broken.jsonl", "columns=prompt=QUESTION"], "no column 'QUESTION' (it has text)"),
    "an empty file": (["data=empty.jsonl"], "is empty"),
    "only blank lines": (["data=blank.jsonl"], "holds no records"),
    "a split that is not there": (["data=splits:test"], "no file of the folder is named after split 'test'"),
    "a folder without data": (["data=nothing"], "holds no file that is read"),
    "a file that is not there": (["data=none.jsonl"], "'none.jsonl' does not exist"),
    "all labels masked": (["data=masked.jsonl"], "are all labels masked?"),
    "ids beyond the vocabulary": (["data=ids.jsonl"], "the data has token id 300,000, but the model has only"),
    "answers beyond seq_len": (["data=long.jsonl"], "the answers of long samples lie beyond seq_len"),
    "long samples that are to stop": (["data=long.jsonl", "too_long=stop"], "line 1 has"),
    "mixed formats": (["data=mixed"], "one run trains on one format"),
    "no template": (["data=chat.jsonl", "model=no_template"], "the model's tokenizer has no chat template"),
    "a hub id without network": (["data=owner/name"], "neither a file here nor a hub dataset that can be fetched"),
    "answers of plain text": (["data=splits", "train_on=answers"], "has no answers; use train_on=everything"),
}
NOT_STREAMED = ("an empty file", "a split that is not there", "a folder without data", "a file that is not there")
"""These are found before it matters how data is read."""

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from recipes.train import main
from toolkit.errors import ToolkitError
from toolkit.training.start import quiet
quiet()
for name, words in json.loads(sys.stdin.read()).items():
    try:
        main(words)
        told = (0, "")
    except ToolkitError as error:
        told = (error.exit_code, str(error))
    print("TOLD " + json.dumps([name, *told]), flush=True)
"""


@pytest.fixture(scope="module")
def told(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[int, str]]]:
    """(folder, case to exit status and line), all in one process."""
    folder = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "latin.jsonl").write_bytes('{"text": "caf\u00e9"}\n'.encode("latin-1"))
    shutil.copytree(tiny_model, folder / "no_template", ignore=shutil.ignore_patterns("chat_template.jinja"))
    common = [f"model={tiny_model}", "output=run", "max_steps=2", "seq_len=64", "precision=fp32", "tracker=none", "preflight=off",
              "profile=false", "export=false"]
    cases = {name: [*common, *words] for name, (words, _) in CASES.items()}
    cases |= {f"{name}, streamed": [*words, "streaming=true"] for name, words in cases.items() if name not in NOT_STREAMED}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT),
                   "TOOLKIT_CACHE": str(folder / "cache")}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(ROOT)], input=json.dumps(cases), cwd=folder, env=environment,
                          capture_output=True, text=True, timeout=200)
    lines: list[Any] = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    assert len(lines) == len(cases), done.stdout + done.stderr
    return folder, {name: (status, text) for name, status, text in lines}


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_bad_data_is_one_line_that_says_what_and_where(
    case: str, streamed: bool, told: tuple[Path, dict[str, tuple[int, str]]]
) -> None:
    if streamed and case in NOT_STREAMED:
        return
    folder, said = told
    status, line = said[f"{case}, streamed" if streamed else case]
    assert status == 2 and CASES[case][1] in line, line
    assert "\n" not in line and not (folder / "run").exists()
