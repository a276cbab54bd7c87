"""Validation shared by the specs: every message names the field, the value and what is allowed."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

from toolkit.errors import UserError, nearest


def option(field: str) -> str:
    """A field's name as people type it: `micro_batch` -> `micro-batch`."""
    return field.replace("_", "-")


def check_choices(spec: Any) -> None:
    """Hold every `Literal` field of a frozen spec to its allowed values.

    Raises:
        UserError: names the field, the value, and the nearest or all allowed values.
    """
    hints = get_type_hints(type(spec))
    for field in dataclasses.fields(spec):
        hint = hints[field.name]
        if get_origin(hint) is Literal and getattr(spec, field.name) not in get_args(hint):
            value, allowed = getattr(spec, field.name), [str(a) for a in get_args(hint)]
            raise UserError(f"{option(field.name)} {value!r} is not one of {', '.join(allowed)}"
                            + (nearest(str(value), allowed) if nearest(str(value), allowed)[2:5] == "did" else ""))


def check_positive(spec: Any, *fields: str, limit: int = 10**12) -> None:
    """Hold integer fields to 1..limit. Raises UserError otherwise."""
    for name in fields:
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{option(name)} is {value!r}; it must be a whole number of at least 1")
        if value > limit:
            raise UserError(f"{option(name)} is {value}; nothing that large is meant (limit {limit})")
