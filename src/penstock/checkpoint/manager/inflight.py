"""Saves in progress: the handle that a caller gets, the thread they run on, and the check for failed ones.

A handle is staged, then committed, failed or cancelled. Invariant: a failure is raised at least once on every
rank, by `SaveHandle.result` or by the manager's next collective call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.checkpoint.engine import RankSaveStats, SaveCancelled, StagedSave
from penstock.cluster.comm import format_cause
from penstock.errors import PenstockError, RankFailed, UsageError, WaitTimeout
from penstock.progress import Progress, Silent
from penstock.units import format_bytes, format_rate

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """The result of a save: where the step is, and the statistics of each rank, in rank order."""

    step: int
    uri: str
    ranks: tuple[RankSaveStats, ...]

    @property
    def payload_bytes(self) -> int:
        """The bytes of the state, over all ranks."""
        return sum(each.payload_bytes for each in self.ranks)

    def format_line(self, rank: int) -> str:
        """The statistics of one rank as a line of the log."""
        stats = self.ranks[rank]
        rate = format_rate(stats.file_bytes / stats.write_s) if stats.write_s else "no time"
        return (
            f"step {self.step}, rank {rank}: {format_bytes(stats.payload_bytes)}; plan {stats.plan_s:.3f} s, "
            f"stage {stats.stage_s:.3f} s, write {stats.write_s:.3f} s ({rate}), sync {stats.sync_s:.3f} s, "
            f"commit {stats.commit_s:.3f} s; memory {format_bytes(stats.memory_bytes)}"
        )


@dataclass(frozen=True, slots=True)
class ProgressState:
    """The progress of a save on this rank."""

    phase: str
    done: float
    total: float


class SaveProgress:
    """The `Progress` of one save: remembers the latest state, and forwards to another `Progress`."""

    def __init__(self, forward_to: Progress | None) -> None:
        self._forward_to = forward_to or Silent()
        self._lock = threading.Lock()
        self._stand = ProgressState("waiting", 0.0, 0.0)

    @property
    def stand(self) -> ProgressState:
        """The latest state."""
        return self._stand

    def begin(self, phase: str, total: float) -> None:
        """Begin a phase."""
        with self._lock:
            self._stand = ProgressState(phase, 0.0, total)
        self._forward_to.begin(phase, total)

    def advance(self, amount: float) -> None:
        """Advance within the phase."""
        with self._lock:
            now = self._stand
            self._stand = ProgressState(now.phase, now.done + amount, now.total)
        self._forward_to.advance(amount)


class SaveHandle:
    """A save in the background. Any thread may call; nothing here is collective."""

    def __init__(
        self,
        step: int,
        number: int,
        staged: StagedSave,
        future: Future[SaveReport],
        *,
        meter: SaveProgress,
        timeout_s: float,
    ) -> None:
        self.step = step
        self.number = number
        """Counts the saves of a manager from 1, the same on all ranks."""
        self._staged = staged
        self._future = future
        self._meter = meter
        self._timeout_s = timeout_s
        self._is_reported = False
        self._is_cancelled = False

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when the tensors may change; `WaitTimeout` after `timeout` or the manager's limit, in s."""
        self._staged.wait_staged(self._timeout_s if timeout is None else timeout)

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the step is committed; raises the error if the save failed, at every call.

        `WaitTimeout` after `timeout` seconds. Without one, only the time limits of the save itself apply.
        """
        try:
            report = self._future.result(timeout)
        except FutureTimeout as error:
            if self._future.done():
                self._is_reported = True
                raise
            raise WaitTimeout(f"step {self.step} to be committed", timeout or 0.0) from error
        except (PenstockError, CancelledError):
            self._is_reported = True
            raise
        return report

    @property
    def done(self) -> bool:
        """Whether it was committed, failed or cancelled."""
        return self._future.done()

    @property
    def stats(self) -> SaveReport | None:
        """The report if the step is committed; None before that, and after a failure."""
        is_committed = self._future.done() and self._future.exception() is None
        return self._future.result() if is_committed else None

    @property
    def progress(self) -> ProgressState:
        """The progress of this rank's share."""
        return self._meter.stand

    def cancel(self) -> None:
        """Cancel the save on all ranks; an older checkpoint of this step is unaffected.

        `result` then raises. Has no effect once this rank's files are written: the step will be committed.
        """
        self._is_cancelled = True
        self._staged.cancel()

    def unreported_error(self) -> BaseException | None:
        """Its error, if it failed and no one has seen it yet."""
        if self._is_reported or self._is_cancelled or not self._future.done():
            return None
        return self._future.exception()

    def mark_reported(self) -> None:
        """Note that its failure is being raised elsewhere."""
        self._is_reported = True

    def wait_done(self, timeout_s: float) -> None:
        """Return when it is over, successful or not."""
        try:
            self._future.exception(timeout_s)
        except FutureTimeout as error:
            raise WaitTimeout(f"step {self.step} to be committed", timeout_s) from error


NO_HANDLE = 0
"""Stands for a failure without a handle, such as of a flush: handles count from 1."""

logger = logging.getLogger(__name__)


class InFlightSaves:
    """One rank's saves that are pending, or failed without having been reported."""

    def __init__(self, comm: Comm, timeout_s: float) -> None:
        self._comm = comm
        self._timeout_s = timeout_s
        self._handles: list[SaveHandle] = []

    def add(self, handle: SaveHandle) -> None:
        """Remember a save until its end was reported."""
        self._handles.append(handle)

    def wait(self) -> None:
        """Return when all are over, successful or not."""
        for handle in self._handles:
            handle.wait_done(self._timeout_s)

    def cancel(self) -> None:
        """Cancel all of them."""
        for handle in self._handles:
            handle.cancel()

    def sync_and_raise(self, activity: str, flush_failures: Mapping[int, BaseException]) -> None:
        """Wait until all ranks make the same call, then raise the first unreported failure. Collective.

        This is where a background failure of one rank becomes an error on all: ranks gather what failed
        before they start anything new. `flush_failures` happened after their saves had returned.
        """
        comm = self._comm
        mine = [
            (handle.number, *_blame(failure, comm.rank, comm.host, handle.step))
            for handle in self._handles
            if (failure := handle.unreported_error()) is not None
        ]
        mine += [
            (NO_HANDLE, *_blame(failure, comm.rank, comm.host, step, doing="making durable"))
            for step, failure in flush_failures.items()
        ]
        views = comm.gather((activity, mine), awaiting=f"all ranks to begin {activity}")
        if {other for other, _ in views} != {activity}:
            calls = ", ".join(f"rank {rank}: {other}" for rank, (other, _) in enumerate(views))
            raise UsageError(
                f"The ranks make different calls: {calls}",
                fix="Make the same calls in the same order on all ranks.",
            )
        failures = sorted(failure for _, failed in views for failure in failed)
        self._forget({number for number, *_ in failures})
        if failures:
            _, rank, host, cause = failures[0]
            raise RankFailed(rank, host, cause)

    def _forget(self, reported: set[int]) -> None:
        """Drop handles with nothing left to report. A save that failed on another rank fails here, too."""
        for handle in self._handles:
            if handle.number in reported:
                handle.wait_done(self._timeout_s)
                handle.mark_reported()
        self._handles = [each for each in self._handles if not each.done or each.unreported_error()]


def log_failure(step: int, future: Future[SaveReport]) -> None:
    """Log a failure: the program may end before anyone asks for the result."""
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, SaveCancelled):
        logger.error("Step %d was not saved: %s", step, format_cause(error))


def _blame(
    failure: BaseException, rank: int, host: str, step: int, *, doing: str = "saving"
) -> tuple[int, str, str]:
    """Rank, host and cause of a failure in the background."""
    if isinstance(failure, RankFailed):
        rank, host, cause = failure.rank, failure.host, failure.cause
    else:
        cause = format_cause(failure)
    return rank, host, f"{doing} step {step} in the background: {cause}"


def start_lasting_worker(name: str) -> ThreadPoolExecutor:
    """A pool of one thread whose work is finished before the program ends.

    Python stops all thread pools at the beginning of its exit, after which a pending save could start none of
    its threads and would be lost. Callbacks run in reverse order of registration, and the pools registered
    theirs on import: so this one runs before them, and waits while all other pools still work.
    """
    worker = ThreadPoolExecutor(1, thread_name_prefix=name)
    threading._register_atexit(worker.shutdown)  # type: ignore[attr-defined]  # noqa: SLF001 - nothing public comes in time
    return worker
