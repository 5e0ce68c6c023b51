"""The first sentences of a report: exact numbers, and none that a finding calls misleading."""

from collections.abc import Sequence
from typing import Any

from tests.support.trace_studies import small_study

from penstock.reports.page import render_report
from penstock.trace.compare.findings import rank_findings
from penstock.trace.compare.run_report import overview, report_runs, say_answer
from penstock.trace.compare.trace_study import TraceFinding, Weight
from penstock.trace.event_schema import ALL_RANKS
from penstock.trace.questions.answer import Answer, make_columns


def call(name: str, ts_us: int, dur_us: int, size_bytes: int | None = None, **more: Any) -> dict[str, Any]:
    return {"run": "base", "host": "n", "name": name, "path": "/fast/x.npz", "ts_us": ts_us, "dur_us": dur_us,
            "size_bytes": size_bytes, **more}  # fmt: skip


ROWS = [
    call("open", 0, 10),
    call("read", 10, 100, 1 << 18),
    call("read", 60, 100, 1 << 18, tid=2, path="/fast/y.npz"),
    call("write", 900, 100, 1000, pid=2),
    call("train.compute", 110, 1000, cat="app", path=None),
]


def finding(code: str, *runs: str, weight: Weight = Weight.ALARM) -> TraceFinding:
    columns = make_columns("extra_us", "small_us")
    evidence = Answer(name="e", title="", columns=columns, rows=[(int(code[1:]) * 100, 5)])
    return TraceFinding(code, weight, code, runs, [], evidence)


def answer(rows: Sequence[dict[str, Any]] = ROWS, findings: Sequence[TraceFinding] = ()) -> Answer:
    runs = list(dict.fromkeys(row["run"] for row in rows))
    with small_study(rows, runs=runs) as study:
        return overview(study.events, study.runs, findings)


def test_a_run_is_summed_up_exactly() -> None:
    (row,) = answer().records()
    assert (row["span_us"], row["union_us"], row["num_calls"], row["num_files"]) == (1110, 260, 4, 2)
    assert (row["read_bytes"], row["written_bytes"]) == (2 << 18, 1000)
    assert (row["slowest_op"], row["slowest_op_us"], row["longest_call_us"]) == ("read", 150, 100)
    assert row["busy_rate"] == ((2 << 18) + 1000) * 1e6 / 260


def test_the_sentences_of_one_run_say_what_moved_how_busy_and_what_was_slow() -> None:
    with small_study(ROWS, runs=["base"]) as study:
        says = report_runs(study).says
    assert says == [
        "In 1.11 ms, base read 512 KiB and wrote 1000 B, with 4 calls on 2 files (2 processes on 1 host).",
        (
            "At least one call was under way for 260 us, 23.4 % of the run, at 1.88 GiB/s; "
            "meanwhile, 1.2 ran at a time."
        ),
        "The operation longest under way was read: 150 us. Its longest call took 100 us, on x.npz.",
        "19.2 % of the I/O was under way while its process computed.",
    ]


def test_totals_of_a_run_with_missing_ranks_are_not_said() -> None:
    found = answer(findings=[finding("F1", "base")])
    (row,) = found.records()
    assert (row["read_bytes"], row["written_bytes"], row["busy_rate"]) == (None, None, None)
    assert row["per_process_bytes"] == (2 << 18) // 2 + 500
    says = " ".join(say_answer(found, Answer(name="", title="", columns=[], rows=[])))
    assert "moved 256 KiB a process" in says
    assert "512 KiB" not in says
    assert "GiB/s" not in says
    assert "F1" in found.notes[0]


def test_sums_of_all_ranks_alone_are_reported() -> None:
    """As Darshan's logs have them of files that all ranks share."""
    with small_study([{**row, "pid": ALL_RANKS, "tid": ALL_RANKS} for row in ROWS], runs=["base"]) as study:
        says = report_runs(study).says
    assert "read 512 KiB and wrote 1000 B" in says[0]


def test_the_rate_of_reads_from_the_page_cache_is_not_said() -> None:
    found = answer(findings=[finding("F9", "base")])
    (row,) = found.records()
    assert (row["busy_rate"], row["read_bytes"]) == (None, 2 << 18)
    assert "F9" in found.notes[0]


def test_a_finding_about_another_run_hides_nothing() -> None:
    (row,) = answer(findings=[finding("F1", "new")]).records()
    assert row["busy_rate"]


def test_a_run_without_io_says_so() -> None:
    says = say_answer(answer([ROWS[-1]]), Answer(name="", title="", columns=[], rows=[]))
    assert says == ["base has no I/O in its trace, which spans 1.00 ms."]


def test_each_of_several_runs_has_a_sentence() -> None:
    rows = [*ROWS, *({**row, "run": "new", "dur_us": 5 * row["dur_us"]} for row in ROWS)]
    with small_study(rows, runs=["base", "new"]) as study:
        says = report_runs(study).says
    assert [said.partition(" read ")[0] for said in says[::2]] == ["In 1.11 ms, base", "In 5.11 ms, new"]


def test_findings_that_mislead_come_first_and_then_those_that_cost_most() -> None:
    found = [
        finding("F2", weight=Weight.COST),
        finding("F5", weight=Weight.NOTE),
        finding("F3"),
        finding("F6", weight=Weight.COST),
    ]
    assert [each.code for each in rank_findings(found)] == ["F3", "F2", "F6", "F5"]


def test_a_report_has_findings_about_each_run_with_what_to_do_about_them() -> None:
    reads = [
        {"run": "base", "name": "pread64", "path": "/fast/a", "ts_us": at, "dur_us": 1, "size_bytes": 512,
         "offset": 512 * at, "rank": 0, "pid": 0}
        for at in range(200)
    ]  # fmt: skip
    with small_study(reads, runs=["base"]) as study:
        made = report_runs(study)
    found = {each["code"]: each for each in made.document()["findings"]}
    assert found["R1"]["lost_us"] == 200
    assert "larger buffer" in found["R1"]["fix"]
    page = render_report(made.page())
    assert "200 us a rank" in page
    assert "Read through a larger buffer" in page


def test_sums_are_no_calls_and_never_all_right() -> None:
    args = '{"is_sum": true, "calls": 170, "num_ranks": 512, "fsyncs": 3}'
    rows = [
        {**call("read", 0, 90, 1 << 20), "host": None, "rank": rank, "pid": rank, "args": args}
        for rank in (0, 7)
    ]
    with small_study(rows, runs=["base"]) as study:
        made = report_runs(study)
    assert made.says == [
        "In 90.0 us, base read 2 MiB and wrote 0 B, with 346 calls on 1 file (512 ranks, 512 processes).",
        "These are sums by file and rank: single calls, their order and their times are not known.",
    ]
    banner = made.page().banner
    assert banner is not None
    assert (banner.verdict, banner.to_do) == (
        "sums only", "Record single calls: Darshan with DXT, or `penstock trace record`.",
    )  # fmt: skip


def test_workers_compute_with_their_trainer_and_its_start_is_told_in_a_line() -> None:
    trainer = [call("train.compute", 0, 1000, cat="app", path=None)]
    read = call("read", 100, 200, 1 << 18, pid=2, args='{"parent": 1}')
    module = call("read", 0, 50, 100, path="/env/lib/python3.12/json/__init__.py")
    with small_study([*trainer, read, module], runs=["base"]) as study:
        says = report_runs(study).says
    assert says[-2] == "100.0 % of the I/O was under way while its process computed."
    assert says[-1].startswith("Findings leave out start-up and runtime of base")
    assert says[-1].endswith(": 1 call, which took 50.0 us.")
