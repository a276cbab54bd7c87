"""DeepSpeed's own defaults, read from the source of the installed version.

Importing DeepSpeed takes a second, probes the machine and prints to stdout, so the values are read from its
source text instead; without DeepSpeed, or with one whose source reads otherwise, those of 0.19.8 hold. A test
compares them with the real configuration class.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

KNOWN: Mapping[str, Any] = MappingProxyType({
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
    "overlap_comm": None,
    "contiguous_gradients": True,
    "round_robin_gradients": False,
    "stage3_gather_16bit_weights_on_model_save": False,
    "pin_memory": True,
})  # fmt: skip
"""deepspeed 0.19.8, deepspeed/runtime/zero/config.py and offload_config.py. Sizes in elements; `overlap_comm`
None: true for stage 3, false below. `pin_memory` is that of both offload sections."""

_CLASSES = {
    "zero/config.py": ("DeepSpeedZeroConfig",),
    "zero/offload_config.py": ("DeepSpeedZeroOffloadOptimizerConfig",),
}


@functools.cache
def engine_defaults() -> Mapping[str, Any]:
    """The defaults by the name of the JSON key."""
    found = dict(KNOWN)
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return MappingProxyType(found)
    runtime = Path(spec.origin).parent / "runtime"
    for file, classes in _CLASSES.items():
        try:
            tree = ast.parse((runtime / file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                found.update({key: value for key, value in _fields(node) if key in KNOWN})
    return MappingProxyType(found)


def _fields(node: ast.ClassDef) -> list[tuple[str, Any]]:
    """(JSON key, default) of each annotated field whose default is plain: a literal, or `Field(literal,
    alias=...)`."""
    fields = []
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name) or item.value is None:
            continue
        name, value = item.target.id, item.value
        if isinstance(value, ast.Call):
            aliases = [k.value for k in value.keywords if k.arg == "alias"]
            if aliases and isinstance(aliases[0], ast.Constant):
                name = str(aliases[0].value)
            defaults = [k.value for k in value.keywords if k.arg == "default"] or value.args
            if not defaults:
                continue
            value = defaults[0]
            if isinstance(value, ast.Call) and value.args:  # pp_int(5e8): an int that prints with commas
                value = value.args[0]
        if isinstance(value, ast.Constant):
            number = value.value
            fields.append(
                (
                    name,
                    int(number)
                    if isinstance(number, float) and number.is_integer() and number > 1
                    else number,
                )
            )
    return fields
