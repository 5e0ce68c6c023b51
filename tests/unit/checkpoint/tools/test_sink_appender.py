"""A file grown from few buffers is what was appended; a storage that fails ends it instead of waiting."""

import threading
from functools import partial

import pytest

from penstock.checkpoint.levels.flush import copy_file
from penstock.checkpoint.tools.tensor_slabs import Appender
from penstock.errors import StorageError
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import ObjectInfo, Release, Sink, WrappedStorage, read_object, write_object


def test_buffers_are_used_again_in_order() -> None:
    storage = MemoryStorage("mem://outlet")
    outlet = Appender(buffer_bytes=4096, num_buffers=2)

    def fill(number: int, buffer: memoryview) -> None:
        buffer[:] = bytes([number]) * len(buffer)

    looked = []
    with outlet.writing(storage.create("x")):
        outlet.write(b"front")
        outlet.copy(
            ((100, partial(fill, number)) for number in range(10)), lambda part: looked.append(bytes(part))
        )
    assert b"".join(looked) == b"".join(bytes([number]) * 100 for number in range(10))
    assert outlet.position == 1005
    assert read_object(storage, "x") == b"front" + b"".join(bytes([number]) * 100 for number in range(10))


class StuckSink:
    """Keeps every buffer, as a storage whose writes have failed; says so on the next call."""

    def __init__(self) -> None:
        self.failed = threading.Event()

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        if self.failed.is_set():
            raise StorageError("The device is gone", uri="test://x")
        if release is not None:
            self.failed.set()

    def finish(self) -> ObjectInfo:
        raise AssertionError

    def abort(self) -> None:
        """Nothing was kept."""


def test_a_failure_that_keeps_the_buffers_is_raised_and_not_waited_for() -> None:
    outlet = Appender(buffer_bytes=4096, num_buffers=1)
    pieces = [(10, lambda _: None), (10, lambda _: None)]
    with pytest.raises(StorageError, match="The device is gone"), outlet.writing(StuckSink()):
        outlet.copy(iter(pieces))


def test_a_copy_to_a_storage_that_fails_ends() -> None:
    class StuckStorage(WrappedStorage):
        def create(self, _key: str, _size_bytes: int | None = None) -> Sink:
            return StuckSink()

    storage = MemoryStorage("mem://cache")
    write_object(storage, "x", [bytes(20_000)])
    with pytest.raises(StorageError, match="The device is gone"):
        copy_file(storage, "x", StuckStorage(storage), "y", block_bytes=4096)
