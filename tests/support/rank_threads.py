"""Ranks that are threads of one process: jobs that take milliseconds, for tests of communicating code.

They keep the contracts of `Comm` and `PointToPoint`. Invariant: values are pickled as between processes, and
a message is a copy, so that no rank sees another's memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar

from penstock.cluster.comm import Comm, PollingWait
from penstock.errors import RankError, WaitTimeout

Result = TypeVar("Result")


@dataclass(slots=True)
class ThreadBoard:
    """What the threads of one job exchange: a row for each exchange of all, and messages."""

    size: int
    rows: dict[int, dict[int, bytes]] = field(default_factory=dict)
    queues: dict[tuple[int, int, int], SimpleQueue[bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def post(self, number: int, rank: int, payload: bytes) -> dict[int, bytes]:
        """Store the payload of `rank` for exchange `number`; returns the row of the exchange."""
        with self.lock:
            row = self.rows.setdefault(number, {})
            row[rank] = payload
            return row

    def queue(self, source: int, to: int, tag: int) -> SimpleQueue[bytes]:
        """The messages of one pair of ranks and one tag."""
        with self.lock:
            return self.queues.setdefault((source, to, tag), SimpleQueue())


class ThreadComm(Comm):
    """One thread's view of a job of threads."""

    def __init__(self, board: ThreadBoard, rank: int, host: str = "") -> None:
        super().__init__(rank, board.size, host or f"thread-{rank}")
        self.board = board
        self.closed = False
        self._num_exchanges = 0

    def close(self) -> None:
        """Record that it was closed."""
        self.closed = True

    def transfer(self) -> ThreadTransfer:
        """A transfer over the same board."""
        return ThreadTransfer(self.board, self.rank)

    def _move_nothing(self, wait: PollingWait) -> None:
        self._gather_bytes(b"", wait, only_on_rank0=False)

    def _broadcast_bytes(self, payload: bytes | None, wait: PollingWait) -> bytes:
        return self._gather_bytes(payload or b"", wait, only_on_rank0=False)[0]

    def _gather_bytes(self, payload: bytes, wait: PollingWait, *, only_on_rank0: bool) -> list[bytes]:
        self._num_exchanges += 1
        row = self.board.post(self._num_exchanges, self.rank, payload)
        wait.until(lambda: len(row) == self.size)
        return [row[rank] for rank in range(self.size)]


class ThreadTransfer:
    """Point-to-point messages over a board."""

    def __init__(self, board: ThreadBoard, rank: int) -> None:
        self.rank = rank
        self._board = board

    def send(self, to: int, buffer: memoryview, *, tag: int = 0) -> _Sent:
        """Send a copy of `buffer`."""
        self._board.queue(self.rank, to, tag).put(bytes(buffer))
        return _Sent()

    def receive(self, source: int, buffer: memoryview, *, tag: int = 0) -> _Awaited:
        """Fill `buffer` with the next message; it is copied by `wait`."""
        return _Awaited(self._board.queue(source, self.rank, tag), buffer)

    def close(self) -> None:
        """Do nothing."""


class _Sent:
    def wait(self, *, awaiting: str, timeout_s: float) -> None:
        """Return at once."""


@dataclass(frozen=True, slots=True)
class _Awaited:
    queue: SimpleQueue[bytes]
    buffer: memoryview

    def wait(self, *, awaiting: str, timeout_s: float) -> None:
        """Take the next message."""
        try:
            message = self.queue.get(timeout=timeout_s)
        except Empty:
            raise WaitTimeout(awaiting, timeout_s) from None
        if len(message) != self.buffer.nbytes:
            raise RankError(f"Received {len(message)} bytes instead of {self.buffer.nbytes}: {awaiting}")
        self.buffer[:] = message


def on_ranks(
    size: int,
    program: Callable[[ThreadComm], Result],
    *,
    hosts: Sequence[str] = (),
    timeout_s: float = 60.0,
) -> list[Result]:
    """Run `program` on each of `size` ranks; their results. The first error of any rank is raised.

    `hosts[rank]` is the host name of a rank; by default each rank is on a different host.
    """
    board = ThreadBoard(size)
    names = list(hosts) or [""] * size
    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(program, ThreadComm(board, rank, names[rank])) for rank in range(size)]
        return [future.result(timeout=timeout_s) for future in futures]
