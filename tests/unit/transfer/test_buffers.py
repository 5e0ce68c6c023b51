"""Buffers have one owner at a time, and no stream can starve another."""

import threading
from concurrent.futures import wait

import pytest

from penstock.errors import StorageTimeout, Unavailable, UsageError
from penstock.storage.aligned import PAGE_BYTES, address_of
from penstock.transfer.buffers import HUGE_PAGE_BYTES, WarmMemory
from penstock.transfer.pipeline import (
    PipelineBuffers,
    PipelineSettings,
    PipelineStopped,
    WorkerGroup,
)


def _buffers(streams: int = 1, num_buffers: int = 4, silence_s: float = 300.0) -> PipelineBuffers:
    settings = PipelineSettings(
        streams=streams,
        chunk_bytes=PAGE_BYTES,
        buffer_memory_bytes=num_buffers * PAGE_BYTES,
        silence_s=silence_s,
    )
    return PipelineBuffers(WarmMemory(settings.buffer_memory_bytes), settings)


def test_memory_begins_at_a_huge_page_and_has_the_requested_size() -> None:
    memory = WarmMemory(3 * PAGE_BYTES + 1)
    memory.touch()
    assert address_of(memory.view) % HUGE_PAGE_BYTES == 0
    assert len(memory.view) == memory.size_bytes == 4 * PAGE_BYTES


def test_touching_again_changes_no_byte() -> None:
    memory = WarmMemory(4 * PAGE_BYTES)
    memory.touch(2 * PAGE_BYTES)
    memory.view[:] = b"x" * len(memory.view)
    memory.touch(PAGE_BYTES)
    assert memory.view[0] == ord("x")
    memory.touch()
    assert memory.view[PAGE_BYTES] == ord("x")


def test_buffers_are_page_aligned_and_disjoint() -> None:
    buffers = _buffers()
    starts = [address_of(buffer.whole) for buffer in buffers.all]
    assert all(start % PAGE_BYTES == 0 for start in starts)
    assert len(set(starts)) == len(starts) == 4


def test_chunks_of_partial_pages_begin_at_pages() -> None:
    settings = PipelineSettings(streams=1, chunk_bytes=1000, buffer_memory_bytes=3 * PAGE_BYTES)
    buffers = PipelineBuffers(WarmMemory(settings.buffer_memory_bytes), settings)
    assert [address_of(buffer.whole) % PAGE_BYTES for buffer in buffers.all] == [0, 0, 0]
    assert {len(buffer.whole) for buffer in buffers.all} == {1000}


def test_a_stream_leaves_two_buffers_for_every_other_stream() -> None:
    buffers = _buffers(streams=2, num_buffers=5)
    taken = [buffers.take(0, "an object") for _ in range(3)]
    assert not buffers._may_take(0)
    assert buffers._may_take(1)
    buffers.take(1, "another")
    buffers.take(1, "another")
    assert not buffers._may_take(1)
    buffers.give_back(taken[0])
    assert buffers._may_take(0)


def test_a_retired_stream_frees_its_reserved_buffers() -> None:
    buffers = _buffers(streams=2, num_buffers=4)
    for _ in range(2):
        buffers.take(0, "an object")
    assert not buffers._may_take(0)
    buffers.retire(1)
    assert buffers._may_take(0)


def test_a_storage_that_releases_no_buffer_is_named() -> None:
    buffers = _buffers(num_buffers=2, silence_s=0.01)
    for _ in range(2):
        buffers.take(0, "rank0/model.pt")
    buffers.expect_returns()
    with pytest.raises(StorageTimeout, match=r"rank0/model\.pt held all 2 buffers for 0\.01 s"):
        buffers.take(0, "rank0/model.pt")


def test_stopping_wakes_threads_that_wait_for_a_buffer() -> None:
    buffers = _buffers(num_buffers=2)
    for _ in range(2):
        buffers.take(0, "an object")
    seen: list[BaseException] = []

    def wait() -> None:
        try:
            buffers.take(0, "an object")
        except PipelineStopped as error:
            seen.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    buffers.stop()
    thread.join(60)
    assert len(seen) == 1


def test_too_little_memory_for_the_streams_says_how_much_is_needed() -> None:
    with pytest.raises(UsageError, match="Give at least 64 bytes"):
        PipelineSettings(streams=4, chunk_bytes=8, buffer_memory_bytes=63)


@pytest.mark.parametrize("field", ["streams", "chunk_bytes", "sample_every"])
def test_a_setting_below_one_is_refused(field: str) -> None:
    with pytest.raises(UsageError, match=f"{field} is 0"):
        PipelineSettings(**{field: 0})  # type: ignore[arg-type]


def test_memory_that_there_is_not_is_an_error_with_its_size() -> None:
    with pytest.raises(Unavailable, match=r"no memory for buffers of 1\.00 EiB: Cannot allocate memory"):
        WarmMemory(1 << 60)


def test_the_cause_is_raised_though_its_thread_ends_last() -> None:
    stopped, may_end = threading.Event(), threading.Event()

    def stop() -> None:
        if not stopped.is_set():
            stopped.set()
            may_end.wait(10)

    def fail() -> None:
        raise OSError("the disk is gone")

    def notice() -> None:
        stopped.wait(10)
        raise PipelineStopped

    group = WorkerGroup(3, stop)
    try:
        done = group.start(lambda: None)
        group.start(fail)
        wait([done, group.start(notice)])
        threading.Timer(0.05, may_end.set).start()
        with pytest.raises(OSError, match="the disk is gone"):
            group.wait([done], "what is done")
    finally:
        group.close()
