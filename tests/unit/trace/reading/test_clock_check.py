"""Files whose clocks or units cannot belong together."""

from pathlib import Path

import pytest

from penstock.trace.event_schema import FileAccount, TraceFile
from penstock.trace.trace_set import APART_US, find_clock_mismatches, read_trace_file

NOW_US = 1_700_000_000_000_000  # 2023-11-14


def _account(name: str, first_us: int | None, *, dialect: str = "json lines", host: str = "") -> FileAccount:
    hosts = {host} if host else set()
    last_us = None if first_us is None else first_us + 1000
    return FileAccount(file=name, dialect=dialect, first_us=first_us, last_us=last_us, hosts=hosts)


def test_files_of_one_run_match() -> None:
    accounts = [_account("a", NOW_US), _account("b", NOW_US + APART_US), _account("empty", None)]
    assert find_clock_mismatches(accounts) == []
    assert find_clock_mismatches([]) == []


@pytest.mark.parametrize(
    ("first_us", "unit"),
    [(NOW_US * 1000, "nanoseconds"), (NOW_US // 1000, "milliseconds"), (NOW_US // 1_000_000, "seconds")],
)
def test_other_unit_is_named_with_its_file(first_us: int, unit: str) -> None:
    (sentence,) = find_clock_mismatches([_account("odd.pfw", first_us)])
    assert sentence.startswith(f"Times of odd.pfw look like {unit} that were read as microseconds")


def test_clock_since_the_start_of_a_machine_is_no_mistake_in_a_chrome_document() -> None:
    assert find_clock_mismatches([_account("t.json", NOW_US // 1000, dialect="chrome")]) == []


def test_host_years_apart_is_named_with_dates() -> None:
    three_years_us = 3 * 365 * 86_400 * 1_000_000
    accounts = [
        _account("new.pfw", NOW_US, host="node1"),
        _account("old.pfw", NOW_US - three_years_us, host="node2"),
    ]
    assert find_clock_mismatches(accounts) == [
        (
            "The clocks or units of these files do not agree, so spans, timelines and overlaps over all of"
            " them are wrong: old.pfw (host node2) from 2020-11-14 22:13 UTC on; new.pfw (host node1) from"
            " 2023-11-14 22:13 UTC on"
        )
    ]


def test_many_files_are_named_by_the_first_three() -> None:
    accounts = [_account(f"{number}.pfw", NOW_US * 1000) for number in range(5)]
    (sentence,) = find_clock_mismatches(accounts)
    assert "0.pfw, 1.pfw, 2.pfw and 2 more" in sentence
    assert "the year 55,840" in sentence


def test_file_that_lasts_long_bridges_the_time_between_others() -> None:
    long = _account("long", NOW_US)
    long.last_us = NOW_US + 3 * APART_US
    assert find_clock_mismatches([long, _account("late", NOW_US + 3 * APART_US)]) == []


def _copy(name: str, rank: int | None, *, last_us: int = 1000) -> FileAccount:
    ranks = set() if rank is None else {rank}
    return FileAccount(file=name, events=9, first_us=NOW_US, last_us=NOW_US + last_us, ranks=ranks)


def test_copies_are_named_whole_or_cut() -> None:
    (sentence,) = find_clock_mismatches([_copy("a", 0), _copy("b", 0), _copy("cut", 0, last_us=500)])
    assert sentence == (
        "a, b, cut begin in the same microsecond and do not differ in host or rank: if they are copies, their"
        " events count several times"
    )
    (sentence,) = find_clock_mismatches([_copy("a", None), _copy("b", None), _copy("c", None, last_us=500)])
    assert sentence.startswith("a, b begin")


def test_empty_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "none.pfw").touch()
    reading = read_trace_file(TraceFile(path=tmp_path / "none.pfw"))
    assert list(reading.batches) == []
    assert reading.account.losses() == ["none.pfw: it is empty"]


def test_ranks_that_begin_in_the_same_microsecond_are_no_copies() -> None:
    assert find_clock_mismatches([_copy("a", 0), _copy("b", 1)]) == []
