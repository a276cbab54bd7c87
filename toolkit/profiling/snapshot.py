"""A CUDA memory snapshot for PyTorch's viewer (https://pytorch.org/memory_viz)."""

from __future__ import annotations

from pathlib import Path

VIEWER = "https://pytorch.org/memory_viz"
ENTRIES = 200_000
"""Allocations and frees that are kept, the last ones: some steps of a large model."""


def keep_history(device: str) -> bool:
    """Have the CUDA allocator keep what a snapshot shows, with stacks; False on a device that keeps none."""
    if device != "cuda":
        return False
    import torch

    torch.cuda.memory._record_memory_history(max_entries=ENTRIES)
    return True


def dump_snapshot(folder: Path, rank: int) -> Path | None:
    """Write this process's history as a pickle that the viewer opens; None where it can't be written."""
    import torch

    path = folder / f"memory_snapshot-{rank:05d}.pickle"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError):
        return None
    return path
