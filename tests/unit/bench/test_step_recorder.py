"""The recorder keeps every step and span in its spool, whatever ends the run."""

import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from penstock.bench.recorded_run import FLUSH_INTERVAL_NS, StepRecorder, read_clocks
from penstock.results.event_files import SpoolWriter, read_spool
from penstock.results.step_events import RankClock, SpanEvent, SpanKind, StepEvent, StepPhase

CLOCK = RankClock(rank=3, host="node1", wall_ns=10, monotonic_ns=5)


def step(number: int, *, at_ns: int | None = None) -> StepEvent:
    now = time.monotonic_ns() if at_ns is None else at_ns
    return StepEvent(
        phase=StepPhase.TRAIN, epoch=1, block=1, step=number,
        start_ns=now - 30, loaded_ns=now - 20, computed_ns=now - 10, barrier_ns=now,
        samples=7, read_bytes=4096, reads=7, read_ns=15, decode_ns=2,
    )  # fmt: skip


def block(number: int) -> SpanEvent:
    return SpanEvent(
        kind=SpanKind.BLOCK, phase=StepPhase.TRAIN, epoch=1, block=number, step=9,
        start_ns=1, end_ns=2, size_bytes=0,
    )  # fmt: skip


def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool" / "3.events"


def test_what_was_added_is_read_back_in_order(tmp_path: Path) -> None:
    steps = [step(number) for number in range(1, 11)]
    with StepRecorder(SpoolWriter(spool(tmp_path), CLOCK), capacity=4) as recorder:
        for each in steps:
            recorder.add_step(each)
        recorder.add_span(block(1))
    events = read_spool(spool(tmp_path))
    assert [StepEvent(*row.item()) for row in events.steps] == steps
    assert list(events.spans_of(SpanKind.BLOCK)) == [block(1)]
    assert events.clock == CLOCK


def test_a_full_buffer_is_written_out_and_an_emptier_one_is_not(tmp_path: Path) -> None:
    recorder = StepRecorder(SpoolWriter(spool(tmp_path), CLOCK), capacity=4)
    for number in range(1, 4):
        recorder.add_step(step(number))
    assert len(read_spool(spool(tmp_path)).steps) == 0
    recorder.add_step(step(4))
    assert len(read_spool(spool(tmp_path)).steps) == 4


def test_steps_are_written_out_after_the_interval_with_a_heartbeat(tmp_path: Path) -> None:
    signs: list[int] = []
    recorder = StepRecorder(SpoolWriter(spool(tmp_path), CLOCK), on_flush=lambda: signs.append(1))
    recorder.add_step(step(1))
    assert signs == []
    recorder.add_step(step(2, at_ns=time.monotonic_ns() + FLUSH_INTERVAL_NS))
    assert signs == [1]
    assert len(read_spool(spool(tmp_path)).steps) == 2


def test_a_span_writes_out_the_steps_before_it(tmp_path: Path) -> None:
    recorder = StepRecorder(SpoolWriter(spool(tmp_path), CLOCK))
    recorder.add_step(step(1))
    recorder.add_span(block(1))
    events = read_spool(spool(tmp_path))
    assert len(events.steps) == len(events.spans) == 1


@pytest.mark.parametrize("ending", [KeyboardInterrupt, ValueError])
def test_a_run_that_fails_or_is_interrupted_keeps_everything(
    tmp_path: Path, ending: type[BaseException]
) -> None:
    def run() -> None:
        with StepRecorder(SpoolWriter(spool(tmp_path), CLOCK)) as recorder:
            recorder.add_step(step(1))
            raise ending

    with pytest.raises(ending):
        run()
    assert len(read_spool(spool(tmp_path)).steps) == 1


def test_recording_a_step_keeps_no_memory(tmp_path: Path) -> None:
    recorder = StepRecorder(SpoolWriter(spool(tmp_path), CLOCK))
    steps = [step(number) for number in range(3000)]
    recorder.add_step(steps[0])
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for each in steps[1:]:
        recorder.add_step(each)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 2048


def test_both_clocks_are_read_together() -> None:
    before = time.time_ns() - time.monotonic_ns()
    clock = read_clocks(1, "node7")
    assert (clock.rank, clock.host) == (1, "node7")
    assert abs(clock.wall_ns - clock.monotonic_ns - before) < 10**9
    assert np.int64(clock.wall_ns) == clock.wall_ns
