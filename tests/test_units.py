"""Quantities: parsed from what people write, formatted for people, never without a unit."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_flops,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_flops,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("1.5 KiB", 1536),
        ("7B", 7),
        ("3e3MB", 3 * 10**9),
        (" 512MiB ", 2**29),
    ],
)
def test_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_other_quantities() -> None:
    assert parse_bandwidth("450GB/s") == 450e9
    assert parse_bandwidth("2GiB/s") == 2**31
    assert parse_seconds("5us") == pytest.approx(5e-6)
    assert parse_seconds("2s") == 2.0
    assert parse_flops("989TFLOP/s") == pytest.approx(989e12)


@pytest.mark.parametrize(
    ("parse", "value", "words"),
    [
        (parse_bytes, 80, ["80", "no unit", "80GiB"]),
        (parse_bytes, "80", ["80", "no unit", "80GiB"]),
        (parse_bytes, True, ["True", "no unit"]),
        (parse_bytes, "80Gb", ["80Gb", "no known unit", "GiB"]),
        (parse_bytes, "-1GiB", ["-1GiB", "not negative"]),
        (parse_bytes, "..GiB", ["number"]),
        (parse_bytes, "1e999GB", ["finite"]),
        (parse_bandwidth, "450GB", ["bandwidth", "no known unit", "450GB/s"]),
        (parse_bandwidth, 450.0, ["no unit", "450GB/s"]),
        (parse_seconds, 5, ["time", "no unit", "5us"]),
        (parse_seconds, "nan s", ["5us"]),
        (parse_flops, "989TB/s", ["speed", "no known unit"]),
    ],
)
def test_refused_with_what_to_write(parse: object, value: object, words: list[str]) -> None:
    assert callable(parse)
    with pytest.raises(ValueError) as caught:
        parse(value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(1536), "1.5 KiB"),
        (format_bytes(80e9), "74.5 GiB"),
        (format_bytes(0), "0 B"),
        (format_bandwidth(25e9), "25 GB/s"),
        (format_bandwidth(4.8e12), "4.8 TB/s"),
        (format_seconds(0.0123), "12.3 ms"),
        (format_seconds(5e-6), "5 us"),
        (format_seconds(0), "0 ns"),
        (format_flops(32_938_104_193_024), "32.9 TFLOP"),
        (format_count(8_030_261_248), "8.03 B"),
        (format_count(12), "12"),
    ],
)
def test_formatted_for_people(text: str, expected: str) -> None:
    assert text == expected


@given(st.floats(min_value=1, max_value=1e14))
def test_formatted_bytes_parse_back(value: float) -> None:
    assert math.isclose(parse_bytes(format_bytes(value).replace(",", "")), value, rel_tol=0.006, abs_tol=0.5)


@given(st.floats(min_value=1e-9, max_value=1e5))
def test_formatted_seconds_parse_back(value: float) -> None:
    assert math.isclose(parse_seconds(format_seconds(value).replace(",", "")), value, rel_tol=0.006)
