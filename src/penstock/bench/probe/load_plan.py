"""Loads at a fixed rate: when operations are due, whether storage kept up, and the next rate to try. Pure.

Operations are due on an even schedule, whatever the storage does, and their latency counts from the moment
they are due. If storage stalls, all operations that fall due meanwhile have to wait, and each of these waits
is counted (no coordinated omission).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError

NS: Final = 1_000_000_000
LIGHT: Final = 0.1
"""The share of the closed-loop rate that counts as light load. The p99 of other loads is compared with its
p99.
"""
MOST_SLOWDOWN: Final = 5.0
"""A load holds if its p99 is at most this many times the p99 of light load."""
MOST_GROWTH: Final = 0.02
"""A load holds if operations fall behind by at most this share of the time."""
PRECISION: Final = 1.05
"""The knee is found once the lowest load that did not hold is at most this factor above the highest that did.
"""
MOST_POINTS: Final = 16
_LADDER: Final = (LIGHT, 0.3, 0.6, 0.8, 0.9, 1.0)
_NEXT_RUNG: Final = 1.15
_CLEARLY_LATE: Final = 0.1
_MOST_TRIES: Final = 3
_WARM_SHARE: Final = 0.2
_ROUNDS: Final = 5
RULE: Final = (
    f"the highest rate at which operations fall behind by less than {MOST_GROWTH:.0%} of the time and p99 is "
    f"at most {MOST_SLOWDOWN:g} times that of light load, both not counting this host's own delay"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A kind of operation, the number in flight on each rank, and the rates to offer.

    Each rate is offered for `seconds`. Without `rates`, the knee is searched for.
    """

    block_bytes: int = 128 << 10
    read_percent: int = 100
    depth: int = 64
    seconds: float = 3.0
    rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or self.depth < 1 or not 0 <= self.read_percent <= 100:
            raise UsageError(
                "A load needs a block, a depth and a share of reads from 0 to 100",
                fix="Leave an option out for its default.",
            )
        if min((self.seconds, *(self.rates or ()))) <= 0:
            raise UsageError("Seconds and rates must be positive", fix="Leave an option out for its default.")


OPERATION: Final = np.dtype(
    [("number", "i8"), ("due", "i8"), ("free", "i8"), ("begun", "i8"), ("ended", "i8"), ("is_write", "?")]
)
"""The timestamps of an operation, in ns since the common start.

An operation is `due` by the schedule, a slot for it is `free`, it has `begun`, and it has `ended`. Events
that never happened have the time at which the operation was abandoned.
"""

Operations = NDArray[np.void]
"""An array of `OPERATION`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadInterval:
    """A short interval of a load: the rate and latency of operations that ended in it."""

    start_s: float
    operations_per_s: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """The figures of one offered rate over all ranks, without its first fifth, which is the warm-up.

    Latencies count from when an operation was due; `service_p50_ms` counts from when it began. `lag_p99_ms`
    is how late this host began operations although a slot was free; `storage_p99_ms` is the p99 of the
    latency without this delay, but with the wait for a slot. `slots_busy` is the share of operations that
    found no slot free; `gib_per_s` counts completed operations. `growth` is how much the latency grows per
    second because the storage falls behind.
    """

    offered_per_s: float
    answered_per_s: float
    gib_per_s: float
    seconds: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    read_p99_ms: float | None
    write_p99_ms: float | None
    service_p50_ms: float
    lag_p99_ms: float
    storage_p99_ms: float
    slots_busy: float
    growth: float
    intervals: tuple[LoadInterval, ...]


def arrivals(rate_per_s: float, seconds: float, *, rank: int, num_ranks: int) -> list[int]:
    """Return the due times of a rank's operations in ns: every `num_ranks`-th slot of an even schedule."""
    total = max(1, round(rate_per_s * seconds))
    numbers = np.arange(rank, total, num_ranks, dtype=np.float64)
    due: list[int] = np.rint(numbers * (NS / rate_per_s)).astype(np.int64).tolist()
    return due


def describe_load(
    operations: Operations, *, rate_per_s: float, seconds: float, block_bytes: int
) -> OfferedLoad:
    """Summarize the operations of all ranks in one load."""
    end_ns = round(seconds * NS)
    warm_ns = round(seconds * _WARM_SHARE * NS)
    counted = due_between(operations, warm_ns, end_ns)
    latencies = counted["ended"] - counted["due"]
    p50, p99, p999 = (float(value) / 1e6 for value in np.percentile(latencies, (50, 99, 99.9)))
    ended = operations["ended"]
    in_time = np.count_nonzero((ended >= warm_ns) & (ended < end_ns))
    lags = counted["begun"] - np.maximum(counted["due"], counted["free"])
    # Operations that end in this time while the storage catches up may have been due before it.
    answered_per_s = min(rate_per_s, in_time / (seconds * (1 - _WARM_SHARE)))
    return OfferedLoad(
        offered_per_s=rate_per_s,
        answered_per_s=answered_per_s,
        gib_per_s=answered_per_s * block_bytes / 2**30,
        seconds=seconds,
        p50_ms=p50,
        p99_ms=p99,
        p999_ms=p999,
        max_ms=float(latencies.max()) / 1e6,
        read_p99_ms=_p99_ms(latencies[~counted["is_write"]]),
        write_p99_ms=_p99_ms(latencies[counted["is_write"]]),
        service_p50_ms=float(np.median(counted["ended"] - counted["begun"])) / 1e6,
        lag_p99_ms=float(np.percentile(lags, 99)) / 1e6,
        storage_p99_ms=float(np.percentile(latencies - lags, 99)) / 1e6,
        slots_busy=float(np.mean(counted["free"] > counted["due"])),
        growth=_growth(counted),
        intervals=intervals(ended, ended - operations["due"], seconds, warm_ns / NS),
    )


def due_between(operations: Operations, start_ns: int, end_ns: int) -> Operations:
    """Return the operations that were due in this interval; all operations if none was."""
    chosen = operations[(operations["due"] >= start_ns) & (operations["due"] < end_ns)]
    return chosen if chosen.size else operations


def _p99_ms(latencies: NDArray[np.int64]) -> float | None:
    return float(np.percentile(latencies, 99)) / 1e6 if latencies.size else None


def _growth(operations: Operations) -> float:
    """Return how fast latency grows, from the medians of the first and last quarter, which ignore stalls.

    While storage completes only A of the R operations due per second, latency grows by 1 - A/R per second.
    If operations were abandoned, the share that never began is the same figure.
    """
    due, latencies = operations["due"], operations["ended"] - operations["due"]
    never = float(np.mean(operations["begun"] == operations["ended"]))
    first, last = np.quantile(due, (0.25, 0.75))
    early, late = due <= first, due >= last
    apart_ns = float(np.median(due[late]) - np.median(due[early]))
    slower_ns = float(np.median(latencies[late]) - np.median(latencies[early]))
    return max(never, slower_ns / apart_ns if apart_ns else 0.0)


def interval_s(seconds: float) -> float:
    """Return the length of the intervals of a time series."""
    return 0.1 if seconds <= 10 else 1.0


def intervals(
    ended_ns: NDArray[np.int64], latencies_ns: NDArray[np.int64], seconds: float, warm_s: float = 0.0
) -> tuple[LoadInterval, ...]:
    """Return the rate and latency over time, from the end of the warm-up (`warm_s`) on.

    The last interval is up to half an interval longer or shorter than the others. Latencies are those of
    operations that were due after the warm-up, 0 if none ended in an interval.
    """
    order = np.argsort(ended_ns, kind="stable")
    ended, latencies = ended_ns[order], latencies_ns[order]
    is_counted = ended - latencies >= round(warm_s * NS)
    step_s = interval_s(seconds)
    edges_s = warm_s + step_s * np.arange(max(1, round((seconds - warm_s) / step_s)) + 1)
    edges_s[-1] = seconds
    bounds = np.searchsorted(ended, np.rint(edges_s * NS), side="right")
    series = []
    for number, (first, end) in enumerate(pairwise(bounds)):
        part = latencies[first:end][is_counted[first:end]] / 1e6
        p50, p99 = np.percentile(part, (50, 99)) if part.size else (0.0, 0.0)
        series.append(
            LoadInterval(
                start_s=round(float(edges_s[number]), 3),
                operations_per_s=float((end - first) / (edges_s[number + 1] - edges_s[number])),
                p50_ms=float(p50),
                p99_ms=float(p99),
            )
        )
    return tuple(series)


def holds(point: OfferedLoad, light: OfferedLoad) -> bool:
    """Return True if the storage kept up with a load; see `RULE`."""
    return point.growth <= MOST_GROWTH and point.storage_p99_ms <= MOST_SLOWDOWN * light.storage_p99_ms


def find_knee(points: Sequence[OfferedLoad]) -> OfferedLoad | None:
    """Return the highest load that held, below the lowest that did not; None if even light load failed."""
    if not points:
        return None
    holding, failing_per_s = _split(points)
    below = [point for point in holding if point.offered_per_s < failing_per_s]
    return max(below, key=lambda point: point.offered_per_s, default=None)


def find_limit(points: Sequence[OfferedLoad], knee: OfferedLoad) -> str:
    """Return what made the first load above the knee fail (see `Knee`); "" if all loads held."""
    light = points[0]
    failed = [point for point in points if not holds(point, light)]
    above = [point for point in failed if point.offered_per_s > knee.offered_per_s]
    if not above:
        return ""
    first = min(above, key=lambda point: point.offered_per_s)
    if first.lag_p99_ms > first.p99_ms / 2:
        return "host"
    is_slower = first.service_p50_ms > 2 * light.service_p50_ms
    return "depth" if first.slots_busy > 0.5 and not is_slower else "storage"


def _split(points: Sequence[OfferedLoad]) -> tuple[list[OfferedLoad], float]:
    """Return the points that held, and the lowest rate that did not. A rate that held once counts as held."""
    light = points[0]
    holding = [point for point in points if holds(point, light)]
    held = {point.offered_per_s for point in holding}
    failed = [point.offered_per_s for point in points if point.offered_per_s not in held]
    return holding, min(failed, default=math.inf)


def next_rate(points: Sequence[OfferedLoad], closed_loop_per_s: float) -> float | None:
    """Return the next rate to offer; None once the knee is known.

    Rates climb a ladder until one does not hold; each further rate lies below the lowest that did not hold,
    and above the highest that held, if any did. A rate at which the storage fell slightly behind is offered
    again, so that a hiccup of the host does not become the knee.
    """
    if not points:
        return LIGHT * closed_loop_per_s
    if len(points) >= MOST_POINTS:
        return None
    _, failing = _split(points)
    last = points[-1]
    tries = sum(point.offered_per_s == last.offered_per_s for point in points)
    is_close = last.growth <= _CLEARLY_LATE and last.offered_per_s == failing
    if is_close and tries < _MOST_TRIES:
        return last.offered_per_s
    knee = find_knee(points)
    if knee is None:
        return failing / 2 if failing > LIGHT * closed_loop_per_s / 8 else None
    best = knee.offered_per_s
    if failing == math.inf:
        rungs = [share * closed_loop_per_s for share in _LADDER if share * closed_loop_per_s > best * 1.001]
        return rungs[0] if rungs else best * _NEXT_RUNG
    return math.sqrt(best * failing) if failing > best * PRECISION else None


def find_steady_state(rounds: Sequence[float]) -> tuple[bool, int, float, float]:
    """Return whether there is a steady state, its first round, and the mean rates from it on and before it.

    This is the test of SNIA's performance test specification, on the last five rounds, all equally long:
    their range must be at most 20 % of their mean, and a line fitted to them may rise or fall by at most 10 %
    of that mean. The steady state also includes the rounds before them that are within 20 % of that mean.
    Rounds before the steady state are another phase: a cache that fills, burst credit that is spent, or a
    slow start.
    """
    window = np.asarray(rounds[-_ROUNDS:])
    mean = float(window.mean())
    slope = float(np.polyfit(np.arange(window.size), window, 1)[0]) if window.size > 1 else 0.0
    is_steady = (
        window.size == _ROUNDS
        and mean > 0
        and float(np.ptp(window)) <= 0.2 * mean
        and abs(slope) * (_ROUNDS - 1) <= 0.1 * mean
    )
    begins = len(rounds) - window.size
    while begins and abs(rounds[begins - 1] - mean) <= 0.2 * mean:
        begins -= 1
    first = rounds[:begins]
    return is_steady, begins, float(np.mean(rounds[begins:])), float(np.mean(first)) if first else 0.0
