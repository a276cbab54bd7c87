"""Bytes, and how people write them. 1 GiB = 2**30 bytes, 1 GB = 10**9 bytes; nothing else is ever meant."""

from __future__ import annotations

import re
from decimal import Decimal

from toolkit.errors import UserError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
LARGEST = 2**60
"""An exbibyte: what is above it is a slip of the keyboard."""
_FACTORS = {
    "": 1, "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip


def parse_size(text: str | int) -> int:
    """Bytes from `80GiB`, `80GB`, `1.5 TiB` or a plain number of bytes.

    Raises:
        UserError: the text is not a size, not above zero, or beyond an exbibyte.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]{1,2})?)\s*([a-z]*)\s*", str(text).lower())
    if not match or match[2] not in _FACTORS:
        raise UserError(f"size {str(text)!r} is not understood; write 80GiB, 80GB, 512MiB or plain bytes")
    size = int(Decimal(match[1]) * _FACTORS[match[2]])
    if size <= 0:
        raise UserError(f"size {str(text)!r} must be above zero")
    if size > LARGEST:
        raise UserError(f"size {str(text)!r} is larger than any machine's; write 80GiB, 80GB, 512MiB or plain bytes")
    return size


def format_size(size: float) -> str:
    """Bytes in binary units with the digits a person reads: `1.44 GiB`, `612 MiB`, `0 B`."""
    sign, size = ("-" if size < 0 else ""), abs(size)
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= factor:
            value = size / factor
            return f"{sign}{value:.0f} {unit}" if value >= 100 else f"{sign}{value:.3g} {unit}"
    return f"{sign}{size:.0f} B"


def format_count(count: float) -> str:
    """A count of parameters, tokens or FLOPs in decimal units: `8.03 B`, `135 M`."""
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= factor * 0.9995:  # what three digits round up to a thousand is one of the next unit
            return f"{count / factor:.3g} {unit}"
    return f"{count:.3g}"


def format_duration(seconds: float) -> str:
    """Seconds as `850 ms`, `12.4 s`, `3 min 20 s`, `5 h 12 min` or `4 d 6 h`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if hours < 1:
        return f"{int(minutes)} min {int(seconds % 60)} s"
    if days < 2:
        return f"{int(hours)} h {int(minutes % 60)} min"
    return f"{int(days)} d {int(hours % 24)} h"
