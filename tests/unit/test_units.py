"""Units: GiB is GiB, GB is GB, and what cannot be exact is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.units import (
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1_000", 1000),
        ("512 B", 512),
        ("4KiB", 4096),
        ("4kB", 4000),
        ("4KB", 4000),
        ("2GiB", 2 * 1024**3),
        ("2 GB", 2 * 10**9),
        ("1.5GiB", 3 * 512 * 1024**2),
        ("1e3", 1000),
        ("1.25e2kB", 125_000),
        ("9007199254740993B", 9007199254740993),
        ("1gib", 1024**3),
        ("8EiB", 2**63),
        ("3.02GiB", 3_242_700_308),
        ("0.1 KiB", 102),
        ("4,104,817,584,000 B", 4_104_817_584_000),
        ("1,047.02 GiB", 1_124_229_164_564),
    ],
)
def test_sizes_are_whole_bytes_and_exact_where_they_can_be(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["4G", "4k", "4 m"])
def test_a_bare_prefix_is_refused_because_it_means_two_things(text: str) -> None:
    with pytest.raises(UsageError, match="ambiguous") as caught:
        parse_bytes(text)
    assert "iB" in caught.value.fix


@pytest.mark.parametrize(
    "text",
    [
        "", "GiB", "-1", "1.2.3", "4 XiB", "0.5B", "0.0001KiB", "1e999", "1e-500", "4GiB/s",
        "1,00B", "1,0000B", "0,100B", ",100B", "1000,000B", "1,000,B",
    ],
)  # fmt: skip
def test_what_is_no_whole_number_of_bytes_is_refused_with_advice(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    assert caught.value.fix
    assert repr(text) in str(caught.value)


@given(st.integers(min_value=0, max_value=2**70))
def test_every_whole_number_reads_as_itself(size_bytes: int) -> None:
    assert parse_bytes(str(size_bytes)) == size_bytes


@given(st.integers(min_value=0, max_value=2**62))
def test_printed_sizes_and_rates_read_back_within_their_three_digits(size_bytes: int) -> None:
    assert math.isclose(parse_bytes(format_bytes(size_bytes)), size_bytes, rel_tol=0.006)
    assert math.isclose(parse_rate(format_rate(size_bytes)), size_bytes, rel_tol=0.006)


@given(st.floats(min_value=1e-8, max_value=1e9))
def test_printed_times_read_back_within_their_digits(elapsed_s: float) -> None:
    assert math.isclose(parse_seconds(format_seconds(elapsed_s)), elapsed_s, rel_tol=0.06)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (2**20, "1 MiB"),
        (1536, "1.50 KiB"),
        (1023.7 * 1024, "1.00 MiB"),
        (123 * 1024**3, "123 GiB"),
        (-2048, "-2 KiB"),
        (0.5, "0.50 B"),
    ],
)
def test_sizes_print_with_three_digits_in_binary_units(size_bytes: float, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.floats(min_value=0, max_value=2**62))
def test_a_printed_minimum_is_enough(size_bytes: float) -> None:
    assert size_bytes <= parse_bytes(format_bytes(size_bytes, at_least=True)) <= 1.011 * size_bytes + 1
    assert size_bytes <= parse_rate(format_rate(size_bytes, at_least=True))


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1536, "1.50 KiB"),
        (1537, "1.51 KiB"),
        (9.991 * 1024, "10.00 KiB"),
        (1023.1 * 1024, "1.00 MiB"),
    ],
)
def test_a_minimum_is_rounded_up(size_bytes: float, text: str) -> None:
    assert format_bytes(size_bytes, at_least=True) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 5.0),
        ("5s", 5.0),
        ("26 min 38 s", 1598.0),
        ("2 h 05 min", 7500.0),
        ("250ms", 0.25),
        ("2min", 120.0),
        ("1.5h", 5400.0),
        ("3us", 3e-6),
    ],
)
def test_durations_carry_their_unit_and_default_to_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "5 fortnights", "5m"])
def test_an_unknown_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("elapsed_s", "text"),
    [
        (35e-6, "35.0 us"),
        (1.25e-3, "1.25 ms"),
        (12.5, "12.5 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (2e-9, "2 ns"),
        (0, "0 ns"),
        (-1.5, "-1.50 s"),
        (math.nan, "unknown"),
    ],
)
def test_durations_print_at_the_scale_a_reader_thinks_in(elapsed_s: float, text: str) -> None:
    assert format_seconds(elapsed_s) == text


def test_rates_are_bytes_per_second_both_ways() -> None:
    assert parse_rate("2GiB/s") == 2 * 1024**3
    assert parse_rate("100 MB/s") == 1e8
    assert format_rate(1.5 * 1024**3) == "1.50 GiB/s"


@pytest.mark.parametrize("text", ["2GiB", "2GiB/min", "2Gb/s/s", "2/s", "2Gb/s", "2Gib/s", "2gb/s"])
def test_what_is_no_rate_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_rate(text)
