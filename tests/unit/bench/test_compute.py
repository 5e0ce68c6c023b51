"""Emulated computation ends when it should, and is the same in every run."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.epoch_order import DrawnTimes
from penstock.bench.training import training_loop
from penstock.bench.training.training_loop import SPIN_NS
from penstock.results.step_events import StepPhase
from penstock.workload.quantities import Distribution, Duration


class ScriptedClock:
    """A clock that moves when one sleeps on it (late by `late_ns`) or looks at it."""

    def __init__(self, *, late_ns: int = 0, look_ns: int = 1000) -> None:
        self.time_ns = 0
        self.slept_ns: list[int] = []
        self.num_gave_way = 0
        self._late_ns, self._look_ns = late_ns, look_ns

    def monotonic_ns(self) -> int:
        self.time_ns += self._look_ns
        return self.time_ns

    def sleep(self, seconds: float) -> None:
        self.slept_ns.append(round(seconds * 1e9))
        self.time_ns += round(seconds * 1e9) + self._late_ns

    def sched_yield(self) -> None:
        self.num_gave_way += 1


def compute_until(end_ns: int, clock: ScriptedClock) -> int:
    """Compute on a clock of ours instead of the machine's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_loop, "time", clock)
        patch.setattr(training_loop, "os", clock)
        return training_loop.compute_until(end_ns)


@given(st.integers(0, 10**10), st.integers(0, SPIN_NS - 5000), st.integers(1, 5000))
def test_it_ends_at_its_end_though_sleeps_are_late(duration_ns: int, late_ns: int, look_ns: int) -> None:
    clock = ScriptedClock(late_ns=late_ns, look_ns=look_ns)
    ended_ns = compute_until(duration_ns, clock)
    assert duration_ns <= ended_ns <= duration_ns + 2 * look_ns


def test_a_long_computation_sleeps_once_and_watches_the_clock_at_the_end() -> None:
    clock = ScriptedClock()
    compute_until(10**9, clock)
    assert len(clock.slept_ns) == 1
    assert 10**9 - SPIN_NS - 2000 <= clock.slept_ns[0] <= 10**9 - SPIN_NS
    assert 0 < clock.num_gave_way <= SPIN_NS // 1000


def test_a_short_one_does_not_sleep() -> None:
    clock = ScriptedClock()
    compute_until(SPIN_NS // 2, clock)
    assert clock.slept_ns == []
    assert clock.num_gave_way > 0


def test_an_end_that_has_passed_returns_at_once() -> None:
    clock = ScriptedClock()
    clock.time_ns = 5_000_000
    assert compute_until(10, clock) == 5_001_000
    assert clock.slept_ns == []
    assert clock.num_gave_way == 0


def test_a_sleep_that_is_far_too_late_is_not_made_longer() -> None:
    clock = ScriptedClock(late_ns=10**9)
    ended_ns = compute_until(10**8, clock)
    assert clock.num_gave_way == 0
    assert ended_ns > 10**9


def test_the_machines_clock_keeps_to_the_contract() -> None:
    begun_ns = time.monotonic_ns()
    ended_ns = training_loop.compute_until(begun_ns + 2_000_000)
    assert ended_ns >= begun_ns + 2_000_000
    assert time.monotonic_ns() >= ended_ns


def times(
    law: Distribution = Distribution.NORMAL,
    *,
    seed: int = 1,
    rank: int = 0,
    phase: StepPhase = StepPhase.TRAIN,
) -> DrawnTimes:
    duration = {
        Distribution.FIXED: Duration(mean_s=0.323),
        Distribution.NORMAL: Duration(law=Distribution.NORMAL, mean_s=0.3, stdev_s=0.1),
        Distribution.UNIFORM: Duration(law=Distribution.UNIFORM, min_s=0.1, max_s=0.2),
        Distribution.GAMMA: Duration(law=Distribution.GAMMA, shape=2.0, scale_s=0.1),
        Distribution.EXPONENTIAL: Duration(law=Distribution.EXPONENTIAL, scale_s=0.1),
        Distribution.POISSON: Duration(law=Distribution.POISSON, expected_events=2),
    }[law]
    return DrawnTimes(duration=duration, seed=seed, phase=phase, rank=rank)


def test_a_fixed_time_is_the_same_nanoseconds_every_step() -> None:
    assert times(Distribution.FIXED).of_epoch(1, 3) == [323_000_000] * 3


@pytest.mark.parametrize("law", Distribution)
def test_the_same_key_gives_the_same_times_and_none_is_negative(law: Distribution) -> None:
    first, second = times(law).of_epoch(2, 50), times(law).of_epoch(2, 50)
    assert first == second
    assert min(first) >= 0


def test_a_step_does_not_depend_on_how_many_come_after_it() -> None:
    assert times().of_epoch(2, 10) == times().of_epoch(2, 100)[:10]


def test_whatever_names_a_step_changes_its_time() -> None:
    base = times().of_epoch(1, 20)
    others = [
        times(seed=2).of_epoch(1, 20),
        times(rank=1).of_epoch(1, 20),
        times(phase=StepPhase.EVAL).of_epoch(1, 20),
        times().of_epoch(2, 20),
    ]
    for other in others:
        assert not set(base) & set(other)
    assert len(set(base)) == 20


def test_drawn_times_have_the_mean_that_was_asked_for() -> None:
    drawn_s = np.array(times().of_epoch(1, 2000)) / 1e9
    assert abs(drawn_s.mean() - 0.3) < 0.015
    assert abs(drawn_s.std() - 0.1) < 0.015
