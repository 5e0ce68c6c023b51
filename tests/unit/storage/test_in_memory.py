import threading
from contextlib import closing

import numpy as np
import pytest

from penstock.errors import ObjectNotFound, ShortTransfer, UsageError
from penstock.storage.in_memory import FIRST_CAPACITY_BYTES, MemoryStorage
from penstock.storage.protocol import Storage, read_object, write_object
from penstock.storage.uri import open_storage
from penstock.testing.storage_contract import StorageContract, assert_same_bytes


class TestMemoryStorage(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return open_storage("mem://contract", {})


def test_opening_a_name_twice_gives_two_stores() -> None:
    first, second = open_storage("mem://same", {}), open_storage("mem://same", {})
    write_object(first, "key", [b"x"])
    assert list(second.list()) == []


def test_an_option_is_refused_because_memory_has_none() -> None:
    with pytest.raises(UsageError, match="part_bytes"):
        open_storage("mem://store?part_bytes=8MiB", {})


def test_an_open_source_keeps_the_object_it_was_opened_on() -> None:
    storage = MemoryStorage()
    write_object(storage, "key", [b"old"])
    with closing(storage.open("key")) as source:
        write_object(storage, "key", [b"newer"])
        storage.delete("key")
        seen = bytearray(source.size_bytes)
        source.read_into(0, memoryview(seen))
    assert seen == b"old"


def test_an_object_of_unknown_size_grows_past_its_first_room() -> None:
    storage = MemoryStorage()
    block = bytes(range(256)) * (FIRST_CAPACITY_BYTES // 512)
    write_object(storage, "grown", [block] * 7)
    assert_same_bytes(read_object(storage, "grown"), block * 7)


def test_buffers_of_other_formats_are_taken_as_their_bytes() -> None:
    storage = MemoryStorage()
    numbers = np.arange(10, dtype=np.float32)
    write_object(storage, "numbers", [numbers.data], size_bytes=40)
    assert np.array_equal(np.frombuffer(read_object(storage, "numbers"), dtype=np.float32), numbers)


def test_moving_bytes_in_and_out_of_memory_counts_no_copies() -> None:
    storage = MemoryStorage()
    write_object(storage, "key", [bytes(10_000)])
    read_object(storage, "key")
    assert sum(storage.counters.copied_bytes.values()) == 0


def test_a_declared_size_of_zero_is_checked_like_any_other() -> None:
    storage = MemoryStorage()
    with pytest.raises(ShortTransfer) as caught:
        write_object(storage, "key", [b"x"], size_bytes=0)
    assert (caught.value.expected_bytes, caught.value.actual_bytes) == (0, 1)


def test_of_two_threads_that_delete_a_key_neither_breaks_the_store() -> None:
    storage = MemoryStorage()
    write_object(storage, "key", [b"x"])
    outcomes: list[str] = []

    def delete() -> None:
        try:
            storage.delete("key")
        except ObjectNotFound:
            outcomes.append("absent")
        else:
            outcomes.append("deleted")

    threads = [threading.Thread(target=delete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(outcomes) == 8
    assert "deleted" in outcomes
    assert list(storage.list()) == []
