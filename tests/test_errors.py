"""The exit status belongs to the exception, and a wrong name is answered with the nearest right one."""

from __future__ import annotations

import pytest

from toolkit.errors import NothingFits, ToolkitError, UserError, nearest

STRATEGIES = ("single", "ddp", "fsdp", "fsdp-grad", "hsdp", "zero1", "zero2", "zero3")


@pytest.mark.parametrize(("kind", "status"), [(ToolkitError, 1), (UserError, 2), (NothingFits, 3)])
def test_each_kind_has_its_exit_status(kind: type[ToolkitError], status: int) -> None:
    assert kind.exit_code == status
    assert issubclass(kind, ToolkitError)


@pytest.mark.parametrize(("typed", "meant"), [("fdsp", "fsdp"), ("FSDP", "fsdp"), ("zero-3", "zero3"), ("singel", "single")])
def test_a_slip_is_answered_with_the_name_that_was_meant(typed: str, meant: str) -> None:
    hint = nearest(typed, STRATEGIES)
    assert hint.startswith(f"; did you mean {meant!r}")
    assert hint.endswith("?")


def test_the_suggestion_keeps_the_case_of_the_name() -> None:
    assert nearest("llamaforcausallm", ["LlamaForCausalLM"]) == "; did you mean 'LlamaForCausalLM'?"


def test_what_is_near_nothing_is_answered_with_what_is_known() -> None:
    assert nearest("qqq", ["b", "a"]) == "; known: a, b"
    assert nearest("qqq", [f"name-{i:02}" for i in range(30)]).endswith("name-09, ...")


def test_a_hint_is_one_line() -> None:
    assert "\n" not in nearest("x", STRATEGIES)
