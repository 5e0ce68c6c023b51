import errno
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

from penstock.errors import OutOfSpace, StorageError
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import Sink, Storage, exists, read_object, write_object
from penstock.testing.faults import (
    FailAfter,
    FailAtCall,
    Full,
    Late,
    Slow,
    Verb,
)
from penstock.testing.storage_contract import ReleaseLedger, StorageContract


class StoppedClock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


class TestSlowByNothing(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return Slow(MemoryStorage(), 0)


class TestFailAfterMoreThanIsMoved(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return FailAfter(MemoryStorage(), 2**60)


class TestFailAtACallThatNeverComes(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return FailAtCall(MemoryStorage(), "submit", 10**9)


class TestFullAtMoreThanIsWritten(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return Full(MemoryStorage(), 2**60)


class TestLate(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return Late(MemoryStorage())


class TestWrappersInsideEachOther(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return Full(Late(FailAfter(Slow(MemoryStorage(), 0), 2**60)), 2**60)


def test_slow_delays_every_call_once() -> None:
    clock = StoppedClock()
    storage = Slow(MemoryStorage(), 0.25, sleep=clock.sleep)
    write_object(storage, "key", [b"one", b"two"])
    assert clock.slept == [0.25] * 4  # create, two submits, finish
    read_object(storage, "key")
    list(storage.list())
    storage.stat("key")
    storage.sync()
    storage.delete("key")
    assert clock.slept == [0.25] * 10


def test_an_abort_is_slow_after_it_gave_up() -> None:
    clock = StoppedClock()
    storage = Slow(MemoryStorage(), 1.0, sleep=clock.sleep)
    sink = storage.create("key")
    sink.abort()
    assert clock.slept == [1.0, 1.0]


def test_wrapping_shows_in_the_recorded_options() -> None:
    storage = Full(Slow(MemoryStorage(), 0.5), 1000)
    assert storage.options == {"slow_latency_s": 0.5, "full_capacity_bytes": 1000}
    assert storage.uri == "mem://store"


def test_fail_after_lets_exactly_its_bytes_through() -> None:
    storage = FailAfter(MemoryStorage(), 10)
    write_object(storage, "fits", [bytes(6)])
    with pytest.raises(StorageError, match="Injected fault in submit") as caught:
        write_object(storage, "too much", [bytes(4), bytes(1)])
    assert caught.value.errno == errno.EIO
    assert exists(storage, "fits")
    assert not exists(storage, "too much")
    with pytest.raises(StorageError, match="Injected fault in read_into"):
        read_object(storage, "fits")


@pytest.mark.parametrize("verb", ["create", "submit", "finish", "open", "read_into", "list", "stat", "sync"])
def test_fail_at_call_fails_once_and_at_that_verb_only(verb: Verb) -> None:
    storage = FailAtCall(MemoryStorage(), verb, 2)

    def use_all_verbs() -> None:
        write_object(storage, "key", [b"x"])
        read_object(storage, "key")
        list(storage.list())
        storage.stat("key")
        storage.sync()

    use_all_verbs()
    with pytest.raises(StorageError, match=f"Injected fault in {verb}"):
        use_all_verbs()
    use_all_verbs()


def test_a_failing_delete_keeps_the_object() -> None:
    storage = FailAtCall(MemoryStorage(), "delete", 1)
    write_object(storage, "key", [b"x"])
    with pytest.raises(StorageError, match="delete"):
        storage.delete("key")
    assert exists(storage, "key")
    storage.delete("key")
    assert not exists(storage, "key")


def test_a_failing_abort_has_given_up_inside() -> None:
    storage = FailAtCall(MemoryStorage(), "abort", 1)
    sink = storage.create("key")
    with pytest.raises(StorageError, match="abort"):
        sink.abort()
    sink.abort()
    assert list(storage.list()) == []


def submit_until_it_fails(sink: Sink, ledger: ReleaseLedger) -> None:
    for _ in range(5):
        buffer = bytearray(100)
        sink.submit(memoryview(buffer), ledger.issue(buffer))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inside: FailAfter(inside, 250),
        lambda inside: FailAtCall(inside, "submit", 3),
        lambda inside: Full(inside, 250),
        lambda inside: FailAfter(Late(inside), 250),
        lambda inside: Late(FailAfter(inside, 250)),
    ],
)
def test_where_a_submit_fails_every_buffer_is_released_once(wrap: Callable[[Storage], Storage]) -> None:
    storage, ledger = wrap(MemoryStorage()), ReleaseLedger()
    sink = storage.create("key")
    with pytest.raises(StorageError):
        submit_until_it_fails(sink, ledger)
    sink.abort()
    assert ledger.num_issued == 3
    ledger.assert_each_released_once()
    assert not exists(storage, "key")


def test_a_submit_without_release_fails_alike() -> None:
    sink = FailAtCall(MemoryStorage(), "submit", 1).create("key")
    with pytest.raises(StorageError):
        sink.submit(memoryview(b"x"))
    sink.submit(memoryview(b"y"))
    assert sink.finish().size_bytes == 1


def test_full_storage_raises_enospc() -> None:
    storage = Full(MemoryStorage(), 10)
    write_object(storage, "fits", [bytes(10)])
    with pytest.raises(OutOfSpace, match="1 bytes do not fit into 0") as caught:
        write_object(storage, "not", [bytes(1)])
    assert caught.value.errno == errno.ENOSPC


def test_full_takes_back_what_abort_delete_and_overwrite_free() -> None:
    storage = Full(MemoryStorage(), 10)
    with suppress(OutOfSpace):
        write_object(storage, "aborted", [bytes(8), bytes(8)])
    write_object(storage, "key", [bytes(5)])
    write_object(storage, "key", [bytes(5)])
    write_object(storage, "other", [bytes(5)])
    storage.delete("key")
    write_object(storage, "third", [bytes(5)])
    with pytest.raises(OutOfSpace):
        write_object(storage, "fourth", [bytes(1)])


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_late_acknowledges_only_at_the_end(end: str) -> None:
    released: list[int] = []
    sink = Late(MemoryStorage()).create("key")
    for number in range(3):
        sink.submit(memoryview(b"x"), partial(released.append, number))
    assert released == []
    getattr(sink, end)()
    assert released == [0, 1, 2]
