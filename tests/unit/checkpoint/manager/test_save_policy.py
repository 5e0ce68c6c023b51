"""When the next checkpoint is due."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.manager.policies import (
    Daly,
    EverySeconds,
    EverySteps,
    Overhead,
    SavePolicy,
    SaveScheduler,
    SaveTiming,
    daly_interval_s,
)
from penstock.errors import UsageError


def _measured(step: int = 1, since_last_s: float = 0.0, blocked_s: float | None = None) -> SaveTiming:
    return SaveTiming(step=step, since_last_s=since_last_s, blocked_s=blocked_s)


def test_steps_are_counted_and_seconds_are_waited_for() -> None:
    assert [step for step in range(1, 13) if EverySteps(4).is_due(_measured(step))] == [4, 8, 12]
    assert not EverySeconds(60).is_due(_measured(since_last_s=59.9))
    assert EverySeconds(60).is_due(_measured(since_last_s=60))


def test_an_overhead_is_kept_below_its_share_of_the_time() -> None:
    policy = Overhead(percent=2)
    assert policy.is_due(_measured(blocked_s=None)), "the first save tells what saving costs"
    assert not policy.is_due(_measured(since_last_s=99, blocked_s=2))
    assert policy.is_due(_measured(since_last_s=100, blocked_s=2))


def test_the_optimum_between_saving_and_failing_is_waited_for() -> None:
    interval_s = daly_interval_s(10, 86400)
    policy = Daly(mtbf_s=86400)
    assert policy.is_due(_measured(blocked_s=None))
    assert not policy.is_due(_measured(since_last_s=interval_s - 1, blocked_s=10))
    assert policy.is_due(_measured(since_last_s=interval_s + 1, blocked_s=10))


@given(st.floats(1e-3, 1e4), st.floats(1e4, 1e8))
def test_both_optima_agree_where_saving_is_short(blocked_s: float, mtbf_s: float) -> None:
    young, daly = math.sqrt(2 * blocked_s * mtbf_s), daly_interval_s(blocked_s, mtbf_s)
    assert 0 < daly <= mtbf_s or blocked_s < 2 * mtbf_s
    if blocked_s < mtbf_s / 1000:
        assert math.isclose(young, daly, rel_tol=0.05)


def test_saving_longer_than_failures_are_apart_leaves_one_checkpoint_a_failure() -> None:
    assert daly_interval_s(100, 50) == 50


@pytest.mark.parametrize(
    "make",
    [lambda: EverySteps(0), lambda: EverySeconds(0), lambda: Overhead(-1), lambda: Daly(float("inf"))],
)
def test_invalid_intervals_are_refused(make: Callable[[], SavePolicy]) -> None:
    with pytest.raises(UsageError):
        make()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_pacer_learns_what_saves_cost_and_forgets_the_first_ones() -> None:
    clock = Clock()
    pacer = SaveScheduler(Overhead(percent=10), clock=clock)
    assert pacer.is_due(1)
    for blocked_s in (50.0, 1.0, 1.0, 1.0):
        with pacer.measure():
            clock.now_s += blocked_s
        clock.now_s += 9.9
        assert not pacer.is_due(1)
    clock.now_s += 0.2
    assert pacer.is_due(1)


def test_a_pacer_counts_from_the_end_of_the_last_save() -> None:
    clock = Clock()
    pacer = SaveScheduler(EverySeconds(10), clock=clock)
    clock.now_s = 10.0
    assert pacer.is_due(1)
    with pacer.measure():
        clock.now_s += 5
    assert not pacer.is_due(1)
    clock.now_s += 10
    assert pacer.is_due(1)
