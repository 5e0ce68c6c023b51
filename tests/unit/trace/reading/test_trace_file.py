"""The rank in the name of a trace file, and what an account has of a file."""

from pathlib import Path

import pytest
from tests.support.trace_files import START_US, Writing, make_events, write_trace

from penstock.errors import UsageError
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


@pytest.mark.parametrize(
    ("pattern", "rank"),
    [
        (r"node(\d+)", 12), (r"NODE(\d+)_(\d+)", 12), (r"(node)", None), (r"node(x?)", None),
        (r"no(\d+)", None), (r"_(\d+)", 2_147_483_647), (r"-(\d+)", None),
    ],
)  # fmt: skip
def test_a_pattern_of_ones_own_finds_the_number_in_its_first_group(pattern: str, rank: int | None) -> None:
    file = TraceFile(path=Path("node12_2147483647-2147483648\udcff.pfw"), rank_pattern=pattern)
    assert file.rank == rank


@pytest.mark.parametrize("pattern", ["", "rank", "(", "rank(?=(7))", "(" * 10_000, "(a{2000})", "(\ud800)"])
def test_a_pattern_that_can_find_no_rank_is_refused_by_its_name(pattern: str) -> None:
    with pytest.raises(UsageError, match="finds no rank in a file's name") as refused:
        assert TraceFile(path=Path("rank7.pfw"), rank_pattern=pattern).rank is None
    assert len(str(refused.value)) < 1000


def test_a_pattern_takes_linear_time() -> None:
    file = TraceFile(path=Path("a" * 250 + ".pfw"), rank_pattern=r"(a+)+$")
    assert file.rank is None  # by Python's engine, it would take longer than the universe exists


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
