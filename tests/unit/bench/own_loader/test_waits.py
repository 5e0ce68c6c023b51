"""Waits are divided by the work of the worker that was awaited, and the stages add up to the waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.own_loader.waits import (
    Delivery,
    Fetch,
    LoaderWaits,
    StepWait,
    WaitStage,
    divide_waits,
)


def worker(*fetches: Fetch) -> list[Fetch]:
    return list(fetches)


def fetch(began: int, loaded: int, ended: int, *, awake: int = 0) -> Fetch:
    return Fetch(began, loaded, ended, awake, is_batch=True)


def delivery(asked: int, given_: int, fetches: list[Fetch], number: int = 0) -> Delivery:
    return Delivery(asked, given_, 5, fetches, fetches[number])


def test_wait_for_a_reading_worker_is_storage_then_collation_then_copy() -> None:
    reading = worker(fetch(100, 180, 190))
    stages = divide_waits([StepWait(120, 200, 0)], [delivery(120, 200, reading)], 0.0)
    assert +stages == {WaitStage.STORAGE: 60, WaitStage.COLLATE: 10, WaitStage.COPY: 10}


def test_time_in_which_a_worker_is_awake_is_decoding_and_transforms() -> None:
    computing = worker(fetch(100, 200, 200, awake=80))
    stages = divide_waits([StepWait(100, 200, 0)], [delivery(100, 200, computing)], 0.0)
    assert (stages[WaitStage.STORAGE], stages[WaitStage.COMPUTE]) == pytest.approx((20, 80))


def test_first_wait_begins_with_the_start_of_workers() -> None:
    reading = worker(fetch(100, 150, 150))
    first = StepWait(0, 150, 0, is_first=True)
    stages = divide_waits([first], [delivery(10, 150, reading)], 0.0)
    assert stages[WaitStage.STARTUP] == 95
    assert stages[WaitStage.STORAGE] == 50 + 5


def test_wait_for_the_second_batch_of_a_worker_has_both() -> None:
    busy = worker(fetch(0, 50, 60), fetch(60, 90, 100))
    stages = divide_waits([StepWait(20, 110, 0)], [delivery(20, 110, busy, 1)], 0.0)
    assert (stages[WaitStage.STORAGE], stages[WaitStage.COLLATE], stages[WaitStage.COPY]) == (60, 20, 10)


def test_batch_that_was_ready_costs_nothing_but_its_copy() -> None:
    early = worker(fetch(0, 50, 60))
    stages = divide_waits([StepWait(500, 503, 0)], [delivery(500, 503, early)], 0.0)
    assert set(+stages) == {WaitStage.COPY}


def test_loader_of_another_library_is_divided_by_its_busiest_thread() -> None:
    stages = divide_waits([StepWait(0, 100, 20), StepWait(100, 200, 20)], [], 0.75)
    assert stages[WaitStage.STORAGE] == pytest.approx(40)
    assert stages[WaitStage.COMPUTE] == pytest.approx(40 + 120)


def test_first_batch_of_an_unknown_loader_is_its_start_beyond_the_usual_wait() -> None:
    steps = [StepWait(0, 100, 0, is_first=True), StepWait(100, 110, 0), StepWait(110, 120, 0)]
    stages = divide_waits(steps, [], 0.0)
    assert stages[WaitStage.STARTUP] == 90
    assert stages[WaitStage.STORAGE] == 30


def test_the_answer_names_the_largest_stage_unless_hardly_anything_was_waited_for() -> None:
    waits = LoaderWaits(loader="x:y", wait_s=8.0, compute_s=2.0, workers=2)
    waits.stages_s.update({WaitStage.STORAGE: 6.0, WaitStage.COPY: 2.0})
    waits.trials["workers=4"] = 1.85
    assert waits.sentence == (
        "Waiting 80.0% of the time, first steps included; 75% of that is reading from storage on 2 workers; "
        "workers=4 brings 1.85x"
    )
    waits.compute_s = 1000.0
    assert waits.bottleneck == "consumer"
    assert "the step itself is the limit" in waits.sentence


MOMENTS = st.lists(st.integers(0, 1000), min_size=3, max_size=3).map(sorted)


@given(
    fetches=st.lists(MOMENTS, min_size=1, max_size=6),
    waits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=6),
    awake=st.integers(0, 2000),
)
def test_stages_always_add_up_to_the_waits(
    fetches: list[list[int]], waits: list[tuple[int, int]], awake: int
) -> None:
    base, rows = 0, []
    for began, loaded, ended in fetches:
        rows.append(fetch(base + began, base + loaded, base + ended, awake=awake))
        base += ended
    one, now = worker(*rows), 0
    steps, deliveries = [], []
    for number, (before, wait) in enumerate(waits):
        now += before
        steps.append(StepWait(now, now + wait, wait // 2, is_first=number == 0))
        if number < len(rows):
            deliveries.append(delivery(now + wait // 4, now + wait, one, number))
        now += wait
    stages = divide_waits(steps, deliveries, 0.5)
    assert sum(stages.values()) == pytest.approx(sum(wait for _, wait in waits))
    assert min(stages.values()) >= 0
