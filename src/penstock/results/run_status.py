"""The current state of a run: rank 0 counts its own work, and shows the state to people and monitoring.

Counting costs a few microseconds per step. One thread shows the state to every `Follower`: the display of
this process, `status.json` in the run's folder, and `penstock-RUN.prom` for node exporter's text collector if
the user asks for it. The thread wakes as often as its most frequent follower needs; a follower that hangs or
fails never delays the run. Files are replaced atomically but without a sync, because a crash cannot make
their content wrong. If a folder does not accept files any more, only these files are lost.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from socket import gethostname
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from penstock import __version__
from penstock.errors import UsageError
from penstock.progress import Activity, Progress, RunName
from penstock.storage.files.local_files import open_draft, parse_json, read_document
from penstock.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.cluster.comm import RankWait

logger = logging.getLogger(__name__)

STATUS_FILE: Final = "status.json"
FORMAT_VERSION: Final = 1
RUNNING: Final = "running"
DIED: Final = "died"
_COUNTED: Final = ("steps", "files", "operations", "samples")
"""The units with which the names of phases may end. Any other phase counts bytes, and is shown as a share."""
_SHARES: Final = {
    "computing_s": "computing",
    "sample_wait_s": "waiting for samples",
    "rank_wait_s": "waiting for ranks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of a run at one time. Times are seconds since 1970.

    Totals and rates are by unit, such as `read_bytes`. `rates` are means since a unit was first counted, and
    `rates_now` means over the last seconds. `state` is `working`, `computing`, or `waiting for` samples,
    storage or ranks, and has lasted for `state_s`; `absent_ranks` are the ranks that rank 0 waits for, if
    they are known. Totals that end with `_s` are seconds of rank 0.
    """

    format: int = FORMAT_VERSION
    run: str
    kind: str
    workload: str
    ranks: int
    host: str
    started_at_s: float
    written_at_s: float
    outcome: str = RUNNING
    why: str = ""
    exit_code: int | None = None
    phase: str = ""
    phase_done: float = 0.0
    phase_total: float = 0.0
    share_done: float | None = None
    left_s: float | None = None
    state: str = "working"
    state_s: float = 0.0
    awaiting: str = ""
    absent_ranks: tuple[int, ...] = ()
    remark: str = ""
    totals: Mapping[str, float] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    rates_now: Mapping[str, float] = field(default_factory=dict)


def read_status(folder: Path) -> RunStatus | None:
    """Read the status in a run's folder; return None if there is none, or if another version wrote it."""
    try:
        document = parse_json(read_document(folder / STATUS_FILE))
        if document.get("format") != FORMAT_VERSION:
            return None
        return RunStatus(**{**document, "absent_ranks": tuple(document["absent_ranks"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.debug("No status in %s: %s", folder, error)
        return None


def _replace_file(path: Path, content: str) -> None:
    """Replace a file atomically, without a sync. Errors are ignored."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open_draft(unfinished) as file:
            file.write(content.encode())
        unfinished.replace(path)
    except OSError as error:
        logger.debug("%s cannot be written: %s", path, error)
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


class Follower:
    """Shows a run to someone. The meter calls `show` every `interval_s`, and once more when the run ends."""

    interval_s = 1.0

    def show(self, status: RunStatus) -> None:
        """Show the run's current state."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the follower holds: nothing more will be shown."""


class StatusFile(Follower):
    """Writes the status of a run into its folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATUS_FILE
        self._is_closed = False

    def show(self, status: RunStatus) -> None:
        if not self._is_closed:
            # On one line, because json takes five times as long to indent.
            _replace_file(self._path, json.dumps(asdict(status)) + "\n")

    def close(self) -> None:
        """Write nothing more. The file keeps the last state; the folder may be moved or deleted."""
        self._is_closed = True


FILE_INTERVAL_S: Final = 5.0
"""Collectors read the file every 15 s or less often."""
KEPT_S: Final = 3600.0
"""If a run has written nothing to its file for this long, the next command with this folder removes it."""
_STATES: Final = (
    "working", "computing", "waiting for samples", "waiting for storage", "waiting for ranks",
)  # fmt: skip
_OUTCOMES: Final = (RUNNING, "finished", "failed", "interrupted", DIED)


def format_metrics(status: RunStatus) -> str:
    """Return the text that Prometheus reads; docs/following.md documents names and labels.

    Every metric family has the same help text and type in all files, because a collector reads the files of
    several runs as if they were one.
    """
    state = status.state if status.outcome == RUNNING else ""
    facts = {"kind": status.kind, "workload": status.workload, "host": status.host, "version": __version__}
    done = min(1.0, status.phase_done / status.phase_total) if status.phase_total else None
    families: list[tuple[str, str, list[tuple[dict[str, str], float | None]]]] = [
        ("info", "Facts of the run; always 1.", [(facts, 1)]),
        ("ranks", "Ranks of the run.", [({}, status.ranks)]),
        (
            "outcome", "1 for the outcome of the run, or running.",
            [({"outcome": name}, status.outcome == name) for name in _OUTCOMES],
        ),
        ("start_time_seconds", "When the run began, since 1970.", [({}, status.started_at_s)]),
        ("update_time_seconds", "When the run last wrote its state.", [({}, status.written_at_s)]),
        ("exit_code", "The exit code of the run's command.", [({}, status.exit_code)]),
        (
            "state", "1 for what rank 0 does now.",
            [({"state": name.replace(" ", "_")}, state == name) for name in _STATES],
        ),
        (
            "state_seconds", "For how long rank 0 has been in its state.",
            [({}, status.state_s if state else 0)],
        ),
        (
            "absent_rank", "1 for each rank that rank 0 waits for, the first eight of them.",
            [({"rank": str(rank)}, 1) for rank in status.absent_ranks],
        ),
        ("phase_done_ratio", "Share of the current phase that is done.", [({"phase": status.phase}, done)]),
        ("done_ratio", "Share of the whole run that is done.", [({}, status.share_done)]),
        ("left_seconds", "Estimated time to the end of the run.", [({}, status.left_s)]),
        (
            "counted_total", "What all ranks have done: read_bytes, written_bytes, samples, steps.",
            [({"unit": unit}, total) for unit, total in status.totals.items() if not unit.endswith("_s")],
        ),
        (
            "rank0_seconds_total", "Seconds that rank 0 spent: computing, sample_wait, rank_wait.",
            [({"what": unit[:-2]}, total) for unit, total in status.totals.items() if unit.endswith("_s")],
        ),
    ]  # fmt: skip
    lines: list[str] = []
    for name, text, samples in families:
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP penstock_run_{name} {text}", f"# TYPE penstock_run_{name} {kind}"]
        for labels, value in known:
            pairs = {"run": status.run, **labels}
            # JSON escapes the same characters as Prometheus: backslashes, quotes and line breaks.
            written = ",".join(
                f"{label}={json.dumps(content, ensure_ascii=False)}" for label, content in pairs.items()
            )
            lines.append(f"penstock_run_{name}{{{written}}} {float(value)!r}")
    return "\n".join(lines) + "\n"


class TextCollectorFile(Follower):
    """Keeps `DIR/penstock-RUN.prom` up to date, and removes files of other runs that are older than `KEPT_S`.

    After a run, its file shows how it ended. A command's own file, for the time before its run, is removed
    once a run begins or the command ends.
    """

    interval_s = FILE_INTERVAL_S

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UsageError(
                "No such directory",
                where=f"--metrics-dir {folder}",
                fix="Name the text collector's directory.",
            )
        self._folder = folder
        self._without_run = folder / f"penstock-process-{os.getpid()}.prom"
        for old in folder.glob("penstock-*.prom"):
            with suppress(OSError):
                if time.time() - old.stat().st_mtime > KEPT_S:
                    old.unlink()

    def show(self, status: RunStatus) -> None:
        if status.kind:
            self.close()
        _replace_file(self._folder / f"penstock-{status.run}.prom", format_metrics(status))

    def close(self) -> None:
        self._without_run.unlink(missing_ok=True)


def format_age(seconds: float) -> str:
    """Format a time in whole seconds: `42 s`, `3 min 20 s`."""
    return f"{seconds:.0f} s" if seconds < 99.5 else format_seconds(round(seconds))


def state_sentence(status: RunStatus) -> str:
    """Describe what the run is waiting for, and for how long; return "" while it works."""
    if status.outcome != RUNNING:
        return ""
    for_s = f"for {format_age(status.state_s)}"
    if status.state == "waiting for ranks":
        shown = ", ".join(map(str, status.absent_ranks[:4])) + (
            " ..." if len(status.absent_ranks) > 4 else ""
        )
        which = f"rank{'s' * (len(status.absent_ranks) > 1)} {shown}" if shown else "other ranks"
        return f"waiting for {which} {for_s} ({status.awaiting})"
    if status.state in ("waiting for samples", "waiting for storage"):
        return f"{status.state} {for_s}"
    if status.state == "working" and status.state_s >= 10:
        return f"no progress {for_s}"
    return ""


def phase_sentence(status: RunStatus) -> str:
    """Describe the phase and how much of it is done."""
    if not status.phase_total:
        return status.phase
    share = f"{min(1.0, status.phase_done / status.phase_total):.0%}"
    name, _, unit = status.phase.rpartition(" ")
    if unit in _COUNTED:
        count = f"{status.phase_done:,.0f} of {status.phase_total:,.0f} {unit}"
        return f"{name.rstrip(',')}: {count} ({share})"
    return f"{status.phase}: {share}"


def figure_lines(status: RunStatus) -> Iterator[tuple[str, str]]:
    """Yield each kind of figure with its text: current and overall rates, and how rank 0 spent its time."""
    for unit, total in status.totals.items():
        if unit.endswith("_s") or unit == "steps":
            continue
        name, now, mean = unit.removesuffix("_bytes"), status.rates_now.get(unit), status.rates.get(unit, 0.0)
        is_bytes = unit.endswith("_bytes")
        rate = format_rate if is_bytes else lambda value: f"{value:,.1f}/s"
        moved = format_bytes(total) if is_bytes else f"{total:,.0f}"
        rates = f"{rate(now or 0.0)} now, {rate(mean)} so far" if status.outcome == RUNNING else rate(mean)
        yield name, f"{rates}, {moved} in all"
    spent = {unit: status.totals[unit] for unit in _SHARES if unit in status.totals}
    whole_s = sum(spent.values())
    if whole_s:
        yield (
            "rank 0's time",
            ", ".join(f"{_SHARES[unit]} {seconds / whole_s:.1%}" for unit, seconds in spent.items()),
        )


def left_sentence(status: RunStatus) -> str:
    """Describe how much of the whole run is done, and how long the rest will take, if that is known."""
    share = f"{status.share_done:.0%} of the run" if status.share_done is not None else ""
    left = f"about {format_age(max(1.0, status.left_s))} left" if status.left_s is not None else ""
    return ", ".join(filter(None, (share, left)))


def status_line(status: RunStatus) -> str:
    """Format the whole status in one line, for logs."""
    figures = [
        f"{name} {text.partition(', ')[0]}" for name, text in figure_lines(status) if name != "rank 0's time"
    ]
    parts = [phase_sentence(status), *figures, left_sentence(status), state_sentence(status), status.remark]
    return "; ".join(filter(None, parts))


# The meter

NOW_S: Final = 10.0
"""Current rates are computed since the newest `_Look` that is at least this old."""
RECENT_S: Final = 60.0
"""The time left is estimated from the speed over this time."""
NOTED_WAIT_S: Final = 2.0
"""Shorter waits are not mentioned."""
LONGEST_GOODBYE_S: Final = 2.0
"""The end of a run waits this long for a follower that hangs, for example on its results folder."""


@dataclass(slots=True)
class _Phase:
    """The current phase. `counted` has the units that the phase has counted."""

    began_s: float
    moved_s: float
    name: str = ""
    total: float = 0.0
    done: float = 0.0
    unit: str = ""
    times: int = 1
    counted: set[str] = field(default_factory=set)


_Look = tuple[float, float, dict[str, float]]
"""A time, and what the phase and the run had counted by then."""


class Meter(Progress):
    """The `Progress` of rank 0. Within its `with` block, it shows itself to its followers.

    `name` is for work without a folder. `find_wait` returns what this rank is waiting for, if anything.
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
        self._expected: tuple[float, tuple[str, ...], float] = (0.0, (), 0.0)
        self._remark = ""
        self._lock = threading.Lock()
        now_s = clock()
        self._phase = _Phase(now_s, now_s)
        self._activity: tuple[Activity, float] = ("working", self._phase.began_s)
        self._totals: dict[str, float] = {}
        self._spent_s: Counter[str] = Counter()
        self._looks: deque[_Look] = deque([(self._phase.began_s, 0.0, {})])
        self._showing = threading.Lock()
        self._wake = threading.Event()
        self._is_over = self._is_new_phase = False
        self._thread = threading.Thread(target=self._follow, name="penstock-status", daemon=True)

    def begin(self, phase: str, total: float) -> None:
        now_s = self._clock()
        with self._lock:
            for unit in self._phase.counted:
                self._spent_s[unit] += self._phase.moved_s - self._phase.began_s  # type: ignore[assignment]
            self._phase = _Phase(now_s, now_s, phase, total)
            self._activity = ("working", now_s)
            self._looks = deque([(now_s, 0.0, dict(self._totals))])
            self._is_new_phase = True
        self._wake.set()

    def advance(self, amount: float) -> None:
        """Advance the phase. May be called from any thread."""
        phase = self._phase
        self.count(done=amount, **({phase.unit: amount * phase.times} if phase.unit else {}))

    def count(self, *, done: float = 0.0, **amounts: float) -> None:
        """Add to the totals, and to what the phase has done."""
        with self._lock:
            self._phase.done += done
            self._phase.moved_s = self._clock()
            self._phase.counted.update(amounts)
            for unit, amount in amounts.items():
                self._totals[unit] = self._totals.get(unit, 0.0) + amount

    def enter(self, activity: Activity, *, unit: str = "", times: int = 1) -> None:
        """Report this rank's current activity.

        Does not take the lock, because it is called twice per step.
        """
        self._activity = (activity, self._clock())
        if unit:
            self._phase.unit, self._phase.times = unit, times

    def expect(self, total: float, *units: str, pauses_s: float = 0.0) -> None:
        """Announce the total that the run will count."""
        self._expected = (total, units, pauses_s)

    def remark(self, text: str) -> None:
        self._remark = text

    def attach(self, run: RunName) -> None:
        """Show the run in its folder from now on."""
        with self._showing, self._lock:
            self._name, self._kind, self._workload = run.folder.name, run.kind, run.workload
            self._ranks, self._started_at_s, self._outcome = run.ranks, time.time(), (RUNNING, "", None)
            # One command may perform several runs, each with its own totals.
            self._totals.clear()
            self._spent_s.clear()
            self._phase.counted.clear()
            self._looks = deque([(self._clock(), self._phase.done, {})])
            self._expected = (0.0, (), 0.0)
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
        if self._outcome[0] == RUNNING:  # work without a folder: its last figures have not been shown
            self._show(self._followers)
        for follower in self._followers:
            with suppress(OSError):
                follower.close()

    def _follow(self) -> None:
        due_s: dict[Follower, float] = {}
        while not self._is_over:
            now_s = self._clock()
            # Copied, because runs that begin and end meanwhile add and remove followers.
            due_s = {follower: due_s.get(follower, now_s) for follower in tuple(self._followers)}
            # A progress bar shows a phase at once, however short it is.
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
            return  # another call of show hangs
        try:
            status = self.status()
            for follower in followers:
                with suppress(OSError):
                    follower.show(status)
        finally:
            self._showing.release()

    def status(self) -> RunStatus:
        now_s, wait = self._clock(), self._find_wait()
        with self._lock:
            phase, totals = self._phase, dict(self._totals)
            done, moved_s = phase.done, phase.moved_s
            if now_s - self._looks[-1][0] >= 1:
                self._looks.append((now_s, done, totals))
            while len(self._looks) > 2 and now_s - self._looks[1][0] >= RECENT_S:
                self._looks.popleft()
            looks = tuple(self._looks)
            # A complete phase ended with its last advance.
            end_s = moved_s if phase.total and done >= phase.total else now_s
            elapsed_s = max(end_s - phase.began_s, 0.0)
            means = {
                unit: total / spent_s
                for unit, total in totals.items()
                if not unit.endswith("_s")
                and (spent_s := self._spent_s[unit] + (unit in phase.counted) * elapsed_s) > 0
            }
        outcome, why, exit_code = self._outcome
        state, state_s = self._state(now_s, moved_s, wait)
        recent = _rates_since(looks, now_s - RECENT_S, (now_s, done, totals))
        latest = _rates_since(looks, now_s - NOW_S, (now_s, done, totals))
        awaited = wait if state == "waiting for ranks" else None
        expected, units, pauses_s = self._expected
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
            left_s=max(left, 0.0) * (1 / speed + (pauses_s / expected if expected else 0.0))
            if speed and outcome == RUNNING
            else None,
            state=state,
            state_s=state_s,
            awaiting=awaited.awaiting if awaited else "",
            absent_ranks=awaited.absent if awaited else (),
            remark=self._remark,
            totals=totals,
            rates=means,
            rates_now={unit: rate for unit, rate in latest.items() if unit},
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


def _rates_since(looks: tuple[_Look, ...], since_s: float, now: _Look) -> dict[str, float]:
    """Return the rates by unit since the newest look before `since_s`, or else since the oldest.

    The unit "" stands for the phase.
    """
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
