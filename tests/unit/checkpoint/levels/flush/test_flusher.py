"""How fast a flush may go, and what makes no sense to ask of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.levels.flush.file_copy import (
    BLOCK_BYTES,
    SMALLEST_BLOCK_BYTES,
    RateLimiter,
    block_bytes_for,
)
from penstock.checkpoint.levels.options import Flush
from penstock.errors import UsageError


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@given(st.lists(st.integers(1, 10_000), min_size=2, max_size=50), st.integers(1, 5_000))
def test_bytes_pass_at_the_rate_and_no_slower(sizes: list[int], rate: int) -> None:
    time = Time()
    pace = RateLimiter(float(rate), clock=lambda: time.now_s, sleep=time.sleep)
    for size in sizes:
        pace.take(size)
    # The last bytes may go as soon as those before them are paid for.
    assert time.now_s - 100.0 == pytest.approx(sum(sizes[:-1]) / rate)


def test_a_pause_earns_no_burst() -> None:
    time = Time()
    pace = RateLimiter(100.0, clock=lambda: time.now_s, sleep=time.sleep)
    pace.take(100)
    time.sleep(1000)
    before_s = time.now_s
    for _ in range(3):
        pace.take(100)
    assert time.now_s - before_s == pytest.approx(2.0)


def test_a_short_wait_for_the_disk_costs_nothing_of_the_rate() -> None:
    time = Time()
    pace = RateLimiter(100.0, burst_s=2.0, clock=lambda: time.now_s, sleep=time.sleep)
    pace.take(100)
    time.sleep(1000)
    before_s = time.now_s
    for _ in range(4):
        pace.take(100)
    assert time.now_s - before_s == pytest.approx(1.0)


def test_without_a_limit_bytes_pass_at_once() -> None:
    pace = RateLimiter(None, sleep=lambda _: pytest.fail("slept"))
    pace.take(1 << 40)


@pytest.mark.parametrize("rate", [None, 1.0, 5e5, 1e7, 3e9])
def test_blocks_are_large_but_no_larger_than_a_tenth_of_a_second_lets_pass(rate: float | None) -> None:
    size_bytes = block_bytes_for(rate)
    assert SMALLEST_BLOCK_BYTES <= size_bytes <= BLOCK_BYTES
    assert size_bytes % 4096 == 0
    if rate is None or rate >= 1e9:
        assert size_bytes == BLOCK_BYTES
    else:
        assert size_bytes <= max(rate / 10, SMALLEST_BLOCK_BYTES)


def test_rates_are_numbers_or_words() -> None:
    assert Flush(bandwidth="2GiB/s").bytes_per_s == 2 << 30
    assert Flush(bandwidth=5e6).bytes_per_s == 5e6
    assert Flush().bytes_per_s is None


@pytest.mark.parametrize(
    "fields", [{"every": 0}, {"threads": 0}, {"bandwidth": "0MiB/s"}, {"bandwidth": "fast"}, {"by": "nobody"}]
)
def test_invalid_flush_settings_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Flush(**fields)  # type: ignore[arg-type]
