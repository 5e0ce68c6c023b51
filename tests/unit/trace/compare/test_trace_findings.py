"""Each rule has a finding where it should, and none elsewhere."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from tests.support.trace_studies import small_study

from penstock.trace.compare.findings import FINDING_RULES, find_all
from penstock.trace.compare.trace_study import TraceFinding

KIB, MIB = 1 << 10, 1 << 20


def event(run: str, name: str = "write", *, tier: str = "slow", **more: Any) -> dict[str, Any]:
    return {"run": run, "name": name, "path": f"/{tier}/f-0.pt", "rank": 0, "pid": 0, "dur_us": 1, **more}


def found(code: str, rows: Sequence[dict[str, Any]], **asked: Any) -> list[TraceFinding]:
    with small_study(rows, **asked) as study:
        return FINDING_RULES[code](study)


def test_alike_and_ordinary_runs_have_no_findings() -> None:
    rows = [
        event(run, name, ts_us=at, dur_us=10, size_bytes=MIB if name == "write" else None)
        for run in ("base", "new")
        for at, name in ((0, "open"), (10, "write"), (20, "close"))
    ]
    with small_study(rows) as study:
        assert find_all(study) == []


def test_f1_names_missing_ranks() -> None:
    rows = [event("base", rank=rank, pid=rank, size_bytes=9) for rank in range(3)]
    rows += [event("new", rank=1, pid=1, size_bytes=9)]
    (finding,) = found("F1", rows)
    assert finding.runs == ["new"]
    assert "ranks 0, 2 are missing" in finding.says[0]


def test_f1_also_sees_a_baseline_that_is_the_smaller_one() -> None:
    rows = [event("new", rank=rank, pid=rank, size_bytes=9) for rank in range(3)] + [
        event("base", size_bytes=9)
    ]
    assert [finding.runs for finding in found("F1", rows)] == [["base"]]


def test_f1_has_no_finding_where_ranks_are_unknown() -> None:
    assert found("F1", [event("base", rank=None), event("new", rank=None)]) == []


def test_f2_counts_calls_a_file_and_ignores_more_reads_and_writes() -> None:
    rows = [event("base", "open"), event("base"), event("new", "open"), event("new"), event("new")]
    assert found("F2", rows) == []
    (finding,) = found("F2", [*rows, event("new", "__xstat"), event("new", "stat", dur_us=4)])
    (row,) = finding.evidence.records()
    assert (row["op"], row["per_file"], row["per_file_base"], row["extra_us"]) == ("stat", 2, 0, 5)


def test_f3_needs_calls_side_by_side_in_one_process() -> None:
    apart = [event("base", ts_us=0, dur_us=10), event("base", ts_us=0, dur_us=10, pid=1)]
    assert found("F3", apart) == []
    beside = [event("new", ts_us=0, dur_us=10, tid=tid) for tid in range(4)]
    (finding,) = found("F3", beside)
    row = finding.evidence.records()[0]
    assert (row["sum_us"], row["union_us"], row["concurrency"], row["num_threads"]) == (40, 10, 4, 4)


def test_f4_sees_other_threads_read_back_what_was_written_while_another_tier_is() -> None:
    written = [event("new", tier="fast", size_bytes=100, tid=1)]
    read = [event("new", "read", tier="fast", size_bytes=100, tid=2)]
    flushed = [event("new", tier="slow", size_bytes=100, tid=2)]
    (finding,) = found("F4", [*written, *read, *flushed])
    assert "flush to slow reads fast" in finding.title
    assert found("F4", [*written, *read]) == []
    own = [{**read[0], "tid": 1}]
    assert found("F4", [*written, *own, *flushed]) == []


def test_f5_compares_runs_that_write_the_same_bytes_to_one_tier_each() -> None:
    def run(name: str, tier: str, app_us: int, size: int = 1000) -> list[dict[str, Any]]:
        app = {"run": name, "name": "X.checkpoint", "cat": "checkpoint", "dur_us": app_us, "pid": 0}
        return [app, event(name, tier=tier, size_bytes=size, dur_us=app_us)]

    (finding,) = found("F5", [*run("base", "slow", 100), *run("new", "fast", 130)])
    assert finding.title == "new: checkpoints are slower on fast than on slow"
    assert found("F5", [*run("base", "slow", 100), *run("new", "fast", 90)]) == []
    assert found("F5", [*run("base", "slow", 100), *run("new", "fast", 130, size=500)]) == []
    assert found("F5", [*run("base", "slow", 100), *run("new", "slow", 130)]) == []


def test_f6_counts_small_writes_that_are_a_habit() -> None:
    small = [event("base", ts_us=at, size_bytes=KIB) for at in range(120)]
    (finding,) = found("F6", small)
    assert finding.evidence.records()[0]["num_small"] == 120
    assert found("F6", small[:50]) == []
    large = [event("base", ts_us=at, size_bytes=MIB) for at in range(400)]
    assert found("F6", small + large) == []


def test_f7_counts_lookups_of_one_process_in_one_file() -> None:
    rows = [event("base", "stat", path=f"/slow/f-{number}.pt") for number in range(12) for _ in range(3)]
    (finding,) = found("F7", rows)
    assert finding.evidence.records()[0]["num_lookups"] == 36
    shared = [{**row, "pid": number} for number, row in enumerate(rows)]
    assert found("F7", shared) == []
    elsewhere = [{**row, "host": f"n{number}"} for number, row in enumerate(rows)]
    assert found("F7", elsewhere) == []


def test_f7_tells_opens_from_lookups() -> None:
    rows = [event("base", "open", path=f"/slow/f-{number}.pt") for number in range(12) for _ in range(7)]
    (finding,) = found("F7", rows)
    assert finding.says[0] == "One process opens each of 12 files of f.pt up to 7 times."
    assert finding.lost_us  # or it would be left out as irrelevant


def test_f7_has_a_finding_for_each_run() -> None:
    def lookups(run: str, number: int, dur_us: int) -> list[dict[str, Any]]:
        paths = [f"/slow/f-{file}.pt" for file in range(12)]
        called = [path for path in paths for _ in range(number)]
        return [
            event(run, "stat", path=path, ts_us=at * dur_us, dur_us=dur_us) for at, path in enumerate(called)
        ]

    base, new = found("F7", [*lookups("base", 9, 1), *lookups("new", 4, 100)])
    assert (base.runs, new.runs) == (["base"], ["new"])
    assert new.lost_us == 12 * 4 * 100


def test_f6_has_a_finding_for_each_run() -> None:
    fast = [event("base", ts_us=at, size_bytes=KIB) for at in range(200)]
    slow = [event("new", ts_us=10 * at, dur_us=10, size_bytes=KIB) for at in range(120)]
    _, finding = found("F6", fast + slow)
    assert finding.title == "new: small writes"
    assert finding.says[0].startswith("120 of 120 writes")
    assert finding.lost_us == 1200


def test_seconds_lost_are_those_of_one_rank_by_the_clock() -> None:
    # Two ranks, each with two threads side by side: 400 us of calls are 100 us by the clock of each.
    rows = [
        event("base", "stat", path=f"/slow/f-{file}.pt", rank=rank, pid=rank, tid=tid, ts_us=0, dur_us=1)
        for rank in range(2)
        for tid in range(2)
        for file in range(12)
        for _ in range(4)
    ]
    rows = [
        {**row, "ts_us": number // 2 % 48} for number, row in enumerate(sorted(rows, key=lambda r: r["rank"]))
    ]
    (finding,) = found("F7", rows)
    assert finding.evidence.records()[0]["lookup_us"] == 192
    assert finding.lost_us == 48


def test_f8_names_the_ranks_that_are_busy_longest() -> None:
    rows = [event("base", rank=rank, pid=rank, dur_us=400 if rank == 2 else 100) for rank in range(5)]
    (finding,) = found("F8", rows)
    assert "rank 2; longest rank 2" in finding.says[0]
    assert finding.lost_us == 300


def writers(slow_us: int, bytes_of_slow: int) -> list[dict[str, Any]]:
    """Five ranks that write a MiB in 100 us each, but for rank 2."""
    return [
        event(
            "base", rank=rank, pid=rank, dur_us=slow_us if rank == 2 else 100,
            size_bytes=bytes_of_slow if rank == 2 else MIB,
        )
        for rank in range(5)
    ]  # fmt: skip


def test_a_rank_that_moves_twice_the_bytes_in_twice_the_time_does_more_and_is_no_straggler() -> None:
    assert found("F8", writers(200, 2 * MIB)) == []
    (finding,) = found("F13", writers(200, 2 * MIB))
    (row,) = finding.evidence.records()
    assert (row["rank"], row["to_median"], row["work_to_median"]) == (2, 2.0, 2.0)
    assert "Rank 2 moves 2 MiB, not 1 MiB" in finding.says[0]
    assert finding.says[0].endswith("the others wait for it, but it is not slow.")


def test_a_rank_that_takes_longer_than_its_bytes_explain_is_a_straggler_and_has_its_rate() -> None:
    (finding,) = found("F8", writers(400, 2 * MIB))
    assert found("F13", writers(400, 2 * MIB)) == []
    assert "400 us (4.00 times) for 2.00 times the work, at 4.88 GiB/s" in finding.says[0]


def test_workers_belong_to_their_trainer() -> None:
    # One of four workers of each rank reads most: among workers they are late, but the ranks are alike.
    rows = [
        {**row, "pid": 1000 + 10 * row["rank"] + worker, "dur_us": 900 if worker == 1 else 10}
        for row in writers(100, MIB)
        for worker in range(4)
    ]
    assert found("F8", rows) == []
    by_parent = [{**row, "rank": None, "args": f'{{"parent":{row["rank"]}}}'} for row in rows]
    assert found("F8", by_parent) == []
    assert len(found("F8", [{**row, "rank": None} for row in rows])) == 1


def test_ranks_without_numbers_are_named_by_their_processes() -> None:
    rows = [{**row, "rank": None} for row in writers(400, MIB)]
    (finding,) = found("F8", rows)
    assert "process 2; longest process 2" in finding.says[0]


@pytest.mark.parametrize(("rate", "expected"), [("1GB/s", 1), ("100GB/s", 0)])
def test_f9_finds_reads_faster_than_their_device(rate: str, expected: int) -> None:
    rows = [event("base", "read", tier="fast", size_bytes=8 * MIB, dur_us=2000)]
    assert len(found("F9", rows, device_rates={"fast": rate})) == expected


@pytest.mark.parametrize(("size", "us"), [(4 * KIB, 0.5), (16 * KIB, 1), (128 * KIB, 8)])
def test_f9_judges_small_reads_together(size: int, us: float) -> None:
    def reads(each_us: float) -> list[dict[str, Any]]:
        # Whole microseconds: of calls that take half of one, every other seems to take none.
        moments = [round(each_us * number) for number in range(4001)]
        return [
            event("base", "read", ts_us=begin, dur_us=end - begin, size_bytes=size)
            for begin, end in pairwise(moments)
        ]

    assert len(found("F9", reads(us))) == 1
    # Most of these were fetched by one before them, which took as long as a device of 1 GB/s needs.
    each_us = 32 * size // 1000
    fetching = [
        {**row, "dur_us": each_us if at % 32 == 0 else 1, "ts_us": each_us * at}
        for at, row in enumerate(reads(us))
    ]
    assert found("F9", fetching) == []


def test_f9_without_a_rate_takes_only_memory_for_memory() -> None:
    slow = [event("base", "read", size_bytes=8 * MIB, dur_us=2000)]
    fast = [event("base", "read", size_bytes=8 * MIB, dur_us=400)]
    assert found("F9", slow) == []
    assert len(found("F9", fast)) == 1
