"""The model of queues: what it must say of loaders whose pace is known."""

import pytest

from penstock.bench.own_loader.prediction import BatchWork, LoaderModel, predict


def model(
    *,
    sleep_s: float = 0.0,
    cpu_s: float = 0.0,
    send_s: float = 0.0,
    step_s: float = 0.0,
    workers: int = 1,
    steps: int = 1000,
) -> LoaderModel:
    return LoaderModel(
        batches=[BatchWork(sleep_s, cpu_s, 0.0, 0.0, send_s)],
        steps_s=[step_s],
        num_workers=workers,
        prefetch=2,
        num_cores=4,
        steps_per_epoch=steps,
    )


def test_sleeping_workers_add_up() -> None:
    one = model(sleep_s=0.1, step_s=0.001)
    assert one.epoch_s() == pytest.approx(100, rel=0.01)
    assert one.with_workers(4).epoch_s() == pytest.approx(25, rel=0.02)


def test_step_is_the_limit_of_any_loader() -> None:
    assert model(sleep_s=0.1, step_s=0.05).with_workers(16).epoch_s() == pytest.approx(50, rel=0.01)


def test_workers_beyond_the_cores_bring_nothing_to_work_that_computes() -> None:
    four = model(cpu_s=0.1, workers=4)
    assert four.epoch_s() == pytest.approx(25, rel=0.02)
    assert four.with_workers(16).epoch_s() == pytest.approx(25, rel=0.05)


def test_loader_without_workers_reads_and_computes_in_turn() -> None:
    alone = model(sleep_s=0.02, step_s=0.03, workers=0)
    assert alone.epoch_s() == pytest.approx(50, rel=0.01)
    assert alone.with_workers(2).epoch_s() == pytest.approx(30, rel=0.02)


def test_copies_are_serial_whatever_the_workers() -> None:
    copying = model(sleep_s=0.01, send_s=0.02, workers=4)
    assert copying.with_workers(8).epoch_s() == pytest.approx(20, rel=0.02)
    assert copying.with_cheaper_copies(2).epoch_s() == pytest.approx(10, rel=0.02)


def test_long_epochs_go_on_at_the_pace_of_their_middle() -> None:
    assert model(sleep_s=0.1, step_s=0.001, steps=50_000).epoch_s() == pytest.approx(5000, rel=0.01)


def test_other_programs_take_their_part_of_the_cores() -> None:
    alone = model(cpu_s=0.1, workers=4)
    beside = alone.with_queueing(queued_s=0.1)
    assert beside.others == pytest.approx(4, rel=0.05)
    assert beside.epoch_s() == pytest.approx(2 * alone.epoch_s(), rel=0.05)


def test_best_prediction_comes_first_and_is_the_stage_that_is_slow() -> None:
    slow_storage = predict(model(sleep_s=0.1, cpu_s=0.001, step_s=0.001, workers=1))
    assert [one.change for one in slow_storage[:2]] == ["workers=4", "workers=2"]
    gains = {one.change: one.gain for one in slow_storage}
    assert gains["storage 2x faster"] == pytest.approx(2, rel=0.05)
    assert gains["collation 2x cheaper"] == pytest.approx(1, abs=0.01)
