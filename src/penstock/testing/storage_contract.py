"""The contract suite of `Storage`: every promise of `penstock.storage.protocol`, as tests to inherit.

A back end subclasses it in a class named `Test...` with one fixture. For readable failures, call
`pytest.register_assert_rewrite("penstock.testing.storage_contract")` in `conftest.py`.

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def storage(self) -> Storage:
            return MyStorage(...)       # fresh and empty for each test

If a back end legitimately differs, it sets a class attribute; nothing else may be overridden.
"""

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import ClassVar

import numpy as np
import pytest

from penstock.errors import AccessRefused, ObjectNotFound, ShortTransfer, UsageError
from penstock.storage.protocol import (
    ObjectInfo,
    OptionValue,
    Release,
    Sink,
    Storage,
    exists,
    read_object,
    write_object,
)

_SHOWN_BYTES = 16

Buffer = bytes | bytearray | memoryview


def assert_same_bytes(actual: Buffer, expected: Buffer) -> None:
    """Fail unless both are equal. The message shows the first bytes that differ.

    With a plain `==`, pytest would compute a diff of both buffers, which takes hours for large ones.
    """
    one, other = bytes(actual), bytes(expected)
    if one != other:
        pairs = enumerate(zip(one, other, strict=False))
        at = next((at for at, (byte, wanted) in pairs if byte != wanted), min(len(one), len(other)))
        raise AssertionError(
            f"{len(one)} bytes instead of {len(other)}; from byte {at} onward "
            f"{one[at : at + _SHOWN_BYTES]!r} instead of {other[at : at + _SHOWN_BYTES]!r}"
        )


SMALL_SIZES = (0, 1, 4095, 4096, 4097)
ODD_PIECES = (1, 4095, 65_537, 4097, 1_000_003, 512)
WAIT_S = 60.0
"""The longest wait of the suite, so that a back end that hangs fails its test."""

ESCAPING_KEYS = ("", ".", "..", "../x", "a/../../x", "a/..", "/etc/passwd", "a//b", "a/./b", "a/", "a\0b")
ESCAPING_PREFIXES = ("..", "../x", "a/../../x", "/etc", "a//b", "./a", "a\0b")
AWKWARD_KEYS = (
    "plain",
    ".hidden/.file",
    "with space/and+plus",
    "per%41cent/q?uery#mark",
    "naïve/größe/文",
    "deep/er/and/deep/er/still",
    "dots..in...names",
)


def arbitrary_bytes(size_bytes: int, seed: int = 1) -> bytes:
    """Return incompressible bytes, always the same for the same arguments."""
    return np.random.default_rng(seed).bytes(size_bytes)


def pieces_of(content: bytes, sizes: tuple[int, ...] = ODD_PIECES) -> Iterator[bytearray]:
    """Yield `content` in writable pieces whose sizes cycle through `sizes`."""
    start = turn = 0
    while start < len(content):
        size = sizes[turn % len(sizes)]
        yield bytearray(content[start : start + size])
        start, turn = start + size, turn + 1


class ReleaseLedger:
    """Hands out `release` callbacks, overwrites each buffer that comes back, and counts its returns."""

    def __init__(self) -> None:
        self._released: list[int] = []
        self.num_issued = 0

    def issue(self, buffer: bytearray) -> Release:
        """Issue the callback for `buffer`.

        The callback acts as an owner that refills the buffer at once, as a pipeline does.
        """
        number = self.num_issued
        self.num_issued += 1

        def release() -> None:
            self._released.append(number)
            buffer[:] = b"\xff" * len(buffer)

        return release

    def assert_each_released_once(self) -> None:
        """Fail unless every buffer came back exactly once."""
        assert sorted(self._released) == list(range(self.num_issued))


def submit_pieces(sink: Sink, content: bytes, ledger: ReleaseLedger) -> None:
    """Submit all of `content` in pieces of odd sizes, each of which is overwritten once it is released."""
    for piece in pieces_of(content):
        sink.submit(memoryview(piece), ledger.issue(piece))


class StorageContract:
    """Tests of all promises of `penstock.storage.protocol`. Subclass it and define the `storage` fixture."""

    delete_missing_is_silent: ClassVar[bool] = False
    """True if deleting an absent key succeeds, because the service does not report that it is absent."""
    large_size_bytes: ClassVar[int] = 12 * 1024 * 1024 + 4097
    """The size of an object with several parts and an odd tail. Set a larger one if parts are larger."""
    clock_skew_s: ClassVar[float] = 120.0
    """The largest difference between the storage's clock and this machine's."""
    expected_options: ClassVar[Mapping[str, OptionValue]] = {}
    """Options that the storage's record must have, with these values."""

    @pytest.fixture
    def storage(self) -> Storage:
        """A fresh, empty storage: the only fixture that a subclass must define."""
        raise UsageError("A storage contract has no storage", fix="Override the `storage` fixture.")

    # Writing: `create` and its sinks

    @pytest.mark.parametrize("size", SMALL_SIZES)
    @pytest.mark.parametrize("size_is_told", [True, False])
    def test_small_objects_come_back_as_written(
        self, storage: Storage, size: int, *, size_is_told: bool
    ) -> None:
        content = arbitrary_bytes(size)
        info = write_object(storage, "a/small", [content], size_bytes=size if size_is_told else None)
        assert (info.key, info.size_bytes) == ("a/small", size)
        assert_same_bytes(read_object(storage, "a/small"), content)

    @pytest.mark.parametrize("size_is_told", [True, False])
    def test_a_large_object_in_odd_pieces_comes_back_as_written(
        self, storage: Storage, *, size_is_told: bool
    ) -> None:
        content = arbitrary_bytes(self.large_size_bytes)
        sink = storage.create("large", len(content) if size_is_told else None)
        ledger = ReleaseLedger()
        submit_pieces(sink, content, ledger)
        assert sink.finish().size_bytes == len(content)
        ledger.assert_each_released_once()
        assert_same_bytes(read_object(storage, "large", at_most=self.large_size_bytes), content)

    def test_a_large_object_from_one_buffer_comes_back_as_written(self, storage: Storage) -> None:
        content = arbitrary_bytes(self.large_size_bytes)
        write_object(storage, "large", [content])
        assert_same_bytes(read_object(storage, "large", at_most=self.large_size_bytes), content)

    def test_a_buffer_without_release_may_be_read_only_and_at_an_odd_address(self, storage: Storage) -> None:
        content = arbitrary_bytes(8193)
        sink = storage.create("odd")
        sink.submit(memoryview(content)[1:4098])
        sink.submit(memoryview(content)[4098:])
        assert sink.finish().size_bytes == 8192
        assert_same_bytes(read_object(storage, "odd"), content[1:])

    def test_empty_buffers_add_nothing_and_are_released(self, storage: Storage) -> None:
        ledger = ReleaseLedger()
        sink = storage.create("sparse", 3)
        for piece in (b"", b"ab", b"", b"c", b""):
            buffer = bytearray(piece)
            sink.submit(memoryview(buffer), ledger.issue(buffer))
        sink.finish()
        ledger.assert_each_released_once()
        assert read_object(storage, "sparse") == b"abc"

    @pytest.mark.parametrize("submitted", [0, 1, 9_999, 10_001, 200_000])
    def test_another_size_than_declared_is_an_error_and_leaves_nothing(
        self, storage: Storage, submitted: int
    ) -> None:
        ledger = ReleaseLedger()
        sink = storage.create("wrong/size", 10_000)
        with pytest.raises(ShortTransfer) as caught:
            self._submit_and_finish(sink, arbitrary_bytes(submitted), ledger)
        sink.abort()
        assert caught.value.expected_bytes == 10_000
        ledger.assert_each_released_once()
        assert not exists(storage, "wrong/size")
        assert list(storage.list()) == []

    @staticmethod
    def _submit_and_finish(sink: Sink, content: bytes, ledger: ReleaseLedger) -> None:
        submit_pieces(sink, content, ledger)
        sink.finish()

    def test_nobody_sees_an_object_before_it_is_finished(self, storage: Storage) -> None:
        sink = storage.create("folder/growing", 8192)
        sink.submit(memoryview(bytes(4096)))
        assert not exists(storage, "folder/growing")
        assert list(storage.list()) == []
        sink.submit(memoryview(bytes(4096)))
        sink.finish()
        assert [info.key for info in storage.list()] == ["folder/growing"]

    @pytest.mark.parametrize("size", [0, 10_000, 3_000_000])
    def test_abort_releases_all_and_leaves_nothing_and_is_safe_twice(
        self, storage: Storage, size: int
    ) -> None:
        ledger = ReleaseLedger()
        sink = storage.create("folder/given-up")
        submit_pieces(sink, arbitrary_bytes(size), ledger)
        sink.abort()
        sink.abort()
        ledger.assert_each_released_once()
        assert not exists(storage, "folder/given-up")
        assert list(storage.list()) == []

    def test_an_overwrite_keeps_the_old_object_until_it_is_finished(self, storage: Storage) -> None:
        old, new = arbitrary_bytes(5000, seed=1), arbitrary_bytes(7000, seed=2)
        write_object(storage, "key", [old])
        sink = storage.create("key", len(new))
        sink.submit(memoryview(new))
        assert_same_bytes(read_object(storage, "key"), old)
        sink.finish()
        assert_same_bytes(read_object(storage, "key"), new)
        assert storage.stat("key").size_bytes == 7000

    def test_an_aborted_overwrite_keeps_the_old_object(self, storage: Storage) -> None:
        write_object(storage, "key", [b"old"])
        sink = storage.create("key")
        sink.submit(memoryview(b"newer"))
        sink.abort()
        assert read_object(storage, "key") == b"old"
        assert [info.key for info in storage.list()] == ["key"]

    def test_sinks_in_many_threads_do_not_mix(self, storage: Storage) -> None:
        def write(number: int) -> int:
            content = arbitrary_bytes(200_000 + number, seed=number)
            return write_object(storage, f"many/{number}", pieces_of(content)).size_bytes

        with ThreadPoolExecutor(4) as threads:
            sizes = list(threads.map(write, range(8), timeout=WAIT_S))
        assert sizes == [200_000 + number for number in range(8)]
        for number in range(8):
            expected = arbitrary_bytes(200_000 + number, seed=number)
            assert_same_bytes(read_object(storage, f"many/{number}"), expected)

    # Reading: `open` and its sources

    content: ClassVar[bytes] = arbitrary_bytes(300_007, seed=3)

    @pytest.fixture
    def stored(self, storage: Storage) -> Storage:
        """The storage with `content` at `read/me`."""
        write_object(storage, "read/me", [self.content])
        return storage

    @pytest.mark.parametrize("offset", [0, 1, 511, 4096, 4097, 299_000])
    @pytest.mark.parametrize("length", [0, 1, 512, 1001])
    @pytest.mark.parametrize("shift", [0, 1])
    def test_any_range_is_read_into_a_buffer_at_any_address(
        self, stored: Storage, offset: int, length: int, shift: int
    ) -> None:
        room = bytearray(b"\xa5" * (length + 64))
        with closing(stored.open("read/me")) as source:
            source.read_into(offset, memoryview(room)[shift : shift + length])
        assert_same_bytes(room[shift : shift + length], self.content[offset : offset + length])
        assert set(room[:shift] + room[shift + length :]) == {0xA5}

    def test_long_unaligned_ranges_are_read_whole(self, stored: Storage) -> None:
        with closing(stored.open("read/me")) as source:
            for offset, length in ((0, 300_007), (1, 300_006), (4095, 290_000), (8192, 262_144)):
                room = bytearray(length + 1)
                source.read_into(offset, memoryview(room)[1:])
                assert_same_bytes(room[1:], self.content[offset : offset + length])

    def test_a_source_knows_its_size(self, stored: Storage) -> None:
        with closing(stored.open("read/me")) as source:
            assert source.size_bytes == len(self.content)

    @pytest.mark.parametrize(
        ("offset", "length", "there"),
        [(300_006, 2, 1), (300_007, 1, 0), (900_000, 10, 0), (0, 300_008, 300_007)],
    )
    def test_a_read_past_the_end_is_an_error(
        self, stored: Storage, offset: int, length: int, there: int
    ) -> None:
        with closing(stored.open("read/me")) as source:
            with pytest.raises(ShortTransfer) as caught:
                source.read_into(offset, memoryview(bytearray(length)))
            source.read_into(300_007, memoryview(bytearray()))
        assert (caught.value.expected_bytes, caught.value.actual_bytes) == (length, there)

    def test_many_threads_read_one_source_at_once(self, stored: Storage) -> None:
        with closing(stored.open("read/me")) as source:

            def read(number: int) -> bool:
                offset = (number * 7919) % 250_000
                room = bytearray(10_000 + number)
                source.read_into(offset, memoryview(room))
                return room == self.content[offset : offset + len(room)]

            with ThreadPoolExecutor(8) as threads:
                assert all(threads.map(read, range(64), timeout=WAIT_S))

    def test_closing_twice_is_safe(self, stored: Storage) -> None:
        source = stored.open("read/me")
        source.close()
        source.close()
        assert exists(stored, "read/me")

    # Naming: keys, `list`, `stat`, `delete`, `sync` and the record

    @pytest.mark.parametrize("verb", ["open", "stat", "delete"])
    @pytest.mark.parametrize("key", ["absent", "no/such/folder", "present/below-an-object", "folder"])
    def test_an_absent_object_is_not_found_and_named(self, storage: Storage, verb: str, key: str) -> None:
        write_object(storage, "present", [b"x"])
        write_object(storage, "folder/object", [b"x"])
        if verb == "delete" and self.delete_missing_is_silent:
            storage.delete(key)
        else:
            with pytest.raises(ObjectNotFound) as caught:
                getattr(storage, verb)(key)
            assert key in str(caught.value)
        assert exists(storage, "folder/object")

    @pytest.mark.parametrize("verb", ["create", "open", "stat", "delete"])
    @pytest.mark.parametrize("key", ESCAPING_KEYS)
    def test_a_key_that_leaves_the_root_is_refused(self, storage: Storage, verb: str, key: str) -> None:
        with pytest.raises(AccessRefused):
            getattr(storage, verb)(key)

    @pytest.mark.parametrize("prefix", ESCAPING_PREFIXES)
    def test_a_prefix_that_leaves_the_root_is_refused(self, storage: Storage, prefix: str) -> None:
        with pytest.raises(AccessRefused):
            list(storage.list(prefix))
        with pytest.raises(AccessRefused):
            storage.sync(prefix)

    @pytest.mark.parametrize("key", AWKWARD_KEYS)
    def test_awkward_names_are_taken_literally(self, storage: Storage, key: str) -> None:
        content = key.encode()
        assert write_object(storage, key, [content]).key == key
        assert_same_bytes(read_object(storage, key), content)
        assert [info.key for info in storage.list()] == [key]
        storage.delete(key)
        assert list(storage.list()) == []

    def test_a_fresh_storage_lists_nothing(self, storage: Storage) -> None:
        assert list(storage.list()) == []
        assert list(storage.list("no/such/folder")) == []

    def test_a_listing_gives_all_objects_of_all_folders(self, storage: Storage) -> None:
        keys = {f"{folder}{number}" for folder in ("", "a/", "a/b/", "c/d/e/") for number in range(5)}
        for key in keys:
            write_object(storage, key, [key.encode()])
        listed = list(storage.list())
        assert sorted(info.key for info in listed) == sorted(keys)
        assert all(info.size_bytes == len(info.key) for info in listed)

    def test_a_prefix_is_a_folder_and_no_string_prefix(self, storage: Storage) -> None:
        for key in ("a", "ab/x", "b/1", "b/c/2", "bc"):
            write_object(storage, key, [b"x"])
        assert sorted(info.key for info in storage.list("b")) == ["b/1", "b/c/2"]
        assert sorted(info.key for info in storage.list("b/")) == ["b/1", "b/c/2"]
        assert [info.key for info in storage.list("b/c")] == ["b/c/2"]
        assert list(storage.list("a")) == []

    def test_a_listing_is_a_stream_that_may_be_left_early(self, storage: Storage) -> None:
        for number in range(3):
            write_object(storage, str(number), [b"x"])
        listing = storage.list()
        assert isinstance(listing, Iterator)
        assert isinstance(next(listing), ObjectInfo)
        del listing
        assert sorted(info.key for info in storage.list()) == ["0", "1", "2"]

    def test_stat_and_list_agree_on_size_and_time(self, storage: Storage) -> None:
        before_s = time.time()
        write_object(storage, "a/dated", [b"12345"])
        info = storage.stat("a/dated")
        (listed,) = storage.list("a")
        assert (info.key, info.size_bytes) == (listed.key, listed.size_bytes) == ("a/dated", 5)
        assert abs(info.modified_s - listed.modified_s) < 1.001
        assert before_s - self.clock_skew_s <= info.modified_s <= time.time() + self.clock_skew_s

    def test_a_deleted_object_is_gone_and_its_neighbour_stays(self, storage: Storage) -> None:
        write_object(storage, "a/goes", [b"x"])
        write_object(storage, "a/stays", [b"y"])
        storage.delete("a/goes")
        assert not exists(storage, "a/goes")
        assert [info.key for info in storage.list()] == ["a/stays"]
        with pytest.raises(ObjectNotFound):
            storage.open("a/goes")

    @pytest.mark.parametrize("prefix", ["", "a", "a/", "no/such/folder"])
    def test_sync_keeps_every_object(self, storage: Storage, prefix: str) -> None:
        write_object(storage, "a/b/kept", [b"kept"])
        storage.sync(prefix)
        assert read_object(storage, "a/b/kept") == b"kept"

    def test_counters_tell_the_bytes_that_moved(self, storage: Storage) -> None:
        before = storage.counters.snapshot()
        write_object(storage, "counted", [bytes(5000), bytes(345)])
        with closing(storage.open("counted")) as source:
            source.read_into(45, memoryview(bytearray(1200)))
        after = storage.counters.snapshot()
        assert after.written_bytes - before.written_bytes == 5345
        assert after.read_bytes - before.read_bytes == 1200
        assert after.requests > before.requests
        assert after.errors == before.errors

    def test_the_storage_says_what_it_is_and_how_it_was_told_to_work(self, storage: Storage) -> None:
        assert "://" in storage.uri
        recorded = dict(storage.options)
        kinds = (str, int, float, bool, tuple)
        assert all(isinstance(value, kinds) for value in recorded.values())
        assert json.loads(json.dumps(recorded)).keys() == recorded.keys()
        for name, value in self.expected_options.items():
            assert recorded[name] == value
