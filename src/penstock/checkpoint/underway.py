"""The saves of one manager that are under way, and where its ranks meet before each collective call.

Invariant: what failed on any rank and was not told is raised on all of them, by the next meeting at the
latest.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from penstock.checkpoint.staging.base import SaveCancelled
from penstock.cluster.collectives import format_cause
from penstock.errors import RankFailed, UsageError

if TYPE_CHECKING:
    from penstock.checkpoint.handle import SaveHandle, SaveReport
    from penstock.cluster.comm import Comm

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
