"""A plan is a strategy and its knobs; what was not written stays None until the engine fills it in."""

from __future__ import annotations

from typing import get_args

import pytest

from toolkit.errors import UserError
from toolkit.specs import Plan
from toolkit.specs.plan import StrategyName
from toolkit.strategies import STRATEGIES


def test_the_names_are_the_registrys() -> None:
    assert set(get_args(StrategyName)) == set(STRATEGIES)


def test_nothing_is_filled_in_that_was_not_written() -> None:
    plan = Plan(strategy="zero3")
    assert plan.bucket is None and plan.persist is None and plan.shard_size is None
    assert set(vars(plan.zero).values()) == set(vars(plan.ddp).values()) == {None}


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({}, "single"),
        ({"strategy": "fsdp", "checkpointing": "full"}, "fsdp"),
        ({"strategy": "zero3", "offload": "all"}, "zero3-offload-all"),
        ({"strategy": "zero3", "offload": "all", "offload_to": "nvme"}, "zero3-offload-all-nvme"),
        ({"strategy": "zero3", "offload_to": "nvme"}, "zero3"),
        ({"strategy": "fsdp", "tp": 2, "cp": 4}, "fsdp-tp2-cp4"),
    ],
)
def test_the_label_is_what_files_are_named_after(changes: dict[str, object], label: str) -> None:
    assert Plan(**changes).label == label  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"strategy": "fdsp"}, "is not one of single, ddp, fsdp, fsdp-grad, hsdp, zero1, zero2, zero3; did you mean 'fsdp'"),
        ({"checkpointing": "half"}, "checkpointing 'half' is not one of none, selective, full"),
        ({"offload": "some"}, "offload 'some' is not one of none, optimizer, all"),
        ({"offload_to": "tape"}, "offload-to 'tape' is not one of cpu, nvme"),
        ({"tp": 0}, "tp is 0"),
        ({"cp": -2}, "cp is -2"),
        ({"sp": 1.0}, "sp is 1.0"),
        ({"bucket": 0}, "bucket is 0"),
        ({"shard_size": 0}, "shard-size is 0"),
    ],
)
def test_impossible_knobs_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as caught:
        Plan(**changes)  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_a_changed_copy_is_checked_again() -> None:
    assert Plan(strategy="fsdp").with_(tp=2).tp == 2
    with pytest.raises(UserError):
        Plan(strategy="fsdp").with_(tp=0)
