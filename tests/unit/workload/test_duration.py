"""Times: fixed or drawn, never negative, with a mean that is the mean of what is drawn."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.workload.duration import Distribution, Duration

LAWS = [
    Duration.fixed(0.323),
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
    drawn = [duration.draw(generator) for _ in range(20_000)]
    assert min(drawn) >= 0
    assert np.mean(drawn) == pytest.approx(duration.expected_s, rel=0.03)


@pytest.mark.parametrize("duration", LAWS, ids=lambda duration: str(duration.law))
def test_the_same_generator_draws_the_same_times(duration: Duration) -> None:
    first, second = np.random.default_rng(11), np.random.default_rng(11)
    assert [duration.draw(first) for _ in range(10)] == [duration.draw(second) for _ in range(10)]


def test_a_fixed_time_is_exact_and_draws_nothing_from_the_generator() -> None:
    generator = np.random.default_rng(3)
    before = generator.bit_generator.state
    assert Duration.fixed(0.00551).draw(generator) == 0.00551
    assert Duration.fixed(0.00551).expected_s == 0.00551
    assert generator.bit_generator.state == before


def test_a_normal_time_without_spread_is_its_mean() -> None:
    assert Duration(law=Distribution.NORMAL, mean_s=0.25, stdev_s=0.0).expected_s == 0.25


def test_only_a_fixed_nothing_is_zero() -> None:
    assert Duration().is_zero
    assert not Duration.fixed(0.1).is_zero
    assert not Duration(law=Distribution.NORMAL, mean_s=0.0, stdev_s=1.0).is_zero
