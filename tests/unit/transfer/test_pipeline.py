"""Pipelines on storages that are late, slow, lossy or broken: all bytes are right, or the phase fails."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
import weakref
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.child_processes import LIMIT_S, run_children

from penstock.bench.checkpoint.read_pipeline import read_objects
from penstock.dataset.content import Content
from penstock.errors import (
    ObjectNotFound,
    PenstockError,
    ShortTransfer,
    StorageError,
    StorageTimeout,
    Unavailable,
    WaitTimeout,
)
from penstock.progress import Progress
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import (
    ObjectInfo,
    Release,
    Sink,
    Storage,
    WrappedSink,
    WrappedStorage,
    exists,
    read_object,
    write_object,
)
from penstock.testing.faults import FailAtCall, Late, Slow
from penstock.transfer.buffers import WarmMemory
from penstock.transfer.ledger import WrongByte, combine_ranks
from penstock.transfer.pipeline import (
    DeferringProducer,
    PipelineSettings,
    PlannedObject,
    WritePipeline,
    write_objects,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK = 4096
SMALL = PipelineSettings(streams=2, chunk_bytes=CHUNK, buffer_memory_bytes=6 * CHUNK)


class Keyed:
    """Content by the object's key, made and verified."""

    def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        Content(1, planned.key).fill(buffer, offset)

    def verify(self, planned: PlannedObject, offset: int, buffer: memoryview) -> int | None:
        return Content(1, planned.key).verify(buffer, offset)


def _objects(*sizes: int) -> list[PlannedObject]:
    return [PlannedObject(f"rank0/part{number}", size) for number, size in enumerate(sizes)]


def _expected(planned: PlannedObject) -> bytes:
    content = bytearray(planned.size_bytes)
    Content(1, planned.key).fill(memoryview(content))
    return bytes(content)


def _assert_stored(storage: Storage, planned: Sequence[PlannedObject]) -> None:
    for each in planned:
        assert read_object(storage, each.key) == _expected(each)


@given(
    sizes=st.lists(st.integers(0, 5 * CHUNK), max_size=5),
    streams=st.integers(1, 3),
    chunk_bytes=st.sampled_from([1000, CHUNK, 3 * CHUNK]),
    extra_buffers=st.integers(0, 3),
)
def test_all_planned_objects_are_stored_and_verified(
    sizes: list[int], streams: int, chunk_bytes: int, extra_buffers: int
) -> None:
    storage, planned = MemoryStorage(), _objects(*sizes)
    some = PipelineSettings(
        streams=streams,
        chunk_bytes=chunk_bytes,
        buffer_memory_bytes=(2 * streams + extra_buffers) * (chunk_bytes + CHUNK),
    )
    written = write_objects([storage], planned, Keyed(), some)
    _assert_stored(storage, planned)
    assert written.ledger.durable_bytes == written.ledger.generated_bytes == sum(sizes)
    seen = read_objects([storage], planned, Keyed().verify, some)
    assert seen.ledger.verified_bytes == seen.ledger.read_bytes == sum(sizes)
    assert sum(stream.moved_bytes for stream in seen.streams) == sum(sizes)
    assert sum(stream.objects for stream in written.streams) == len(sizes)


class _SlowToFinish(WrappedStorage):
    """Keeps every buffer until the object is durable, and takes its time for that."""

    def __init__(self, inside: Storage, finish_s: float) -> None:
        super().__init__(Late(inside))
        self._finish_s = finish_s

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        finish_s = self._finish_s

        class Finishing(WrappedSink):
            def finish(self) -> ObjectInfo:
                time.sleep(finish_s)
                return super().finish()

        return Finishing(super().create(key, size_bytes))


def test_late_acknowledgement_counts_as_storage_time() -> None:
    roomy = PipelineSettings(streams=1, chunk_bytes=CHUNK, buffer_memory_bytes=4 * CHUNK)
    measurement = write_objects([_SlowToFinish(MemoryStorage(), 0.05)], _objects(4 * CHUNK), Keyed(), roomy)
    figures = combine_ranks([measurement])
    assert figures.drain_s >= 0.05
    assert figures.duration_s >= figures.drain_s
    assert figures.storage_busy_s >= 0.05
    assert figures.gib_per_s <= 4 * CHUNK / 2**30 / 0.05
    assert measurement.latencies_ns.min() >= 0.05e9


class _Sluggish(Keyed):
    def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        time.sleep(0.03)
        super().fill(planned, offset, buffer)


def test_a_slow_generator_is_reported_not_hidden() -> None:
    roomy = PipelineSettings(streams=1, chunk_bytes=CHUNK, buffer_memory_bytes=16 * CHUNK)
    measurement = write_objects([MemoryStorage()], _objects(10 * CHUNK), _Sluggish(), roomy)
    assert measurement.content_busy_s >= 0.3
    # The storage waited nearly all of the time; a tenth of it is what no busy machine makes of that.
    assert measurement.storage_stall_s >= 0.03


def test_the_wait_for_the_first_chunk_is_set_up_and_no_stall() -> None:
    single = PipelineSettings(streams=1, chunk_bytes=CHUNK, buffer_memory_bytes=2 * CHUNK)
    began_s = time.monotonic()
    measurement = write_objects([MemoryStorage()], _objects(CHUNK), _Sluggish(), single)
    # A stall comes after the first chunk was submitted, so it cannot overlap with its generation.
    assert measurement.content_busy_s + measurement.storage_stall_s <= time.monotonic() - began_s


class _LosesTheEnd(WrappedStorage):
    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        class Losing(WrappedSink):
            def finish(self) -> ObjectInfo:
                info = super().finish()
                return ObjectInfo(key=info.key, size_bytes=info.size_bytes - 1, modified_s=info.modified_s)

        return Losing(super().create(key, size_bytes))


def test_a_lost_part_fails_the_phase_and_names_the_object() -> None:
    with pytest.raises(ShortTransfer, match=r"rank0/part0.*lost part"):
        write_objects([_LosesTheEnd(MemoryStorage())], _objects(3 * CHUNK), Keyed(), SMALL)


def test_each_reader_keeps_its_own_statistics() -> None:
    storage = MemoryStorage()
    planned = _objects(*[8 * CHUNK] * 2)
    write_objects([storage], planned, Keyed(), SMALL)
    # Each reader waits for the other's first chunk, so both take part however threads are scheduled.
    both = threading.Barrier(2)
    met = threading.local()

    class Together(Progress):
        def advance(self, amount: float) -> None:
            if not getattr(met, "done", False):
                met.done = True
                both.wait(60)

    seen = read_objects([storage], planned, Keyed().verify, SMALL, progress=Together())
    assert [stream.stream for stream in seen.streams] == [0, 1]
    assert all(stream.chunks >= 1 for stream in seen.streams)
    assert sum(stream.chunks for stream in seen.streams) == 16
    assert sum(stream.requests for stream in seen.streams) == seen.counters.requests == 16


def test_streams_with_separate_storages_count_their_own_requests() -> None:
    storages = [MemoryStorage(), MemoryStorage()]
    measurement = write_objects(storages, _objects(CHUNK, CHUNK, CHUNK), Keyed(), SMALL)
    assert [stream.requests for stream in measurement.streams] == [
        storage.counters.requests for storage in storages
    ]
    assert measurement.counters.requests == 3


class _ReleasesTwice(WrappedStorage):
    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        class Twice(WrappedSink):
            def submit(self, buffer: memoryview, release: Release | None = None) -> None:
                super().submit(buffer, release)
                if release is not None:
                    release()

        return Twice(super().create(key, size_bytes))


def test_a_buffer_released_twice_is_an_error_that_names_the_storage() -> None:
    with pytest.raises(PenstockError, match=r"did not have was released\. A storage must"):
        write_objects([_ReleasesTwice(MemoryStorage())], _objects(CHUNK), Keyed(), SMALL)


class _Nowhere(WrappedStorage):
    """Takes bytes at no cost, and looks at Python's memory after the first chunks and before the last."""

    def __init__(self, num_chunks: int) -> None:
        super().__init__(MemoryStorage())
        self.grown_bytes = self.peak_bytes = -1
        self._num_chunks = num_chunks

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        return _NowhereSink(self, key, size_bytes or 0, self._num_chunks)


class _NowhereSink:
    def __init__(self, storage: _Nowhere, key: str, size_bytes: int, num_chunks: int) -> None:
        self._storage = storage
        self._info = ObjectInfo(key=key, size_bytes=size_bytes, modified_s=0.0)
        self._num_chunks = num_chunks
        self._seen = 0
        self._before = 0

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        self._seen += 1
        if self._seen == 50:
            tracemalloc.reset_peak()
            self._before = tracemalloc.get_traced_memory()[0]
        if self._seen == self._num_chunks - 10:
            now, peak = tracemalloc.get_traced_memory()
            self._storage.grown_bytes, self._storage.peak_bytes = now - self._before, peak - self._before
        assert release is not None
        release()

    def finish(self) -> ObjectInfo:
        return self._info

    def abort(self) -> None:
        return None


NUM_CHUNKS = 4000


def growth_over_chunks() -> tuple[int, int]:
    """By how many bytes Python's memory grows while chunks are written, at the end and at most."""

    class Nothing:
        def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
            return None

    chunk_bytes = 64 * 1024
    storage = _Nowhere(NUM_CHUNKS)
    few = PipelineSettings(streams=1, chunk_bytes=chunk_bytes, buffer_memory_bytes=4 * chunk_bytes)
    memory = WarmMemory(few.buffer_memory_bytes)
    tracemalloc.start()
    write_objects([storage], _objects(NUM_CHUNKS * chunk_bytes), Nothing(), few, memory=memory)
    return storage.grown_bytes, storage.peak_bytes


def test_the_steady_state_allocates_nothing_per_chunk() -> None:
    # In a process of its own: what threads of other tests allocate is counted, too.
    [(grown_bytes, peak_bytes)] = run_children([(growth_over_chunks, ())], LIMIT_S)
    # Over 3,940 chunks: no Python object is as small as 4 bytes. At the peak, a waiting thread holds a lock.
    assert grown_bytes < 4 * 3940
    assert peak_bytes < 16 * 1024


class _Reluctant(WrappedStorage):
    """Copies each buffer only long after it was submitted, in a thread, and releases it then."""

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        return _ReluctantSink(super().create(key, size_bytes))


class _ReluctantSink(WrappedSink):
    def __init__(self, inside: Sink) -> None:
        super().__init__(inside)
        self._threads: list[threading.Thread] = []

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        before = self._threads[-1] if self._threads else None

        def write_later() -> None:
            if before is not None:
                before.join()
            time.sleep(0.001)
            WrappedSink.submit(self, buffer, release)

        self._threads.append(threading.Thread(target=write_later))
        self._threads[-1].start()

    def finish(self) -> ObjectInfo:
        for thread in self._threads:
            thread.join()
        return super().finish()

    def abort(self) -> None:
        for thread in self._threads:
            thread.join()
        super().abort()


def test_a_slow_writer_with_few_buffers_writes_every_byte_as_it_was_made() -> None:
    storage, planned = MemoryStorage(), _objects(40 * CHUNK, 25 * CHUNK + 7)
    fewest = PipelineSettings(streams=2, chunk_bytes=CHUNK, buffer_memory_bytes=4 * CHUNK)
    write_objects([_Reluctant(storage)], planned, Keyed(), fewest)
    _assert_stored(storage, planned)


def test_a_storage_that_keeps_all_buffers_is_an_error_not_a_hang() -> None:
    impatient = PipelineSettings(streams=1, chunk_bytes=CHUNK, buffer_memory_bytes=2 * CHUNK, silence_s=0.05)
    storage = MemoryStorage()
    with pytest.raises(StorageTimeout, match="rank0/part0 held all 2 buffers"):
        write_objects([Late(storage)], _objects(5 * CHUNK), Keyed(), impatient)
    assert not exists(storage, "rank0/part0")


@pytest.mark.parametrize(("verb", "number"), [("create", 2), ("submit", 1), ("submit", 5), ("finish", 1)])
def test_a_failing_storage_fails_the_phase_and_leaves_no_partial_object(verb: str, number: int) -> None:
    inside = MemoryStorage()
    storage = FailAtCall(inside, verb, number)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match=f"Injected fault in {verb}"):
        write_objects([storage], _objects(4 * CHUNK, 4 * CHUNK), Keyed(), SMALL)
    for each in _objects(4 * CHUNK, 4 * CHUNK):
        if exists(inside, each.key):
            assert read_object(inside, each.key) == _expected(each)


def test_a_producers_error_is_raised_by_the_phase() -> None:
    class Broken(Keyed):
        def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
            if offset:
                raise KeyError(planned.key)

    storage = MemoryStorage()
    with pytest.raises(KeyError, match="rank0/part0"):
        write_objects([storage], _objects(6 * CHUNK), Broken(), SMALL)
    assert list(storage.list()) == []


def test_buffers_are_filled_before_a_storage_is_given() -> None:
    planned = _objects(2 * CHUNK, CHUNK)
    storage = MemoryStorage()
    memory = WarmMemory(SMALL.buffer_memory_bytes)
    with WritePipeline(planned, Keyed(), SMALL, memory=memory) as pipe:
        pipe.start_filling()
        pipe.wait_filled(60)
        assert list(storage.list()) == []
        pipe.write_to([storage])
    _assert_stored(storage, planned)


def test_waiting_for_more_bytes_than_fit_times_out() -> None:
    with (
        WritePipeline(_objects(50 * CHUNK), Keyed(), SMALL, memory=WarmMemory(6 * CHUNK)) as pipe,
        pytest.raises(WaitTimeout, match="all bytes to be copied into buffers"),
    ):
        pipe.wait_filled(0.01)


@pytest.mark.parametrize("number", range(4))
def test_where_no_more_threads_can_be_started_those_that_were_end_with_an_error_of_ours(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        if len(started) >= number:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        started_really(thread)

    started_really = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    memory = WarmMemory(SMALL.buffer_memory_bytes)
    with (
        pytest.raises(Unavailable, match="can't start new thread"),
        WritePipeline(_objects(50 * CHUNK, 50 * CHUNK), Keyed(), SMALL, memory=memory) as pipe,
    ):
        pipe.write_to([MemoryStorage()])
    # The memory is the next save's now.
    assert len(started) == number
    assert not any(thread.is_alive() for thread in started)


class Settling(DeferringProducer, Keyed):
    """Makes zeros first, and what is wanted only when it is told that nobody waits."""

    def __init__(self) -> None:
        self.may_settle = threading.Event()
        self.settled: list[tuple[str, int]] = []

    def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """Not yet."""

    def catch_up(self) -> None:
        """Nothing comes late."""

    def settle(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        assert self.may_settle.wait(60)
        self.settled.append((planned.key, offset))
        Keyed.fill(self, planned, offset, buffer)


def test_filled_all_first_the_source_is_free_before_anything_is_settled() -> None:
    planned, storage, producer = _objects(2 * CHUNK, CHUNK, 0), MemoryStorage(), Settling()
    memory = WarmMemory(SMALL.buffer_memory_bytes)
    with WritePipeline(planned, producer, SMALL, memory=memory, fills_first=True) as pipe:
        pipe.start_filling()
        pipe.wait_filled(60)
        assert pipe.filled_ns > 0
        assert producer.settled == []
        producer.may_settle.set()
        pipe.write_to([storage])
    _assert_stored(storage, planned)
    assert [at for key, at in producer.settled if key == planned[0].key] == [0, CHUNK]


def test_filled_chunk_by_chunk_each_is_settled_before_it_is_written() -> None:
    planned, storage, producer = _objects(9 * CHUNK, CHUNK), MemoryStorage(), Settling()
    producer.may_settle.set()
    write_objects([storage], planned, producer, SMALL)
    _assert_stored(storage, planned)


def test_an_error_while_settling_is_raised_by_the_phase() -> None:
    class Broken(Settling):
        def settle(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
            raise KeyError(planned.key)

    storage = MemoryStorage()
    memory = WarmMemory(SMALL.buffer_memory_bytes)
    with (
        WritePipeline(_objects(CHUNK), Broken(), SMALL, memory=memory, fills_first=True) as pipe,
        pytest.raises(KeyError, match="rank0/part0"),
    ):
        pipe.write_to([storage])
    assert list(storage.list()) == []


def _written(*sizes: int) -> tuple[MemoryStorage, list[PlannedObject]]:
    storage, planned = MemoryStorage(), _objects(*sizes)
    write_objects([storage], planned, Keyed(), SMALL)
    return storage, planned


def _flip(storage: MemoryStorage, key: str, offset: int) -> None:
    content = read_object(storage, key)
    content[offset] ^= 1
    write_object(storage, key, [content])


def test_a_wrong_byte_is_named_and_its_chunk_is_not_verified() -> None:
    storage, planned = _written(4 * CHUNK, 4 * CHUNK)
    _flip(storage, planned[1].key, 2 * CHUNK + 17)
    seen = read_objects([storage], planned, Keyed().verify, SMALL)
    assert seen.wrong_bytes == (WrongByte("rank0/part1", 2 * CHUNK + 17),)
    assert seen.ledger.read_bytes == 8 * CHUNK
    assert seen.ledger.verified_bytes == 7 * CHUNK
    assert combine_ranks([seen]).wrong_bytes == 1


def test_a_sample_verifies_some_chunks_and_always_the_last() -> None:
    storage, planned = _written(10 * CHUNK + 5)
    sampling = PipelineSettings(
        streams=1, chunk_bytes=CHUNK, buffer_memory_bytes=2 * CHUNK, verify="sample", sample_every=4
    )
    seen = read_objects([storage], planned, Keyed().verify, sampling)
    assert seen.ledger.verified_bytes == 3 * CHUNK + 5


def test_without_a_verifier_everything_is_read_and_nothing_verified() -> None:
    storage, planned = _written(3 * CHUNK)
    seen = read_objects([storage], planned, None, SMALL)
    assert (seen.ledger.read_bytes, seen.ledger.verified_bytes) == (3 * CHUNK, 0)


def test_reading_an_object_of_another_size_fails_by_name() -> None:
    storage, planned = _written(3 * CHUNK)
    write_object(storage, planned[0].key, [bytes(CHUNK)])
    with pytest.raises(ShortTransfer, match="rank0/part0"):
        read_objects([storage], planned, Keyed().verify, SMALL)


def test_reading_a_missing_object_fails_by_name() -> None:
    with pytest.raises(ObjectNotFound, match="rank0/part0"):
        read_objects([MemoryStorage()], _objects(CHUNK), Keyed().verify, SMALL)


def test_an_empty_object_must_exist_and_be_empty() -> None:
    with pytest.raises(ObjectNotFound, match="rank0/part0"):
        read_objects([MemoryStorage()], _objects(0), Keyed().verify, SMALL)
    storage, planned = _written(0)
    write_object(storage, planned[0].key, [b"x"])
    with pytest.raises(ShortTransfer, match="rank0/part0"):
        read_objects([storage], planned, Keyed().verify, SMALL)


def test_a_verifier_that_raises_fails_the_phase() -> None:
    class Broken(Keyed):
        def verify(self, planned: PlannedObject, offset: int, buffer: memoryview) -> int | None:
            raise KeyError(planned.key)

    storage, planned = _written(30 * CHUNK)
    with pytest.raises(KeyError, match="rank0/part0"):
        read_objects([storage], planned, Broken().verify, SMALL)


def test_progress_adds_up_to_what_was_moved() -> None:
    class Added(Progress):
        def __init__(self) -> None:
            self.phases: list[tuple[str, float]] = []
            self.moved = 0.0
            self._lock = threading.Lock()

        def begin(self, phase: str, total: float) -> None:
            self.phases.append((phase, total))

        def advance(self, amount: float) -> None:
            with self._lock:
                self.moved += amount

    storage, planned, progress = MemoryStorage(), _objects(2 * CHUNK + 1, 5), Added()
    write_objects([Slow(storage, 0.0)], planned, Keyed(), SMALL, progress=progress)
    read_objects([storage], planned, Keyed().verify, SMALL, progress=progress)
    assert progress.phases == [("writing", 2 * CHUNK + 6), ("reading", 2 * CHUNK + 6)]
    assert progress.moved == 2 * (2 * CHUNK + 6)


def test_a_finished_pipe_frees_its_producer_without_garbage_collection() -> None:
    producer = Keyed()
    gc.disable()
    try:
        write_objects([MemoryStorage()], _objects(3 * CHUNK), producer, SMALL)
        alive = weakref.ref(producer)
        del producer
        assert alive() is None
    finally:
        gc.enable()
