"""System calls that fail, fall short or kill the process: what goes wrong below file storage.

`faulty_calls(FailFileCall("fsync", 2, errno.EIO), ...)` gives `FileCalls` for a `PosixStorage`; faults wrap
each other, the last one outermost. Invariant: a fault strikes at the same call in every run of one program.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from penstock.storage.files.system_calls import REAL_CALLS, FileCalls

Call = Callable[..., Any]

MOVING_CALLS = ("pwrite", "pread_into")


class CallFault(Protocol):
    """Something that goes wrong in system calls."""

    def around(self, name: str, call: Call) -> Call:
        """The faulty version of `call`, the field `name` of `FileCalls`."""


def faulty_calls(*faults: CallFault, base: FileCalls = REAL_CALLS) -> FileCalls:
    """`base` with `faults` around each of its calls."""
    calls: dict[str, Call] = {spec.name: getattr(base, spec.name) for spec in fields(FileCalls)}
    for fault in faults:
        calls = {name: fault.around(name, call) for name, call in calls.items()}
    return FileCalls(**calls)


@dataclass(slots=True)
class CallLog:
    """No fault: the names of all calls made, in order. It tells a sweep how many there are to strike at."""

    names: list[str] = field(default_factory=list)

    def around(self, name: str, call: Call) -> Call:
        """The call, with its name noted first."""

        def logged(*arguments: Any) -> Any:
            self.names.append(name)
            return call(*arguments)

        return logged


@dataclass(slots=True)
class _Countdown:
    """Strikes at the `number`-th call, from 1, of those named, or of all if none is."""

    name: str | None
    number: int
    seen: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def strikes(self, *, and_after: bool) -> bool:
        with self.lock:
            self.seen += 1
            return self.seen == self.number or (and_after and self.seen > self.number)

    def concerns(self, name: str) -> bool:
        return self.name in (None, name)


class FailFileCall:
    """The `number`-th call named `name` (None: of all calls) fails with `error_number`."""

    def __init__(self, name: str | None, number: int, error_number: int) -> None:
        self._countdown = _Countdown(name, number)
        self._error_number = error_number
        self._for_good = False

    @classmethod
    def and_all_after(cls, name: str | None, number: int, error_number: int) -> FailFileCall:
        """The same, and every such call after it: a disk that filled up or died."""
        fault = cls(name, number, error_number)
        fault._for_good = True
        return fault

    def around(self, name: str, call: Call) -> Call:
        """The call, or the failure in its place."""
        if not self._countdown.concerns(name):
            return call

        def failing(*arguments: Any) -> Any:
            if self._countdown.strikes(and_after=self._for_good):
                if name == "close":
                    # A close that fails has closed, on Linux: the descriptor is gone either way.
                    call(*arguments)
                raise OSError(self._error_number, os.strerror(self._error_number))
            return call(*arguments)

        return failing


class NoSync:
    """fsync returns at once: a killed process leaves the same, as the kernel lives on; for fast sweeps."""

    def around(self, name: str, call: Call) -> Call:
        """The call, unless it syncs."""

        def skip(_descriptor: int) -> None:
            """Nothing is made durable."""

        return skip if name == "fsync" else call


class KillAtFileCall:
    """The process dies by SIGKILL instead of making its `number`-th call."""

    def __init__(self, number: int) -> None:
        self._countdown = _Countdown(None, number)

    def around(self, _name: str, call: Call) -> Call:
        """The call, or death in its place."""

        def deadly(*arguments: Any) -> Any:
            if self._countdown.strikes(and_after=False):
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments)

        return deadly


class ShortTransfers:
    """No read or write moves more than `most_bytes`, as at a signal, a quota or a network file system."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes

    def around(self, name: str, call: Call) -> Call:
        """The call on the beginning of its buffer."""
        if name not in MOVING_CALLS:
            return call

        def short(descriptor: int, buffer: memoryview, offset: int) -> Any:
            return call(descriptor, buffer[: self._most_bytes], offset)

        return short
