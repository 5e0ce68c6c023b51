"""Which runs of a result count, and what is left to do."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.submission.authoring.run_sequence import (
    PublishedDir,
    SeriesState,
    missing_checkpoints,
    plan_run_sequence,
    select_runs,
)
from penstock.submission.edition import load_edition
from penstock.submission.tree_layout import SubmissionPhase

BEGAN = datetime(2026, 7, 1, 10, 0, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
WANTED = {"accelerator": "b200", "num_processes": 8, "data_path": "/data", "num_files": 28_000}


def published_dir(
    begin_min: float, duration_min: float, *, phase: str = "run", is_success: bool = True
) -> PublishedDir:
    started_at = BEGAN + begin_min * MINUTE
    return PublishedDir(
        folder=Path(f"/tree/{phase}/{started_at:%Y%m%d_%H%M%S}"),
        started_at=started_at,
        ended_at=started_at + duration_min * MINUTE,
        accelerator="b200",
        num_processes=8,
        num_files=28_000,
        data_path="/data",
        exit_status=0 if is_success else 1,
    )


def runs(
    num_runs: int, *, every_min: float = 20, duration_min: float = 18, begin_min: float = 0
) -> list[PublishedDir]:
    return [published_dir(begin_min + number * every_min, duration_min) for number in range(num_runs)]


def at(minute: float) -> datetime:
    return BEGAN + minute * MINUTE


def state(found: list[PublishedDir], *, has_data: bool = True) -> SeriesState:
    before = (published_dir(-60, 1, phase="datasize"),), (published_dir(-50, 1, phase="datagen"),)
    datasizes, datagens = before if has_data else ((), ())
    return SeriesState(datasizes=datasizes, datagens=datagens, runs=tuple(found), attempts=(), unreadable=())


def test_everything_is_left_to_do_in_an_empty_place() -> None:
    sequence = plan_run_sequence(state([], has_data=False), WANTED, 6, 1.0, now=at(0))
    assert sequence.phases == (SubmissionPhase.DATASIZE, SubmissionPhase.DATAGEN, *[SubmissionPhase.RUN] * 6)


@pytest.mark.parametrize("num_there", range(7))
def test_as_many_runs_are_left_as_are_missing(num_there: int) -> None:
    sequence = plan_run_sequence(state(runs(num_there)), WANTED, 6, 1.0, now=at(20 * num_there))
    assert sequence.phases == (SubmissionPhase.RUN,) * (6 - num_there)
    assert len(sequence.counted) == num_there
    assert sequence.excluded == ()


@pytest.mark.parametrize(("waited_min", "num_kept"), [(0, 3), (17.9, 3), (18, 0), (600, 0), (-1, 0)])
def test_an_unfinished_sequence_counts_while_the_next_run_may_follow(
    waited_min: float, num_kept: int
) -> None:
    end = 2 * 20 + 18
    counted, excluded = select_runs(runs(3), 6, 1.0, now=at(end + waited_min))
    assert (len(counted), len(excluded)) == (num_kept, 3 - num_kept)


def test_a_whole_sequence_counts_for_ever() -> None:
    sequence = plan_run_sequence(state(runs(6)), WANTED, 6, 1.0, now=at(100_000))
    assert not sequence.phases


def test_six_of_more_runs_are_the_result_and_the_others_are_named() -> None:
    counted, excluded = select_runs(runs(8), 6, 1.0, now=at(160))
    assert [len(counted), len(excluded)] == [6, 2]
    assert {reason for _, reason in excluded} == {"the result is complete without it"}


def test_runs_before_a_failed_one_do_not_count() -> None:
    found = [*runs(2), published_dir(40, 18, is_success=False), *runs(2, begin_min=60)]
    counted, excluded = select_runs(found, 6, 1.0, now=at(100))
    assert counted == tuple(found[3:])
    assert [run for run, _ in excluded] == found[:3]


def test_a_pause_is_measured_against_the_shortest_run() -> None:
    found = [published_dir(0, 30), published_dir(35, 4)]  # 5 minutes between them, and the second takes 4
    counted, _ = select_runs(found, 6, 1.0, now=at(39))
    assert counted == (found[1],)


def test_runs_that_overlap_do_not_follow_one_another() -> None:
    counted, _ = select_runs([published_dir(0, 30), published_dir(20, 30)], 6, 1.0, now=at(51))
    assert [run.started_at for run in counted] == [at(20)]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.booleans()), max_size=12),
    st.integers(0, 60),
)
def test_every_run_counts_or_is_excluded_and_counted_runs_follow_one_another(
    drawn: list[tuple[int, int, bool]], waited: int
) -> None:
    found, minute = [], 0
    for pause, duration, is_success in drawn:
        minute += pause
        found.append(published_dir(minute, duration, is_success=is_success))
        minute += duration
    counted, excluded = select_runs(found, 6, 1.0, now=at(minute + waited))
    assert sorted([*counted, *(run for run, _ in excluded)], key=lambda run: run.started_at) == found
    assert len(counted) <= 6
    shortest = min((run.duration for run in counted), default=timedelta(0))
    for before, after in pairwise(counted):
        assert timedelta(0) <= after.started_at - before.ended_at < shortest


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"accelerator": "mi355"}, "accelerator: b200, requested: mi355"),
        ({"num_processes": 4}, "accelerators: 8, requested: 4"),
        ({"num_files": 7}, "files: 28000, requested: 7"),
        ({"data_path": "/other"}, "data: /data, requested: /other"),
    ],
)
def test_another_result_under_way_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan_run_sequence(state(runs(1)), WANTED | change, 6, 1.0, now=at(20))


def test_size_of_another_request_is_set_aside_as_long_as_nothing_was_generated() -> None:
    sized = replace(state([], has_data=False), datasizes=(published_dir(-60, 1, phase="datasize"),))
    other = {**WANTED, "data_path": "/other"}
    sequence = plan_run_sequence(sized, other, 6, 1.0, now=at(0))
    assert [(run.folder.parent.name, reason) for run, reason in sequence.excluded] == [
        ("datasize", "nothing was generated or run for this size")
    ]
    assert sequence.phases[0] is SubmissionPhase.DATASIZE
    assert plan_run_sequence(sized, WANTED, 6, 1.0, now=at(0)).excluded == ()


@pytest.mark.parametrize(("counts", "missing"), [((10, 0), (0, 10)), ((10, 10), (0, 0)), ((0, 0), (10, 10))])
def test_missing_checkpoints_are_counted(counts: tuple[int, int], missing: tuple[int, int]) -> None:
    run = published_dir(0, 5).model_copy(update={"num_writes": counts[0], "num_reads": counts[1]})
    found = missing_checkpoints(state([run]), load_edition("v3.0"))
    assert (found["writes"], found["reads"]) == missing
