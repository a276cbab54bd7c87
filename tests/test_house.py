"""How the house is laid out: floors, sizes of files and functions, and what the command line may import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ("specs", "timeline", "strategies", "estimate", "planner", "profiling", "training", "report", "cli")
"""From the ground up: a file imports only from floors below its own, or from its own."""
GROUND = ("__init__", "units", "errors", "cache")
"""Single files under all floors; they import none of them."""
ENTRANCE = "__main__"
"""`python -m toolkit`: stands above all floors."""
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 400, 60
READ_FROM_TOP_TO_BOTTOM = {"recipes/train.py": ("main", 130)}
"""A recipe reads like a paper: its one function is the whole training run, in the order in which things happen."""
FOLDERS = ("toolkit", "recipes", "tests", "benchmarks", "docs", "ds_configs", ".github")
TEXT = {".py", ".md", ".yaml", ".yml", ".json", ".jsonl", ".toml", ".txt", ".csv", ".sh", ".html", ".cfg", ".ini", ""}

TOOLKIT = sorted(ROOT.glob("toolkit/**/*.py"))
SOURCES = TOOLKIT + sorted(ROOT.glob("recipes/**/*.py"))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions and those for types included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports are absolute here"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, lines without the docstring) of every function."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            yield node.name, lines


def floor_of(path: Path) -> int:
    """-1 for the ground, the number of floors for the entrance."""
    parts = path.relative_to(ROOT / "toolkit").with_suffix("").parts
    if len(parts) == 1:
        assert parts[0] in (*GROUND, ENTRANCE), f"{named(path)} stands on no floor"
        return len(FLOORS) if parts[0] == ENTRANCE else -1
    return FLOORS.index(parts[0])


def test_every_folder_is_a_floor() -> None:
    folders = {path.relative_to(ROOT / "toolkit").parts[0] for path in TOOLKIT if path.parent != ROOT / "toolkit"}
    assert folders <= set(FLOORS)


@pytest.mark.parametrize("path", TOOLKIT, ids=named)
def test_a_file_imports_from_floors_below_its_own(path: Path) -> None:
    own = floor_of(path)
    for line, name in imports(ast.parse(path.read_text(encoding="utf-8"))):
        parts = name.split(".")
        assert parts[0] not in ("recipes", "tests", "benchmarks"), f"{named(path)}:{line} imports {name}"
        if parts[0] == "toolkit" and len(parts) > 1 and parts[1] in FLOORS:
            assert FLOORS.index(parts[1]) <= own, f"{named(path)}:{line} imports {name}, which is above it"


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_files_and_functions_fit(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES_OF_A_FILE
    recipe, most = READ_FROM_TOP_TO_BOTTOM.get(named(path), ("", 0))
    for name, lines in functions(ast.parse(text)):
        limit = most if name == recipe else LINES_OF_A_FUNCTION
        assert lines <= limit, f"{named(path)}: {name} has {lines} lines, the limit is {limit}"


def test_the_command_line_starts_without_heavy_imports() -> None:
    """`toolkit --help` must answer at once."""
    code = (
        "import sys\nimport toolkit.cli.main\ntoolkit.cli.main.build_app()\n"
        "print(*sorted({'torch', 'transformers', 'numpy', 'accelerate', 'deepspeed', 'datasets', 'peft'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_nothing_is_left_to_do_in_a_comment() -> None:
    later = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    files += list(ROOT.iterdir())
    for path in files:
        if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts and path.stat().st_size < 2**20:
            found = later.search(path.read_text(encoding="utf-8", errors="replace"))
            assert found is None, f"{named(path)}: {found and found[0]}"
