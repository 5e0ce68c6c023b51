"""Loads on a schedule: what is due when, what a knee is, and that a stall is seen by all it held up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bench.probe.load_plan import (
    MOST_POINTS,
    NS,
    OPERATION,
    LoadRequest,
    OfferedLoad,
    Operations,
    arrivals,
    describe_load,
    find_knee,
    find_limit,
    find_steady_state,
    interval_s,
    intervals,
    next_rate,
)
from penstock.bench.probe.load_run import choose_operations
from penstock.errors import UsageError

SECONDS = 2.0


def _serve(rate_per_s: float, *, capacity_per_s: float, latency_s: float) -> OfferedLoad:
    """What a storage would show that begins one operation after another and answers each after a latency."""
    due = np.array(arrivals(rate_per_s, SECONDS, rank=0, num_ranks=1))
    service = round(NS / capacity_per_s)
    # The classic recursion of a queue, without a loop: an operation begins at its time or after its elders.
    turns = np.arange(due.size) * service
    begun = np.maximum.accumulate(due - turns) + turns
    ended = begun + service + round(latency_s * NS)
    return describe_load(_times(due, begun, ended), rate_per_s=rate_per_s, seconds=SECONDS, block_bytes=4096)


def _times(due: np.ndarray, begun: np.ndarray, ended: np.ndarray, free: np.ndarray | int = 0) -> Operations:
    operations = np.zeros(due.size, OPERATION)
    operations["due"], operations["free"] = due, free
    operations["begun"], operations["ended"] = begun, ended
    return operations


@given(
    capacity_per_s=st.floats(100, 20_000),
    latency_s=st.floats(0.0001, 0.05),
    closed_loop_share=st.floats(0.7, 1.4),
)
@settings(max_examples=15)
def test_the_knee_of_a_storage_of_known_rate_is_found_within_5_percent(
    capacity_per_s: float, latency_s: float, closed_loop_share: float
) -> None:
    points: list[OfferedLoad] = []
    while rate := next_rate(points, closed_loop_share * capacity_per_s):
        points.append(_serve(rate, capacity_per_s=capacity_per_s, latency_s=latency_s))
    knee = find_knee(points)
    assert knee is not None
    assert knee.offered_per_s == pytest.approx(capacity_per_s, rel=0.05)
    assert len(points) <= MOST_POINTS


def test_a_load_that_fell_behind_by_little_is_offered_again_and_counts_if_it_holds_then() -> None:
    light = _serve(100, capacity_per_s=1000, latency_s=0.01)
    late = _serve(1030, capacity_per_s=1000, latency_s=0.01)
    assert next_rate([light, late], 1000) == next_rate([light, late, late], 1000) == late.offered_per_s
    assert next_rate([light, late, late, late], 1000) != late.offered_per_s
    held = _serve(1030, capacity_per_s=2000, latency_s=0.01)
    knee = find_knee([light, late, held])
    assert knee is held


def test_a_storage_that_fails_light_load_is_asked_for_less_and_then_given_up() -> None:
    points: list[OfferedLoad] = []
    while rate := next_rate(points, 1000):
        points.append(_serve(rate, capacity_per_s=1, latency_s=0))
    assert find_knee(points) is None
    assert len(points) < MOST_POINTS


def _serve_in_slots(rate_per_s: float, *, depth: int, latency_s: float, late: float = 0) -> OfferedLoad:
    """What a storage would show that answers each operation after a latency, however many are in flight."""
    due = arrivals(rate_per_s, SECONDS, rank=0, num_ranks=1)
    free, begun, ended = ([0] * len(due) for _ in range(3))
    for number, moment in enumerate(due):
        free[number] = ended[number - depth] if number >= depth else 0
        begun[number] = max(round(moment * (1 + late)), free[number])
        ended[number] = begun[number] + round(latency_s * NS)
    times = _times(np.array(due), np.array(begun), np.array(ended), np.array(free))
    return describe_load(times, rate_per_s=rate_per_s, seconds=SECONDS, block_bytes=4096)


def test_what_a_load_ran_into_is_storage_or_too_few_in_flight_or_the_host() -> None:
    light = _serve_in_slots(100, depth=4, latency_s=0.02)
    knee = _serve_in_slots(190, depth=4, latency_s=0.02)
    assert find_limit([light, knee], knee) == ""
    assert find_limit([light, knee, _serve_in_slots(400, depth=4, latency_s=0.02)], knee) == "depth"
    assert find_limit([light, knee, _serve_in_slots(400, depth=4, latency_s=0.06)], knee) == "storage"
    assert (
        find_limit([light, knee, _serve_in_slots(400, depth=400, latency_s=0.02, late=0.5)], knee) == "host"
    )


def test_a_load_that_was_given_up_did_not_hold_even_if_it_is_the_only_one() -> None:
    due = np.array(arrivals(1000, SECONDS, rank=0, num_ranks=1))
    given_up = np.full_like(due, 3 * NS)
    point = describe_load(_times(due, given_up, given_up), rate_per_s=1000, seconds=SECONDS, block_bytes=4096)
    assert find_knee([point]) is None


def test_a_load_that_falls_behind_never_answers_more_than_was_offered() -> None:
    due = np.arange(0, 4 * 1000) * 1_000_000
    ended = np.maximum(due, 1_500_000_000) + np.minimum(np.arange(due.size) * 300_000, 900_000_000)
    seen = describe_load(_times(due, due, np.sort(ended)), rate_per_s=1000, seconds=4, block_bytes=4096)
    assert seen.answered_per_s <= 1000


def test_every_operation_that_a_stall_held_up_is_counted_from_when_it_was_due() -> None:
    due = np.array(arrivals(1000, 4, rank=0, num_ranks=1))
    phase = due % (2 * NS)
    ended = np.where(phase < 0.2 * NS, due - phase + round(0.2 * NS), due) + NS // 1000
    seen = describe_load(_times(due, due, ended), rate_per_s=1000, seconds=4, block_bytes=4096)
    assert seen.p50_ms == pytest.approx(1)
    assert seen.p999_ms == pytest.approx(200, rel=0.02)
    assert seen.growth == pytest.approx(0, abs=0.01)
    assert seen.answered_per_s == pytest.approx(1000, rel=0.01)
    assert seen.gib_per_s == seen.answered_per_s * 4096 / 2**30


@given(st.floats(1, 5000), st.floats(0.1, 3), st.integers(1, 7))
def test_the_ranks_share_one_even_schedule(rate: float, seconds: float, num_ranks: int) -> None:
    shares = [arrivals(rate, seconds, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    together = sorted(moment for share in shares for moment in share)
    assert together == arrivals(rate, seconds, rank=0, num_ranks=1)
    assert len(together) == max(1, round(rate * seconds))
    assert all(abs(gap - NS / rate) <= 1 for gap in np.diff(together))


@given(read_percent=st.integers(0, 100), blocks=st.integers(1, 64))
def test_operations_read_and_write_in_exact_shares_and_pass_each_block_once(
    read_percent: int, blocks: int
) -> None:
    load = LoadRequest(block_bytes=4096, read_percent=read_percent)
    offsets, writes = choose_operations(load, blocks * 4096 + 7, rank=1)
    assert sorted(offsets.tolist()) == [4096 * number for number in range(blocks)]
    for hundred in range(0, len(writes), 100):
        assert sum(writes[hundred : hundred + 100]) == 100 - read_percent


def test_a_burst_is_told_apart_from_the_steady_state_behind_it() -> None:
    is_steady, begins, rate, first_rate = find_steady_state(
        [1000, 990, 1010, 600, 202, 198, 200, 201, 199, 203]
    )
    assert is_steady
    assert (begins, round(rate)) == (4, 200)
    assert first_rate == pytest.approx(900)


@pytest.mark.parametrize(
    "rounds",
    [[100, 100, 100, 100], [100, 110, 120, 130, 140], [100, 140, 100, 140, 100], [9, 0, 0, 0, 0, 0]],
    ids=["few", "climbing", "uneven", "silent"],
)
def test_rounds_that_are_few_or_climb_or_differ_are_not_steady(rounds: list[float]) -> None:
    is_steady, *_ = find_steady_state(rounds)
    assert not is_steady


@pytest.mark.parametrize("wrong", [{"block_bytes": 0}, {"depth": 0}, {"read_percent": 101}])
def test_a_load_of_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="share of reads"):
        LoadRequest(**wrong)  # type: ignore[arg-type]


def test_intervals_of_a_load_leave_out_the_warm_up_as_its_figures_do() -> None:
    point = _serve(500, capacity_per_s=1000, latency_s=0.001)
    assert [one.start_s for one in point.intervals] == pytest.approx(np.arange(0.4, SECONDS, 0.1))
    assert [one.operations_per_s for one in point.intervals] == pytest.approx([500] * 16)
    # One operation of the warm-up takes as long as all of it, and ends a moment later.
    due = np.array(arrivals(500, SECONDS, rank=0, num_ranks=1))
    ended = due + 1_000_000
    ended[0] = round(0.401 * NS)
    late = describe_load(_times(due, due, ended), rate_per_s=500, seconds=SECONDS, block_bytes=4096)
    assert max(one.p99_ms for one in late.intervals) <= late.max_ms == 1.0


@pytest.mark.parametrize("seconds", [0.036, 0.1, 0.94, 0.951, 1.0, 1.049, 2.3000001, 12.4, 12.6])
def test_a_steady_rate_is_the_same_in_each_interval_whatever_the_length_of_the_last(seconds: float) -> None:
    ended = np.arange(1, round(seconds * 1000) + 1) * (NS // 1000)
    found = intervals(ended, np.full(ended.size, 500), seconds)
    assert [one.operations_per_s for one in found] == pytest.approx([1000] * len(found), rel=1e-6)
    lengths = np.diff([*(one.start_s for one in found), seconds])
    assert lengths[:-1] == pytest.approx(interval_s(seconds))
    assert len(found) == 1 or 0.5 <= lengths[-1] / interval_s(seconds) <= 1.5
