"""Ranks that are threads of one process: a job in milliseconds, for tests of what ranks tell each other.

They keep the contracts of `Comm` and `Transfer`. Invariant: values are packed as between processes; a message
of a transfer is a copy, so no rank sees another's memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar

from penstock.cluster.comm import BaseComm, PollingWait
from penstock.errors import RankError, WaitTimeout

Result = TypeVar("Result")


@dataclass(slots=True)
class ThreadBoard:
    """Where the threads of one job leave what they carry: a row for each collective call, and messages."""

    size: int
    rows: dict[int, dict[int, bytes]] = field(default_factory=dict)
    lines: dict[tuple[int, int, int], SimpleQueue[bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def post(self, call: int, rank: int, payload: bytes) -> dict[int, bytes]:
        """Leave what `rank` brings to collective call number `call`; returns the call's row."""
        with self.lock:
            row = self.rows.setdefault(call, {})
            row[rank] = payload
            return row

    def line(self, source: int, to: int, tag: int) -> SimpleQueue[bytes]:
        """The messages of one pair of ranks and one tag."""
        with self.lock:
            return self.lines.setdefault((source, to, tag), SimpleQueue())


class ThreadComm(BaseComm):
    """One thread's view of a job of threads."""

    def __init__(self, board: ThreadBoard, rank: int, host: str = "") -> None:
        super().__init__(rank, board.size, host or f"thread-{rank}")
        self.board = board
        self.closed = False

    def close(self) -> None:
        """Remember that it was closed."""
        self.closed = True

    def transfer(self) -> ThreadTransfer:
        """A transfer over the same board."""
        return ThreadTransfer(self.board, self.rank)

    def _move_nothing(self, wait: PollingWait) -> None:
        self._gather_bytes(b"", wait)

    def _broadcast_bytes(self, payload: bytes | None, wait: PollingWait) -> bytes:
        return self._gather_bytes(payload or b"", wait)[0]

    def _gather_bytes(self, payload: bytes, wait: PollingWait) -> list[bytes]:
        row = self.board.post(self._call, self.rank, payload)
        wait.until(lambda: len(row) == self.size)
        return [row[rank] for rank in range(self.size)]


class ThreadTransfer:
    """Messages over a board."""

    def __init__(self, board: ThreadBoard, rank: int) -> None:
        self.rank = rank
        self.size = board.size
        self._board = board

    def send(self, to: int, buffer: memoryview, *, tag: int = 0) -> _Sent:
        """Leave a copy of `buffer`."""
        self._board.line(self.rank, to, tag).put(bytes(buffer))
        return _Sent()

    def receive(self, source: int, buffer: memoryview, *, tag: int = 0) -> _Awaited:
        """Fill `buffer` with the next message, when it is waited for."""
        return _Awaited(self._board.line(source, self.rank, tag), buffer)

    def close(self) -> None:
        """Nothing was made."""


class _Sent:
    def wait(self, *, awaiting: str, timeout_s: float) -> None:
        """It left at once."""


@dataclass(frozen=True, slots=True)
class _Awaited:
    line: SimpleQueue[bytes]
    buffer: memoryview

    def wait(self, *, awaiting: str, timeout_s: float) -> None:
        """Take the next message."""
        try:
            message = self.line.get(timeout=timeout_s)
        except Empty:
            raise WaitTimeout(awaiting, timeout_s) from None
        if len(message) != self.buffer.nbytes:
            raise RankError(f"{len(message)} bytes came where {self.buffer.nbytes} were awaited: {awaiting}")
        self.buffer[:] = message


def on_ranks(
    size: int,
    program: Callable[[ThreadComm], Result],
    *,
    hosts: Sequence[str] = (),
    timeout_s: float = 60.0,
) -> list[Result]:
    """What `program` returns on each of `size` ranks; the first error of any is raised.

    `hosts[rank]` names where a rank pretends to run; without them each rank has a host of its own.
    """
    board = ThreadBoard(size)
    names = list(hosts) or [""] * size
    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(program, ThreadComm(board, rank, names[rank])) for rank in range(size)]
        return [future.result(timeout=timeout_s) for future in futures]
