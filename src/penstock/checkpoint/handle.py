"""A save under way, as its caller sees it: staged, then committed, failed or cancelled.

Between `manager`, which starts saves, and the thread that completes them. Invariant: a failure is told at
least once on every rank: by `result`, or by the manager's next call.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, WaitTimeout
from penstock.progress import Silent
from penstock.units import format_bytes, format_rate

if TYPE_CHECKING:
    from penstock.checkpoint.staging.base import ShareStats, StagedSave
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
