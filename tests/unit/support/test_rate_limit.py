import math
import threading
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.rate_limit import RateLimitedStorage, TokenBucket

from penstock.errors import UsageError
from penstock.storage import open_storage
from penstock.storage.capabilities import find_folder_tree, prefer_direct_access
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import Storage, read_object, write_object
from penstock.testing.storage_contract import StorageContract


class StoppedClock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class TestLimitedToInfinity(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return RateLimitedStorage(MemoryStorage(), math.inf)


class TestLimitedToWhatNobodyNotices(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return RateLimitedStorage(MemoryStorage(), 1e12)


def test_the_limit_shows_in_the_recorded_options() -> None:
    assert RateLimitedStorage(MemoryStorage(), 1e6).options == {"limited_rate_bytes_per_s": 1e6}


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_that_lets_nothing_pass_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="is not above 0"):
        RateLimitedStorage(MemoryStorage(), rate)


def test_the_way_past_the_page_cache_has_the_same_limit(tmp_path: Path) -> None:
    clock = StoppedClock()
    files = open_storage(str(tmp_path / "root"), {})
    storage = RateLimitedStorage(files, 1000.0, clock=clock, sleep=clock.sleep)
    large = prefer_direct_access(storage)
    write_object(storage, "small", [bytes(1000)])
    write_object(large, "large", [bytes(3000)])
    assert clock.now_s - 100.0 == pytest.approx(4.0, abs=0.011)
    assert isinstance(large, RateLimitedStorage)
    assert large.options["publish"] == "in_place"
    assert find_folder_tree(large) is not None
    assert bytes(read_object(storage, "large")) == bytes(3000)


def test_a_wait_that_fails_releases_the_buffer() -> None:
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    released: list[int] = []
    sink = RateLimitedStorage(MemoryStorage(), 1.0, sleep=interrupted).create("key")
    with pytest.raises(KeyboardInterrupt):
        sink.submit(memoryview(bytes(1000)), lambda: released.append(1))
    sink.abort()
    assert released == [1]


def test_limited_bytes_take_their_time_whatever_the_size_of_a_call() -> None:
    clock = StoppedClock()
    storage = RateLimitedStorage(MemoryStorage(), 1000.0, clock=clock, sleep=clock.sleep)
    write_object(storage, "key", [bytes(1000), bytes(500), bytes(3500)])
    assert clock.now_s - 100.0 == pytest.approx(5.0, abs=0.011)
    with closing(storage.open("key")) as source:
        source.read_into(0, memoryview(bytearray(2000)))
    assert clock.now_s - 100.0 == pytest.approx(7.0, abs=0.011)


def test_a_bucket_does_not_save_up_more_than_its_burst() -> None:
    clock = StoppedClock()
    bucket = TokenBucket(1000.0, clock=clock, burst_s=0.5)
    clock.now_s += 3600
    assert bucket.take(500) == pytest.approx(0.0)
    assert bucket.take(1000) == pytest.approx(1.0)
    assert bucket.take(1000) == pytest.approx(2.0)


def test_threads_share_one_bucket() -> None:
    clock = StoppedClock()
    bucket = TokenBucket(1000.0, clock=clock, burst_s=0.0)
    waits: list[float] = []
    threads = [threading.Thread(target=lambda: waits.append(bucket.take(100))) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(waits) == pytest.approx([0.1 * turn for turn in range(1, 11)])
