"""What slows a job down is the first or second finding of its comparison with a run without the cause."""

import re
from functools import cache
from typing import Any

import pytest
from tests.support.planted_runs import KIB, Job, seen_by_strace, trace_job
from tests.support.trace_studies import small_study

from penstock.trace.compare.findings import find_all
from penstock.trace.compare.trace_study import TraceFinding, Weight

CLEAN = Job()


@cache
def _rows(job: Job, run: str) -> list[dict[str, Any]]:
    return trace_job(job, run)


def compare(base: Job, new: Job, *, is_strace: bool = False) -> list[TraceFinding]:
    runs = [_rows(base, "base"), _rows(new, "new")]
    if is_strace:
        runs = [seen_by_strace(rows) for rows in runs]
    with small_study([row for rows in runs for row in rows]) as study:
        return [finding for finding in find_all(study) if finding.weight is not Weight.NOTE]


CAUSES: dict[str, tuple[Job, str]] = {
    "small reads": (Job(read_bytes=16 * KIB, read_us=500), "R1|F11 .*smaller reads"),
    "random reads": (Job(is_random=True, read_us=3000), "R2"),
    "one slow file": (Job(slow_file=17, factor=100), r"F14 .*one file .*: sample-17\.npz"),
    "a slow rank": (Job(slow_rank=1), "F8 .*(rank 1|process 200)"),
    "a metadata storm": (Job(stats=40), "F2|R4|F7"),
    "too few workers": (Job(workers=1), "F15 .*fewer readers"),
    "serialized opens": (Job(has_open_lock=True, open_us=6000), "F14 .*calls of open.* one by one"),
    "an fsync for each write": (Job(fsyncs_each_write=True), r"F2 .*\+15 fsync"),
    "a slow second half": (Job(slow_after_us=400_000), "F14 .*reads are slow since"),
    "decompression": (Job(decode_us=40_000), "F10 .*waiting for data.*what follows reading"),
    "contention": (
        Job(read_us=4800, open_us=2000, write_us=6000, fsync_us=30_000, jitter=1.0),
        "F14 .*reads are slower than in base.*others use it",
    ),
}


def text_of(finding: TraceFinding) -> str:
    return " ".join([finding.code, finding.title, *finding.says])


def assert_found(findings: list[TraceFinding], wanted: str) -> None:
    shown = [f"{one.lost_us} {text_of(one)}" for one in findings]
    assert any(re.match(wanted, text_of(one)) for one in findings[:2]), "\n".join(shown)


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_cause_is_named_first_or_second(cause: str) -> None:
    job, wanted = CAUSES[cause]
    assert_found(compare(CLEAN, job), wanted)


@pytest.mark.parametrize("cause", ["one slow file", "a slow rank", "too few workers", "serialized opens"])
def test_a_planted_cause_is_named_from_outside_of_the_program(cause: str) -> None:
    job, wanted = CAUSES[cause]
    assert_found(compare(CLEAN, job, is_strace=True), wanted)


@pytest.mark.parametrize("is_strace", [False, True])
def test_a_cold_run_is_told_that_the_other_read_from_memory(*, is_strace: bool) -> None:
    findings = compare(Job(read_us=10), Job(read_us=4800), is_strace=is_strace)
    assert_found(findings, "F9 base: reads of slow that no device served")
    assert any("they came from the page cache" in text_of(one) for one in findings if one.code == "F14")


@pytest.mark.parametrize("is_strace", [False, True])
def test_two_runs_of_one_program_have_no_finding(*, is_strace: bool) -> None:
    assert compare(CLEAN, Job(seed=2), is_strace=is_strace) == []
