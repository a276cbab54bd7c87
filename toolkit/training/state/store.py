"""Files of pieces: safetensors, written one tensor at a time with a checksum in the same pass, read by position."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import ToolkitError, UserError

FILE_BYTES = 4 << 30
"""A rank begins another file when one has become this large: files are verified and moved one by one."""
_STRETCH = 16 << 20
CACHED = 1 << 20
"""What is read is hashed while a processor's cache still has it."""
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_SIZES = {name: dtype.itemsize for dtype, name in _DTYPES.items()}


@dataclass(frozen=True)
class Lazy:
    """A tensor that is read only when it is written, a stretch at a time."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]
    """(position of the first element, elements) to these elements on the host, one dimension."""
    at_once: bool = False
    """A stretch costs as much as the whole."""

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize

    def parts(self) -> Iterator[torch.Tensor]:
        """All of it, in order."""
        size = self.numel()
        length = size if self.at_once else _STRETCH // self.dtype.itemsize
        for start in range(0, size, length):
            yield self.read(start, min(length, size - start))

    def whole(self) -> torch.Tensor:
        """All of it in its shape."""
        return self.read(0, self.numel()).view(self.shape)

    def flat(self) -> Lazy:
        """The same in one dimension."""
        return Lazy(self.dtype, (self.numel(),), self.read, self.at_once)

    def to(self, dtype: torch.dtype) -> Lazy:
        """The same in another dtype."""
        return Lazy(dtype, self.shape, lambda start, numel: self.read(start, numel).to(dtype), self.at_once)


@dataclass(frozen=True)
class Fragment:
    """A contiguous part of one tensor of the state, in this rank's memory or about to be written."""

    kind: str
    """`weights`, `buffers`, or the optimizer's own name of the state: exp_avg, step, ..."""
    name: str
    """The parameter's name in the model, without wrappers."""
    start: int
    """Position of the first element in the flattened tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    tensor: Any
    """A tensor of one dimension, or a Lazy of one."""
    copy: tuple[int, int] = (0, 1)
    """(index, number) among the ranks that hold the same part: each of them writes its share."""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"

    def share(self) -> Fragment:
        """The part of it that this rank writes; may have no elements."""
        index, number = self.copy
        size = self.tensor.numel()
        begin, end = size * index // number, size * (index + 1) // number
        return Fragment(self.kind, self.name, self.start + begin, self.shape, self.tensor[begin:end])


@dataclass(frozen=True)
class Piece:
    """Where a file holds a fragment."""

    file: str
    key: str
    start: int
    numel: int
    offset: int
    """Of its first byte in the file."""


@dataclass
class Entry:
    """One tensor of the state, over all files."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * _SIZES.get(self.dtype, 1)

    def gap(self) -> tuple[int, int] | None:
        """The first stretch of elements that no file holds."""
        reached = 0
        for piece in sorted(self.pieces, key=lambda piece: piece.start):
            if piece.start > reached:
                return reached, piece.start
            reached = max(reached, piece.start + piece.numel)
        return (reached, self.numel) if reached < self.numel else None


def checksum(path: Path) -> str:
    """The XXH3 (128 bits) of a file's bytes, in hexadecimal. Raises OSError."""
    from xxhash import xxh3_128

    digest, buffer = xxh3_128(), memoryview(bytearray(CACHED))
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(buffer):
            digest.update(buffer[:got])
    return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes on the host; no copy when it is there and contiguous."""
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def _contents(tensors: Iterable[tuple[str, torch.Tensor | Lazy]]) -> Iterator[memoryview]:
    for _, tensor in tensors:
        yield from map(bytes_of, tensor.parts() if isinstance(tensor, Lazy) else [tensor])


def write_tensors(path: Path, tensors: Sequence[tuple[str, torch.Tensor | Lazy]], metadata: dict[str, str]) -> dict[str, Any]:
    """Write a safetensors file and have it on the disk; returns {"bytes", "xxh3"}.

    Only one tensor at a time is copied to the host, and only a stretch of one that is still to be read. Raises OSError;
    ToolkitError for an empty tensor or a dtype that the format lacks.
    """
    from xxhash import xxh3_128

    tensors = sorted(tensors, key=lambda item: -item[1].element_size())  # Keeps every tensor aligned in the file.
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for key, tensor in tensors:
        if tensor.numel() == 0 or tensor.dtype not in _DTYPES:
            raise ToolkitError(f"{key}: {tensor.dtype} of {tensor.numel()} elements cannot be written to safetensors")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, size = xxh3_128(), 0
    with path.open("wb") as file:
        for data in chain((memoryview(len(text).to_bytes(8, "little")), memoryview(text)), _contents(tensors)):
            for at in range(0, len(data), CACHED):
                digest.update(data[at : at + CACHED])
                file.write(data[at : at + CACHED])
            size += len(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "xxh3": digest.hexdigest()}


def write_fragments(folder: Path, prefix: str, fragments: Iterable[Fragment]) -> dict[str, dict[str, Any]]:
    """Write `prefix-000.safetensors` and as many more as needed; returns file name to {"bytes", "xxh3"}."""
    batches: list[list[Fragment]] = [[]]
    size = 0
    for fragment in fragments:
        if fragment.tensor.numel() == 0:
            continue
        more = fragment.tensor.numel() * fragment.tensor.element_size()
        if batches[-1] and size + more > FILE_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(fragment)
        size += more
    written = {}
    for number, batch in enumerate(filter(None, batches)):
        name = f"{prefix}-{number:03d}.safetensors"
        pieces = {part.key: {"start": part.start, "shape": list(part.shape)} for part in batch}
        tensors = [(part.key, part.tensor) for part in batch]
        written[name] = write_tensors(folder / name, tensors, {"pieces": json.dumps(pieces)})
    return written


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its data begins.

    Raises:
        UserError: it is none, or it is cut.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= path.stat().st_size - 8:
                raise ValueError
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError
    except (OSError, ValueError):
        raise UserError(f"{path} is not a whole safetensors file") from None
    return header, 8 + length


def read_into(data: memoryview, file: FileIO, offset: int) -> None:
    """Fill a buffer from a file: the pages of a mapped file would count as the process's memory."""
    file.seek(offset)
    while data:
        got = file.readinto(data)
        if not got:
            raise UserError(f"{file.name!s} is not a whole safetensors file")
        data = data[got:]


def tensors_in(path: Path) -> dict[str, Lazy]:
    """Name to tensor of an ordinary safetensors file. Raises UserError."""
    header, base = read_header(path)
    header.pop("__metadata__", None)

    def of(facts: dict[str, Any]) -> Lazy:
        dtype, offset = _BY_NAME[facts["dtype"]], base + facts["data_offsets"][0]

        def read(start: int, numel: int) -> torch.Tensor:
            found = torch.empty(numel, dtype=dtype)
            with path.open("rb", buffering=0) as file:
                read_into(bytes_of(found), file, offset + start * dtype.itemsize)
            return found

        return Lazy(dtype, tuple(facts["shape"]), read)

    return {name: of(facts) for name, facts in header.items()}


class Reader:
    """Reads the state in `folder` by kind, name and position, from whichever of its files hold it."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        self.folder, self.files = folder, sorted(files)
        self._open: dict[str, FileIO] = {}

    @cached_property
    def entries(self) -> dict[tuple[str, str], Entry]:
        """(kind, name) to what is there. Raises UserError when a file is broken or two files disagree."""
        found: dict[tuple[str, str], Entry] = {}
        for file in self.files:
            header, base = read_header(self.folder / file)
            pieces = json.loads(header.pop("__metadata__", {}).get("pieces", "{}"))
            for key, facts in header.items():
                kind, _, name = key.partition("/")
                shape = tuple(pieces[key]["shape"])
                entry = found.setdefault((kind, name), Entry(kind, name, facts["dtype"], shape))
                if (entry.dtype, entry.shape) != (facts["dtype"], shape):
                    raise UserError(f"{self.folder / file}: {kind} of {name} is {facts['dtype']} {list(shape)} there, "
                                    f"{entry.dtype} {list(entry.shape)} in {entry.pieces[0].file}")
                offset = base + facts["data_offsets"][0]
                entry.pieces.append(Piece(file, key, pieces[key]["start"], facts["shape"][0], offset))
        return found

    @cached_property
    def states_of(self) -> dict[str, set[str]]:
        """Parameter name to the kinds of optimizer state that are there for it."""
        found: dict[str, set[str]] = {}
        for kind, name in self.entries:
            if kind not in ("weights", "buffers"):
                found.setdefault(name, set()).add(kind)
        return found

    def read(self, kind: str, name: str, start: int, numel: int) -> torch.Tensor:
        """`numel` elements from position `start` of a flattened tensor, on the host.

        Raises:
            UserError: it is not there, or only in part.
        """
        found = torch.empty(numel, dtype=self.dtype(kind, name))
        for file, offset, at, length in self.places(kind, name, start, numel):
            if file not in self._open:
                self._open[file] = (self.folder / file).open("rb", buffering=0)
            read_into(bytes_of(found[at : at + length]), self._open[file], offset)
        return found

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """Of a tensor as it is in the files. Raises UserError when it is not there."""
        return _BY_NAME[self._entry(kind, name).dtype]

    def places(self, kind: str, name: str, start: int, numel: int) -> list[tuple[str, int, int, int]]:
        """Where `numel` elements from position `start` of a flattened tensor are: (file, offset of the first byte in it, position
        of the first element from `start`, elements).

        Raises:
            UserError: it is not there, or only in part.
        """
        entry, found, reached = self._entry(kind, name), [], 0
        for piece in sorted(entry.pieces, key=lambda piece: piece.start):
            at = start + reached - piece.start
            if 0 <= at < piece.numel and reached < numel:
                length = min(numel - reached, piece.numel - at)
                found.append((piece.file, piece.offset + at * _SIZES[entry.dtype], reached, length))
                reached += length
        if reached < numel:
            raise UserError(f"{self.folder}: no file holds elements {start + reached} to {start + numel} of {kind} of {name}")
        return found

    def _entry(self, kind: str, name: str) -> Entry:
        entry = self.entries.get((kind, name))
        if entry is None:
            raise UserError(f"{self.folder} has no {kind} of {name}")
        return entry

    def lazy(self, kind: str, name: str) -> Lazy:
        """A whole tensor, to be read later."""
        entry = self.entries[kind, name]
        return Lazy(_BY_NAME[entry.dtype], entry.shape, lambda start, numel: self.read(kind, name, start, numel))

    def close(self) -> None:
        """Let go of the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()
