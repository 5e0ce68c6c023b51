"""Records what each step of a rank did without disturbing it: preallocated rows, written out between steps.

The timed loop calls `add_*`; `results.event_files` collects the spools, and a traced run has the same in its
trace. A run that is killed loses at most the last seconds; one that fails or is interrupted loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from penstock.results.step_events import (
    SPAN_TYPE,
    STEP_TYPE,
    RankClock,
    SpanEvent,
    SpanKind,
    StepEvent,
    StepPhase,
)
from penstock.storage.capabilities import RecordSpan, find_span_trace

if TYPE_CHECKING:
    from penstock.results.event_files import SpoolWriter
    from penstock.storage import Storage
    from penstock.storage.protocol import OptionValue

CAPACITY: Final = 4096
FLUSH_INTERVAL_NS: Final = 10 * 10**9
"""At most this much of a run is lost when a rank is killed."""


def read_clocks(rank: int, host: str) -> RankClock:
    """Both clocks of this host, read together, to which a rank's events refer."""
    return RankClock(rank=rank, host=host, wall_ns=time.time_ns(), monotonic_ns=time.monotonic_ns())


_PREFIXES: Final = {StepPhase.TRAIN: "train", StepPhase.EVAL: "eval"}
_SPANS: Final = {
    SpanKind.EPOCH: ("epoch", "epoch"),
    SpanKind.SAVE: ("checkpoint.save", "checkpoint"),
    SpanKind.LOAD: ("checkpoint.load", "checkpoint"),
}
"""Name and category of the spans that are traced: a block is an epoch, or what checkpoints make of it."""


def find_trace_folder(storage_options: Mapping[str, OptionValue]) -> str | None:
    """The folder that a storage of these options writes its trace into; None if it writes none."""
    folder = storage_options.get("trace")
    return None if folder is None else str(folder)


@dataclass(frozen=True, slots=True)
class RunTrace:
    """One rank's spans; used by the thread that runs the loop."""

    record: RecordSpan

    @classmethod
    def of(cls, storage: Storage, folder: Path) -> Self | None:
        """The trace of `storage` for the run in `folder`, which it names first; None if it is not traced."""
        record = find_span_trace(storage)
        if record is None:
            return None
        now_ns, results = time.monotonic_ns(), folder.absolute()
        # At the start, so that the trace of a run that is killed names it, too.
        record("run", "run", now_ns, now_ns, {"run": results.name, "results": str(results)})
        return cls(record)

    def add_step(self, step: StepEvent) -> None:
        """The whole step, and its three parts."""
        prefix = _PREFIXES[StepPhase(step.phase)]
        place = {"epoch": step.epoch, "step": step.step}
        counted = {**place, "samples": step.samples, "read_bytes": step.read_bytes}
        record = self.record
        record(f"{prefix}.step", "step", step.start_ns, step.barrier_ns, counted)
        record(f"{prefix}.wait", "wait", step.start_ns, step.loaded_ns, place)
        record(f"{prefix}.compute", "compute", step.loaded_ns, step.computed_ns, place)
        record(f"{prefix}.barrier", "barrier", step.computed_ns, step.barrier_ns, place)

    def add_span(self, span: SpanEvent) -> None:
        """An epoch, or this rank's part of a checkpoint."""
        names = _SPANS.get(SpanKind(span.kind))
        if names is None:
            return
        place = {"epoch": span.epoch, "step": span.step} if span.step else {"epoch": span.epoch}
        args = {**place, "checkpoint_bytes": span.size_bytes} if span.size_bytes else place
        self.record(*names, span.start_ns, span.end_ns, args)

    def add_stall(self, *, epoch: int, step: int, began_ns: int, ended_ns: int) -> None:
        """The time for which a checkpoint held this rank up, its wait for other ranks included."""
        self.record("stall", "stall", began_ns, ended_ns, {"epoch": epoch, "step": step})


class StepRecorder:
    """One rank's record, used by one thread. Leaving its block writes the remaining rows, after errors, too.

    Rows are written when `capacity` of them wait, `FLUSH_INTERVAL_NS` after the last write, and with every
    span: always after a step's barrier, so that the time is in none of the step's figures. `on_flush` is
    called each time, for a sign of life.
    """

    def __init__(
        self,
        spool: SpoolWriter,
        *,
        capacity: int = CAPACITY,
        on_flush: Callable[[], None] = lambda: None,
        trace: RunTrace | None = None,
    ) -> None:
        self._spool = spool
        self._trace = trace
        self._on_flush = on_flush
        self._rows = np.zeros(capacity, STEP_TYPE)
        self._num_rows = 0
        self._flushed_ns = time.monotonic_ns()

    def add_step(self, step: StepEvent) -> None:
        """Keep one step."""
        self._rows[self._num_rows] = step
        self._num_rows += 1
        if self._trace is not None:
            self._trace.add_step(step)
        is_full = self._num_rows == len(self._rows)
        if is_full or step.barrier_ns - self._flushed_ns >= FLUSH_INTERVAL_NS:
            self.flush()

    def add_span(self, span: SpanEvent) -> None:
        """Keep an epoch, a block or a checkpoint that has just ended; writes all steps before it."""
        self.flush()
        self._spool.append(np.array([span], SPAN_TYPE))
        if self._trace is not None:
            self._trace.add_span(span)

    def add_stall(self, *, epoch: int, step: int, began_ns: int) -> None:
        """Keep, in a trace only, that a checkpoint has held this rank up until now."""
        if self._trace is not None:
            self._trace.add_stall(epoch=epoch, step=step, began_ns=began_ns, ended_ns=time.monotonic_ns())

    def flush(self) -> None:
        """Write the steps that wait."""
        self._spool.append(self._rows[: self._num_rows])
        self._num_rows = 0
        self._flushed_ns = time.monotonic_ns()
        self._on_flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
        finally:
            self._spool.close()
