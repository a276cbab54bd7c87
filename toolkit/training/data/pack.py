"""Which samples share a row."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

Row = list[int]
"""The samples of one row, in order."""


def one_per_row(samples: npt.NDArray[np.int64]) -> list[Row]:
    """No packing: a row is a sample."""
    return [[int(sample)] for sample in samples]


def in_order(samples: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], seq_len: int) -> list[Row]:
    """Fill row after row and keep the order of the samples."""
    rows: list[Row] = []
    space = 0
    for sample in samples:
        length = int(lengths[sample])
        if length > space:
            rows.append([])
            space = seq_len
        rows[-1].append(int(sample))
        space -= length
    return rows


def best_fit(samples: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], seq_len: int) -> list[Row]:
    """Put each sample, longest first, where it leaves the least space. Whole samples only; all fit in
    `seq_len`."""
    rows: list[Row] = []
    open_rows: dict[int, list[int]] = {}
    spaces: list[int] = []
    longest_first = samples[np.argsort(-lengths[samples], kind="stable")]
    for sample in longest_first:
        length = int(lengths[sample])
        at = bisect_left(spaces, length)
        if at == len(spaces):
            row, space = len(rows), seq_len
            rows.append([])
        else:
            space = spaces[at]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space], spaces[at]
        rows[row].append(int(sample))
        left = space - length
        if left not in open_rows:
            open_rows[left] = []
            insort(spaces, left)
        open_rows[left].append(row)
    return rows
