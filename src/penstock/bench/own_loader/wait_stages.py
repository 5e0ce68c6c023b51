"""Where each second of waiting for a batch went: the work that the awaited worker was doing at that moment.

Pure: records in, nanoseconds by stage out; the stages of a wait add up to the wait. A batch that is awaited
holds the consumer up by whatever its own worker does until it arrives, so that work is laid over the wait.
What no DataLoader explains is divided by what the consumer's own threads and the other processes did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.void]
"""Fetches of a worker, in their order: `worker_probe.FETCH_TYPE`."""


class WaitStage(StrEnum):
    """What a consumer waits for."""

    STORAGE = "storage"
    DECODE = "decode"
    TRANSFORM = "transform"
    COLLATE = "collate"
    COPY = "copy"
    STARTUP = "startup"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class LoadSplit:
    """How the time of fetching samples divides, beyond what a fetch's own record says."""

    transform_share: float = 0.0
    """Of the processor time, what was spent in transforms; the rest is decoding."""

    @classmethod
    def of_samples(cls, cpu_ns: Mapping[str, int]) -> LoadSplit:
        """From what a sampler found; what it could not name counts as decoding."""
        transform, whole = cpu_ns.get("transform", 0), sum(cpu_ns.values())
        return cls(transform / whole if whole else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFetches:
    """What one worker of a loader did, and since when it was being started; `began_ns` 0: it was there."""

    began_ns: int
    rows: Rows
    split: LoadSplit

    def stages_between(self, start_ns: int, end_ns: int, seq: int) -> Iterator[tuple[WaitStage, float]]:
        """The stages of the time from `start_ns` until fetch `seq` had arrived, at `end_ns`."""
        rows = self.rows[: int(np.searchsorted(self.rows["seq"], seq, side="right"))]
        if not len(rows) or rows[-1]["seq"] != seq:
            yield WaitStage.OTHER, end_ns - start_ns
            return
        first_ns = int(rows[0]["began_ns"])
        if start_ns < first_ns:
            until_ns = min(first_ns, end_ns)
            yield (WaitStage.STARTUP if self.began_ns else WaitStage.COPY), until_ns - start_ns
            start_ns = until_ns
        for row in rows[int(np.searchsorted(rows["ended_ns"], start_ns, side="right")) :]:
            began_ns, loaded_ns, ended_ns = (min(int(row[name]), end_ns) for name in _MOMENTS)
            if began_ns > start_ns:  # it had sent its last batch, and had not begun with the next
                yield WaitStage.COPY, began_ns - start_ns
                start_ns = began_ns
            if loaded_ns > start_ns:
                yield from self._divide(row, loaded_ns - start_ns)
                start_ns = loaded_ns
            if ended_ns > start_ns:
                yield WaitStage.COLLATE, ended_ns - start_ns
                start_ns = ended_ns
        if end_ns > start_ns:
            yield WaitStage.COPY, end_ns - start_ns

    def _divide(self, row: Any, part_ns: int) -> Iterator[tuple[WaitStage, float]]:
        """Divide a part of a fetch's loading as the whole of it divides."""
        # A wait for a core prolongs what came before it: a sleep or a computation, in their proportion.
        slept = sleep_ns(row)
        spent = slept + int(row["load_cpu_ns"]) + int(row["other_cpu_ns"])
        asleep = part_ns * slept / spent if spent else 0.0
        computing = part_ns - asleep
        yield WaitStage.STORAGE, asleep
        yield WaitStage.TRANSFORM, computing * self.split.transform_share
        yield WaitStage.DECODE, computing * (1 - self.split.transform_share)


_MOMENTS = ("began_ns", "loaded_ns", "ended_ns")


def sleep_ns(row: Any) -> float:
    """For how long a fetch's thread slept while nothing else of its process computed for it."""
    wall = int(row["loaded_ns"] - row["began_ns"])
    # Helper threads may have worked for several fetches at once, so never more than there was.
    return max(0, wall - int(row["load_cpu_ns"]) - int(row["load_queued_ns"]) - int(row["other_cpu_ns"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedWait:
    """A time for which a DataLoader let the consumer wait, and the worker whose batch ended it."""

    asked_ns: int
    given_ns: int
    fetches: WorkerFetches | None
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherWork:
    """What is known of the time that no DataLoader explains.

    `own_cpu_ns` is what the consumer's own thread computed while it waited, by label; `busy_share` how busy
    the busiest of all other threads and processes was, None where there are none.
    """

    own_cpu_ns: Mapping[str, int] = field(default_factory=dict)
    busy_share: float | None = None
    split: LoadSplit = field(default_factory=LoadSplit)


@dataclass(frozen=True, slots=True)
class StepWait:
    """A step's wait: its moments, and how much of it the consumer's own thread computed."""

    start_ns: int
    loaded_ns: int
    own_cpu_ns: int
    is_first: bool = False


def divide_waits(
    steps: Sequence[StepWait], explained: Sequence[ExplainedWait], other: OtherWork
) -> Counter[WaitStage]:
    """Nanoseconds of all waits by stage; they sum to the waits."""
    found: Counter[WaitStage] = Counter()
    startup_ns = _usual_start_ns(steps) if not any(wait.fetches for wait in explained) else None
    position = 0
    for step in steps:
        rest_ns: float = step.loaded_ns - step.start_ns
        while position < len(explained) and explained[position].given_ns <= step.loaded_ns:
            wait = explained[position]
            position += 1
            asked_ns = max(wait.asked_ns, step.start_ns)
            if wait.fetches is None or wait.given_ns <= asked_ns:
                continue
            # The time in which it was made and its workers started belongs to the first of its batches.
            if step.is_first and wait.fetches.began_ns > 0:
                asked_ns = max(step.start_ns, min(asked_ns, wait.fetches.began_ns))
            for stage, part_ns in wait.fetches.stages_between(asked_ns, wait.given_ns, wait.seq):
                found[stage] += part_ns  # type: ignore[assignment]  # parts of nanoseconds
            rest_ns -= wait.given_ns - asked_ns
        _divide_rest(found, step, max(rest_ns, 0.0), other, startup_ns)
    return found


def _usual_start_ns(steps: Sequence[StepWait]) -> float | None:
    """The wait that a first step has like all others; None where there are only first ones."""
    later = [step.loaded_ns - step.start_ns for step in steps if not step.is_first]
    return float(np.median(later)) if later else None


def _divide_rest(
    found: Counter[WaitStage], step: StepWait, rest_ns: float, other: OtherWork, usual_ns: float | None
) -> None:
    """Divide what no DataLoader explains of a step's wait."""
    if step.is_first and usual_ns is not None and rest_ns > usual_ns:
        found[WaitStage.STARTUP] += rest_ns - usual_ns  # type: ignore[assignment]
        rest_ns = usual_ns
    own_ns = min(float(step.own_cpu_ns), rest_ns)
    total = sum(other.own_cpu_ns.values())
    for label, spent in (other.own_cpu_ns or {"other": 1}).items():
        share = spent / total if total else 1.0
        found[_STAGES.get(label, WaitStage.DECODE)] += own_ns * share  # type: ignore[assignment]
    asleep_ns = rest_ns - own_ns
    computing_ns = asleep_ns * (other.busy_share or 0.0)
    found[WaitStage.STORAGE] += asleep_ns - computing_ns  # type: ignore[assignment]
    found[WaitStage.TRANSFORM] += computing_ns * other.split.transform_share  # type: ignore[assignment]
    found[WaitStage.DECODE] += computing_ns * (1 - other.split.transform_share)  # type: ignore[assignment]


_STAGES: Mapping[str, WaitStage] = {
    "decode": WaitStage.DECODE,
    "transform": WaitStage.TRANSFORM,
    "collate": WaitStage.COLLATE,
    "copy": WaitStage.COPY,
}
