"""The rank in the name of a trace file, and what an account has of a file."""

from pathlib import Path

import pytest
from tests.support.trace_files import START_US, Writing, make_events, write_trace

from penstock.trace.event_schema import TraceFile
from penstock.trace.trace_set import read_trace_file


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("trace-3-of-16.pfw.gz", 3),
        ("trace-1-of-2-node7-4711-1.pfw.gz", 1),
        ("run_rank12.pfw", 12),
        ("trace-7.pfw", 7),
        ("trace-node7-4711.pfw.gz", None),
        ("trace-0c95a86b679b75ff-preload.pfw.gz", None),
        ("trace-1234567890123456-app.pfw.gz", None),
        ("frank-3.pfw", None),
    ],
)
def test_a_rank_is_a_number_in_its_place_and_not_the_beginning_of_a_hash(name: str, rank: int | None) -> None:
    assert TraceFile(path=Path(name)).rank == rank


@pytest.mark.parametrize("num_events", [5, 2000])
def test_an_account_has_hosts_ranks_and_times_of_its_file(num_events: int, tmp_path: Path) -> None:
    writing = Writing(events=num_events, rank=9)
    reading = read_trace_file(TraceFile(path=write_trace(tmp_path, writing)))
    assert sum(batch.num_rows for batch in reading.batches) == num_events + 1
    account = reading.account
    assert (account.hosts, account.ranks) == ({"node1"}, {9})
    events = list(make_events(writing))
    assert account.first_us == events[0].ts_us >= START_US
    assert account.last_us == events[-1].ts_us + events[-1].dur_us, "where the writer's own last event is"
