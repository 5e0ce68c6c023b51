"""Where the time went, and what is to blame: from tables of steps small enough to check by eye."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.run_events import RankScript, even_run

from penstock.results.counter_files import IoReconciliation, ReconciliationVerdict
from penstock.results.phase_figures import (
    Bottleneck,
    TimeBreakdown,
    UtilizationWindow,
    break_down_times,
    compute_phase_figures,
    find_bottleneck,
    held_up_ns,
    judge,
)
from penstock.results.step_events import RankEvents, StepPhase
from penstock.workload.load_workload import load
from penstock.workload.settings import parse_settings

RULE = UtilizationWindow(num_steps=100, exclude_start_steps=0, exclude_end_steps=0, batch_size=1)


def rank_of(
    number: int,
    *steps: tuple[float, float, float],
    read: float = 0.0,
    decode: float = 0.0,
    harness: float = 0.0,
) -> RankEvents:
    script = RankScript(number)
    script.epoch()
    for wait, compute, barrier in steps:
        script.step(wait, compute, barrier, read=read, decode=decode)
    script.pass_time(harness)
    script.end_block()
    script.end_epoch()
    return script.events()


def times_of(*ranks: RankEvents, rule: UtilizationWindow = RULE) -> TimeBreakdown:
    times = break_down_times(ranks, rule, StepPhase.TRAIN)
    assert times is not None
    return times


def test_percentiles_are_of_all_steps_and_of_each_rank() -> None:
    times = times_of(
        rank_of(0, *((number / 100, 1.0, 0.0) for number in range(1, 101))),
        rank_of(4, (3.0, 1.0, 0.5), read=2.0, decode=0.25),
    )
    waits = times.by_rank[0]["wait"]
    assert (waits.num_steps, waits.max_s) == (100, 1.0)
    assert waits.total_s == pytest.approx(50.5)
    assert (waits.p50_s, waits.p90_s, waits.p99_s) == pytest.approx((0.505, 0.901, 0.9901))
    assert times.over_ranks["wait"].max_s == 3.0
    assert times.over_ranks["wait"].num_steps == 101
    assert times.by_rank[4]["read"].mean_s == 2.0
    assert times.by_rank[4]["decode"].p99_s == 0.25
    assert times.by_rank[4]["barrier"].total_s == 0.5


def test_excluded_steps_count_nowhere_but_in_the_harness_of_their_block() -> None:
    rule = UtilizationWindow(num_steps=3, exclude_start_steps=1, exclude_end_steps=1, batch_size=1)
    times = times_of(rank_of(0, (9, 1, 0), (1, 1, 0), (5, 1, 0), harness=2), rule=rule)
    assert times.over_ranks["wait"].total_s == 1.0
    assert times.shares.harness == pytest.approx(2 / 4)
    assert times.shares.compute == pytest.approx(1 / 4)


def test_skew_names_the_fastest_and_the_slowest_rank() -> None:
    ranks = [rank_of(number, (wait, 1.0, 0.0)) for number, wait in ((0, 0.2), (1, 0.9), (2, 0.1))]
    skew = times_of(*ranks).skew["wait"]
    assert (skew.fastest_rank, skew.slowest_rank) == (2, 1)
    assert (skew.fastest_s, skew.median_s, skew.slowest_s) == pytest.approx((0.1, 0.2, 0.9))


def test_a_barrier_is_split_into_late_samples_of_another_rank_and_the_rest() -> None:
    """Rank 1 gets its samples 2 s later, and the barrier itself takes 0.5 s."""
    times = times_of(rank_of(0, (1, 1, 2.5)), rank_of(1, (3, 1, 0.5)))
    assert times.shares.held_up == pytest.approx(2 / 9)
    assert times.shares.barrier == pytest.approx(1 / 9)
    assert times.shares.wait == pytest.approx(4 / 9)


def test_uneven_computation_is_not_blamed_on_samples() -> None:
    times = times_of(rank_of(0, (1, 1, 2)), rank_of(1, (1, 3, 0)))
    assert times.shares.held_up == 0.0
    assert times.shares.barrier == pytest.approx(2 / 8)


step = st.tuples(*[st.integers(0, 10**6)] * 3).map(lambda parts: tuple(part / 1e6 for part in parts))


@given(st.lists(st.lists(step, min_size=4, max_size=4), min_size=1, max_size=4))
def test_shares_are_parts_of_one(tables: list[list[tuple[float, float, float]]]) -> None:
    times = times_of(*(rank_of(number, *table) for number, table in enumerate(tables)))
    shares = times.shares
    parts = (shares.compute, shares.wait, shares.held_up, shares.barrier, shares.harness)
    assert all(-1e-12 <= part <= 1 + 1e-12 for part in parts)
    assert sum(parts) == pytest.approx(1.0) or sum(parts) == 0.0


@given(st.lists(step, min_size=1, max_size=8))
def test_single_rank_is_not_held_up(table: list[tuple[float, float, float]]) -> None:
    assert held_up_ns(rank_of(0, *table).steps).sum() == 0


def test_phase_without_steps_has_no_times() -> None:
    assert break_down_times([], RULE, StepPhase.TRAIN) is None
    assert break_down_times([rank_of(0)], RULE, StepPhase.TRAIN) is None


def test_a_rank_without_counted_steps_is_left_out_of_the_skew() -> None:
    times = times_of(rank_of(0, (1, 1, 0)), rank_of(1))
    assert set(times.by_rank) == {0}


@pytest.mark.parametrize(
    ("ranks", "wanted", "said"),
    [
        ([rank_of(0, (0.05, 0.95, 0.0), read=0.5)], Bottleneck.NONE, "95.0% was computation"),
        ([rank_of(0, (0.5, 0.5, 0.0), read=0.9, decode=0.1)], Bottleneck.STORAGE, "900 ms reading"),
        ([rank_of(0, (0.5, 0.5, 0.0), read=0.1, decode=0.9)], Bottleneck.CLIENT_CPU, "900 ms decoding"),
        ([rank_of(0, (0.5, 0.5, 0.0))], Bottleneck.STORAGE, "did not separate reading from decoding"),
        ([rank_of(0, (0.1, 0.5, 0.4), read=0.1)], Bottleneck.BARRIER, "cores that ranks share"),
        ([rank_of(0, (0.1, 0.5, 0.0), harness=0.4)], Bottleneck.CLIENT_CPU, "between steps"),
    ],
)
def test_the_largest_loss_is_the_bottleneck(ranks: list[RankEvents], wanted: Bottleneck, said: str) -> None:
    verdict = find_bottleneck(times_of(*ranks), threshold=0.9, passed=wanted is Bottleneck.NONE)
    assert verdict.bottleneck is wanted
    assert said in " ".join(verdict.evidence)


def test_a_failed_run_always_has_a_bottleneck() -> None:
    """DLIO's AU may miss the threshold although the share of computation, first step included, reaches it."""
    verdict = find_bottleneck(times_of(rank_of(0, (0.01, 0.95, 0.04))), threshold=0.9, passed=False)
    assert verdict.bottleneck is Bottleneck.BARRIER


def test_one_slow_path_to_storage_is_storage_and_the_rank_is_named() -> None:
    ranks = [rank_of(number, (0.1, 1.0, 1.9), read=0.1) for number in range(3)]
    ranks.append(rank_of(3, (2.0, 1.0, 0.0), read=2.0))
    verdict = find_bottleneck(times_of(*ranks), threshold=0.9, passed=False)
    assert verdict.bottleneck is Bottleneck.STORAGE
    assert "Rank 3 waits 2.00 s a step, the median rank 100 ms" in verdict.evidence[-1]


def test_equal_waits_name_no_rank() -> None:
    verdict = find_bottleneck(
        times_of(*(rank_of(number, (1.0, 1.0, 0.0), read=1) for number in (0, 1))),
        threshold=0.9,
        passed=False,
    )
    assert "Rank" not in " ".join(verdict.evidence)


@pytest.mark.parametrize(("wait_s", "is_named"), [(1.5, False), (1.75, True)])
def test_rank_is_named_that_waits_more_than_half_as_long_again_as_the_median(
    wait_s: float, *, is_named: bool
) -> None:
    ranks = [rank_of(number, (1.0, 1.0, wait_s - 1.0), read=1) for number in range(2)]
    ranks.append(rank_of(2, (wait_s, 1.0, 0.0), read=1))
    evidence = " ".join(find_bottleneck(times_of(*ranks), threshold=0.9, passed=False).evidence)
    assert ("Rank 2 waits" in evidence) is is_named


def test_ceiling_below_the_threshold_makes_the_client_the_bottleneck() -> None:
    times = times_of(rank_of(0, (0.5, 0.5, 0.0), read=0.9))
    assert (
        find_bottleneck(times, threshold=0.9, passed=False, ceiling=0.8).bottleneck is Bottleneck.CLIENT_CPU
    )
    verdict = find_bottleneck(times, threshold=0.9, passed=False, ceiling=0.99)
    assert verdict.bottleneck is Bottleneck.STORAGE
    assert any("99.0%" in sentence for sentence in verdict.evidence)


READ = IoReconciliation(
    direction="read",
    application_bytes=9,
    delivered_bytes=4,
    by={},
    verdict=ReconciliationVerdict.FAIL,
    why="",
)


@pytest.mark.parametrize(
    ("changes", "deliveries", "epochs", "verdict"),
    [
        ({}, [], [], "passed"),
        ({}, [replace(READ, verdict=ReconciliationVerdict.NOT_CHECKED)], [{"cache": None}], "passed"),
        ({}, [READ], [], "doubtful"),
        ({}, [], [{"cache": {"resident_share": 0.5}}], "doubtful"),
        ({"meets_threshold": False}, [READ], [], "failed"),
        ({"au_strict_percent": None}, [], [], "no figure"),
    ],
)
def test_there_is_one_verdict(
    changes: dict[str, object],
    deliveries: list[IoReconciliation],
    epochs: list[dict[str, object]],
    verdict: str,
) -> None:
    workload = load("unet3d_h100", overrides=parse_settings(["metric.au=0.1"])).workload
    figures = compute_phase_figures(even_run(), workload)
    assert figures is not None
    assert judge(replace(figures, **changes), deliveries, epochs) == verdict  # type: ignore[arg-type]
    assert judge(None, deliveries, epochs) == "no figure"
