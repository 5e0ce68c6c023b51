"""The native loader: batches in order, bounded depth and memory, errors at their batch, no thread left."""

import threading
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bench.loader.loader_protocol import BatchRequest, ReadRequest
from penstock.bench.loader.native_loader import NativeLoader, NativeOptions
from penstock.errors import ObjectNotFound, ShortTransfer, UsageError
from penstock.storage import Source, Storage
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import write_object


def _stored(num_objects: int, size_bytes: int = 1000) -> MemoryStorage:
    storage = MemoryStorage()
    for index in range(num_objects):
        write_object(storage, f"f{index}", [bytes([index % 256]) * size_bytes])
    return storage


def _whole(*indices: int) -> BatchRequest:
    return BatchRequest(tuple(ReadRequest(f"f{index}") for index in indices), len(indices))


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-loader")]


@pytest.fixture
def storage() -> MemoryStorage:
    return _stored(40)


@settings(max_examples=settings().max_examples // 3)
@given(
    st.lists(st.integers(0, 5), max_size=12),
    st.integers(1, 6),
    st.integers(0, 4),
    st.integers(1, 1500),
)
def test_every_batch_arrives_in_order_with_its_bytes(
    sizes: list[int], threads: int, prefetch: int, buffer_bytes: int
) -> None:
    storage = _stored(6)
    options = NativeOptions(threads=threads, prefetch_batches=prefetch, buffer_bytes=buffer_bytes)
    loader = NativeLoader(storage, options)
    batches = list(loader.epoch(_whole(*range(size)) for size in sizes))
    loader.close()
    assert [batch.num_samples for batch in batches] == sizes
    assert [batch.read_bytes for batch in batches] == [size * 1000 for size in sizes]
    assert storage.counters.read_bytes == sum(sizes) * 1000


def test_ranges_are_read_exactly(storage: MemoryStorage) -> None:
    loader = NativeLoader(storage, NativeOptions(threads=2, buffer_bytes=64))
    request = BatchRequest(
        (ReadRequest("f1", 100, 300), ReadRequest("f1", 400, 1), ReadRequest("f2", 999)), 3
    )
    (batch,) = loader.epoch([request])
    loader.close()
    assert (batch.read_bytes, batch.num_reads, batch.num_samples) == (302, 3, 3)
    assert batch.read_ns > 0


def test_threads_serve_all_epochs_and_end_with_the_loader(storage: MemoryStorage) -> None:
    loader = NativeLoader(storage, NativeOptions(threads=3))
    for _ in range(3):
        assert sum(batch.num_samples for batch in loader.epoch([_whole(1, 2), _whole(3)])) == 3
        assert len(_threads()) == 3
    loader.close()
    loader.close()
    assert _threads() == []


def test_a_missing_object_is_an_error_at_its_batch_and_the_loader_goes_on(storage: MemoryStorage) -> None:
    loader = NativeLoader(storage, NativeOptions(threads=2))
    epoch = loader.epoch([_whole(1), _whole(2, 99), _whole(3)])
    assert next(epoch).num_samples == 1
    with pytest.raises(ObjectNotFound, match="f99"):
        next(epoch)
    assert len(list(loader.epoch([_whole(4)]))) == 1
    loader.close()


def test_a_file_of_another_size_is_named(storage: MemoryStorage) -> None:
    loader = NativeLoader(storage, NativeOptions())
    with pytest.raises(ShortTransfer, match="f5") as caught:
        list(loader.epoch([BatchRequest((ReadRequest("f5", expected_bytes=1001),), 1)]))
    assert (caught.value.expected_bytes, caught.value.actual_bytes) == (1001, 1000)
    loader.close()


def test_a_range_past_the_end_is_a_short_transfer(storage: MemoryStorage) -> None:
    loader = NativeLoader(storage, NativeOptions())
    with pytest.raises(ShortTransfer):
        list(loader.epoch([BatchRequest((ReadRequest("f5", 500, 501),), 1)]))
    loader.close()


class _Watched:
    """A storage that notes how many reads are under way, and holds them until it is told."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.gate = threading.Event()
        self.under_way = 0
        self.most = 0
        self.opened: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, key: str) -> Source:
        with self._lock:
            self.opened.append(key)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        self.gate.wait(10)
        with self._lock:
            self.under_way -= 1
        return self._inner.open(key)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_defect_of_a_storage_comes_out_instead_of_hanging(storage: MemoryStorage, threads: int) -> None:
    watched = _Watched(storage)
    watched.open = lambda key: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    loader = NativeLoader(watched, NativeOptions(threads=threads, prefetch_batches=4))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            list(loader.epoch([_whole(*range(8))] * 9))
    loader.close()


def _endless() -> Iterator[BatchRequest]:
    while True:
        yield _whole(0, 1)


def test_no_more_is_asked_for_than_the_prefetch_allows_and_the_threads_can_take(
    storage: MemoryStorage,
) -> None:
    watched = _Watched(storage)
    asked = []

    def requests() -> Iterator[BatchRequest]:
        for request in _endless():
            asked.append(request)
            yield request

    loader = NativeLoader(watched, NativeOptions(threads=3, prefetch_batches=4))
    watched.gate.set()
    assert len(list(islice(loader.epoch(requests()), 10))) == 10
    assert len(asked) <= 10 + 4 + 1
    assert watched.most <= 3
    loader.close()


def test_an_epoch_left_early_leaves_no_reads_behind(storage: MemoryStorage) -> None:
    loader = NativeLoader(storage, NativeOptions(threads=2, prefetch_batches=8))
    epoch = loader.epoch(_endless())
    next(epoch)
    epoch.close()  # type: ignore[attr-defined]
    before = storage.counters.read_bytes
    (batch,) = loader.epoch([_whole(7)])
    assert batch.read_bytes == storage.counters.read_bytes - before == 1000
    loader.close()


def test_a_file_read_in_ranges_is_opened_once_by_a_thread(storage: MemoryStorage) -> None:
    watched = _Watched(storage)
    watched.gate.set()
    loader = NativeLoader(watched, NativeOptions(threads=1))
    ranges = [BatchRequest((ReadRequest("f1", start, 100),), 1) for start in range(0, 1000, 100)]
    assert len(list(loader.epoch(ranges))) == 10
    assert watched.opened == ["f1"]
    loader.close()


def test_memory_does_not_grow_with_what_is_read() -> None:
    storage = MemoryStorage()
    write_object(storage, "f0", [np.zeros(8 << 20, dtype=np.uint8).data])
    loader = NativeLoader(storage, NativeOptions(threads=1, buffer_bytes=64 << 10))
    list(loader.epoch([_whole(0)]))
    tracemalloc.start()
    list(loader.epoch([_whole(0)] * 8))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    loader.close()
    assert peak < 256 << 10


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"prefetch_batches": -1}, {"buffer_bytes": 0}])
def test_options_that_cannot_work_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        NativeOptions(**wrong)
