"""C functions that are called while signals arrive."""

import errno
import os
import signal
from collections.abc import Iterator

import pytest

from penstock.storage.files.system_calls import call_uninterrupted, libc, raise_on_failure


@pytest.fixture
def many_signals() -> Iterator[list[int]]:
    """A signal each millisecond, as from a sampling profiler."""
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _frame: seen.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    yield seen
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_signals_do_not_interrupt_a_call_and_are_not_lost(many_signals: list[int]) -> None:
    assert libc().usleep(50_000) == -1
    del many_signals[:]
    raise_on_failure(call_uninterrupted(libc().usleep, 50_000))
    assert many_signals


def test_the_error_of_a_call_outlives_the_signals(many_signals: list[int]) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        raise_on_failure(call_uninterrupted(libc().fallocate, -1, 0, 0, 1))
    assert isinstance(many_signals, list)
