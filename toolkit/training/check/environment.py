"""Variables of Accelerate's that are misspelt or unreadable, and the default file that decides when none is
named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from toolkit.errors import UserError, nearest
from toolkit.strategies.base import as_bool
from toolkit.training.check.finding import Finding, Findings
from toolkit.training.check.known import SWITCHES, VARIABLES

PREFIXES = ("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_")
CURLY = "\u201c\u201d\u2018\u2019\u00ab\u00bb"
"""Quotes that a word processor puts and a shell takes as part of the value."""


def check_environment(environ: Mapping[str, str]) -> list[Finding]:
    """Name every variable of Accelerate's that it does not know or can't read."""
    out = Findings("environment")
    for name in sorted(environ):
        if not name.startswith(PREFIXES):
            continue
        value = environ[name]
        if name not in VARIABLES and not name.startswith("ACCELERATE_FP8_"):
            out.error(name, f"Accelerate does not read this variable{nearest(name, VARIABLES)}")
        quoted = any(mark in value for mark in CURLY)
        if quoted:
            out.error(name, f"the value {value!r} holds curly quotes, which are part of it; write plain ones, or none")
        elif name in SWITCHES:
            try:
                as_bool(value, name)
            except UserError:
                out.error(name, f"the value {value!r} is neither true nor false")
    return out.found


def default_file(environ: Mapping[str, str]) -> Path:
    """The file that `accelerate launch` takes when no `--config_file` is given."""
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")) / ".cache"
    home = environ.get("HF_HOME") or Path(cache) / "huggingface"
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"


def check_default_file(environ: Mapping[str, str]) -> list[Finding]:
    """Say what a forgotten default file would decide."""
    path = default_file(environ)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return []
    if not isinstance(content, dict):
        return []
    out = Findings(str(path))
    out.note(
        "distributed_type",
        f"a start without --config_file takes {content.get('distributed_type')!r} from this file; name the file that you mean",
    )
    return out.found
