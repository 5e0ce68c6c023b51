"""Follows a run from within: rank 0 counts what it does, and one thread shows that to whoever follows.

Counting costs some microseconds a step. The thread wakes as often as its most eager follower wants, and a
follower that hangs or fails never holds the run up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from socket import gethostname
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

from penstock.progress import Activity, Progress, RunName
from penstock.results.run_status import RUNNING, RunStatus, StatusFile

if TYPE_CHECKING:
    from penstock.cluster.comm import RankWait

logger = logging.getLogger(__name__)

NOW_S: Final = 10.0
"""Rates "now" are those since the newest look that is at least this old."""
RECENT_S: Final = 60.0
"""The time left follows from the speed of this long."""
NOTED_WAIT_S: Final = 2.0
"""Shorter waits are not worth a word."""
LONGEST_GOODBYE_S: Final = 2.0
"""The end of a run waits this long for a follower that is stuck, as on a results folder that hangs."""


class Follower(Protocol):
    """Shows a run to someone. The meter calls `show` every `interval_s`, and once when the run has ended."""

    @property
    def interval_s(self) -> float:
        """Seconds between two calls of `show`."""

    def show(self, status: RunStatus) -> None:
        """Show the run as it is now."""

    def close(self) -> None:
        """Nothing more will be shown."""


@dataclass(slots=True)
class _Phase:
    """The present phase; `counted` are the units that it has counted."""

    began_s: float
    name: str = ""
    total: float = 0.0
    done: float = 0.0
    moved_s: float = 0.0
    unit: str = ""
    times: int = 1
    counted: set[str] = field(default_factory=set)

    def elapsed_s(self, now_s: float) -> float:
        """Its time so far; until its last advance, once it is complete."""
        end_s = self.moved_s if self.total and self.done >= self.total else now_s
        return max(end_s - self.began_s, 0.0)


_Look = tuple[float, float, dict[str, float]]
"""A moment, and what the phase and the run had counted by then."""


class Meter(Progress):
    """The `Progress` of rank 0. Entered, it shows itself to its followers until it is left.

    `name` is that of work without a folder; `find_wait` says what this rank awaits of others, if anything.
    """

    def __init__(
        self,
        followers: Iterable[Follower] = (),
        *,
        name: str = "",
        ranks: int = 1,
        find_wait: Callable[[], RankWait | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._followers = list(followers)
        self._find_wait, self._clock = find_wait, clock
        self._name, self._kind, self._workload, self._ranks = name, "", "", ranks
        self._host, self._started_at_s = gethostname(), time.time()
        self._outcome: tuple[str, str, int | None] = (RUNNING, "", None)
        self._expected: tuple[float, tuple[str, ...]] = (0.0, ())
        self._remark = ""
        self._lock = threading.Lock()
        self._phase = _Phase(clock())
        self._activity: tuple[Activity, float] = ("working", self._phase.began_s)
        self._totals: dict[str, float] = {}
        self._spent_s: Counter[str] = Counter()
        self._looks: deque[_Look] = deque([(self._phase.began_s, 0.0, {})])
        self._showing = threading.Lock()
        self._wake = threading.Event()
        self._is_over = self._is_new_phase = False
        self._thread = threading.Thread(target=self._follow, name="penstock-status", daemon=True)

    def begin(self, phase: str, total: float) -> None:
        """Begin a phase."""
        now_s = self._clock()
        with self._lock:
            for unit in self._phase.counted:
                self._spent_s[unit] += self._phase.moved_s - self._phase.began_s  # type: ignore[assignment]
            self._phase = _Phase(now_s, phase, total, moved_s=now_s)
            self._activity = ("working", now_s)
            self._looks = deque([(now_s, 0.0, dict(self._totals))])
            self._is_new_phase = True
        self._wake.set()

    def advance(self, amount: float) -> None:
        """Advance the phase, from any thread."""
        with self._lock:
            phase = self._phase
            phase.done += amount
            phase.moved_s = self._clock()
            if phase.unit:
                phase.counted.add(phase.unit)
                self._totals[phase.unit] = self._totals.get(phase.unit, 0.0) + amount * phase.times

    def count(self, **amounts: float) -> None:
        """Add to the totals."""
        with self._lock:
            self._phase.moved_s = self._clock()
            self._phase.counted.update(amounts)
            for unit, amount in amounts.items():
                self._totals[unit] = self._totals.get(unit, 0.0) + amount

    def enter(self, activity: Activity, *, unit: str = "", times: int = 1) -> None:
        """Report what this rank does now. Called twice a step, hence without the lock."""
        self._activity = (activity, self._clock())
        if unit:
            self._phase.unit, self._phase.times = unit, times

    def expect(self, total: float, *units: str) -> None:
        """Announce what the run will count in all."""
        self._expected = (total, units)

    def remark(self, text: str) -> None:
        """Show a sentence about now."""
        self._remark = text

    def attach(self, run: RunName) -> None:
        """Show the run in its folder from now on."""
        with self._showing, self._lock:
            self._name, self._kind, self._workload = run.folder.name, run.kind, run.workload
            self._ranks, self._started_at_s, self._outcome = run.ranks, time.time(), (RUNNING, "", None)
            # One command may make several runs, each with totals of its own.
            self._totals.clear()
            self._spent_s.clear()
            self._phase.counted.clear()
            self._looks = deque([(self._clock(), self._phase.done, {})])
            self._expected = (0.0, ())
            self._followers.append(StatusFile(run.folder))
        self._wake.set()

    def settle(self, outcome: str, why: str, exit_code: int) -> None:
        """Show all followers how the run ended."""
        self._outcome = (outcome, why, exit_code)
        self._show(self._followers)
        for follower in [follower for follower in self._followers if isinstance(follower, StatusFile)]:
            follower.close()
            self._followers.remove(follower)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        self._wake.set()
        self._thread.join(timeout=LONGEST_GOODBYE_S)
        if self._outcome[0] == RUNNING:  # work without a folder, whose last figures nobody has seen
            self._show(self._followers)
        for follower in self._followers:
            with suppress(OSError):
                follower.close()

    def _follow(self) -> None:
        due_s: dict[Follower, float] = {}
        while not self._is_over:
            now_s = self._clock()
            # A copy: runs begin and end meanwhile, which adds followers and removes them.
            due_s = {follower: due_s.get(follower, now_s) for follower in tuple(self._followers)}
            # A bar has a phase at once, however short that is.
            is_new, self._is_new_phase = self._is_new_phase, False
            due = [
                follower
                for follower, at_s in due_s.items()
                if at_s <= now_s or (is_new and follower.interval_s < 1)
            ]
            self._show(due)
            due_s |= {follower: now_s + follower.interval_s for follower in due}
            self._wake.wait(max(0.0, min(due_s.values(), default=now_s + NOW_S) - self._clock()))
            self._wake.clear()

    def _show(self, followers: Iterable[Follower]) -> None:
        if not self._showing.acquire(timeout=LONGEST_GOODBYE_S):
            return  # another show hangs
        try:
            status = self.status()
            for follower in followers:
                with suppress(OSError):
                    follower.show(status)
        finally:
            self._showing.release()

    def status(self) -> RunStatus:
        """The run as it is now."""
        now_s, wait = self._clock(), self._find_wait()
        with self._lock:
            phase, totals = self._phase, dict(self._totals)
            done, moved_s = phase.done, phase.moved_s
            self._look(now_s, done, totals)
            looks = tuple(self._looks)
            means = {
                unit: total / spent_s
                for unit, total in totals.items()
                if not unit.endswith("_s")
                and (spent_s := self._spent_s[unit] + (unit in phase.counted) * phase.elapsed_s(now_s)) > 0
            }
        outcome, why, exit_code = self._outcome
        state, state_s = self._state(now_s, moved_s, wait)
        recent = _rates_since(looks, now_s - RECENT_S, (now_s, done, totals))
        expected, units = self._expected
        counted = sum(totals.get(unit, 0.0) for unit in units)
        speed = sum(recent.get(unit) or means.get(unit, 0.0) for unit in units)
        left, speed = (expected - counted, speed) if expected else (phase.total - done, recent.get("", 0.0))
        return RunStatus(
            run=self._name,
            kind=self._kind,
            workload=self._workload,
            ranks=self._ranks,
            host=self._host,
            started_at_s=self._started_at_s,
            written_at_s=time.time(),
            outcome=outcome,
            why=why,
            exit_code=exit_code,
            phase=phase.name,
            phase_done=done,
            phase_total=phase.total,
            share_done=min(1.0, counted / expected) if expected else None,
            left_s=max(left, 0.0) / speed if speed and outcome == RUNNING else None,
            state=state,
            state_s=state_s,
            awaiting=wait.awaiting if wait and state == "waiting for ranks" else "",
            absent_ranks=wait.absent if wait and state == "waiting for ranks" else (),
            remark=self._remark,
            totals=totals,
            rates=means,
            rates_now={
                unit: rate
                for unit, rate in _rates_since(looks, now_s - NOW_S, (now_s, done, totals)).items()
                if unit
            },
        )

    def _state(self, now_s: float, moved_s: float, wait: RankWait | None) -> tuple[str, float]:
        activity, since_s = self._activity
        if wait is not None and wait.waited_s >= NOTED_WAIT_S:
            return "waiting for ranks", wait.waited_s
        if activity == "reading" and now_s - since_s >= NOTED_WAIT_S:
            return "waiting for samples", now_s - since_s
        if activity == "moving" and now_s - max(moved_s, since_s) >= NOTED_WAIT_S:
            return "waiting for storage", now_s - max(moved_s, since_s)
        if activity == "computing":
            return "computing", now_s - since_s
        return "working", now_s - moved_s

    def _look(self, now_s: float, done: float, totals: dict[str, float]) -> None:
        if now_s - self._looks[-1][0] >= 1:
            self._looks.append((now_s, done, totals))
        while len(self._looks) > 2 and now_s - self._looks[1][0] >= RECENT_S:
            self._looks.popleft()


def _rates_since(looks: tuple[_Look, ...], since_s: float, now: _Look) -> dict[str, float]:
    """Rates since the newest look before `since_s`, else the oldest, by unit; the phase's own under ""."""
    then = next((look for look in reversed(looks) if look[0] <= since_s), looks[0])
    elapsed_s = now[0] - then[0]
    if elapsed_s < 0.1:
        return {}
    rates = {
        unit: (total - then[2].get(unit, 0.0)) / elapsed_s
        for unit, total in now[2].items()
        if not unit.endswith("_s")
    }
    return rates | {"": (now[1] - then[1]) / elapsed_s}
