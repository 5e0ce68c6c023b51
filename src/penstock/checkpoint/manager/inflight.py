"""A save under way, as its caller sees it: staged, then committed, failed or cancelled.

Between `manager`, which starts saves, and the thread that completes them. Invariant: a failure is told at
least once on every rank: by `result`, or by the manager's next call.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.checkpoint.engine import SaveCancelled
from penstock.cluster.collectives import format_cause
from penstock.errors import PenstockError, RankFailed, UsageError, WaitTimeout
from penstock.progress import Silent
from penstock.units import format_bytes, format_rate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.checkpoint.engine import ShareStats, StagedSave
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save did: where the step lies now, and what each rank spent on it, in rank order."""

    step: int
    uri: str
    ranks: tuple[ShareStats, ...]

    @property
    def payload_bytes(self) -> int:
        """The state's bytes, all ranks together."""
        return sum(each.payload_bytes for each in self.ranks)

    def line_of(self, rank: int) -> str:
        """What one rank spent, for the log."""
        stats = self.ranks[rank]
        rate = format_rate(stats.file_bytes / stats.write_s) if stats.write_s else "no time"
        return (
            f"step {self.step}, rank {rank}: {format_bytes(stats.payload_bytes)}; plan {stats.plan_s:.3f} s, "
            f"stage {stats.stage_s:.3f} s, write {stats.write_s:.3f} s ({rate}), sync {stats.sync_s:.3f} s, "
            f"commit {stats.commit_s:.3f} s; memory {format_bytes(stats.memory_bytes)}"
        )


@dataclass(frozen=True, slots=True)
class Stand:
    """How far a save is on this rank."""

    phase: str
    done: float
    total: float


class Meter:
    """The `Progress` of one save: remembers where it stands, and passes on to who looks."""

    def __init__(self, onward: Progress | None) -> None:
        self._onward = onward or Silent()
        self._lock = threading.Lock()
        self._stand = Stand("waiting", 0.0, 0.0)

    @property
    def stand(self) -> Stand:
        """Where it stands now."""
        return self._stand

    def begin(self, phase: str, total: float) -> None:
        """A phase starts."""
        with self._lock:
            self._stand = Stand(phase, 0.0, total)
        self._onward.begin(phase, total)

    def advance(self, amount: float) -> None:
        """So much more is done."""
        with self._lock:
            now = self._stand
            self._stand = Stand(now.phase, now.done + amount, now.total)
        self._onward.advance(amount)


class SaveHandle:
    """A save that goes on in the background. Any thread may ask; nothing here is collective."""

    def __init__(
        self,
        step: int,
        number: int,
        staged: StagedSave,
        future: Future[SaveReport],
        *,
        meter: Meter,
        timeout_s: float,
    ) -> None:
        self.step = step
        self.number = number
        """The how-manieth save of its manager this is, on all ranks alike."""
        self._staged = staged
        self._future = future
        self._meter = meter
        self._timeout_s = timeout_s
        self._is_told = False
        self._is_cancelled = False

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when the tensors may change; `WaitTimeout` after `timeout` seconds (or the manager's)."""
        self._staged.wait_staged(self._timeout_s if timeout is None else timeout)

    def result(self, timeout: float | None = None) -> SaveReport:
        """The report once the step is committed; its failure, whenever it is asked for.

        `WaitTimeout` after `timeout` seconds. Without one this waits as long as the save has its own limits.
        """
        try:
            report = self._future.result(timeout)
        except FutureTimeout as error:
            if self._future.done():
                self._is_told = True
                raise
            raise WaitTimeout(f"step {self.step} to be committed", timeout or 0.0) from error
        except (PenstockError, CancelledError):
            self._is_told = True
            raise
        return report

    @property
    def done(self) -> bool:
        """Whether it was committed, failed or cancelled."""
        return self._future.done()

    @property
    def stats(self) -> SaveReport | None:
        """The report, once the step is committed; None before, and after a failure."""
        is_committed = self._future.done() and self._future.exception() is None
        return self._future.result() if is_committed else None

    @property
    def progress(self) -> Stand:
        """How far this rank's share is."""
        return self._meter.stand

    def cancel(self) -> None:
        """Give the save up, on all ranks; an older checkpoint of this step stays as it is.

        `result` then raises. Too late once this rank's files are written: the step is committed.
        """
        self._is_cancelled = True
        self._staged.cancel()

    def untold_failure(self) -> BaseException | None:
        """Why it failed, if it has and nobody has asked for it."""
        if self._is_told or self._is_cancelled or not self._future.done():
            return None
        return self._future.exception()

    def tell(self) -> None:
        """Its failure is being raised elsewhere."""
        self._is_told = True

    def wait_done(self, timeout_s: float) -> None:
        """Return when it is over, whatever came of it."""
        try:
            self._future.exception(timeout_s)
        except FutureTimeout as error:
            raise WaitTimeout(f"step {self.step} to be committed", timeout_s) from error


NO_HANDLE = 0
"""Stands for a failure that no save's handle tells: handles count from 1."""

logger = logging.getLogger(__name__)


class UnderWay:
    """One rank's handles of saves in the background."""

    def __init__(self, comm: Comm, timeout_s: float) -> None:
        self._comm = comm
        self._timeout_s = timeout_s
        self._handles: list[SaveHandle] = []

    def add(self, handle: SaveHandle) -> None:
        """Remember a save until its end is told."""
        self._handles.append(handle)

    def wait(self) -> None:
        """Return when all are over, whatever came of them."""
        for handle in self._handles:
            handle.wait_done(self._timeout_s)

    def cancel(self) -> None:
        """Give all of them up."""
        for handle in self._handles:
            handle.cancel()

    def meet(self, doing: str, later: Mapping[int, BaseException]) -> None:
        """Let all ranks come to the same call, and raise what failed; `later` failed after its save."""
        comm = self._comm
        mine = [
            (handle.number, *_blame(failure, comm.rank, comm.host, handle.step))
            for handle in self._handles
            if (failure := handle.untold_failure()) is not None
        ]
        mine += [
            (NO_HANDLE, *_blame(failure, comm.rank, comm.host, step, doing="making durable"))
            for step, failure in later.items()
        ]
        views = comm.gather((doing, mine), awaiting=f"all ranks to come to {doing}")
        if {each for each, _ in views} != {doing}:
            others = ", ".join(f"rank {rank}: {each}" for rank, (each, _) in enumerate(views))
            raise UsageError(
                f"Ranks call their managers for different things: {others}",
                fix="All ranks make the same calls in the same order.",
            )
        failures = sorted(failure for _, failed in views for failure in failed)
        self._forget({number for number, *_ in failures})
        if failures:
            _, rank, host, cause = failures[0]
            raise RankFailed(rank, host, cause)

    def _forget(self, told: set[int]) -> None:
        """Drop handles that nothing is to be told of any more. Those that failed elsewhere fail here, too."""
        for handle in self._handles:
            if handle.number in told:
                handle.wait_done(self._timeout_s)
                handle.tell()
        self._handles = [each for each in self._handles if not each.done or each.untold_failure()]


def log_failure(step: int, future: Future[SaveReport]) -> None:
    """Say in the log what failed: the program may end before anybody asks."""
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, SaveCancelled):
        logger.error("Step %d was not saved: %s", step, format_cause(error))


def _blame(
    failure: BaseException, rank: int, host: str, step: int, *, doing: str = "saving"
) -> tuple[int, str, str]:
    """Which rank failed, where and why, in a save of the background."""
    if isinstance(failure, RankFailed):
        rank, host, cause = failure.rank, failure.host, failure.cause
    else:
        cause = format_cause(failure)
    return rank, host, f"{doing} step {step} in the background: {cause}"


def lasting_worker(name: str) -> ThreadPoolExecutor:
    """A pool of one thread. The end of the program waits for its work, while all other pools still work."""
    worker = ThreadPoolExecutor(1, thread_name_prefix=name)
    # What is registered later is called earlier: before the pools of threads, which registered on import.
    threading._register_atexit(worker.shutdown)  # type: ignore[attr-defined]  # noqa: SLF001 - nothing public comes in time
    return worker
