"""R1 to R4: what is dear in one run, in seconds, with what to do about it."""

import json
from collections.abc import Sequence
from typing import Any

from tests.support.trace_studies import small_study

from penstock.trace.compare.query_findings import HABIT_RULES
from penstock.trace.compare.trace_study import TraceFinding

KIB, MIB = 1 << 10, 1 << 20


def calls(
    name: str, number: int, size: int | None, *, step: int = 0, dur_us: int = 10
) -> list[dict[str, Any]]:
    """Calls one after the other on one file, each `step` bytes after the one before."""
    return [
        {"run": "one", "name": name, "ts_us": dur_us * at, "dur_us": dur_us, "path": "/fast/f-0.npz",
         "size_bytes": size, "offset": None if size is None else at * step, "rank": 0, "pid": 0}
        for at in range(number)
    ]  # fmt: skip


def found(code: str, rows: Sequence[dict[str, Any]]) -> list[TraceFinding]:
    with small_study(rows, runs=("one",)) as study:
        return HABIT_RULES[code](study)


def test_large_aligned_sequential_reads_have_no_finding() -> None:
    rows = calls("pread64", 200, MIB, step=MIB)
    assert [code for code in HABIT_RULES if found(code, rows)] == []


def test_r1_counts_small_reads_and_says_what_they_cost_and_what_helps() -> None:
    (finding,) = found("R1", calls("pread64", 200, KIB, step=KIB))
    assert finding.title == "one: small reads"
    assert finding.says == [
        "200 of 200 reads of f.npz move less than 64 KiB, half of them 1 KiB or less; together 200 KiB."
    ]
    assert finding.lost_us == 2000
    assert "1 MiB per read" in finding.fix
    assert found("R1", calls("pread64", 90, KIB, step=KIB)) == []
    mostly_large = calls("pread64", 120, KIB) + calls("pread64", 200, MIB)
    assert found("R1", mostly_large) == []


def test_r2_counts_reads_that_do_not_follow_the_one_before() -> None:
    forward = calls("pread64", 200, 4 * KIB, step=16 * KIB)
    (finding,) = found("R2", forward)
    (row,) = finding.evidence.records()
    assert (row["num_reads"], row["num_random"], row["num_backwards"]) == (199, 199, 0)
    assert finding.lost_us == 1990
    backward = [{**row, "offset": 4 * MIB - row["offset"]} for row in forward]
    assert found("R2", backward)[0].evidence.records()[0]["num_backwards"] == 199
    assert found("R2", calls("pread64", 200, 4 * KIB, step=4 * KIB)) == []
    assert found("R2", calls("read", 200, 4 * KIB)[:0]) == []


def test_r2_follows_each_file_of_each_process_by_itself() -> None:
    rows = [
        {**row, "path": f"/fast/f-{file}.npz", "ts_us": row["ts_us"] + file}
        for file in range(2)
        for row in calls("pread64", 200, 4 * KIB, step=4 * KIB)
    ]
    assert found("R2", rows) == []


def test_r2_takes_a_file_that_is_read_again_for_another_reading() -> None:
    whole = [
        {**row, "ts_us": 1000 * epoch + row["ts_us"], "path": f"/fast/f-{at}.npz", "offset": 0}
        for epoch in range(2)
        for at, row in enumerate(calls("pread64", 200, 64 * KIB))
    ]
    assert found("R2", whole) == []
    opened = calls("open", 200, None)
    headers = [{**row, "name": "pread64", "size_bytes": KIB, "offset": 512} for row in opened]
    headers = [row for pair in zip(opened, headers, strict=True) for row in pair]
    assert found("R2", headers) == []


def test_the_runtime_of_a_program_is_no_habit_of_it() -> None:
    small = calls("read", 200, KIB)
    for path in ("socket:[4711]", "pipe:[3]", "/dev/shm/torch_12_3", "/x/lib/python3.11/json/decoder.py",
                 "/venv/lib64/python3.12/site-packages/torch/nn", "/usr/lib/locale/LC_CTYPE"):  # fmt: skip
        assert found("R1", [{**row, "path": path} for row in small]) == [], path
    assert len(found("R1", [{**row, "path": "data/x.npz"} for row in small])) == 1


def test_r3_counts_transfers_that_begin_between_two_pages() -> None:
    (finding,) = found("R3", calls("pwrite64", 200, 4 * KIB, step=4 * KIB + 7))
    (row,) = finding.evidence.records()
    assert (row["direction"], row["num_unaligned"]) == ("write", 199)
    assert "199 of 200 writes below 1 MiB of f.npz begin inside a page of 4 KiB" in finding.says[0]
    assert found("R3", calls("pwrite64", 200, 5 * KIB, step=8 * KIB)) == []


def test_large_transfers_may_begin_anywhere() -> None:
    rows = calls("pread64", 200, MIB, step=3 * MIB + 7)
    assert [found(code, rows) for code in ("R2", "R3")] == [[], []]


def test_r4_compares_calls_that_move_no_bytes_with_all_io() -> None:
    reads = calls("pread64", 10, MIB, dur_us=100)
    (finding,) = found("R4", reads + calls("stat", 100, None, dur_us=20))
    (row,) = finding.evidence.records()
    assert (row["op"], row["num_calls"], row["metadata_us"]) == ("stat", 100, 2000)
    assert finding.says[0].startswith("67 % of the time in I/O calls (2.00 ms")
    assert finding.lost_us == 2000
    assert found("R4", reads + calls("stat", 100, None, dur_us=1)) == []
    assert found("R4", reads + calls("stat", 50, None, dur_us=90)) == []
    assert found("R4", reads + calls("fsync", 100, None, dur_us=90)) == []


def test_each_run_has_findings_of_its_own() -> None:
    rows = calls("pread64", 200, KIB, step=KIB)
    with small_study([*rows, *({**row, "run": "two"} for row in rows)], runs=("one", "two")) as study:
        assert [finding.runs for finding in HABIT_RULES["R1"](study)] == [["one"], ["two"]]


def counted(run: str, tier: str = "fast", **more: Any) -> dict[str, Any]:
    """What Darshan has of a file without its DXT: of 1,000 reads, 900 small, 200 in order."""
    args = {"is_sum": True, "calls": 1000, "time_us": 8_000_000, "num_ranks": 4, "sequential": 200,
            "sizes": [900, 0, 0, 0, 0, 100, 0, 0, 0, 0], **more}  # fmt: skip
    return {"run": run, "name": "read", "path": f"/{tier}/f.h5", "rank": 0, "pid": 0, "dur_us": 6_000_000,
            "size_bytes": 10 * MIB, "args": json.dumps(args)}  # fmt: skip


def test_r7_finds_what_counters_tell_where_calls_were_not_recorded() -> None:
    opens = {**counted("one"), "name": "metadata", "size_bytes": None}
    opens["args"] = json.dumps({"is_sum": True, "calls": 1, "time_us": 5, "num_ranks": 4, "unaligned": 700})
    by_title = {one.title: one for one in found("R7", [counted("one"), opens])}
    assert sorted(title.split()[1] for title in by_title) == ["scattered", "small", "unaligned"]
    finding = by_title["one: small reads, by counters"]
    assert finding.says[0] == "900 of 1,000 reads move less than 100 kB, most of them of f.h."
    # Eight seconds of four ranks, of which nine tenths.
    assert finding.lost_us == 1_800_000
    assert by_title["one: unaligned transfers, by counters"].amount == 700
    assert found("R7", [counted("one", sequential=1000, sizes=[0, 0, 0, 0, 0, 1000, 0, 0, 0, 0])]) == []
    # One sum is no call, however small.
    assert found("R1", [{**counted("one"), "size_bytes": KIB, "ts_us": at} for at in range(200)]) == []
