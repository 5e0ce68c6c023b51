import json
import pickle
from concurrent.futures import ThreadPoolExecutor

from penstock.storage.protocol import Counters


def test_counters_begin_at_nothing() -> None:
    fresh = Counters()
    assert (fresh.requests, fresh.retries, fresh.errors, fresh.written_bytes, fresh.read_bytes) == (0,) * 5
    assert not fresh.copied_bytes
    assert not fresh.requests_by_endpoint


def test_events_add_up() -> None:
    counters = Counters()
    counters.add(requests=1, written_bytes=10)
    counters.add(requests=2, read_bytes=5, retries=1, errors=1)
    counters.add_copy("bounce", 7)
    counters.add_copy("bounce", 1)
    counters.add_copy("client", 2)
    assert (counters.requests, counters.retries, counters.errors) == (3, 1, 1)
    assert (counters.written_bytes, counters.read_bytes) == (10, 5)
    assert counters.copied_bytes == {"bounce": 8, "client": 2}


def test_requests_are_counted_by_endpoint() -> None:
    counters = Counters()
    counters.add(requests=1, endpoint="http://a")
    counters.add(requests=2, endpoint="http://b")
    counters.add(requests=3)
    assert counters.requests == 6
    assert counters.requests_by_endpoint == {"http://a": 1, "http://b": 2}


def test_a_snapshot_does_not_move_on() -> None:
    counters = Counters()
    counters.add(requests=1, endpoint="http://a")
    counters.add_copy("bounce", 1)
    before = counters.snapshot()
    counters.add(requests=1, endpoint="http://a")
    counters.add_copy("bounce", 1)
    assert (before.requests, before.copied_bytes["bounce"], before.requests_by_endpoint["http://a"]) == (
        1,
        1,
        1,
    )
    assert counters.snapshot().requests == 2


def test_threads_lose_no_event() -> None:
    counters = Counters()

    def count(_turn: int) -> None:
        for _ in range(500):
            counters.add(requests=1, written_bytes=3, endpoint="http://a")
            counters.add_copy("bounce", 2)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(count, range(8), timeout=60))
    assert counters.requests == counters.requests_by_endpoint["http://a"] == 4000
    assert counters.written_bytes == 12_000
    assert counters.copied_bytes["bounce"] == 8000


def _some() -> Counters:
    counters = Counters()
    counters.add(requests=3, retries=1, errors=2, written_bytes=10, read_bytes=5, endpoint="http://a")
    counters.add_copy("bounce", 7)
    return counters


def test_counters_travel_between_processes() -> None:
    arrived = pickle.loads(pickle.dumps(_some()))
    assert arrived == _some()
    arrived.add(requests=1)
    assert arrived.requests == 4


def test_the_counters_of_several_ranks_are_summed_by_name() -> None:
    other = Counters()
    other.add(requests=1, endpoint="http://b")
    other.add_copy("bounce", 1)
    both = sum([_some(), other], Counters())
    assert (both.requests, both.retries, both.errors, both.written_bytes, both.read_bytes) == (4, 1, 2, 10, 5)
    assert both.copied_bytes == {"bounce": 8}
    assert both.requests_by_endpoint == {"http://a": 3, "http://b": 1}


def test_a_record_is_plain_data() -> None:
    assert json.loads(json.dumps(_some().record()))["copied_bytes"] == {"bounce": 7}
