"""The exceptions of the toolkit. The exit status belongs to the exception.

    ToolkitError            1   a fault of the toolkit itself
    ├── UserError           2   what was given is wrong: what, where, and what would be right
    └── NothingFits         3   the question was answered: no plan fits
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ToolkitError(Exception):
    """Base of every error the toolkit raises on purpose. Its text is one line, fit to be shown as it is."""

    exit_code = 1


class UserError(ToolkitError):
    """Bad input: the message names the value, where it stands, and what would be right."""

    exit_code = 2


class NothingFits(ToolkitError):
    """No plan fits the cluster; the message names the closest one and by how much it misses."""

    exit_code = 3


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause that suggests the nearest known names: `; did you mean 'fsdp'?`, or lists a few known ones."""
    names = sorted(known)
    lowered = {known_name.lower(): known_name for known_name in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.6)
    if close:
        return "; did you mean " + " or ".join(repr(lowered[c]) for c in close) + "?"
    return "; known: " + ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
