"""Runs selected by outcome, workload, age and number; a removal never takes an active one."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.results.history import (
    OUTCOMES,
    CatalogedRun,
    find_run,
    parse_age,
    parse_outcomes,
    plan_removal,
    select_runs,
)

NOW = datetime(2026, 2, 1, 12, tzinfo=UTC)


def a_run(
    number: int = 1, *, outcome: str = "finished", age_days: float | None = 1.0, workload: str = "unet3d_h100"
) -> CatalogedRun:
    return CatalogedRun(
        id=f"{number:06x}",
        folder=f"{workload}-{number:06x}",
        path=Path(f"/results/{workload}-{number:06x}"),
        where="here",
        outcome=outcome,
        why="",
        workload=workload,
        started=None if age_days is None else NOW - timedelta(days=age_days),
        began=None,
        summary=None,
    )


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2w", NOW - timedelta(days=14)),
        ("7d", NOW - timedelta(days=7)),
        ("12h", NOW - timedelta(hours=12)),
        ("90min", NOW - timedelta(minutes=90)),
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        ("2026-01-31T08:00:00+02:00", datetime(2026, 1, 31, 6, tzinfo=UTC)),
    ],
)
def test_an_age_or_a_date_is_a_moment(text: str, moment: datetime) -> None:
    assert parse_age(text, NOW) == moment


@pytest.mark.parametrize("text", ["2", "old", "1e30w", "2026-13-01", "-2w"])
def test_malformed_age_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="neither an age nor a date"):
        parse_age(text, NOW)


def test_incomplete_stands_for_runs_without_a_recorded_end() -> None:
    assert parse_outcomes("incomplete") == {"interrupted", "running", "unknown"}
    assert parse_outcomes("failed,finished") == {"failed", "finished"}
    with pytest.raises(UsageError, match="'done' is not an outcome"):
        parse_outcomes("done")


def test_criteria_fit_together() -> None:
    fitting = a_run(outcome="failed", age_days=3)
    others = [
        a_run(outcome="finished", age_days=3),
        a_run(outcome="failed", age_days=1),
        a_run(outcome="failed", age_days=3, workload="resnet50_h100"),
        a_run(outcome="failed", age_days=None),
    ]
    runs = [*others, fitting]
    assert select_runs(runs, status="failed", workload="UNET", older_than="2d", now=NOW) == [fitting]
    assert select_runs(runs, now=NOW) == runs


RUNS = st.lists(
    st.builds(
        a_run,
        st.integers(0, 99),
        outcome=st.sampled_from(OUTCOMES),
        age_days=st.none() | st.floats(0, 30),
        workload=st.sampled_from(["unet3d_h100", "resnet50_a100"]),
    ),
    max_size=12,
)


@given(
    runs=RUNS,
    outcomes=st.frozensets(st.sampled_from(OUTCOMES), max_size=3),
    age_days=st.none() | st.integers(1, 30),
    keep_last=st.integers(0, 5),
)
def test_every_run_that_fits_is_taken_or_spared_with_a_reason(
    runs: list[CatalogedRun], outcomes: frozenset[str], age_days: int | None, keep_last: int
) -> None:
    older_than = "" if age_days is None else f"{age_days}d"
    fitting = select_runs(runs, status=",".join(sorted(outcomes)), older_than=older_than, now=NOW)
    removed, spared = plan_removal(fitting, keep_last)
    assert len(removed) + len(spared) == len(fitting)
    assert all(run.outcome != "running" for run in removed)
    assert all(reason for _, reason in spared)
    assert [run for run, _ in spared][: min(keep_last, len(fitting))] == fitting[:keep_last]


def test_a_run_is_named_by_id_folder_or_part() -> None:
    runs = (a_run(1), a_run(2), a_run(3, workload="resnet50_a100"))
    assert find_run("000002", runs, where="x") is runs[1]
    assert find_run("unet3d_h100-000001", runs, where="x") is runs[0]
    assert find_run("resnet", runs, where="x") is runs[2]
    assert find_run("/results/unet3d_h100-000001/", runs, where="x") is runs[0]
    with pytest.raises(UsageError, match="'unet3d' names 2 runs"):
        find_run("unet3d", runs, where="x")
    with pytest.raises(UsageError, match="No run is called 'bert'"):
        find_run("bert", runs, where="x")
    with pytest.raises(UsageError, match="No run is called ''"):
        find_run("", runs, where="x")


@pytest.mark.parametrize(("age_days", "is_old"), [(7.0, False), (7.1, True), (6.9, False), (None, False)])
def test_run_is_older_than_an_age_from_the_moment_after_it(age_days: float | None, *, is_old: bool) -> None:
    assert bool(select_runs([a_run(age_days=age_days)], older_than="7d", now=NOW)) is is_old


def test_removal_spares_the_last_runs_and_running_ones() -> None:
    runs = [a_run(3), a_run(2, outcome="running"), a_run(1)]
    removed, spared = plan_removal(runs, keep_last=1)
    assert removed == [runs[2]]
    assert spared == [(runs[0], "one of the last 1"), (runs[1], "still running")]
