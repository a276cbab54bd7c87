"""Bytes as people write them, and figures as people read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import UserError
from toolkit.units import GIB, KIB, LARGEST, MIB, TIB, format_count, format_duration, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * GIB),
        ("80GB", 80 * 10**9),
        ("80 gib", 80 * GIB),
        ("85899345920", 80 * GIB),
        (85899345920, 80 * GIB),
        ("512MiB", 512 * MIB),
        ("1.5TiB", 3 * TIB // 2),
        (" .5 KiB ", 512),
        ("1b", 1),
        ("2e3kb", 2_000_000),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_are_read_to_the_byte(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "lots", "80XB", "-5", "-5GiB", "80 Gi B", "1e400", "0x10", "nan", "inf", "1,5GiB", "8G"]
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match="is not understood; write 80GiB") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.1", "0.0001 KiB"])
def test_a_size_is_at_least_one_byte(text: str) -> None:
    with pytest.raises(UserError, match="must be above zero"):
        parse_size(text)


def test_a_size_beyond_all_machines_is_refused() -> None:
    assert parse_size(str(LARGEST)) == LARGEST
    for text in (str(LARGEST + 1), "1e99", "9" * 400):
        with pytest.raises(UserError, match="larger than any machine"):
            parse_size(text)


@given(size=st.integers(1, LARGEST))
@settings(max_examples=200, deadline=None)
def test_plain_bytes_come_back(size: int) -> None:
    assert parse_size(size) == parse_size(str(size)) == size


@given(size=st.integers(1, 2**50 - 1))
@settings(max_examples=200, deadline=None)
def test_a_printed_size_is_within_one_percent_of_the_size(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= max(1, 0.01 * size)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (612 * MIB, "612 MiB"), (int(1.44 * GIB), "1.44 GiB"),
     (79 * GIB, "79 GiB"), (640 * GIB, "640 GiB"), (3 * TIB, "3 TiB"), (-2 * MIB, "-2 MiB"), (9 * KIB, "9 KiB")],
)  # fmt: skip
def test_sizes_as_people_read_them(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1_000, "1 k"), (135_000_000, "135 M"), (8_030_261_248, "8.03 B"), (999_885_952, "1 B"),
     (999_700, "1 M"), (15e12, "15 T"), (2250e12, "2.25 P")],
)  # fmt: skip
def test_counts_as_people_read_them(count: float, text: str) -> None:
    assert format_count(count) == text


@given(count=st.integers(0, 10**17))
@settings(max_examples=300, deadline=None)
def test_a_count_is_never_in_scientific_notation(count: int) -> None:
    assert re.fullmatch(r"[0-9]+(\.[0-9]+)?( [kMBTP])?", format_count(count))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.85, "850 ms"), (12.4, "12.4 s"), (200, "3 min 20 s"), (5 * 3600 + 12 * 60, "5 h 12 min"), (102 * 3600, "4 d 6 h"),
     (47 * 3600, "47 h 0 min"), (0, "0 ms")],
)  # fmt: skip
def test_durations_as_people_read_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
