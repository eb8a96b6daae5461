"""Quantities survive being written and read; what cannot be read is refused with a
remedy.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.contract.units import (
    format_bytes,
    format_rate,
    parse_rate,
)
from gradwire.errors import InvalidSetting
from gradwire_lab.planning.inputs import parse_bytes
from tests.each import each


@each(
    "text, rate_bytes_per_s",
    [
        ("500mbit", 62.5e6),
        ("10gbit", 1.25e9),
        ("8 bit", 1.0),
        (" 1.5Kbit ", 187.5),
        (".5gbit", 62.5e6),
    ],
)
def test_rates_are_read(text: str, rate_bytes_per_s: float) -> None:
    assert parse_rate(text) == pytest.approx(rate_bytes_per_s)


@each("text", ["", "500", "fast", "-1mbit", "0mbit", "5mb", "1e3mbit", "mbit"])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(
        InvalidSetting, match=r"rate must be .*; write 500mbit"
    ) as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


@each(
    "text, size_bytes",
    [("0", 0), ("12", 12), ("25MB", 25_000_000), ("1.5 kib", 1536), ("1GiB", 2**30)],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@each("text", ["", "MB", "5 mbit", "-5MB", "5 MB MB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"size must be .*; write 25MB"):
        parse_bytes(text)


@given(st.floats(1.0, 1e14))
def test_a_formatted_size_reads_back_to_three_digits(size_bytes: float) -> None:
    number, unit = format_bytes(size_bytes).split()
    read = float(number) * {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    assert math.isclose(read, size_bytes, rel_tol=0.006, abs_tol=0.5)


@given(st.floats(1e3, 1e11))
def test_a_formatted_rate_reads_back(rate_bytes_per_s: float) -> None:
    text = format_rate(rate_bytes_per_s).removesuffix("/s")
    assert math.isclose(parse_rate(text), rate_bytes_per_s, rel_tol=0.006)
