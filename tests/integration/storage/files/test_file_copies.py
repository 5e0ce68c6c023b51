"""Which bytes are copied, and how much memory transfers need."""

import os
import threading
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from penstock.errors import ObjectNotFound, Unavailable
from penstock.storage.aligned import aligned_buffer, copy_bytes
from penstock.storage.files.file_io import COPY_REASON
from penstock.storage.files.file_storage import FileStorage
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import Storage, read_object, write_object
from penstock.storage.uri import open_storage
from penstock.testing.storage_contract import arbitrary_bytes, assert_same_bytes

MIB = 2**20
SCHEMES = ["file", "direct"]


def direct(root: Path, **options: str) -> FileStorage:
    storage = open_storage(f"direct://{root}", {}, options=options)
    assert isinstance(storage, FileStorage)
    return storage


def aligned(content: bytes) -> memoryview:
    buffer = aligned_buffer(len(content))
    copy_bytes(buffer, memoryview(content))
    return buffer


@pytest.mark.parametrize("writes_in_flight", ["1", "3"])
def test_aligned_buffers_go_to_the_device_and_back_without_a_copy(
    tmp_path: Path, writes_in_flight: str
) -> None:
    storage = direct(tmp_path, writes_in_flight=writes_in_flight)
    content = arbitrary_bytes(3 * MIB)
    whole = aligned(content)
    write_object(storage, "key", [whole[:MIB], whole[MIB:]], size_bytes=3 * MIB)
    back = aligned_buffer(3 * MIB)
    with closing(storage.open("key")) as source:
        source.read_into(0, back[:MIB])
        source.read_into(MIB, back[MIB:])
    assert_same_bytes(bytes(back), content)
    assert not storage.counters.copied_bytes
    assert storage.counters.written_bytes == storage.counters.read_bytes == 3 * MIB


def test_of_an_aligned_buffer_with_an_odd_tail_only_the_tail_is_copied(tmp_path: Path) -> None:
    storage = direct(tmp_path)
    content = arbitrary_bytes(MIB + 1000)
    write_object(storage, "key", [aligned(content)])
    assert storage.counters.copied_bytes == {COPY_REASON: 1000}
    back = aligned_buffer(MIB + 1000)
    with closing(storage.open("key")) as source:
        source.read_into(0, back)
    assert_same_bytes(bytes(back), content)
    assert storage.counters.copied_bytes == {COPY_REASON: 2000}
    assert (tmp_path / "key").stat().st_size == MIB + 1000


def test_a_buffer_as_unaligned_as_its_offset_is_copied_at_its_ends_only(tmp_path: Path) -> None:
    storage = direct(tmp_path)
    content = arbitrary_bytes(MIB)
    whole = aligned(content)
    write_object(storage, "key", [whole[:100], whole[100 : MIB - 50], whole[MIB - 50 :]])
    assert_same_bytes(read_object(storage, "key"), content)
    assert storage.counters.copied_bytes[COPY_REASON] >= 4096
    before = storage.counters.snapshot()
    back = aligned_buffer(MIB)
    with closing(storage.open("key")) as source:
        source.read_into(100, back[100 : MIB - 50])
    assert back[100 : MIB - 50] == content[100 : MIB - 50]
    copied = storage.counters.copied_bytes[COPY_REASON] - before.copied_bytes[COPY_REASON]
    assert copied == (4096 - 100) + (4096 - 50)


def test_a_buffer_at_an_odd_address_is_copied_whole_and_counted(tmp_path: Path) -> None:
    storage = direct(tmp_path, bounce_bytes="64KiB")
    content = arbitrary_bytes(300_000)
    odd = aligned_buffer(300_001)[1:]
    copy_bytes(odd, memoryview(content))
    write_object(storage, "key", [odd])
    assert storage.counters.copied_bytes == {COPY_REASON: 300_000}
    with closing(storage.open("key")) as source:
        source.read_into(0, odd)
    assert odd == content
    assert storage.counters.copied_bytes == {COPY_REASON: 600_000}


def test_direct_bytes_are_not_in_the_page_cache(tmp_path: Path) -> None:
    from penstock.storage.residency import measure_residency

    storage = direct(tmp_path)
    write_object(storage, "key", [aligned(arbitrary_bytes(MIB))])
    with closing(storage.open("key")) as source:
        assert measure_residency(source).fraction < 0.1


@pytest.mark.parametrize("num_buffers", [1, 7])
def test_buffered_access_copies_nothing_of_any_shape(tmp_path: Path, num_buffers: int) -> None:
    storage = open_storage(str(tmp_path), {})
    content = arbitrary_bytes(100_003)
    write_object(storage, "key", [content[number::num_buffers] for number in range(num_buffers)])
    back = bytearray(100_004)
    with closing(storage.open("key")) as source:
        source.read_into(0, memoryview(back)[1:])
    assert not storage.counters.copied_bytes


def test_without_direct_io_the_error_names_an_alternative() -> None:
    storage = open_storage("direct:///proc/self", {})
    with pytest.raises(Unavailable, match="does not support O_DIRECT") as caught:
        storage.open("status")
    assert "file://" in caught.value.fix
    with pytest.raises(ObjectNotFound, match="a folder"):
        storage.open("fd")


def test_too_small_an_alignment_is_named_in_the_error(tmp_path: Path) -> None:
    from penstock.storage.files.system_calls import map_os_error

    told = map_os_error(OSError(22, os.strerror(22)), "Writing", f"direct://{tmp_path}/key")
    assert "alignment_bytes" in told.fix


def blocks_written(storage: Storage, buffer: memoryview, num_blocks: int) -> None:
    """Write and read an object of `num_blocks` times the same buffer."""
    sink = storage.create("key", num_blocks * buffer.nbytes)
    for _ in range(num_blocks):
        sink.submit(buffer, threading.Event().set)
    sink.finish()
    with closing(storage.open("key")) as source:
        for number in range(num_blocks):
            source.read_into(number * buffer.nbytes, buffer)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("writes_in_flight", ["1", "2"])
@pytest.mark.parametrize("shift", [0, 1])
def test_memory_does_not_grow_with_the_bytes_that_move(
    tmp_path: Path, scheme: str, writes_in_flight: str, shift: int
) -> None:
    storage = open_storage(
        f"{scheme}://{tmp_path}", {}, options={"writes_in_flight": writes_in_flight, "fsync": "no"}
    )
    buffer = aligned_buffer(MIB + shift)[shift:]
    blocks_written(storage, buffer, 4)
    tracemalloc.start()
    try:
        blocks_written(storage, buffer, 4)
        few = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        blocks_written(storage, buffer, 32)
        many = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert many < 256 * 1024
    assert many < few + 64 * 1024


def test_reading_memory_storage_allocates_nothing_of_the_objects_size() -> None:
    storage = MemoryStorage()
    write_object(storage, "key", [bytes(8 * MIB)])
    room = bytearray(8 * MIB)
    with closing(storage.open("key")) as source:
        tracemalloc.start()
        try:
            source.read_into(0, memoryview(room))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 64 * 1024
