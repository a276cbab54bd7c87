"""What a run does over many steps: does it hold more after every one, and does it reserve what it does not use?"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise

from toolkit.units import format_size

GAP = 0.25
"""Reserved less allocated above this share of reserved: the allocator's pieces do not fit together."""
SETTING = "expandable_segments"


def rise_per_step(held: Sequence[int], least: int) -> int:
    """Bytes per step by which what is held rises, when it has risen at each of at least `least` steps in a row; else 0."""
    rising = len(held) >= least and all(b > a for a, b in pairwise(held))
    return (held[-1] - held[0]) // (len(held) - 1) if rising else 0


def rise_line(who: str, rise: int, left: int) -> str:
    """The line about memory that rises by `rise` bytes a step with `left` bytes still free; 0: not known."""
    pace = f"; at this pace it lasts for {max(0, left) // rise:,} more steps" if left else ""
    return f"{who} holds {format_size(rise)} more after every step{pace}"


def gap_line(who: str, reserved: int, allocated: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """The line about an allocator that reserves much more than tensors take at the peak; None where it does not."""
    if reserved - allocated <= GAP * reserved:
        return None
    set_already = any(SETTING in environment.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    advice = ("expandable segments are on already: fewer different row lengths, or a smaller micro-batch, leave fewer holes"
              if set_already else f"PYTORCH_ALLOC_CONF={SETTING}:True may help")
    return f"{who} reserves {format_size(reserved)} for {format_size(allocated)} of tensors: {advice}"
