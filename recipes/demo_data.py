"""Question and answer pairs from the docstrings of Python's standard library: real text that is on every machine.

    python recipes/demo_data.py OUTPUT.jsonl [--limit N]

The sources are parsed, never imported. The same Python gives the same file.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {"test", "tests", "idlelib", "turtledemo", "lib2to3", "site-packages", "__pycache__", "ensurepip", "pydoc_data"}
SHORTEST, LONGEST = 30, 700
"""Characters of an answer: shorter ones say nothing, longer ones are cut at a paragraph."""
QUESTIONS = {
    "function": ("What does `{name}{signature}` do in Python?", "Explain the Python function `{name}`.",
                 "How is `{name}{signature}` of Python's standard library described?"),
    "class": ("What is the class `{name}` in Python for?", "Describe Python's `{name}` class."),
    "method": ("What does the method `{name}{signature}` do in Python?", "Explain Python's `{name}` method."),
    "module": ("What is Python's `{name}` module for?", "What does the `{name}` module of the standard library offer?"),
}  # fmt: skip


def modules(library: Path) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of the library's public modules."""
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if not SKIPPED & set(parts) and not any(part.startswith("_") for part in name.split(".")):
            yield name, path


def documented(name: str, tree: ast.Module) -> Iterator[tuple[str, str, str, str]]:
    """(kind, dotted name, signature, docstring) of everything public in a module that has one."""
    if text := ast.get_docstring(tree):
        yield "module", name, "", text
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            yield "function", f"{name}.{node.name}", f"({ast.unparse(node.args)})", ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield "class", f"{name}.{node.name}", "", ast.get_docstring(node) or ""
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    signature = f"({ast.unparse(inner.args)})"
                    yield "method", f"{name}.{node.name}.{inner.name}", signature, ast.get_docstring(inner) or ""


def answer_of(docstring: str) -> str | None:
    """The docstring's first paragraphs as running text; None when there is too little of it."""
    kept: list[str] = []
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        text = re.sub(r"\s+", " ", paragraph).strip()
        if not text or ">>>" in text or set(text) <= set("-=~*. "):
            break
        if kept and sum(map(len, kept)) + len(text) > LONGEST:
            break
        kept.append(text[:LONGEST])
    answer = "\n\n".join(kept)
    return answer if len(answer) >= SHORTEST else None


def pairs(library: Path) -> Iterator[dict[str, object]]:
    """One conversation per documented name."""
    for module, path in modules(library):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for kind, name, signature, docstring in documented(module, tree):
            answer = answer_of(docstring)
            if answer is None:
                continue
            wordings = QUESTIONS[kind]
            question = wordings[sum(map(ord, name)) % len(wordings)].format(name=name, signature=signature)
            yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def records() -> list[dict[str, object]]:
    """All pairs of this Python's library, in a random order that is always the same."""
    found = list(pairs(Path(sysconfig.get_paths()["stdlib"])))
    random.Random(0).shuffle(found)
    return found


def write(path: Path, items: list[dict[str, object]]) -> None:
    """One object a line; the file is written whole, or what was there stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items), encoding="utf-8")
    scratch.replace(path)


def write_split(folder: Path, held_out: int) -> tuple[Path, Path]:
    """`train.jsonl` and `held-out.jsonl` with `held_out` pairs, in `folder`."""
    items = records()
    train, rest = folder / "train.jsonl", folder / "held-out.jsonl"
    write(train, items[held_out:])
    write(rest, items[:held_out])
    return train, rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--limit", type=int, default=None, help="keep this many pairs")
    arguments = parser.parse_args()
    items = records()[: arguments.limit]
    if not items:
        sys.exit("error: this Python's standard library has no sources to read")
    write(arguments.output, items)
    print(f"{len(items)} question and answer pairs in {arguments.output}")


if __name__ == "__main__":
    main()
