"""Reading a checkpoint into memory that is there: each file once, from front to back, held to its checksum on the way."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from io import FileIO

import torch

from toolkit.training.state.store import CACHED, Fragment, Reader, bytes_of, read_into

_LARGE_PAGE = 2 << 20
"""Bytes, on x86 and most others."""


def expect_large_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Have the system back new host memory with large pages where it can: to get one of 4 KiB takes longer than to fill it.

    It is advice, which "madvise" in /sys/kernel/mm/transparent_hugepage/enabled (what most systems have) waits for.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    advise = ctypes.CDLL(None).madvise
    for tensor in tensors:
        memory = tensor.untyped_storage()
        if memory.device.type == "cpu" and memory.nbytes() >= _LARGE_PAGE:
            begin = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            advise(ctypes.c_void_p(begin), ctypes.c_size_t(memory.data_ptr() + memory.nbytes() - begin), mmap.MADV_HUGEPAGE)


class Loading:
    """What one rank takes from the files of a checkpoint.

    Args:
        held: file to XXH3 of those that this rank holds to their checksums. What it does not want of them it reads as well.
    """

    def __init__(self, reader: Reader, held: dict[str, str]) -> None:
        self.reader, self.held = reader, held
        self._wanted: dict[str, list[tuple[int, torch.Tensor, torch.dtype]]] = {}
        """File to (offset of the first byte, tensor of one dimension, dtype in the file)."""

    def want(self, fragment: Fragment) -> None:
        """Have a fragment's tensor, on any device and of any dtype, filled from position `start`. Raises UserError."""
        kind, name, tensor = fragment.kind, fragment.name, fragment.tensor
        for file, offset, at, numel in self.reader.places(kind, name, fragment.start, tensor.numel()):
            self._wanted.setdefault(file, []).append((offset, tensor[at : at + numel], self.reader.dtype(kind, name)))

    def run(self) -> str | None:
        """Read. Returns None, or which file is not as it was written; the tensors are filled all the same. Raises UserError and
        OSError."""
        pinned = any(tensor.is_cuda for wanted in self._wanted.values() for _, tensor, _ in wanted)
        between = torch.empty(CACHED, dtype=torch.uint8, pin_memory=pinned)
        problem = None
        # Each rank begins with the file of which it wants the most. Those who want the same go in one order: what the first of
        # them reads from the disk, the others have from the system's cache.
        for name in sorted(self.reader.files, key=lambda name: -self._size(name)):
            wanted = sorted(self._wanted.get(name, []), key=lambda item: item[0])
            path = self.reader.folder / name
            with path.open("rb", buffering=0) as file:
                held = _Held(file, between) if name in self.held else None
                for offset, tensor, dtype in wanted:
                    _take(file, offset, tensor, dtype, between, held)
                if held is not None and held.finish() != self.held[name]:
                    problem = problem or f"the contents of {path} are not what was written"
        return problem


    def _size(self, file: str) -> int:
        return sum(tensor.numel() * dtype.itemsize for _, tensor, dtype in self._wanted.get(file, []))


class _Held:
    """The checksum of a file from its beginning up to `reached`."""

    def __init__(self, file: FileIO, between: torch.Tensor) -> None:
        from xxhash import xxh3_128

        self.file, self.data, self.digest, self.reached = file, bytes_of(between), xxh3_128(), 0

    def skim(self, end: int) -> None:
        """Go over what is not wanted."""
        while self.reached < end:
            data = self.data[: end - self.reached]
            read_into(data, self.file, self.reached)
            self.add(self.reached, data)

    def add(self, offset: int, data: memoryview) -> None:
        """What was just read; a part of it may have been there before."""
        self.digest.update(data[max(0, self.reached - offset) :])
        self.reached = max(self.reached, offset + len(data))

    def finish(self) -> str:
        """The whole file's checksum."""
        self.skim(self.file.seek(0, 2))
        return self.digest.hexdigest()


def _take(file: FileIO, offset: int, tensor: torch.Tensor, dtype: torch.dtype, between: torch.Tensor, held: _Held | None) -> None:
    """Fill a tensor: in place where it can be, else by way of `between`. A block at a time, which is hashed, cast or sent while a
    processor's cache has it."""
    direct = tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype == dtype
    if held is not None:
        held.skim(offset)
    for part in tensor.split(CACHED // dtype.itemsize):
        size = part.numel() * dtype.itemsize
        block = part if direct else between[:size].view(dtype)
        data = bytes_of(block)
        read_into(data, file, offset)
        if held is not None:
            held.add(offset, data)
        if not direct:
            part.copy_(block)
        offset += size
