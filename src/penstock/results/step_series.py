"""The steps of all ranks over the time of a run: rates, waits, and the time at which waits became longer.

Pure: events in, numbers out. Times are seconds since the first step of any rank; ranks on different hosts are
aligned by their wall clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.reports.report import Series, Tone
from penstock.results.step_events import Nanoseconds, RankEvents, Rows, StepPhase, wait_ns

Numbers = NDArray[np.float64]

MOST_BUCKETS: Final = 120
MOST_ROWS: Final = 64
"""The most rows of a heat map. With more ranks, adjacent ranks share a row."""


@dataclass(frozen=True, slots=True)
class RunSteps:
    """The ranks that have steps, and the first and last timestamps of these steps."""

    ranks: Sequence[RankEvents]
    origin_ns: int
    end_s: float

    @classmethod
    def of_events(cls, events: Sequence[RankEvents]) -> RunSteps | None:
        """Place the steps of all ranks on one time axis; return None if there are no steps."""
        ranks = [rank for rank in events if len(rank.steps)]
        if not ranks:
            return None
        origin_ns = min(int(rank.steps["start_ns"][0]) + rank.clock.shift_ns for rank in ranks)
        end_ns = max(int(rank.steps["barrier_ns"][-1]) + rank.clock.shift_ns for rank in ranks)
        return cls(ranks, origin_ns, (end_ns - origin_ns) / 1e9)

    def at_s(self, rank: RankEvents, moment: str) -> Numbers:
        """Return one timestamp (`moment`) of all steps of a rank, in seconds."""
        at_s: Numbers = (rank.steps[moment] + (rank.clock.shift_ns - self.origin_ns)) / 1e9
        return at_s

    @property
    def edges(self) -> Numbers:
        """The edges of equal intervals, as many as a drawing can show and the steps can fill."""
        num_steps = max(len(rank.steps) for rank in self.ranks)
        return np.linspace(0.0, max(self.end_s, 1e-6), max(2, min(MOST_BUCKETS, num_steps)) + 1)

    def rates(self, column: str) -> Numbers:
        """Return the sum of a column over all ranks' steps in each interval, per second."""
        edges = self.edges
        of_ranks = [
            growth(self.at_s(rank, "start_ns"), self.at_s(rank, "barrier_ns"), rank.steps[column], edges)
            for rank in self.ranks
        ]
        taken: Numbers = np.sum(of_ranks, axis=0)
        return taken / np.diff(edges)

    def shares(self, begin: str, end: str) -> Numbers:
        """Return, for each rank, the share of each interval spent between two timestamps of a step."""
        edges, spent = self.edges, []
        for rank in self.ranks:
            begins, ends = self.at_s(rank, begin), self.at_s(rank, end)
            spent.append(growth(begins, ends, ends - begins, edges))
        return np.array(spent) / np.diff(edges)

    def percentiles(self, measure: Callable[[Rows], Nanoseconds]) -> tuple[Numbers, Numbers]:
        """Return the middle of each interval, and p50 and p99 in seconds of the steps that ended in it."""
        edges = self.edges
        ends = np.concatenate([self.at_s(rank, "barrier_ns") for rank in self.ranks])
        values = np.concatenate([measure(rank.steps) / 1e9 for rank in self.ranks])
        bucket = np.clip(np.searchsorted(edges, ends) - 1, 0, len(edges) - 2)
        filled = np.unique(bucket)
        spread = [np.percentile(values[bucket == number], (50, 99)) for number in filled]
        return (edges[filled] + edges[filled + 1]) / 2, np.array(spread).T


def growth(begins: Numbers, ends: Numbers, amounts: NDArray[Any], edges: Numbers) -> Numbers:
    """Return the total amount in each interval between edges.

    Each of the `amounts` is spread evenly over the time from its beginning to its end.
    """
    if not len(amounts):
        return np.zeros(len(edges) - 1)
    after = np.cumsum(amounts, dtype=np.float64)
    moments = np.column_stack([begins, ends]).ravel()
    totals = np.column_stack([after - amounts, after]).ravel()
    return np.diff(np.interp(edges, moments, totals))


def heat_rows(names: Sequence[str], rows: Numbers, edges: Numbers, *, tone: Tone = "full") -> list[Series]:
    """Create the rows of a heat map. If there are more than `MOST_ROWS`, adjacent rows are merged."""
    per_row = -(-len(names) // MOST_ROWS)
    drawn = []
    for start in range(0, len(names), per_row):
        together = rows[start : start + per_row]
        name = names[start] if len(together) == 1 else f"{names[start]} +{len(together) - 1}"
        drawn.append(Series(name=name, x=edges, y=together.max(axis=0), tone=tone))
    return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitShift:
    """A change in waits: from this step, at `at_s`, steps waited longer or shorter than before.

    Both waits are medians in seconds.
    """

    at_s: float
    epoch: int
    step: int
    before_s: float
    after_s: float


LEAST_STEPS: Final = 6
"""A shorter sequence of steps cannot show a change."""
LEAST_FACTOR: Final = 1.5
LEAST_SHARE: Final = 0.05
"""Waits that differ by less than this share of a step's time do not matter."""


def find_wait_shift(steps: RunSteps, *, first: int) -> WaitShift | None:
    """Find when the median wait of training steps changed for good; return None if it hardly changed.

    Steps of an epoch up to number `first` do not count, because they wait for the loader to fill.
    """
    kept = [
        (rank, (rank.steps["phase"] == StepPhase.TRAIN) & (rank.steps["step"] > first))
        for rank in steps.ranks
    ]
    keys = np.concatenate([((r.steps["epoch"] << 32) | r.steps["step"])[some] for r, some in kept])
    begins = np.concatenate([steps.at_s(rank, "start_ns")[some] for rank, some in kept])
    ends = np.concatenate([steps.at_s(rank, "barrier_ns")[some] for rank, some in kept])
    waits = np.concatenate([wait_ns(rank.steps)[some] / 1e9 for rank, some in kept])
    # The median over ranks is the wait of a step. A rank that is slower than the others is reported
    # separately, and must not look like a change.
    by_wait = np.lexsort((waits, keys))
    unique, starts, counts = np.unique(keys[by_wait], return_index=True, return_counts=True)
    median = by_wait[starts + (counts - 1) // 2]
    waited_s, took_s = waits[median], (ends - begins)[median]
    split = best_split(waited_s)
    if split is None:
        return None
    before_s, after_s = float(np.median(waited_s[:split])), float(np.median(waited_s[split:]))
    more, less = max(before_s, after_s), min(before_s, after_s)
    if more < LEAST_FACTOR * less or more - less < LEAST_SHARE * float(np.median(took_s)):
        return None
    epoch, step = divmod(int(unique[split]), 1 << 32)
    at_s = float(begins[median][split])
    return WaitShift(at_s=at_s, epoch=epoch, step=step, before_s=before_s, after_s=after_s)


def best_split(values: Numbers) -> int | None:
    """Return the index that best splits the values into two levels, or None if there are too few values."""
    count = len(values)
    least = max(LEAST_STEPS, count // 10)
    if count < 2 * least:
        return None
    # A few long waits must not decide the result.
    clipped = np.minimum(values, np.percentile(values, 90))
    totals = np.cumsum(clipped)
    left = np.arange(1, count)
    gain = totals[:-1] ** 2 / left + (totals[-1] - totals[:-1]) ** 2 / (count - left)
    inner = gain[least - 1 : count - least]
    return least + int(np.argmax(inner))
