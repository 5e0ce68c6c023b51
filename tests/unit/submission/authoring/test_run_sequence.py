"""Which runs of a result count, and what is left to do."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.submission.authoring.run_sequence import RequestedResult, plan_run_sequence, select_runs
from penstock.submission.authoring.series_state import PublishedDir, SeriesState
from penstock.submission.tree_layout import SubmissionPhase

BEGAN = datetime(2026, 7, 1, 10, 0, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
WANTED = RequestedResult(
    accelerator="b200", num_processes=8, place="/data", num_files=28_000, num_runs=6, max_pause_runs=1.0
)


def leaf(
    begin_min: float, duration_min: float, *, phase: str = "run", is_success: bool = True
) -> PublishedDir:
    began = BEGAN + begin_min * MINUTE
    return PublishedDir(
        folder=Path(f"/tree/{phase}/{began:%Y%m%d_%H%M%S}"),
        began=began,
        ended=began + duration_min * MINUTE,
        accelerator="b200",
        num_processes=8,
        num_files=28_000,
        place="/data",
        is_success=is_success,
    )


def runs(
    num_runs: int, *, every_min: float = 20, duration_min: float = 18, begin_min: float = 0
) -> list[PublishedDir]:
    return [leaf(begin_min + number * every_min, duration_min) for number in range(num_runs)]


def at(minute: float) -> datetime:
    return BEGAN + minute * MINUTE


def standing(found: list[PublishedDir], *, has_data: bool = True) -> SeriesState:
    before = (leaf(-60, 1, phase="datasize"),), (leaf(-50, 1, phase="datagen"),)
    datasizes, datagens = before if has_data else ((), ())
    return SeriesState(datasizes=datasizes, datagens=datagens, runs=tuple(found), attempts=(), unread=())


def test_everything_is_left_to_do_in_an_empty_place() -> None:
    cadence = plan_run_sequence(standing([], has_data=False), WANTED, now=at(0))
    assert cadence.phases == (SubmissionPhase.DATASIZE, SubmissionPhase.DATAGEN, *[SubmissionPhase.RUN] * 6)
    assert not cadence.is_complete


@pytest.mark.parametrize("num_there", range(7))
def test_as_many_runs_are_left_as_are_missing(num_there: int) -> None:
    cadence = plan_run_sequence(standing(runs(num_there)), WANTED, now=at(20 * num_there))
    assert cadence.phases == (SubmissionPhase.RUN,) * (6 - num_there)
    assert len(cadence.kept) == num_there
    assert cadence.surplus == ()


@pytest.mark.parametrize(("waited_min", "num_kept"), [(0, 3), (17.9, 3), (18, 0), (600, 0), (-1, 0)])
def test_an_unfinished_sequence_counts_while_the_next_run_may_follow(
    waited_min: float, num_kept: int
) -> None:
    end = 2 * 20 + 18
    kept, surplus = select_runs(runs(3), WANTED, now=at(end + waited_min))
    assert (len(kept), len(surplus)) == (num_kept, 3 - num_kept)


def test_a_whole_sequence_counts_for_ever() -> None:
    cadence = plan_run_sequence(standing(runs(6)), WANTED, now=at(100_000))
    assert cadence.is_complete


def test_six_of_more_runs_are_the_result_and_the_others_are_named() -> None:
    kept, surplus = select_runs(runs(8), WANTED, now=at(160))
    assert [len(kept), len(surplus)] == [6, 2]
    assert {each.why for each in surplus} == {"the result is complete without it"}


def test_runs_before_a_failed_one_do_not_count() -> None:
    found = [*runs(2), leaf(40, 18, is_success=False), *runs(2, begin_min=60)]
    kept, surplus = select_runs(found, WANTED, now=at(100))
    assert kept == tuple(found[3:])
    assert [each.run_dir for each in surplus] == found[:3]


def test_a_pause_is_measured_against_the_shortest_run() -> None:
    found = [leaf(0, 30), leaf(35, 4)]  # 5 minutes between them, and the second takes 4
    kept, _ = select_runs(found, WANTED, now=at(39))
    assert kept == (found[1],)


def test_runs_that_overlap_do_not_follow_one_another() -> None:
    kept, _ = select_runs([leaf(0, 30), leaf(20, 30)], WANTED, now=at(51))
    assert [run.began for run in kept] == [at(20)]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.booleans()), max_size=12),
    st.integers(0, 60),
)
def test_every_run_is_kept_or_named_and_kept_ones_follow_one_another(
    drawn: list[tuple[int, int, bool]], waited: int
) -> None:
    found, minute = [], 0
    for pause, duration, is_success in drawn:
        minute += pause
        found.append(leaf(minute, duration, is_success=is_success))
        minute += duration
    kept, surplus = select_runs(found, WANTED, now=at(minute + waited))
    assert sorted([*kept, *(each.run_dir for each in surplus)], key=lambda run: run.began) == found
    assert len(kept) <= 6
    shortest = min((run.duration for run in kept), default=timedelta(0))
    for before, after in pairwise(kept):
        assert timedelta(0) <= after.began - before.ended < shortest


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"accelerator": "mi355"}, "accelerator: b200, requested: mi355"),
        ({"num_processes": 4}, "accelerators: 8, requested: 4"),
        ({"num_files": 7}, "files: 28000, requested: 7"),
        ({"place": "/other"}, "data: /data, requested: /other"),
    ],
)
def test_another_result_under_way_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan_run_sequence(standing(runs(1)), replace(WANTED, **change), now=at(20))  # type: ignore[arg-type]  # one of the pairs above
