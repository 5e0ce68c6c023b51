"""Capture: every event is in the trace, or the count beside it says how many are not."""

import gzip
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.environment import TRACE, TRACE_RANK
from penstock.errors import StorageError
from penstock.storage import open_storage
from penstock.storage.capabilities import find_folder_tree, prefer_direct_access
from penstock.storage.protocol import read_object, write_object
from penstock.testing.storage_contract import StorageContract
from penstock.trace import span, steps, traced, tracing_to
from penstock.trace.capture.recorder import TraceRecorder, clock_ns
from penstock.trace.capture.trace_writer import (
    EventKind,
    Layer,
    TraceFileWriter,
)
from penstock.trace.event_schema import TraceFile
from penstock.trace.reading.trace_files import COUNT_SUFFIX, find_trace_files, read_event_count
from penstock.trace.trace_set import read_trace_file

WORK = EventKind("work", "app", Layer.PYTHON)
PROGRAMS = Path(__file__).parent / "programs"


def lines_of(trace: Path) -> list[dict[str, Any]]:
    with gzip.open(trace) as lines:
        return [json.loads(line) for line in lines]


def events_of(folder: Path) -> list[dict[str, Any]]:
    lines = [line for trace in sorted(folder.glob("*.pfw.gz")) for line in lines_of(trace)]
    return [line for line in lines if line["ph"] == 1 and line["name"] != "end"]


def test_all_threads_are_in_one_trace_that_ends_with_their_number(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path, "2/8")

    def work() -> None:
        for number in range(1000):
            recorder.record(WORK, clock_ns(), args={"step": number})

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    (trace,) = tmp_path.iterdir()
    assert trace.name.startswith("trace-2-of-8-")
    lines = lines_of(trace)
    assert (lines[-1]["name"], lines[-1]["args"]["num_events"]) == ("end", 4000)
    by_thread: dict[int, list[int]] = {}
    for line in lines:
        if line["name"] == "work":
            by_thread.setdefault(line["tid"], []).append(line["args"]["step"])
    assert sorted(by_thread.values()) == [list(range(1000))] * 4


def test_a_recorder_that_is_closed_begins_another_trace(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path)
    for _ in range(2):
        recorder.record(WORK, clock_ns())
        recorder.close()
        recorder.close()
    assert len(list(tmp_path.glob("*.pfw.gz"))) == 2
    assert len(events_of(tmp_path)) == 2


def test_a_killed_process_leaves_a_count_of_what_it_recorded(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(PROGRAMS / "killed_while_tracing.py"), str(tmp_path), "70000"], check=False
    )
    assert ended.returncode == -signal.SIGKILL
    (trace,) = tmp_path.glob("*.pfw.gz")
    assert read_event_count(trace) == 70_000
    assert num_missing(trace) == 70_000 - len(events_of(tmp_path))


def num_missing(trace: Path) -> int:
    """What the reader says that is missing of an unfinished trace; it must know it, and count right."""
    reading = read_trace_file(TraceFile(path=trace))
    num_rows = sum(batch.num_rows for batch in reading.batches)
    account = reading.account
    assert account.announced_events is not None
    assert num_rows == account.events + account.salvaged
    if account.missing:
        assert any(f"{account.missing} missing" in line for line in account.losses())
        assert not account.is_whole
    return account.missing


def test_events_lost_with_a_killed_process_are_counted(tmp_path: Path) -> None:
    segments = TraceFileWriter(tmp_path, "trace")
    segments.counts[0], segments.counts[5] = 7, 3
    segments.close(complete=False)
    assert num_missing(segments.path) == 10
    assert find_trace_files([str(tmp_path)]) == find_trace_files([f"{tmp_path}/*"]) == [segments.path]


def test_a_trace_that_ended_is_whole_though_its_count_was_left(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path)
    recorder.record(WORK, clock_ns())
    recorder.close()
    (trace,) = tmp_path.iterdir()
    trace.with_name(trace.name + COUNT_SUFFIX).write_bytes((1).to_bytes(8, "little"))
    assert num_missing(trace) == 0
    reading = read_trace_file(TraceFile(path=trace))
    list(reading.batches)
    assert (reading.account.announced_events, reading.account.events) == (1, 2)
    assert reading.account.is_whole


def test_a_forked_child_has_a_trace_of_its_own_and_the_parents_stays_whole(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path)
    recorder.record(WORK, clock_ns(), args={"who": "parent"})
    child = multiprocessing.get_context("fork").Process(target=_record_as_child, args=(recorder,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    recorder.record(WORK, clock_ns(), args={"who": "parent"})
    recorder.close()
    assert sorted(event["args"]["who"] for event in events_of(tmp_path)) == ["child", "parent", "parent"]
    assert len({event["pid"] for event in events_of(tmp_path)}) == 2
    assert not list(tmp_path.glob(f"*{COUNT_SUFFIX}"))


def _record_as_child(recorder: TraceRecorder) -> None:
    recorder.record(WORK, clock_ns(), args={"who": "child"})


OF_PENSTOCK = {TRACE_RANK: "1/2"}
OF_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize(
    ("method", "rank"),
    [
        ("fork", OF_PENSTOCK),
        ("fork", OF_TORCHRUN),
        pytest.param("spawn", OF_PENSTOCK, marks=pytest.mark.slow),
    ],
    ids=["fork", "torchrun", "spawn"],
)
def test_workers_of_a_data_loader_trace_what_they_read(
    method: str, rank: dict[str, str], tmp_path: Path
) -> None:
    environment = {**os.environ, TRACE: str(tmp_path / "traces"), **rank}
    program = [sys.executable, str(PROGRAMS / "traced_loader.py"), str(tmp_path / "data"), method]
    ended = subprocess.run(program, env=environment, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    reads = [event for event in events_of(tmp_path / "traces") if event["name"] == "pread64"]
    assert len(reads) == 12
    assert sum(event["args"]["count"] for event in reads) == 12 * 1000
    assert len({event["pid"] for event in reads}) == 2
    assert all(trace.name.startswith("trace-1-of-2-") for trace in (tmp_path / "traces").iterdir())


def test_a_write_that_fails_is_taken_back_and_tried_again(tmp_path: Path) -> None:
    segments = TraceFileWriter(tmp_path, "trace")
    segments.append(b"first\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (segments.path.stat().st_size + 10, before[1]))
        with pytest.raises(StorageError, match="could not be written"):
            segments.append(os.urandom(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    segments.append(b"second\n")
    segments.close(complete=True)
    assert gzip.decompress(segments.path.read_bytes()) == b"first\nsecond\n"


def test_a_disk_that_refuses_for_a_while_loses_nothing(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path)
    recorder.record(WORK, clock_ns())
    recorder.flush()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        for _ in range(1000):
            recorder.record(WORK, clock_ns())
        recorder.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    recorder.close()
    assert len(events_of(tmp_path)) == 1001


def test_a_folder_that_takes_no_files_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"Creating failed.*file/traces.*give a folder"):
        TraceRecorder(tmp_path / "file" / "traces").record(WORK, clock_ns())


def test_storage_traces_exact_bytes_and_offsets_where_the_environment_says(tmp_path: Path) -> None:
    environment = {TRACE: str(tmp_path / "traces")}
    storage = open_storage(f"direct://{tmp_path}/data", environment)
    write_object(storage, "a/b", [bytes(5000), bytes(3000)])
    assert read_object(storage, "a/b") == bytes(8000)
    assert [seen.key for seen in storage.list()] == ["a/b"]
    storage.stat("a/b")
    storage.sync()
    storage.delete("a/b")
    assert find_folder_tree(storage) is not None, "what the storage inside can do stays at hand"
    _close_recorder(tmp_path / "traces")
    (trace,) = (tmp_path / "traces").glob("*.pfw.gz")
    lines = lines_of(trace)
    paths = {line["args"]["value"]: line["args"]["name"] for line in lines if line["name"] == "FH"}
    events = [line for line in lines if line["ph"] == 1]
    writes = [(e["args"]["offset"], e["args"]["count"]) for e in events if e["name"] == "pwrite64"]
    assert sorted(writes) == [(0, 5000), (5000, 3000)]
    assert sum(event["args"]["ret"] for event in events if event["name"] == "pread64") == 8000
    seen = {event["name"] for event in events}
    assert seen >= {"creat64", "open64", "fsync", "close", "opendir", "stat", "syncfs", "unlink"}
    named = {paths[event["args"]["fhash"]] for event in events if event["name"] == "pwrite64"}
    assert named == {f"{tmp_path}/data/a/b"}


def _close_recorder(folder: Path, place: str = "") -> None:
    from penstock.trace.capture.recorder import get_recorder

    get_recorder(str(folder), place).close()


class TestTracedStorage(StorageContract):
    """A traced storage keeps every promise of the one inside."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[object]:
        (tmp_path / "data").mkdir()
        yield open_storage(str(tmp_path / "data"), {TRACE: str(tmp_path / "traces")})
        _close_recorder(tmp_path / "traces")


def test_a_traced_storage_takes_large_files_past_the_page_cache_and_traces_them(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    storage = open_storage(str(tmp_path / "data"), {TRACE: str(tmp_path / "traces")})
    large = prefer_direct_access(storage)
    assert large.options["publish"] == "in_place"
    write_object(large, "large", [bytes(8192)])
    _close_recorder(tmp_path / "traces")
    writes = [event for event in events_of(tmp_path / "traces") if event["name"] == "pwrite64"]
    assert [event["args"]["ret"] for event in writes] == [8192]


def test_spans_name_steps_and_pass_errors_on(tmp_path: Path) -> None:
    @traced(cat="compute")
    def double(number: int) -> int:
        return 2 * number

    with tracing_to(tmp_path, rank=0):
        assert [double(item) for item in steps(iter([1, 2]), "train", epoch=1)] == [2, 4]
        with pytest.raises(ValueError, match="bad"), span("fails", step=7):
            raise ValueError("bad")
    _close_recorder(tmp_path, "0/1")
    events = events_of(tmp_path)
    names = [event["name"] for event in events]
    # The wait that ends the loop is no step's; what a body does, only its own spans tell.
    assert [names.count(f"train.{part}") for part in ("wait", "step")] == [2, 2]
    assert {event["cat"] for event in events if event["name"] == "train.step"} == {"step"}
    assert {event["args"].get("step") for event in events if event["name"] == "fails"} == {7}
    assert any(name.endswith("double") for name in names)


def test_spans_outside_of_any_tracing_do_nothing() -> None:
    with span("nobody looks"):
        pass
