import pytest

from penstock.cluster.comm import EAGER_POLLS, LATE_AFTER_S, LONGEST_SLEEP_S, PollingWait
from penstock.errors import WaitTimeout


class Timeline:
    """A clock that moves only while someone sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.sleeps_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.sleeps_s.append(pause_s)
        self.now_s += pause_s


def wait_on(timeline: Timeline, timeout_s: float, told: list[float] | None = None) -> PollingWait:
    late = told if told is not None else []
    return PollingWait(
        "the tide",
        timeout_s,
        on_late=lambda: late.append(timeline.now_s - 100.0),
        clock=timeline.clock,
        sleep=timeline.sleep,
    )


def test_a_condition_that_holds_needs_no_sleep_even_without_time() -> None:
    timeline = Timeline()
    wait_on(timeline, 0.0).until(lambda: True)
    assert timeline.sleeps_s == []


def test_a_wait_polls_eagerly_first_and_then_sleeps_longer_and_longer() -> None:
    timeline = Timeline()
    polls = iter([*[False] * (EAGER_POLLS + 200), True])
    wait_on(timeline, 10.0).until(lambda: next(polls))
    assert len(timeline.sleeps_s) == 200
    assert timeline.sleeps_s == sorted(timeline.sleeps_s)
    assert timeline.sleeps_s[-1] == LONGEST_SLEEP_S


def test_a_wait_times_out_at_its_limit_and_names_what_it_awaited() -> None:
    timeline = Timeline()
    with pytest.raises(WaitTimeout, match="Timed out after 3 s waiting for the tide"):
        wait_on(timeline, 3.0).until(lambda: False)
    assert 103.0 <= timeline.now_s < 103.0 + LONGEST_SLEEP_S


def test_steps_of_one_wait_share_its_limit() -> None:
    timeline = Timeline()
    wait = wait_on(timeline, 1.0)
    wait.until(lambda: timeline.now_s > 100.9)
    with pytest.raises(WaitTimeout):
        wait.until(lambda: timeline.now_s > 101.1)


@pytest.mark.parametrize(("timeout_s", "late_s"), [(2.0, 1.0), (100.0, LATE_AFTER_S)])
def test_a_long_wait_is_reported_once_before_it_ends(timeout_s: float, late_s: float) -> None:
    timeline, told = Timeline(), list[float]()
    with pytest.raises(WaitTimeout):
        wait_on(timeline, timeout_s, told).until(lambda: False)
    assert len(told) == 1
    assert late_s <= told[0] < late_s + 2 * LONGEST_SLEEP_S
