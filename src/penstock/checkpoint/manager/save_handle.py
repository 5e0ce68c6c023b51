"""Saves in the background: the handle that a program has of each, and what failed without being asked for.

Invariant: a failure is raised once by `SaveHandle.result`, or on all ranks by the next collective call of the
manager, or else printed to stderr when the program ends.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.checkpoint.engine import RankSaveStats, SaveCancelled, StagedSave
from penstock.cluster.comm import Comm, format_cause
from penstock.errors import RankFailed, UsageError, WaitTimeout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of a save: the `step`, its `uri`, and the statistics of the `ranks`, in rank order."""

    step: int
    uri: str
    ranks: tuple[RankSaveStats, ...]

    @property
    def payload_bytes(self) -> int:
        """The bytes of the state, over all ranks."""
        return sum(stats.payload_bytes for stats in self.ranks)

    def format_line(self, rank: int) -> str:
        """The statistics of one `rank` as a line of the log."""
        return f"step {self.step}, rank {rank}: {self.ranks[rank].describe()}"


class SaveHandle:
    """A save in the background, by `save_async(step, state)`. Any thread may call; nothing is collective.

    `number` counts the saves of a manager from 1 on all ranks; the manager calls `commit` and `end`.
    """

    def __init__(self, step: int, number: int, staged: StagedSave, *, timeout_s: float) -> None:
        self.step = step
        self.number = number
        self._staged = staged
        self._future: Future[SaveReport] = Future()
        self._timeout_s = timeout_s
        self._is_reported = False

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when the tensors may change; `WaitTimeout` after `timeout` or the manager's limit, in s."""
        try:
            self._staged.wait_staged(self._timeout_s if timeout is None else timeout)
        except SaveCancelled:
            self.result()  # What failed meanwhile has cancelled the copying, and is the cause.
            raise

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the step is committed; raises the error if the save failed, at every call.

        `WaitTimeout` after `timeout` seconds. Without one, only the time limits of the save itself apply.
        """
        self.wait_done(timeout)
        self._is_reported = True
        return self._future.result()

    @property
    def done(self) -> bool:
        """Whether it was committed, failed or cancelled."""
        return self._future.done()

    @property
    def stats(self) -> SaveReport | None:
        """The report if the step is committed; None before that, and after a failure."""
        is_committed = self._future.done() and self._future.exception() is None
        return self._future.result() if is_committed else None

    def cancel(self) -> None:
        """Cancel the save on all ranks; an older checkpoint of this step is unaffected.

        `result` then raises. Has no effect once this rank's files are written: the step will be committed.
        """
        self._is_reported = True
        self._staged.cancel()

    def wait_done(self, timeout_s: float | None) -> None:
        """Return when it is over, successful or not; `WaitTimeout` after `timeout_s`."""
        try:
            self._future.exception(timeout_s)
        except FutureTimeout as error:
            raise WaitTimeout(f"step {self.step} to be committed", timeout_s or 0.0) from error

    def unreported_error(self) -> BaseException | None:
        """Its error, if it failed and no call has raised it yet."""
        return None if self._is_reported or not self._future.done() else self._future.exception()

    def mark_reported(self) -> None:
        """Note that its failure is being raised elsewhere."""
        self._is_reported = True

    def commit(self, report: SaveReport) -> SaveReport:
        """Note that the step is committed."""
        self._future.set_result(report)
        return report

    def end(self, work: Future[None]) -> None:
        """Note how the save has ended, and log a failure: the program may end before it asks for it."""
        error = work.exception()
        if error is None:
            return
        if self._future.done():
            logger.error("Not all old steps were removed: %s", format_cause(error))
            return
        self._future.set_exception(error)
        log_failure(f"Step {self.step} was not saved", work)


MOST_PENDING = 8
"""The most background saves that may be pending on a rank."""


class SavesInFlight:
    """One rank's saves that are pending, or failed without having been reported."""

    def __init__(self, comm: Comm, folder: str, timeout_s: float) -> None:
        self._comm = comm
        self._folder = folder
        self._timeout_s = timeout_s
        self.handles: list[SaveHandle] = []
        self._has_warned = False

    def add(self, handle: SaveHandle) -> None:
        """Watch one more save. Wait if too many are pending: each has threads, and is lost in a crash."""
        self.handles.append(handle)
        if len(self.handles) <= MOST_PENDING:
            return
        first = self.handles[-MOST_PENDING - 1]
        if not (first.done or self._has_warned):
            self._has_warned = True
            logger.warning(
                "Saves take longer than the time between them: %d are pending, so calls wait", MOST_PENDING
            )
        first.wait_done(self._timeout_s)

    def wait(self) -> None:
        """Return when all are over, successful or not."""
        for handle in self.handles:
            handle.wait_done(self._timeout_s)

    def cancel(self) -> None:
        """Cancel all of them."""
        for handle in self.handles:
            handle.cancel()

    def sync_and_raise(self, activity: str, flush_failures: Mapping[int, BaseException]) -> None:
        """Wait until all ranks make the same call, then raise the first unreported failure. Collective.

        This is where a background failure of one rank becomes an error on all: ranks gather what failed
        before they start anything new. `flush_failures` happened after their saves had returned.
        """
        own_failures = [
            (handle.number, *self._locate(failure, f"saving step {handle.step}"))
            for handle in self.handles
            if (failure := handle.unreported_error()) is not None
        ]
        # Number 0: handles count from 1, and a flush has none.
        own_failures += [
            (0, *self._locate(failure, f"making durable step {step}"))
            for step, failure in flush_failures.items()
        ]
        call = (activity, self._folder)
        views = self._comm.gather((call, own_failures), awaiting=f"all ranks to begin {activity}")
        if {other for other, _ in views} != {call}:
            is_elsewhere = len({folder for (_, folder), _ in views}) > 1
            calls = ", ".join(
                f"rank {rank}: {other}" + is_elsewhere * f" in {folder}"
                for rank, ((other, folder), _) in enumerate(views)
            )
            raise UsageError(
                f"The ranks make different calls: {calls}",
                fix="Make the same calls in the same order on all ranks, and their managers of one folder.",
            )
        failures = sorted(failure for _, failed in views for failure in failed)
        self._forget({number for number, *_ in failures})
        if failures:
            _, rank, host, cause = failures[0]
            raise RankFailed(rank, host, cause)

    def _locate(self, failure: BaseException, activity: str) -> tuple[int, str, str]:
        """Rank, host and cause of a failure in the background."""
        rank, host, cause = self._comm.rank, self._comm.host, format_cause(failure)
        if isinstance(failure, RankFailed):
            rank, host, cause = failure.rank, failure.host, failure.cause
        return rank, host, f"{activity} in the background: {cause}"

    def _forget(self, reported: set[int]) -> None:
        """Drop handles with nothing left to report. A save that failed on another rank fails here, too."""
        for handle in self.handles:
            if handle.number in reported:
                handle.wait_done(self._timeout_s)
                handle.mark_reported()
        self.handles[:] = [handle for handle in self.handles if not handle.done or handle.unreported_error()]

    def print_failures(self) -> None:
        """Print to stderr which failures no call has raised, wherever the log goes; the exit code stays."""
        for handle in self.handles:
            if (error := handle.unreported_error()) is not None:
                cause = format_cause(error)
                with suppress(OSError, ValueError):
                    print(  # noqa: T201 - whatever becomes of the log
                        f"penstock: step {handle.step} was not saved, and nobody asked: {cause}",
                        file=sys.stderr,
                    )


def log_failure(what: str, work: Future[Any]) -> None:
    """Log a failure of work in the background, unless it was cancelled."""
    error = None if work.cancelled() else work.exception()
    if error is not None and not isinstance(error, SaveCancelled):
        logger.error("%s: %s", what, format_cause(error))
