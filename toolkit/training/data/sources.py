"""What a `data` entry means: files, a folder or a glob of them, a saved `datasets` folder, or a hub id.

Nothing is read here but names and sizes, so that a mistake is found before anything is started.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.errors import UserError, nearest

LINES, ARRAYS, TABLES = (".jsonl", ".ndjson"), (".json",), (".csv", ".tsv")
PARQUET, TEXT = (".parquet",), (".txt", ".text", ".md")
READABLE = LINES + ARRAYS + TABLES + PARQUET + TEXT
"""Suffixes that are read; all but Parquet also with `.gz` behind."""
_IN_FOLDERS = tuple(suffix for suffix in READABLE if suffix != ".md")
_SPLIT_NAMES = {
    "train": ("train", "training"), "test": ("test", "testing"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
}  # fmt: skip
_HUB = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(#(?P<config>[^:@]+))?(?P<rest>([:@][^@:]+(:[^@]*\])?){0,2})")
_SAVED = ("dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True)
class Source:
    """One entry of `data`."""

    text: str
    """As it was given."""
    kind: Literal["files", "saved", "hub"]
    files: tuple[Path, ...] = ()
    name: str = ""
    """The hub id, or the folder that `datasets` saved."""
    config: str | None = None
    split: str | None = None
    revision: str | None = None


def suffix_of(path: Path) -> str:
    """The suffix that says how a file is read: that before `.gz` for compressed ones."""
    plain = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return plain.suffix.lower()


def is_hub_id(source: str) -> bool:
    """`owner/name`, with `#config`, `:split` and `@revision` understood, and no such path here."""
    found = _HUB.fullmatch(source)
    return (
        found is not None
        and not _exists(source)
        and not _exists(found["name"])  # folder:split
        and not source.startswith((".", "~"))
        and suffix_of(Path(found["name"])) not in READABLE
    )


def resolve(text: str) -> Source:
    """The files or the data set that an entry of `data` stands for.

    Raises:
        UserError: it does not exist, is empty, cannot be read, or holds nothing that is read.
    """
    if is_hub_id(text):
        return _hub(text)
    base, _, split = (text, "", "") if _exists(text) else text.rpartition(":")
    path = Path(base or text).expanduser()
    split = split if base else ""
    if path.is_dir():
        return _folder(text, path, split)
    if glob.has_magic(str(path)) and not path.exists():
        files = tuple(sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()))  # noqa: PTH207 (absolute patterns)
        if not files:
            raise UserError(f"data {text!r}: no file matches")
        return Source(text, "files", tuple(_checked(file) for file in files))
    return Source(text, "files", (_checked(Path(text).expanduser()),))


def check_sources(sources: tuple[str, ...]) -> None:
    """Raises UserError when a file is missing, empty, unreadable, or of a kind that is not read."""
    for source in sources:
        resolve(source)


def fingerprint(sources: tuple[str, ...]) -> str:
    """A digest of the files' bytes and the hub ids: the same data gives the same text, wherever it lies.

    A hub id stands for what it was when it was first read; with `@revision` that is one commit for ever.
    """
    digest = hashlib.sha256()
    for text in sources:
        source = resolve(text)
        if source.kind == "hub":
            digest.update(text.encode())
            continue
        saved = sorted(path for path in Path(source.name).rglob("*") if path.is_file()) if source.kind == "saved" else []
        digest.update((source.split or "").encode())
        for file in (*source.files, *saved):
            with file.open("rb") as stream:
                for block in iter(lambda: stream.read(1 << 20), b""):  # noqa: B023 (used at once)
                    digest.update(block)
            digest.update(suffix_of(file).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _exists(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except OSError:  # A folder on the way may not be entered, or the name is too long: then it is no hub id either.
        return True


def _hub(text: str) -> Source:
    found = _HUB.fullmatch(text)
    parts = re.findall(r"([:@])([^@:]+(?::[^@]*\])?)", found["rest"] if found else "")
    given = dict(parts)
    if found is None or len(given) != len(parts):
        raise UserError(f"data {text!r}: write owner/name, owner/name#config, :split and @revision at most once each")
    return Source(text, "hub", name=found["name"], config=found["config"], split=given.get(":"), revision=given.get("@"))


def _checked(path: Path) -> Path:
    """The file, if it can be read and holds something."""
    try:
        if not path.exists():
            raise UserError(f"data file {str(path)!r} does not exist")
        if not path.is_file():
            raise UserError(f"data {str(path)!r} is neither a file nor a folder")
        if suffix_of(path) not in READABLE or path.name.lower().endswith(".parquet.gz"):
            raise UserError(f"data file {str(path)!r}: only {', '.join(READABLE)} files are read")
        if not os.access(path, os.R_OK):
            raise UserError(f"data file {str(path)!r} cannot be read: permission denied")
        if path.stat().st_size == 0:
            raise UserError(f"data file {str(path)!r} is empty")
    except OSError as error:
        raise UserError(f"data {str(path)!r} cannot be read: {error.strerror or error}") from None
    return path


def _folder(text: str, path: Path, split: str) -> Source:
    """A folder that `datasets` saved, or all files of it (and of the folders in it) that are read.

    Where some files are named after splits (train.jsonl, data/test-00000-of-00001.parquet), those of one split are taken.
    """
    if not os.access(path, os.R_OK | os.X_OK):
        raise UserError(f"data folder {str(path)!r} cannot be read: permission denied")
    if any((path / name).is_file() for name in _SAVED):
        return Source(text, "saved", name=str(path), split=split or None)
    files = [file for file in sorted(path.rglob("*"))
             if file.is_file() and suffix_of(file) in _IN_FOLDERS
             and not any(part.startswith((".", "_")) for part in file.relative_to(path).parts)
             and not file.stem.lower().startswith(("readme", "license"))]
    if not files:
        raise UserError(f"data folder {str(path)!r} holds no file that is read ({', '.join(_IN_FOLDERS)})")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(path)), []).append(file)
    named = sorted(set(by_split) - {""})
    if split:
        wanted = next((name for name, words in _SPLIT_NAMES.items() if split in words), split)
        if wanted not in by_split:
            raise UserError(f"data {text!r}: no file of the folder is named after split {split!r}{nearest(split, named)}")
        files = by_split[wanted]
    elif len(named) > 1:
        # Training on what is meant for the evaluation is worse than asking for more.
        files = by_split.get("train", [])
        if not files:
            raise UserError(f"data {text!r} has the splits {', '.join(named)}; name one: {path}:{named[0]}")
    return Source(text, "files", tuple(_checked(file) for file in files), split=split or None)


def _split_of(path: Path) -> str:
    """The split that a file or its folder is named after; empty when it is none."""
    for part in reversed(path.parts):
        words = re.split(r"[^a-z]+", part.lower())
        found = next((name for name, known in _SPLIT_NAMES.items() if words[0] in known), None)
        if found:
            return found
    return ""
