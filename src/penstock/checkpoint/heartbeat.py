"""Work of all ranks that ends on all of them when one fails or is interrupted.

Invariant: all ranks learn of the first failure in the same heartbeat, and none returns before its own work
has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from penstock.cluster.comm import Comm, format_cause
from penstock.errors import PenstockError, RankError, RankFailed, WaitTimeout
from penstock.storage.capabilities import no_thread, submit_or_run

Result = TypeVar("Result")


Beaten = TypeVar("Beaten")


HEARTBEAT_S = 1.0
"""How late a rank may hear of another's failure. A small message of all ranks at this rate costs nothing."""


INTERRUPTED = "it was interrupted (Ctrl-C) while loading"


class CancelToken:
    """Tells work to end early. All methods may be called from any thread, at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._is_cancelled = False
        self.is_interrupted = False

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call `callback` on cancellation; at once if that has happened."""
        with self._lock:
            self._callbacks.append(callback)
            is_late = self._is_cancelled
        if is_late:
            callback()

    def cancel(self) -> None:
        """End the work. May be called twice."""
        with self._lock:
            self._is_cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def interrupt(self) -> None:
        """End the work because the caller was interrupted, which is what other ranks will report."""
        self.is_interrupted = True
        self.cancel()


RankState = Literal["busy", "done", "failed"]


@dataclass(frozen=True, slots=True)
class _RankStatus:
    """The status of one rank at one heartbeat."""

    state: RankState
    host: str = ""
    cause: str = ""


def run_with_heartbeat(
    comm: Comm, work: Callable[[CancelToken], Result], *, awaiting: str, limit_s: float | None = None
) -> Result:
    """Run `work` on all ranks and return its result here, or raise on all ranks if it fails on any.

    Collective.

    `work` runs in a thread and must end soon after its `CancelToken` is cancelled. No other thread may use
    `comm` meanwhile. A rank that is done waits at most `limit_s` for the others, by default the limit of
    `comm`. On a single rank, the error is raised as it is.
    """
    cancel_token = CancelToken()
    if comm.size == 1:
        with ExitStack() as undo:
            undo.callback(cancel_token.cancel)
            return work(cancel_token)
    with (
        ThreadPoolExecutor(1, thread_name_prefix="penstock-work") as workers,
        ThreadPoolExecutor(1, thread_name_prefix="penstock-heartbeat") as heartbeats,
        ExitStack() as undo,
    ):
        # An interrupt leaves this block, too: the heartbeat then tells the other ranks, and ends.
        undo.callback(cancel_token.interrupt)
        limit_s = comm.timeout_s if limit_s is None else limit_s
        heartbeat = _Heartbeat(comm, cancel_token, awaiting, limit_s)
        # The heartbeat's thread starts the work, so that an interrupt finds both running or neither.
        beating = submit_or_run(heartbeats, heartbeat.beat, partial(_start, workers, work, cancel_token))
        # With time limits, because Ctrl-C does not end a wait that it precedes by an instant.
        while wait([beating], timeout=HEARTBEAT_S).not_done:
            pass
        undo.pop_all()
        cancel_token.cancel()
        working, statuses = heartbeat.result(beating)
        wait([working])
    for rank, status in enumerate(statuses):
        if status.state == "failed":
            own = working.exception() if rank == comm.rank else None
            raise RankFailed(rank, status.host, status.cause) from own
    return working.result()


def _start(
    threads: Executor, work: Callable[[CancelToken], Result], cancel_token: CancelToken
) -> Future[Result]:
    """Start the work. If no thread may be started, it is cancelled, which ends what others wait for."""
    try:
        return threads.submit(work, cancel_token)
    except RuntimeError as error:
        cancel_token.cancel()
        failed: Future[Result] = Future()
        with suppress(PenstockError):
            work(cancel_token)
        failed.set_exception(no_thread(error))
        return failed


@dataclass(slots=True)
class _Heartbeat:
    """Exchanges the status of all ranks until all are done or one has failed."""

    comm: Comm
    cancel_token: CancelToken
    awaiting: str
    limit_s: float
    working: Future[Any] | None = None

    def beat(self, start: Callable[[], Future[Result]]) -> tuple[Future[Result], Sequence[_RankStatus]]:
        """Start the work; returns it and the last status of each rank."""
        with ExitStack() as undo:
            undo.callback(self.cancel_token.cancel)
            working, done_s = start(), None
            self.working = working
            while True:
                wait([working], timeout=HEARTBEAT_S)
                if done_s is None and working.done():
                    done_s = time.monotonic()
                statuses = self.comm.gather(self._status(working, done_s), awaiting=self.awaiting)
                if any(status.state == "failed" for status in statuses):
                    return working, statuses
                if all(status.state == "done" for status in statuses):
                    undo.pop_all()
                    return working, statuses

    def result(self, beating: Future[Beaten]) -> Beaten:
        """What `beat` returned or raised; where ranks lost each other, the work may know which one died."""
        try:
            return beating.result()
        except RankError as error:
            cause = self.working.exception() if self.working is not None else None
            if isinstance(cause, RankError):
                raise cause from error
            raise

    def _status(self, working: Future[Result], done_s: float | None) -> _RankStatus:
        cause = ""
        if self.cancel_token.is_interrupted:
            cause = INTERRUPTED
        elif done_s is None:
            return _RankStatus("busy")
        elif (error := working.exception()) is not None:
            cause = format_cause(error)
        elif time.monotonic() - done_s > self.limit_s:
            cause = format_cause(WaitTimeout(self.awaiting, self.limit_s))
        return _RankStatus("failed", self.comm.host, cause) if cause else _RankStatus("done")
