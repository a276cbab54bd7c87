"""The level of a tape over its optimizer steps, thinned for a picture: by category, with what happens where."""

from __future__ import annotations

from typing import Any

import numpy as np

from toolkit.estimate.result import CATEGORIES
from toolkit.timeline.tape import Tape


def thinned(tape: Tape, points: int) -> dict[str, Any]:
    """Plain data: at most `points` moments of all steps, each the highest of its stretch, so that no peak is lost.

    `level` and each list of `categories` are bytes; `runs` are [phase, what, first point, one past the last]; `steps` are the
    first points of the steps; `peak` is the highest point of the second step, `between` what is held before it, by category. The
    axis is the order of events, not seconds.
    """
    deltas = np.asarray(tape.deltas, dtype=np.int64)
    labels = np.asarray(tape.labels, dtype=np.int64)
    level = np.cumsum(deltas)
    ends = [*tape.boundaries[1:], len(level)]
    each = max(1, points // len(ends))
    kept: list[int] = []
    steps: list[int] = []
    for start, end in zip(tape.boundaries, ends, strict=True):
        steps.append(len(kept))
        edges = np.unique(np.linspace(start, end, min(each, end - start) + 1).astype(np.int64))
        kept += [int(a + level[a:b].argmax()) for a, b in zip(edges, edges[1:], strict=False)]
    at = np.asarray(kept, dtype=np.int64)
    numbers = np.asarray([CATEGORIES.index(label.category) for label in tape.table.labels], dtype=np.int64)[labels]
    categories = {name: np.cumsum(np.where(numbers == i, deltas, 0))[at].tolist()
                  for i, name in enumerate(CATEGORIES) if (numbers == i).any()}
    # A free carries the label of what dies: what happens at a moment is told by the last birth.
    births = np.maximum.accumulate(np.where(deltas > 0, np.arange(len(deltas)), 0))
    found = [tape.table.labels[labels[births[i]]] for i in kept]
    runs: list[list[Any]] = []
    for number, label in enumerate(found):
        if runs and runs[-1][:2] == [label.phase, label.what]:
            runs[-1][3] = number + 1
        else:
            runs.append([label.phase, label.what, number, number + 1])
    second = steps[1] if len(steps) > 1 else 0
    before = tape.boundaries[1] if len(tape.boundaries) > 1 else len(level)
    held = np.bincount(numbers[:before], weights=deltas[:before], minlength=len(CATEGORIES))
    between = {name: int(size) for name, size in zip(CATEGORIES, held, strict=True) if size}
    return {"level": level[at].tolist(), "categories": categories, "runs": runs, "steps": steps, "between": between,
            "peak": second + int(level[at[second:]].argmax())}
