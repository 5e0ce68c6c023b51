"""The spans of a run in its trace: steps, waits, computation, barriers, checkpoints, beside the I/O.

A storage that is traced takes spans, too; without one nothing is recorded. Spans are made of the moments in
the run's own record, so the two agree to the microsecond. Invariant: recording takes place after a step's
barrier, so it is in none of the step's figures.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from penstock.results.step_events import SpanEvent, SpanKind, StepEvent, StepPhase
from penstock.storage.capabilities import SupportsSpans, find_span_trace

if TYPE_CHECKING:
    from penstock.storage import Storage
    from penstock.storage.protocol import OptionValue

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

    spans: SupportsSpans

    @classmethod
    def of(cls, storage: Storage, folder: Path) -> Self | None:
        """The trace of `storage` for the run in `folder`, which it names first; None if it is not traced."""
        spans = find_span_trace(storage)
        if spans is None:
            return None
        now_ns, results = time.monotonic_ns(), folder.absolute()
        # At the start, so that the trace of a run that is killed names it, too.
        spans.record_span("run", "run", now_ns, now_ns, {"run": results.name, "results": str(results)})
        return cls(spans)

    def add_step(self, step: StepEvent) -> None:
        """The whole step, and its three parts."""
        prefix = _PREFIXES[StepPhase(step.phase)]
        place = {"epoch": step.epoch, "step": step.step}
        counted = {**place, "samples": step.samples, "read_bytes": step.read_bytes}
        record = self.spans.record_span
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
        self.spans.record_span(*names, span.start_ns, span.end_ns, args)

    def add_stall(self, *, epoch: int, step: int, began_ns: int, ended_ns: int) -> None:
        """The time for which a checkpoint held this rank up, its wait for other ranks included."""
        self.spans.record_span("stall", "stall", began_ns, ended_ns, {"epoch": epoch, "step": step})
