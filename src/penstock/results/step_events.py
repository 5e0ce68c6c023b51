"""The events of a run as rows: one for each step and each span (epoch, block, checkpoint) of a rank.

The benchmark records them, `event_files` stores them, `phase_figures` evaluates them. Times are nanoseconds
of CLOCK_MONOTONIC, so they can be compared only within a host; `RankClock` converts them to wall-clock
times.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.void]
"""Steps or spans as rows of `STEP_TYPE` or `SPAN_TYPE`."""
Nanoseconds = NDArray[np.int64]

FORMAT_VERSION: Final = 1
"""Incremented whenever a column is added, renamed or changes its meaning."""


class StepPhase(IntEnum):
    """The phase of a step: it trains or evaluates."""

    TRAIN = 0
    EVAL = 1


class SpanKind(IntEnum):
    """The part of a run that a span covers."""

    EPOCH = 0
    BLOCK = 1
    SAVE = 2
    LOAD = 3


class StepEvent(NamedTuple):
    """One step of one rank. Epochs, blocks and steps count from 1, steps within their epoch.

    The four timestamps: the wait begins, the batch has arrived, computation ends, all ranks have passed the
    barrier. `read_ns` and `decode_ns` are sums over threads, so they may exceed the elapsed time.
    """

    phase: int
    epoch: int
    block: int
    step: int
    start_ns: int
    loaded_ns: int
    computed_ns: int
    barrier_ns: int
    samples: int
    read_bytes: int = 0
    reads: int = 0
    read_ns: int = 0
    decode_ns: int = 0


SpanPlace = tuple[int, int, int, int]
"""A span's kind, epoch, block and step."""


class SpanEvent(NamedTuple):
    """A period longer than a step.

    A checkpoint ends a block; `size_bytes` is this rank's part of the checkpoint.
    """

    kind: int
    phase: int
    epoch: int
    block: int
    step: int
    start_ns: int
    end_ns: int
    size_bytes: int = 0

    @property
    def place(self) -> SpanPlace:
        """The span's place in the run, which is the same for all ranks."""
        return self.kind, self.epoch, self.block, self.step

    @property
    def elapsed_s(self) -> float:
        """The time from the span's beginning to its end."""
        return (self.end_ns - self.start_ns) / 1e9


STEP_TYPE: Final = np.dtype([(name, "<i8") for name in StepEvent._fields])
SPAN_TYPE: Final = np.dtype([(name, "<i8") for name in SpanEvent._fields])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClock:
    """A rank, its host, and one moment on both of the host's clocks."""

    rank: int
    host: str
    wall_ns: int
    monotonic_ns: int

    @property
    def shift_ns(self) -> int:
        """The shift that converts a timestamp of this rank's events to nanoseconds since 1970."""
        return self.wall_ns - self.monotonic_ns

    def date(self, moment_ns: int) -> datetime:
        """Convert a timestamp of this rank's events to wall-clock time in UTC."""
        seconds, rest_ns = divmod(moment_ns + self.shift_ns, 10**9)
        return datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest_ns // 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBlock:
    """The steps of one rank between two checkpoints, and when this block began and ended."""

    number: int
    start_ns: int
    end_ns: int
    steps: Rows

    @property
    def elapsed_ns(self) -> int:
        """The time from the block's beginning to its end: waits, computation, barriers and the harness."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvents:
    """All events of one rank, in order of time."""

    clock: RankClock
    steps: Rows
    spans: Rows

    def epochs(self, phase: StepPhase) -> list[int]:
        """Return the epochs in which this rank completed a block of `phase`."""
        return sorted({block.epoch for block in self.spans_of(SpanKind.BLOCK) if block.phase == phase})

    def blocks(self, phase: StepPhase, epoch: int) -> list[StepBlock]:
        """Return the completed blocks of an epoch. Steps of an interrupted block belong to none of them."""
        steps = self.steps[(self.steps["phase"] == phase) & (self.steps["epoch"] == epoch)]
        return [
            StepBlock(
                number=span.block,
                start_ns=span.start_ns,
                end_ns=span.end_ns,
                steps=steps[steps["block"] == span.block],
            )
            for span in self.spans_of(SpanKind.BLOCK)
            if (span.phase, span.epoch) == (phase, epoch)
        ]

    def spans_of(self, *kinds: SpanKind) -> Iterator[SpanEvent]:
        """Yield the spans of these kinds, as records."""
        for span in self.spans[np.isin(self.spans["kind"], kinds)]:
            yield SpanEvent(*span.item())


def digest_samples(items: NDArray[np.uint64], taken: NDArray[np.uint64]) -> int:
    """Return the digest of a set of samples, `taken` of each item, as `run.json` defines it.

    It is the sum, modulo 2**64, of mix(mix(item) + samples taken of it), where mix is the finisher of
    splitmix64. The order does not matter, and digests of disjoint sets add up.
    """

    def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return words ^ words >> np.uint64(31)

    return int(mix(mix(items) + taken).sum(dtype=np.uint64))


def wait_ns(steps: Rows) -> Nanoseconds:
    return cast("Nanoseconds", steps["loaded_ns"] - steps["start_ns"])


def compute_ns(steps: Rows) -> Nanoseconds:
    """Return the time that each step computed, as measured: even overlong computation is not a wait."""
    return cast("Nanoseconds", steps["computed_ns"] - steps["loaded_ns"])


def barrier_ns(steps: Rows) -> Nanoseconds:
    """Return the time that each step waited for other ranks."""
    return cast("Nanoseconds", steps["barrier_ns"] - steps["computed_ns"])
