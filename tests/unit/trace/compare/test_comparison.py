"""Differences between runs, as ranges and short lists."""

from __future__ import annotations

from typing import Any

from tests.support.trace_studies import small_study

from penstock.trace.compare.comparison import compare_runs, find_mismatches
from penstock.trace.compare.findings import rank_findings
from penstock.trace.compare.trace_study import TraceFinding, Weight, format_values
from penstock.trace.event_schema import ALL_RANKS, FileAccount
from penstock.trace.questions.answer import Answer


def write(run: str, rank: int, **more: Any) -> dict[str, Any]:
    path = f"/fast/f-{rank}.pt"
    return {"run": run, "rank": rank, "pid": rank, "name": "write", "path": path, "size_bytes": 8, **more}


def test_numbers_are_spans_and_names_a_short_list() -> None:
    assert format_values([8, 9, 10, 3, 1]) == "1, 3, 8-10"
    assert format_values([]) == ""
    assert format_values(["b", "a", "c", "d"]) == "a, b and 2 more"


def test_equal_runs_have_no_mismatch_and_a_note() -> None:
    with small_study([write("base", 0, host="a"), write("new", 0, host="b")]) as study:
        answer = find_mismatches(study)
    assert answer.rows == []
    assert "All runs have" in answer.notes[0]


def test_missing_ranks_hosts_steps_and_files_are_named() -> None:
    rows = [write("base", rank, host=f"n{rank}", step=rank) for rank in range(4)]
    rows += [write("new", 0, host="n0", step=0)]
    with small_study(rows) as study:
        found = {row["what"]: row for row in find_mismatches(study).records()}
    assert found["ranks"]["missing"] == "1-3"
    assert (found["hosts"]["here"], found["hosts"]["base"]) == (1, 4)
    assert found["steps"]["missing"] == "1-3"
    assert found["written files"]["missing"] == "f-1.pt, f-2.pt and 1 more"


def test_what_a_tracer_does_not_record_is_unknown_and_not_missing() -> None:
    rows = [write("base", rank, host="a", step=rank) for rank in range(8)]
    rows += [{**write("new", rank), "rank": None} for rank in range(8)]
    with small_study(rows) as study:
        found = {row["what"]: row for row in find_mismatches(study).records()}
    for what in ("ranks", "hosts", "steps"):
        assert found[what]["here"] is None
        assert found[what]["missing"] == "unknown: no event of new has one"
        assert found[what]["added"] == ""
    with small_study(rows, runs=("new", "base")) as study:
        found = {row["what"]: row for row in find_mismatches(study).records()}
    assert (found["ranks"]["here"], found["ranks"]["new"]) == (8, None)
    assert found["ranks"]["missing"] == "unknown: no event of new has one"


def test_findings_that_mislead_come_first_and_then_those_that_lost_most() -> None:
    def finding(code: str, weight: Weight, lost_us: int | None) -> TraceFinding:
        return TraceFinding(
            code, weight, code, [], [], Answer(name="", title="", columns=[], rows=[]), lost_us
        )

    ranked = rank_findings([
        finding("note", Weight.NOTE, 900), finding("little", Weight.COST, None),
        finding("much", Weight.COST, 500), finding("first", Weight.ALARM, None),
        finding("second", Weight.ALARM, None), finding("some", Weight.COST, 7),
    ])  # fmt: skip
    assert [each.code for each in ranked] == ["first", "second", "much", "some", "little", "note"]


def test_a_change_of_times_is_one_of_unions_and_not_of_sums() -> None:
    beside = [write("new", 0, tid=tid, ts_us=0, dur_us=100) for tid in range(10)]
    with small_study([write("base", 0, dur_us=100), *beside]) as study:
        compared = compare_runs(study)
    assert list(compared.table("t1").rows[1]) == ["fast I/O", 100, 1000]
    assert list(compared.table("t1_change").rows[1]) == ["fast I/O", 0.0, 0.0]


def test_sums_of_all_ranks_are_no_process_with_the_largest_sum() -> None:
    shared = [write(run, ALL_RANKS, dur_us=900) for run in ("base", "new")]
    with small_study([write("base", 0, dur_us=100), *shared]) as study:
        compared = compare_runs(study)
    # Of the run that has nothing but such sums, they are all that is known.
    assert list(compared.table("t1").rows[1]) == ["fast I/O", 100, 900]
    measures = compared.table("t1_measures").records()
    longest = [(row["max_sum_us"], row["max_union_us"], row["max_thread_us"]) for row in measures]
    assert longest == [(100, 100, 100), (900, 900, 900)]


def test_a_run_that_lost_lines_is_a_mismatch() -> None:
    harmed = FileAccount(file="trace-0.pfw", lines=5, events=3, dropped=2)
    with small_study([write("base", 0), write("new", 0)], accounts={"new": [harmed]}) as study:
        (row,) = find_mismatches(study).records()
    assert (row["what"], row["run"], row["missing"]) == (
        "damaged files", "new", "2 lines dropped, 0 salvaged, 0 torn files",
    )  # fmt: skip


def test_a_run_without_any_event_compares_as_nothing_and_not_as_an_error() -> None:
    with small_study([write("base", 0, dur_us=5)]) as study:
        compared = compare_runs(study)
    assert list(compared.table("t1").rows[1]) == ["fast I/O", 5, None]
    assert [row["run"] for row in compared.mismatches.records()] == ["new"] * 2


def test_names_of_tiers_and_runs_are_text_whatever_they_hold() -> None:
    rows = [{**write("it's", 0, dur_us=3), "path": "/o'b/x"}]
    with small_study(rows, runs=("it's",), tiers={"o'b": "/o'b"}) as study:
        compared = compare_runs(study)
    assert list(compared.table("t1").rows[1]) == ["o'b I/O", 3]


def test_the_first_followed_file_is_the_one_whose_calls_differ_most() -> None:
    rows = [write("base", 0), write("new", 0), write("base", 1), write("new", 1), write("new", 1)]
    with small_study(rows) as study:
        assert {row["file"] for row in compare_runs(study).table("t6").records()} == {"f-1.pt"}
