"""Waits are divided by the work of the worker that was awaited, and the stages add up to the waits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.own_loader.wait_stages import (
    ExplainedWait,
    LoadSplit,
    OtherWork,
    StepWait,
    WaitStage,
    WorkerFetches,
    divide_waits,
)
from penstock.bench.own_loader.worker_probe import FETCH_TYPE, Fetch


def fetch(seq: int, began: int, loaded: int, ended: int, *, cpu: int = 0) -> Fetch:
    return Fetch(seq, 1, began, loaded, ended, cpu, 0, ended - loaded, 0, 0, 0)


def worker(*fetches: Fetch, transforms: float = 0.0) -> WorkerFetches:
    return WorkerFetches(began_ns=5, rows=np.array(list(fetches), FETCH_TYPE), split=LoadSplit(transforms))


def explained(asked: int, given: int, fetches: WorkerFetches, seq: int) -> ExplainedWait:
    return ExplainedWait(asked_ns=asked, given_ns=given, fetches=fetches, seq=seq)


def test_wait_for_a_reading_worker_is_storage_then_collation_then_copy() -> None:
    reading = worker(fetch(0, 100, 180, 190))
    stages = divide_waits([StepWait(120, 200, 0)], [explained(120, 200, reading, 0)], OtherWork())
    assert stages == {WaitStage.STORAGE: 60, WaitStage.COLLATE: 10, WaitStage.COPY: 10} | dict.fromkeys(
        (WaitStage.TRANSFORM, WaitStage.DECODE), 0
    )


def test_processor_time_of_a_fetch_is_decoding_and_transforms() -> None:
    computing = worker(fetch(0, 100, 200, 200, cpu=80), transforms=0.25)
    stages = divide_waits([StepWait(100, 200, 0)], [explained(100, 200, computing, 0)], OtherWork())
    assert (stages[WaitStage.STORAGE], stages[WaitStage.TRANSFORM], stages[WaitStage.DECODE]) == (20, 20, 60)


def test_first_wait_begins_with_the_start_of_workers() -> None:
    reading = worker(fetch(0, 100, 150, 150))
    first = StepWait(0, 150, 0, is_first=True)
    stages = divide_waits([first], [explained(10, 150, reading, 0)], OtherWork())
    assert stages[WaitStage.STARTUP] == 95
    assert stages[WaitStage.STORAGE] == 50 + 5


def test_wait_for_the_second_batch_of_a_worker_has_both() -> None:
    busy = worker(fetch(0, 0, 50, 60), fetch(1, 60, 90, 100))
    stages = divide_waits([StepWait(20, 110, 0)], [explained(20, 110, busy, 1)], OtherWork())
    assert (stages[WaitStage.STORAGE], stages[WaitStage.COLLATE], stages[WaitStage.COPY]) == (60, 20, 10)


def test_batch_that_was_ready_costs_nothing_but_its_copy() -> None:
    early = worker(fetch(0, 0, 50, 60))
    stages = divide_waits([StepWait(500, 503, 0)], [explained(500, 503, early, 0)], OtherWork())
    assert {stage for stage, spent in stages.items() if spent} == {WaitStage.COPY}


def test_loader_without_workers_that_are_known_is_divided_by_busy_threads() -> None:
    other = OtherWork(own_cpu_ns={"collate": 3, "copy": 1}, busy_share=0.75)
    stages = divide_waits([StepWait(0, 100, 20), StepWait(100, 200, 20)], [], other)
    assert stages[WaitStage.STORAGE] == pytest.approx(40)
    assert stages[WaitStage.DECODE] == pytest.approx(120)
    assert (stages[WaitStage.COLLATE], stages[WaitStage.COPY]) == (30, 10)


def test_first_batch_of_an_unknown_loader_is_its_start_beyond_the_usual_wait() -> None:
    steps = [StepWait(0, 100, 0, is_first=True), StepWait(100, 110, 0), StepWait(110, 120, 0)]
    stages = divide_waits(steps, [], OtherWork())
    assert stages[WaitStage.STARTUP] == 90
    assert stages[WaitStage.STORAGE] == 30


MOMENTS = st.lists(st.integers(0, 1000), min_size=3, max_size=3).map(sorted)


@given(
    fetches=st.lists(MOMENTS, min_size=1, max_size=6),
    waits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=6),
    cpu=st.integers(0, 2000),
)
def test_stages_always_add_up_to_the_waits(
    fetches: list[list[int]], waits: list[tuple[int, int]], cpu: int
) -> None:
    base, rows = 0, []
    for seq, (began, loaded, ended) in enumerate(fetches):
        rows.append(fetch(seq, base + began, base + loaded, base + ended, cpu=cpu))
        base += ended
    one, now = worker(*rows), 0
    steps, explanations = [], []
    for number, (before, wait) in enumerate(waits):
        now += before
        steps.append(StepWait(now, now + wait, wait // 2, is_first=number == 0))
        explanations.append(explained(now + wait // 4, now + wait, one, number))
        now += wait
    stages = divide_waits(steps, explanations, OtherWork(busy_share=0.5))
    assert sum(stages.values()) == pytest.approx(sum(wait for _, wait in waits))
    assert min(stages.values()) >= 0
