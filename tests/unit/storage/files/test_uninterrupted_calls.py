"""C functions that are called while signals arrive."""

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.host_windows import Window
from penstock.storage.files.system_calls import REAL_CALLS, call_uninterrupted, libc, raise_on_failure


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


class Stopped(Exception):
    """Raised by the handler of a signal, as KeyboardInterrupt is."""


def test_a_handler_that_raises_leaves_no_signal_blocked() -> None:
    def stop(_number: int, _frame: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGALRM, stop)
    try:
        for number in range(3000):
            with pytest.raises(Stopped):  # noqa: PT012 - the signal may arrive anywhere in the loop
                signal.setitimer(signal.ITIMER_REAL, (1 + number % 300) * 1e-6)
                while True:
                    call_uninterrupted(libc().getpid)
            assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGALRM, before)


class Place:
    """A path that notes, when a call takes it, whether signals are blocked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_safe = False

    def __fspath__(self) -> str:
        self.is_safe = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return str(self._path)


def test_no_signal_interrupts_a_call_that_changes_names(tmp_path: Path) -> None:
    old, new = Place(tmp_path / "old"), Place(tmp_path / "new")
    steps: list[tuple[Any, list[Place]]] = [
        (REAL_CALLS.mkdir, [old]),
        (REAL_CALLS.rename, [old, new]),
        (REAL_CALLS.rmdir, [new]),
    ]
    for call, places in steps:
        call(*places)
        assert all(place.is_safe for place in places), call
        old.is_safe = new.is_safe = False
    (tmp_path / "new").touch()
    REAL_CALLS.unlink(new)  # type: ignore[arg-type]
    assert new.is_safe


def test_no_signal_interrupts_the_allocation_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kernels before 5.19 undo the allocation of shared memory at each signal.
    masks = []
    allocate = os.posix_fallocate

    def noting(*arguments: int) -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", noting)
    Window.make(4096, is_huge=False).close()
    assert signal.SIGTERM in masks[0]
