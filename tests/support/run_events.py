"""Made-up runs: the events of ranks whose every second is chosen, for tests of all that judges runs.

A script has a clock of its own, which each call moves on. Invariant: what it yields is what the recorder of a
run with these times would have kept.
"""

import numpy as np

from penstock.results.run_status import RunStatus
from penstock.results.step_events import (
    SPAN_TYPE,
    STEP_TYPE,
    RankClock,
    RankEvents,
    SpanEvent,
    SpanKind,
    StepEvent,
    StepPhase,
)

WALL_NS = 1_767_225_600 * 10**9
"""2026-01-01T00:00:00 UTC, when every script begins."""

WAITING_STATUS = RunStatus(
    run='odd "name" \\ with\nall',
    kind="training",
    workload="unet3d_h100",
    ranks=8,
    host="node1",
    started_at_s=1000.25,
    written_at_s=2000.5,
    phase="epoch 1 of 5, steps",
    phase_done=25,
    phase_total=100,
    share_done=0.05,
    left_s=1234.5,
    state="waiting for ranks",
    state_s=42.0,
    awaiting="all ranks to finish step 26",
    absent_ranks=(3, 5),
    totals={"steps": 25.0, "read_bytes": 2.0**40, "sample_wait_s": 1.5},
)
"""A run that waits for two of its ranks; its name has all that formats have to quote."""


class RankScript:
    """One rank's run, told step by step; times are seconds."""

    def __init__(self, rank: int = 0, host: str = "node1", *, began_ns: int = 10**9) -> None:
        self._clock = RankClock(rank=rank, host=host, wall_ns=WALL_NS, monotonic_ns=began_ns)
        self._now_ns = began_ns
        self._steps: list[StepEvent] = []
        self._spans: list[SpanEvent] = []
        self._phase, self._epoch, self._block, self._step = StepPhase.TRAIN, 0, 0, 0
        self._epoch_ns = self._block_ns = began_ns

    def epoch(self) -> None:
        """Begin an epoch and its first block."""
        self._phase, self._epoch, self._block, self._step = StepPhase.TRAIN, self._epoch + 1, 0, 0
        self._epoch_ns = self._now_ns
        self.block()

    def evaluation(self) -> None:
        """Begin the evaluation of the epoch; training has ended."""
        self._phase, self._block, self._step = StepPhase.EVAL, 0, 0
        self.block()

    def block(self) -> None:
        """Begin a block."""
        self._block += 1
        self._block_ns = self._now_ns

    def step(
        self,
        wait: float,
        compute: float,
        barrier: float = 0.0,
        *,
        samples: int = 1,
        read_bytes: int = 0,
        read: float = 0.0,
        decode: float = 0.0,
    ) -> None:
        """One step."""
        self._step += 1
        start = self._now_ns
        loaded, computed, passed = self.pass_time(wait), self.pass_time(compute), self.pass_time(barrier)
        self._steps.append(
            StepEvent(
                phase=self._phase, epoch=self._epoch, block=self._block, step=self._step,
                start_ns=start, loaded_ns=loaded, computed_ns=computed, barrier_ns=passed,
                samples=samples, read_bytes=read_bytes, reads=samples,
                read_ns=_ns(read), decode_ns=_ns(decode),
            )
        )  # fmt: skip

    def pass_time(self, seconds: float) -> int:
        """Let time go by, in whatever is open; the moment afterwards."""
        self._now_ns += _ns(seconds)
        return self._now_ns

    def end_block(self) -> None:
        """End the block that is open."""
        self._span(SpanKind.BLOCK, self._block_ns)

    def checkpoint(self, kind: SpanKind, seconds: float, size_bytes: int) -> None:
        """Save or load a checkpoint, between blocks."""
        start_ns = self._now_ns
        self.pass_time(seconds)
        self._span(kind, start_ns, size_bytes)

    def end_epoch(self) -> None:
        """End the epoch; its last block has ended before."""
        self._phase = StepPhase.TRAIN
        self._span(SpanKind.EPOCH, self._epoch_ns)

    def events(self) -> RankEvents:
        """All that was told so far."""
        return RankEvents(
            clock=self._clock, steps=np.array(self._steps, STEP_TYPE), spans=np.array(self._spans, SPAN_TYPE)
        )

    def _span(self, kind: SpanKind, start_ns: int, size_bytes: int = 0) -> None:
        self._spans.append(
            SpanEvent(
                kind=kind, phase=self._phase, epoch=self._epoch, block=self._block, step=self._step,
                start_ns=start_ns, end_ns=self._now_ns, size_bytes=size_bytes,
            )
        )  # fmt: skip


def even_run(*, num_ranks: int = 2, num_epochs: int = 2, num_steps: int = 4) -> list[RankEvents]:
    """Ranks that do the same: a slow first step, then 0.1 s waits, 0.9 s computation, no barriers."""
    scripts = [RankScript(rank) for rank in range(num_ranks)]
    for script in scripts:
        for _ in range(num_epochs):
            script.epoch()
            script.step(1.0, 0.9, samples=2, read_bytes=4096, read=0.5, decode=0.1)
            for _ in range(num_steps - 1):
                script.step(0.1, 0.9, samples=2, read_bytes=4096, read=0.2, decode=0.05)
            script.end_block()
            script.end_epoch()
    return [script.events() for script in scripts]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
