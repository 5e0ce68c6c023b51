"""The contract suite catches storages that break a promise: each defect fails the test that names it."""

from collections.abc import Callable, Iterator

import pytest

from penstock.errors import ObjectNotFound, UsageError
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import (
    Counters,
    ObjectInfo,
    Release,
    Sink,
    Source,
    Storage,
    WrappedSink,
    WrappedSource,
    WrappedStorage,
    exists,
)
from penstock.testing.storage_contract import ReleaseLedger, StorageContract, pieces_of


class ForgetsReleases(WrappedStorage):
    class _Sink(WrappedSink):
        def submit(self, buffer: memoryview, release: Release | None = None) -> None:
            super().submit(buffer)

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        return self._Sink(super().create(key, size_bytes))


class ReleasesTwice(WrappedStorage):
    class _Sink(WrappedSink):
        def submit(self, buffer: memoryview, release: Release | None = None) -> None:
            super().submit(buffer, release)
            if release is not None:
                release()

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        return self._Sink(super().create(key, size_bytes))


class ReleasesBeforeItIsDone(WrappedStorage):
    class _Sink(WrappedSink):
        def submit(self, buffer: memoryview, release: Release | None = None) -> None:
            if release is not None:
                release()
            super().submit(buffer)

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        return self._Sink(super().create(key, size_bytes))


class IgnoresDeclaredSizes(WrappedStorage):
    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        return super().create(key)


class PublishesAborted(WrappedStorage):
    class _Sink(WrappedSink):
        def abort(self) -> None:
            super().finish()

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        return self._Sink(super().create(key, size_bytes))


class ReadsShort(WrappedStorage):
    class _Source(WrappedSource):
        def read_into(self, offset: int, buffer: memoryview) -> None:
            there = max(0, min(buffer.nbytes, self.size_bytes - offset))
            super().read_into(min(offset, self.size_bytes), buffer[:there])

    def open(self, key: str) -> Source:
        return self._Source(super().open(key))


class ListsStringPrefixes(WrappedStorage):
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return (info for info in super().list() if info.key.startswith(prefix))


class CountsNothing(WrappedStorage):
    def __init__(self, inside: Storage) -> None:
        super().__init__(inside)
        self.counters = Counters()


class LosesTheTail(WrappedStorage):
    class _Sink(WrappedSink):
        def submit(self, buffer: memoryview, release: Release | None = None) -> None:
            super().submit(buffer[: buffer.nbytes - buffer.nbytes % 512], release)

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        return self._Sink(super().create(key))


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (
            ForgetsReleases,
            lambda suite, storage: suite.test_empty_buffers_add_nothing_and_are_released(storage),
        ),
        (
            ReleasesTwice,
            lambda suite, storage: suite.test_abort_releases_all_and_leaves_nothing_and_is_safe_twice(
                storage, 10_000
            ),
        ),
        (
            ReleasesBeforeItIsDone,
            lambda suite, storage: suite.test_a_large_object_in_odd_pieces_comes_back_as_written(
                storage, size_is_told=False
            ),
        ),
        (
            PublishesAborted,
            lambda suite, storage: suite.test_an_aborted_overwrite_keeps_the_old_object(storage),
        ),
        (
            ListsStringPrefixes,
            lambda suite, storage: suite.test_a_prefix_is_a_folder_and_no_string_prefix(storage),
        ),
        (
            LosesTheTail,
            lambda suite, storage: suite.test_small_objects_come_back_as_written(
                storage, 4097, size_is_told=True
            ),
        ),
    ],
)
def test_a_broken_promise_fails_its_test(
    broken: Callable[[Storage], Storage], check: Callable[[StorageContract, Storage], None]
) -> None:
    with pytest.raises(AssertionError):
        check(StorageContract(), broken(MemoryStorage()))


def test_a_wrong_size_that_goes_unnoticed_fails_its_test() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        StorageContract().test_another_size_than_declared_is_an_error_and_leaves_nothing(
            IgnoresDeclaredSizes(MemoryStorage()), 9_999
        )


def test_a_short_read_that_goes_unnoticed_fails_its_test() -> None:
    storage = ReadsShort(MemoryStorage())
    sink = storage.create("read/me")
    sink.submit(memoryview(StorageContract.content))
    sink.finish()
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        StorageContract().test_a_read_past_the_end_is_an_error(storage, 300_006, 2, 1)


def test_uncounted_bytes_fail_their_test() -> None:
    with pytest.raises(AssertionError):
        StorageContract().test_counters_tell_the_bytes_that_moved(CountsNothing(MemoryStorage()))


class TestSilentDeletes(StorageContract):
    """A back end whose service does not tell declares it, and passes."""

    delete_missing_is_silent = True

    class _Silent(WrappedStorage):
        def delete(self, key: str) -> None:
            try:
                super().delete(key)
            except ObjectNotFound:
                return

    @pytest.fixture
    def storage(self) -> Storage:
        return self._Silent(MemoryStorage())


def test_a_suite_without_a_storage_fixture_fails_with_a_hint() -> None:
    fixture = vars(StorageContract.__mro__[-2])["storage"]
    with pytest.raises(UsageError, match="has no storage"):
        fixture._get_wrapped_function()(StorageContract())


def test_a_ledger_notices_buffers_that_never_came_back() -> None:
    ledger = ReleaseLedger()
    buffer = bytearray(b"content")
    release = ledger.issue(buffer)
    with pytest.raises(AssertionError):
        ledger.assert_each_released_once()
    release()
    ledger.assert_each_released_once()
    assert buffer == b"\xff" * 7


def test_pieces_are_the_content_in_order() -> None:
    content = bytes(range(256)) * 100
    pieces = list(pieces_of(content, (1, 1000)))
    assert b"".join(pieces) == content
    assert {len(piece) for piece in pieces[:-1]} == {1, 1000}
    assert not exists(MemoryStorage(), "anything")
