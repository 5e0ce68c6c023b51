"""Spans of a run: what a traced storage is given of its steps, and nothing where storage is not traced."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.bench.recorded_run import StepRecorder, name_run_in_trace, read_clocks
from penstock.results.event_files import SpoolWriter
from penstock.results.step_events import SpanEvent, SpanKind, StepEvent, StepPhase
from penstock.storage.capabilities import SpanValue, find_span_trace
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import WrappedStorage


class SpanCollector(WrappedStorage):
    """A traced storage that keeps its spans."""

    def __init__(self) -> None:
        super().__init__(MemoryStorage(), trace="/traces")
        self.spans: list[tuple[str, str, int, int, dict[str, SpanValue]]] = []

    def record_span(
        self, name: str, cat: str, began_ns: int, ended_ns: int, args: Mapping[str, SpanValue]
    ) -> None:
        self.spans.append((name, cat, began_ns, ended_ns, dict(args)))


STEP = StepEvent(
    phase=StepPhase.TRAIN, epoch=2, block=1, step=7, start_ns=100, loaded_ns=130, computed_ns=180,
    barrier_ns=190, samples=4, read_bytes=512, reads=4, read_ns=15, decode_ns=2,
)  # fmt: skip
PLACE = {"epoch": 2, "step": 7}


@pytest.fixture
def traced() -> SpanCollector:
    return SpanCollector()


def recorder(traced: SpanCollector, tmp_path: Path) -> StepRecorder:
    return StepRecorder(
        SpoolWriter(tmp_path / "spool" / "0.events", read_clocks(0, "n0")), record_span=traced.record_span
    )


def span(kind: SpanKind, *, step: int = 0, size_bytes: int = 0) -> SpanEvent:
    return SpanEvent(kind, StepPhase.TRAIN, 2, 1, step, 10, 20, size_bytes)


def test_a_trace_names_its_run_and_where_its_results_are(traced: SpanCollector, tmp_path: Path) -> None:
    assert name_run_in_trace(WrappedStorage(traced), tmp_path / "unet3d-1") is not None
    ((name, cat, began_ns, ended_ns, args),) = traced.spans
    assert (name, cat, began_ns) == ("run", "run", ended_ns)
    assert args == {"run": "unet3d-1", "results": str(tmp_path / "unet3d-1")}


def test_storage_that_is_not_traced_takes_no_spans(tmp_path: Path) -> None:
    storage = WrappedStorage(MemoryStorage())
    assert find_span_trace(storage) is None
    assert name_run_in_trace(storage, tmp_path) is None
    assert "trace" not in storage.options


def test_a_step_is_its_wait_its_computation_and_its_barrier(traced: SpanCollector, tmp_path: Path) -> None:
    recorder(traced, tmp_path).add_step(STEP)
    assert traced.spans == [
        ("train.step", "step", 100, 190, {**PLACE, "samples": 4, "read_bytes": 512}),
        ("train.wait", "wait", 100, 130, PLACE),
        ("train.compute", "compute", 130, 180, PLACE),
        ("train.barrier", "barrier", 180, 190, PLACE),
    ]


def test_steps_of_an_evaluation_have_names_of_their_own(traced: SpanCollector, tmp_path: Path) -> None:
    recorder(traced, tmp_path).add_step(STEP._replace(phase=StepPhase.EVAL))
    assert [name for name, *_ in traced.spans] == ["eval.step", "eval.wait", "eval.compute", "eval.barrier"]


def test_checkpoints_and_epochs_are_spans_and_blocks_are_not(traced: SpanCollector, tmp_path: Path) -> None:
    trace = recorder(traced, tmp_path)
    trace.add_span(span(SpanKind.SAVE, step=7, size_bytes=99))
    trace.add_span(span(SpanKind.LOAD, step=7))
    trace.add_span(span(SpanKind.EPOCH))
    trace.add_span(span(SpanKind.BLOCK, step=7))
    assert traced.spans == [
        ("checkpoint.save", "checkpoint", 10, 20, {**PLACE, "checkpoint_bytes": 99}),
        ("checkpoint.load", "checkpoint", 10, 20, PLACE),
        ("epoch", "epoch", 10, 20, {"epoch": 2}),
    ]


def test_a_recorder_keeps_stalls_in_the_trace_alone(traced: SpanCollector, tmp_path: Path) -> None:
    with StepRecorder(
        SpoolWriter(tmp_path / "spool" / "0.events", read_clocks(0, "n0")), record_span=traced.record_span
    ) as recorder:
        recorder.add_step(STEP)
        recorder.add_span(span(SpanKind.EPOCH))
        recorder.add_stall(epoch=2, step=7, began_ns=5)
    assert [name for name, *_ in traced.spans][-2:] == ["epoch", "stall"]
    _, cat, began_ns, ended_ns, args = traced.spans[-1]
    assert (cat, began_ns, args) == ("stall", 5, PLACE)
    assert ended_ns > began_ns


def test_a_recorder_without_a_trace_takes_stalls_for_nothing(tmp_path: Path) -> None:
    with StepRecorder(SpoolWriter(tmp_path / "spool" / "0.events", read_clocks(0, "n0"))) as recorder:
        recorder.add_stall(epoch=2, step=7, began_ns=5)
