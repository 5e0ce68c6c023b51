"""Quantities: read as written or refused with advice, and what draws of a duration come to."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.workload.quantities import (
    Distribution,
    Duration,
    element_bytes,
    read_bytes,
    read_duration,
    read_element_type,
    read_exact_bytes,
    read_seconds,
    write_duration,
)

TIMES = st.just(0.0) | st.floats(min_value=1e-9, max_value=1e6)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (114660.07, Fraction(11466007, 100)),
        ("114660.07", Fraction(11466007, 100)),
        (146600628, Fraction(146600628)),
        ("146_600_628", Fraction(146600628)),
        ("4MiB", Fraction(4 << 20)),
        ("1.5 GB", Fraction(1_500_000_000)),
        (Fraction(1, 3), Fraction(1, 3)),
        (1e-3, Fraction(1, 1000)),
    ],
)
def test_a_record_length_is_taken_as_it_is_written(written: Any, read: Fraction) -> None:
    assert read_exact_bytes(written) == read


@pytest.mark.parametrize("written", [True, None, [1], {"a": 1}, "4G", "many", "", float("inf"), float("nan")])
def test_what_is_no_size_is_refused_with_an_example(written: Any) -> None:
    with pytest.raises(UsageError) as caught:
        read_exact_bytes(written)
    assert caught.value.fix


def test_whole_sizes_keep_what_the_type_must_judge() -> None:
    assert read_bytes("256KiB") == 262144
    assert read_bytes(262144) == 262144
    assert read_bytes(4096.0) == 4096
    assert read_bytes(0.5) == 0.5
    assert read_bytes([1]) == [1]


def test_seconds_take_units_or_none() -> None:
    assert read_seconds("250ms") == 0.25
    assert read_seconds(3) == 3


@pytest.mark.parametrize(
    ("name", "size"), [("uint8", 1), ("float16", 2), ("float64", 8), ("string", 1), ("binary", 1)]
)
def test_element_types_are_numpys_and_parquets(name: str, size: int) -> None:
    assert read_element_type(name) == name
    assert element_bytes(name) == size


def test_an_unknown_element_type_is_refused() -> None:
    with pytest.raises(UsageError, match="not an element type"):
        read_element_type("float12")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (0.323, Duration(mean_s=0.323)),
        (2, Duration(mean_s=2.0)),
        ("250ms", Duration(mean_s=0.25)),
        ({"mean": 0.5}, Duration(mean_s=0.5)),
        ({"mean": "500ms", "stdev": 0.1}, Duration(law=Distribution.NORMAL, mean_s=0.5, stdev_s=0.1)),
        ({"type": "normal", "mean": 1, "stdev": 0}, Duration(law=Distribution.NORMAL, mean_s=1.0)),
        (
            {"type": "uniform", "min": 0.1, "max": 0.2},
            Duration(law=Distribution.UNIFORM, min_s=0.1, max_s=0.2),
        ),
        (
            {"type": "gamma", "shape": 2, "scale": 0.1},
            Duration(law=Distribution.GAMMA, shape=2.0, scale_s=0.1),
        ),
        ({"type": "exponential", "scale": 0.1}, Duration(law=Distribution.EXPONENTIAL, scale_s=0.1)),
        ({"type": "poisson", "lam": 3}, Duration(law=Distribution.POISSON, expected_events=3.0)),
        (Duration(mean_s=1.0), Duration(mean_s=1.0)),
    ],
)
def test_every_way_to_write_a_time_is_read(written: Any, read: Duration) -> None:
    assert read_duration(written) == read


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"type": "zipf", "a": 1}, "'zipf' is not a distribution"),
        ({"type": "gamma", "mean": 1}, "scale is missing, shape is missing, mean is not one of its values"),
        ({"type": "normal", "mean": 1}, "stdev is missing"),
        ({"type": "uniform", "min": 2, "max": 1}, "min 2 is above max 1"),
        ({"mean": -1}, "mean is -1, which is not a duration"),
        ({"mean": "soon"}, "'soon'"),
        (-0.1, "it is -0.1, which is not a duration"),
        (True, "it is True, which is not a duration"),
        (None, "it is None, which is not a duration"),
        ([0.1], "which is not a duration"),
        (float("inf"), "not a duration"),
    ],
)
def test_a_wrong_time_says_what_is_wrong_with_it(written: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_duration(written)
    assert said in str(caught.value)


@given(
    st.one_of(
        st.builds(lambda mean: Duration(mean_s=mean), TIMES),
        st.builds(
            lambda mean, spread: Duration(law=Distribution.NORMAL, mean_s=mean, stdev_s=spread), TIMES, TIMES
        ),
        st.builds(
            lambda low, more: Duration(law=Distribution.UNIFORM, min_s=low, max_s=low + more), TIMES, TIMES
        ),
        st.builds(
            lambda shape, scale: Duration(law=Distribution.GAMMA, shape=shape, scale_s=scale), TIMES, TIMES
        ),
        st.builds(lambda scale: Duration(law=Distribution.EXPONENTIAL, scale_s=scale), TIMES),
        st.builds(lambda events: Duration(law=Distribution.POISSON, expected_events=events), TIMES),
    )
)
def test_a_written_time_reads_as_itself(duration: Duration) -> None:
    assert read_duration(write_duration(duration)) == duration


LAWS = [
    Duration(mean_s=0.323),
    Duration(law=Distribution.NORMAL, mean_s=0.3, stdev_s=0.05),
    Duration(law=Distribution.NORMAL, mean_s=0.1, stdev_s=0.4),
    Duration(law=Distribution.NORMAL, mean_s=0.0, stdev_s=0.2),
    Duration(law=Distribution.UNIFORM, min_s=0.1, max_s=0.5),
    Duration(law=Distribution.GAMMA, shape=2.0, scale_s=0.1),
    Duration(law=Distribution.EXPONENTIAL, scale_s=0.2),
    Duration(law=Distribution.POISSON, expected_events=3.0),
]


@pytest.mark.parametrize("duration", LAWS, ids=lambda duration: str(duration.law))
def test_the_expected_time_is_the_mean_of_the_draws(duration: Duration) -> None:
    generator = np.random.default_rng(7)
    drawn = [duration.draw(generator) for _ in range(8000)]
    assert min(drawn) >= 0
    assert np.mean(drawn) == pytest.approx(duration.expected_s, rel=0.05)


@pytest.mark.parametrize("duration", LAWS, ids=lambda duration: str(duration.law))
def test_the_same_generator_draws_the_same_times(duration: Duration) -> None:
    first, second = np.random.default_rng(11), np.random.default_rng(11)
    assert [duration.draw(first) for _ in range(10)] == [duration.draw(second) for _ in range(10)]


def test_a_fixed_time_is_exact_and_draws_nothing_from_the_generator() -> None:
    generator = np.random.default_rng(3)
    before = generator.bit_generator.state
    assert Duration(mean_s=0.00551).draw(generator) == 0.00551
    assert Duration(mean_s=0.00551).expected_s == 0.00551
    assert generator.bit_generator.state == before


def test_a_normal_time_without_spread_is_its_mean() -> None:
    assert Duration(law=Distribution.NORMAL, mean_s=0.25, stdev_s=0.0).expected_s == 0.25


def test_only_a_fixed_nothing_is_zero() -> None:
    assert Duration().is_zero
    assert not Duration(mean_s=0.1).is_zero
    assert not Duration(law=Distribution.NORMAL, mean_s=0.0, stdev_s=1.0).is_zero
