"""Accelerator utilization by DLIO's formula and by ours, recomputed by hand from small tables of steps."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.run_events import RankScript, even_run

from penstock.results.phase_figures import (
    UtilizationWindow,
    choose_window,
    compat_block_rate,
    compat_rate,
    compute_phase_figures,
    epoch_rates,
    mean_and_stdev,
    strict_au_percent,
)
from penstock.results.step_events import RankEvents, SpanKind, StepPhase
from penstock.workload.spec import Dataset, Evaluation, Metric, ReaderSection, Train, Workflow, Workload


def rule(num_steps: int, *, start: int = 1, end: int = 0, batch: int = 2) -> UtilizationWindow:
    return UtilizationWindow(
        num_steps=num_steps, exclude_start_steps=start, exclude_end_steps=end, batch_size=batch
    )


def one_block(*steps: tuple[float, float, float], harness: float = 0.0) -> RankEvents:
    script = RankScript()
    script.epoch()
    for wait, compute, barrier in steps:
        script.step(wait, compute, barrier, samples=2)
    script.pass_time(harness)
    script.end_block()
    script.end_epoch()
    return script.events()


def only_block_rate(
    events: RankEvents, given_rule: UtilizationWindow, phase: StepPhase = StepPhase.TRAIN
) -> tuple[float, float]:
    (block,) = events.blocks(phase, 1)
    return compat_block_rate(block, given_rule, phase)


def test_dlios_formula_by_hand() -> None:
    """Steps of (wait, compute, barrier); the first is excluded, but its barrier stays in the time.

    T = 14 - (5 + 1) = 8, W = 1 + 1, AU = 100 x 2 / 8, throughput = 2 steps x 2 samples / 8 s.
    """
    events = one_block((5, 1, 0.5), (2, 1, 0.5), (1, 1, 1), harness=1)
    assert only_block_rate(events, rule(3)) == pytest.approx((25.0, 0.5))


def test_our_formula_by_hand() -> None:
    """Of the steps after the first: compute 2, wait 3; barriers and harness are in neither."""
    events = one_block((5, 1, 0.5), (2, 1, 0.5), (1, 1, 1), harness=1)
    assert strict_au_percent(events.steps, rule(3)) == pytest.approx(100 * 2 / 5)


def test_steps_at_the_end_are_left_out_of_both() -> None:
    events = one_block((5, 1, 0), (1, 1, 0), (1, 3, 0), (7, 1, 0))
    assert only_block_rate(events, rule(4, end=1)) == pytest.approx((100 * 4 / 6, 2 * 2 / 6))
    assert strict_au_percent(events.steps, rule(4, end=1)) == pytest.approx(100 * 4 / 6)


def test_dlio_excludes_no_last_step_where_a_rank_has_fewer_than_the_whole_data_set_promises() -> None:
    events = one_block((5, 1, 0), (1, 1, 0), (7, 1, 0))
    assert only_block_rate(events, rule(4, end=1)) == pytest.approx((100 * 2 / 10, 2 * 2 / 10))
    assert strict_au_percent(events.steps, rule(4, end=1)) == pytest.approx(50.0)


def test_dlio_counts_an_end_below_zero_from_the_back() -> None:
    events = one_block((1, 1, 0), (1, 1, 0), (1, 1, 0), (1, 3, 0))
    au, rate = only_block_rate(events, rule(0, end=1))
    assert au == pytest.approx(100 * 2 / 4 * (4 / 4))
    assert rate == pytest.approx(2 * 2 / 4)


def test_dlio_drops_the_first_step_of_every_block_and_we_once_an_epoch() -> None:
    script = RankScript()
    script.epoch()
    for _ in range(3):
        script.step(1, 1)
    script.end_block()
    script.checkpoint(SpanKind.SAVE, 10, 1)
    script.block()
    script.step(3, 1)
    script.step(0, 1)
    script.end_block()
    script.end_epoch()
    events = script.events()
    blocks = events.blocks(StepPhase.TRAIN, 1)
    rates = [compat_block_rate(block, rule(5), StepPhase.TRAIN) for block in blocks]
    assert [au_percent for au_percent, _ in rates] == pytest.approx([50.0, 100.0])
    assert compat_rate(blocks, rule(5), StepPhase.TRAIN)[0] == pytest.approx((50 * 3 + 100 * 2) / 5)
    assert strict_au_percent(events.steps, rule(5)) == pytest.approx(100 * 4 / (4 + 5))


def test_a_block_whose_every_step_is_excluded_has_no_utilization_in_dlio() -> None:
    events = one_block((1, 1, 0))
    assert only_block_rate(events, rule(1)) == (0.0, 0.0)
    assert strict_au_percent(events.steps, rule(1)) is None


def test_an_empty_epoch_has_no_figures() -> None:
    assert compat_rate([], rule(3), StepPhase.TRAIN) == (0.0, 0.0)
    script = RankScript()
    script.epoch()
    script.end_block()
    (rate,) = epoch_rates([script.events()], rule(3), StepPhase.TRAIN)
    assert (rate.au_compat_percent, rate.au_strict_percent, rate.samples_per_s_strict) == (0.0, None, 0.0)


def test_dlios_evaluation_counts_all_steps_over_all_time_in_its_throughput() -> None:
    script = RankScript()
    script.epoch()
    script.end_block()
    script.evaluation()
    script.step(5, 1, 0)
    script.step(1, 1, 0)
    script.step(1, 1, 0)
    script.end_block()
    script.end_epoch()
    au, rate = only_block_rate(script.events(), rule(3), StepPhase.EVAL)
    assert au == pytest.approx(50.0)
    assert rate == pytest.approx(3 * 2 / 10)


def test_ranks_are_averaged_in_utilization_and_added_in_throughput() -> None:
    fast, slow = RankScript(0), RankScript(1)
    for script, wait in ((fast, 0.0), (slow, 1.0)):
        script.epoch()
        for _ in range(3):
            script.step(wait, 1, 0, samples=2, read_bytes=100)
        script.end_block()
        script.end_epoch()
    (rate,) = epoch_rates([fast.events(), slow.events()], rule(3), StepPhase.TRAIN)
    assert rate.au_compat_percent == pytest.approx((100 + 50) / 2)
    assert rate.au_strict_percent == pytest.approx((100 + 50) / 2)
    assert rate.samples_per_s_compat == pytest.approx(2 * 2 / 2 + 2 * 2 / 4)
    assert rate.samples == 12
    assert rate.elapsed_s == pytest.approx(6.0)
    assert rate.samples_per_s_strict == pytest.approx(2.0)


def test_an_epoch_that_some_rank_did_not_complete_is_left_out() -> None:
    complete = even_run(num_ranks=1, num_epochs=2)[0]
    cut = RankScript(1)
    cut.epoch()
    cut.step(1, 1)
    cut.end_block()
    cut.end_epoch()
    cut.epoch()
    cut.step(1, 1)
    rates = epoch_rates([complete, cut.events()], rule(4), StepPhase.TRAIN)
    assert [rate.epoch for rate in rates] == [1]
    assert epoch_rates([], rule(4), StepPhase.TRAIN) == []


@pytest.mark.parametrize(
    ("num_ranks", "total_steps", "phase", "wanted"),
    [
        (1, None, StepPhase.TRAIN, 42 * 3 // 4),
        (4, None, StepPhase.TRAIN, 42 * 3 // 16),
        (4, 9, StepPhase.TRAIN, 9),
        (2, 9, StepPhase.EVAL, 10 * 3 // 4),
    ],
)
def test_dlios_number_of_steps(
    num_ranks: int, total_steps: int | None, phase: StepPhase, wanted: int
) -> None:
    workload = Workload(
        name="x",
        dataset=Dataset(num_files_train=42, num_files_eval=10, num_samples_per_file=3),
        reader=ReaderSection(batch_size=4, batch_size_eval=2),
        train=Train(total_training_steps=total_steps),
        metric=Metric(exclude_start_steps=2, exclude_end_steps=3),
    )
    found = choose_window(workload, num_ranks=num_ranks, phase=phase)
    batch = 4 if phase is StepPhase.TRAIN else 2
    assert found == UtilizationWindow(
        num_steps=wanted, exclude_start_steps=2, exclude_end_steps=3, batch_size=batch
    )


seconds = st.floats(0, 10).map(lambda value: round(value, 6))
steps = st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=12)


@given(steps, st.integers(0, 3), st.integers(0, 3), seconds)
def test_utilization_is_a_percentage_and_ours_is_never_below_dlios(
    table: list[tuple[float, float, float]], start: int, end: int, harness: float
) -> None:
    events = one_block(*table, harness=harness)
    given_rule = rule(len(table), start=start, end=end)
    compat, _ = only_block_rate(events, given_rule)
    strict = strict_au_percent(events.steps, given_rule)
    assert 0 <= compat <= 100
    if end <= len(table):
        assert compat <= (strict or 0.0) + 1e-9
    assert strict is None or 0 <= strict <= 100


@given(steps, seconds)
def test_barriers_and_harness_do_not_change_ours(
    table: list[tuple[float, float, float]], barrier: float
) -> None:
    without = one_block(*((wait, compute, 0.0) for wait, compute, _ in table))
    harder = one_block(*((wait, compute, barrier) for wait, compute, _ in table), harness=barrier)
    given_rule = rule(len(table))
    assert strict_au_percent(without.steps, given_rule) == strict_au_percent(harder.steps, given_rule)


@given(steps)
def test_without_barriers_and_harness_both_agree(table: list[tuple[float, float, float]]) -> None:
    events = one_block(*((wait, compute, 0.0) for wait, compute, _ in table))
    compat, _ = only_block_rate(events, rule(len(table)))
    assert compat == pytest.approx(strict_au_percent(events.steps, rule(len(table))) or 0.0)


WORKLOAD = Workload(
    name="tiny",
    workflow=Workflow(train=True),
    dataset=Dataset(num_files_train=16, num_samples_per_file=1),
    reader=ReaderSection(batch_size=2),
    train=Train(epochs=2),
    evaluation=Evaluation(),
    metric=Metric(au=0.9),
)


def test_a_runs_figures_are_means_over_epochs() -> None:
    figures = compute_phase_figures(even_run(num_ranks=2, num_epochs=2, num_steps=4), WORKLOAD)
    assert figures is not None
    assert figures.au_compat_percent.mean == pytest.approx(90.0)
    assert figures.au_compat_percent.stdev == pytest.approx(0.0)
    assert figures.au_strict_percent is not None
    assert figures.au_strict_percent.mean == pytest.approx(90.0)
    assert figures.samples_per_s_compat.mean == pytest.approx(2 * 2.0)
    assert figures.samples_per_s_strict == pytest.approx(2 * 2 * 4 / 4.9)
    assert figures.io_compat_mib_per_s.mean == pytest.approx(4.0 * 65536 / 2**20)
    assert figures.read_bytes == 2 * 2 * 4 * 4096
    assert figures.read_bytes_per_s == pytest.approx(2 * 4 * 4096 / 4.9)


def test_the_threshold_is_met_from_its_very_value_on() -> None:
    ranks = [one_block((1, 1, 0), (0, 1, 0), (1, 2, 0))]
    at = replace(WORKLOAD, metric=Metric(au=0.75))
    above = replace(WORKLOAD, metric=Metric(au=0.7501))
    assert [getattr(compute_phase_figures(ranks, each), "meets_threshold", None) for each in (at, above)] == [
        True,
        False,
    ]


def test_a_run_without_a_completed_block_has_no_figures() -> None:
    assert compute_phase_figures([], WORKLOAD) is None
    assert compute_phase_figures([RankScript().events()], WORKLOAD) is None
    assert compute_phase_figures(even_run(), WORKLOAD, phase=StepPhase.EVAL) is None


def test_a_run_of_excluded_steps_alone_has_neither_times_nor_verdict() -> None:
    figures = compute_phase_figures(even_run(num_steps=1), WORKLOAD)
    assert figures is not None
    assert (figures.au_strict_percent, figures.times, figures.verdict) == (None, None, None)
    assert figures.au_compat_percent.mean == 0.0
    (note,) = figures.notes
    assert "Epoch 1, 2 has no utilization" in note
    assert "the first 1 and the last 0 steps" in note
    assert "0 %" in note


def test_a_run_with_steps_that_count_has_nothing_to_explain() -> None:
    figures = compute_phase_figures(even_run(num_steps=5), WORKLOAD)
    assert figures is not None
    assert figures.notes == ()


def test_the_deviation_is_the_populations() -> None:
    assert mean_and_stdev([1.0, 3.0]).stdev == 1.0
    assert mean_and_stdev([2.0]).stdev == 0.0
