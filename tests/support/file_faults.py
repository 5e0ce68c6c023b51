"""System calls that fail, fall short or kill the process: faults below file storage.

`faulty_calls(FailFileCall("fsync", 2, errno.EIO), ...)` gives `FileCalls` for a `FileStorage`; faults wrap
each other, the last one outermost. Invariant: a fault occurs at the same call in every run of one program.
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
    """A fault of system calls."""

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
    """No fault: records the names of all calls, in order, for sweeps over them."""

    names: list[str] = field(default_factory=list)

    def around(self, name: str, call: Call) -> Call:
        """The call, after its name is recorded."""

        def logged(*arguments: Any) -> Any:
            self.names.append(name)
            return call(*arguments)

        return logged


@dataclass(slots=True)
class _Countdown:
    """Strikes at the `number`-th call, from 1, of this name, or of all calls."""

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
        self._is_lasting = False

    @classmethod
    def and_all_after(cls, name: str | None, number: int, error_number: int) -> FailFileCall:
        """The same for every such call from then on: a disk that is full or broken."""
        fault = cls(name, number, error_number)
        fault._is_lasting = True
        return fault

    def around(self, name: str, call: Call) -> Call:
        """The call, or its failure."""
        if not self._countdown.concerns(name):
            return call

        def failing(*arguments: Any) -> Any:
            if self._countdown.strikes(and_after=self._is_lasting):
                if name == "close":
                    # On Linux a close that fails has closed the descriptor.
                    call(*arguments)
                raise OSError(self._error_number, os.strerror(self._error_number))
            return call(*arguments)

        return failing


class NoSync:
    """fsync returns at once, for fast sweeps: what a killed process leaves does not depend on it."""

    def around(self, name: str, call: Call) -> Call:
        """The call, except fsync."""

        def skip(_descriptor: int) -> None:
            """Do nothing."""

        return skip if name == "fsync" else call


class KillAtFileCall:
    """The process dies by SIGKILL instead of making its `number`-th call."""

    def __init__(self, number: int) -> None:
        self._countdown = _Countdown(None, number)

    def around(self, _name: str, call: Call) -> Call:
        """The call, or the kill."""

        def deadly(*arguments: Any) -> Any:
            if self._countdown.strikes(and_after=False):
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments)

        return deadly


class ShortTransfers:
    """No read or write moves more than `most_bytes`, as happens with signals and network file systems."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes

    def around(self, name: str, call: Call) -> Call:
        """The call, on the first bytes of its buffer."""
        if name not in MOVING_CALLS:
            return call

        def short(descriptor: int, buffer: memoryview, offset: int) -> Any:
            return call(descriptor, buffer[: self._most_bytes], offset)

        return short
