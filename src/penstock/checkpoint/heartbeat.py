"""Work of all ranks that ends on all of them when one fails or is interrupted.

Invariant: all ranks learn of the first failure in the same heartbeat, and none returns before its own work
has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

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


def run_with_heartbeat(
    comm: Comm, work: Callable[[CancelToken], Result], *, awaiting: str, limit_s: float | None = None
) -> Result:
    """Run `work` on all ranks and return its result here, or raise on all ranks if it fails on any.

    Collective.

    `work` runs in a thread and must end soon after its `CancelToken` is cancelled. No other thread may use
    `comm` meanwhile. A rank that is done waits at most `limit_s` for the others, by default the limit of
    `comm`. On a single rank, the error is raised as it is.
    """
    cancel_token, limit_s = CancelToken(), comm.timeout_s if limit_s is None else limit_s
    if comm.size == 1:
        with ExitStack() as undo:
            undo.callback(cancel_token.cancel)
            return work(cancel_token)
    working: list[Future[Result]] = []

    def beat() -> list[tuple[str, str | None]]:
        """Start the work; returns the host and last status of each rank."""
        with ExitStack() as undo:
            undo.callback(cancel_token.cancel)
            try:
                working.append(workers.submit(work, cancel_token))
            except RuntimeError as error:
                # Cancelled, the work ends at once, after what other ranks wait for.
                cancel_token.cancel()
                with suppress(PenstockError):
                    work(cancel_token)
                failed: Future[Result] = Future()
                failed.set_exception(no_thread(error))
                working.append(failed)
            done_s: float | None = None
            while True:
                wait(working, timeout=HEARTBEAT_S)
                done_s = time.monotonic() if done_s is None and working[0].done() else done_s
                status = (
                    INTERRUPTED
                    if cancel_token.is_interrupted
                    else _status(working[0], done_s, awaiting, limit_s)
                )
                statuses = comm.gather((comm.host, status), awaiting=awaiting)
                if any(state for _, state in statuses):
                    return statuses
                if all(state == "" for _, state in statuses):
                    undo.pop_all()
                    return statuses

    with (
        ThreadPoolExecutor(1, thread_name_prefix="penstock-work") as workers,
        ThreadPoolExecutor(1, thread_name_prefix="penstock-heartbeat") as heartbeats,
        ExitStack() as undo,
    ):
        # An interrupt leaves this block, too: the heartbeat then informs the other ranks, and ends.
        undo.callback(cancel_token.interrupt)
        # The heartbeat's thread starts the work, so that an interrupt finds both running or neither.
        beating = submit_or_run(heartbeats, beat)
        # With time limits, because Ctrl-C does not end a wait that it precedes by an instant.
        while wait([beating], timeout=HEARTBEAT_S).not_done:
            pass
        undo.pop_all()
        cancel_token.cancel()
        try:
            statuses = beating.result()
        except RankError as error:
            # Where ranks lost each other, the work may know which one died.
            cause = working[0].exception() if working else None
            if isinstance(cause, RankError):
                raise cause from error
            raise
        wait(working)
    for rank, (host, state) in enumerate(statuses):
        if state:
            raise RankFailed(rank, host, state) from (working[0].exception() if rank == comm.rank else None)
    return working[0].result()


def _status(working: Future[Any], done_s: float | None, awaiting: str, limit_s: float) -> str | None:
    """None while this rank is busy, "" once it is done, and otherwise the cause of its failure."""
    if done_s is None:
        return None
    if (error := working.exception()) is not None:
        return format_cause(error)
    return format_cause(WaitTimeout(awaiting, limit_s)) if time.monotonic() - done_s > limit_s else ""
