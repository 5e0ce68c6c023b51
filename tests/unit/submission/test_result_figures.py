"""Means, deviations, intervals and outliers of few values, against tables and by their definitions."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.submission.result_figures import (
    MAX_SCORE,
    ResultFigure,
    measure_figure,
    student_quantile,
)


@pytest.mark.parametrize(
    ("share", "degrees", "t"),
    [
        (0.95, 1, 12.7062),
        (0.95, 2, 4.3027),
        (0.95, 3, 3.1824),
        (0.95, 4, 2.7764),
        (0.95, 9, 2.2622),
        (0.95, 30, 2.0423),
        (0.95, 120, 1.9799),
        (0.99, 4, 4.6041),
        (0.90, 5, 2.0150),
        (0.50, 1, 1.0),
    ],
)
def test_quantiles_of_students_t_are_those_of_the_tables(share: float, degrees: int, t: float) -> None:
    assert student_quantile(share, degrees) == pytest.approx(t, abs=6e-5)


def compute_spread(values: dict[str, float]) -> ResultFigure:
    return measure_figure("throughput", "samples/s", values)


VALUES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=12)


@given(numbers=VALUES)
def test_mean_and_deviation_are_those_of_the_population(numbers: list[float]) -> None:
    found = compute_spread({str(position): number for position, number in enumerate(numbers)})
    assert found.mean == pytest.approx(statistics.fmean(numbers), abs=1e-3)
    assert found.deviation == pytest.approx(statistics.pstdev(numbers), rel=1e-6, abs=1e-3)
    if len(numbers) == 1:
        assert found.interval is None
    else:
        assert found.interval is not None
        low, high = found.interval
        assert low <= found.mean <= high


def test_the_interval_is_students_of_the_sample() -> None:
    values = {"a": 20.0, "b": 20.1, "c": 20.2, "d": 20.3, "e": 20.4}
    reach = 2.7764451 * statistics.stdev(values.values()) / math.sqrt(5)
    interval = compute_spread(values).interval
    assert interval == pytest.approx((20.2 - reach, 20.2 + reach), rel=1e-7)


def around(*odd: float) -> dict[str, float]:
    return {
        "run1": 100.0, "run2": 101.0, "run3": 99.0, "run4": 100.5,
        **{f"odd{position}": value for position, value in enumerate(odd)},
    }  # fmt: skip


def test_a_run_apart_from_the_others_is_named_with_the_rule() -> None:
    ((run, rule),) = compute_spread(around(120.0)).outliers.items()
    assert run == "odd0"
    assert f"> {MAX_SCORE} deviations from the median 100.5" in rule
    assert "median absolute deviation" in rule


@pytest.mark.parametrize(("value", "is_outlier"), [(105.0, True), (95.0, False), (94.0, True)])
def test_the_limit_of_an_outlier_is_the_modified_score(value: float, is_outlier: bool) -> None:  # noqa: FBT001
    values = around(value)
    middle = statistics.median(values.values())
    score = 0.6745 * abs(value - middle) / statistics.median(abs(each - middle) for each in values.values())
    assert (score > 3.5) is is_outlier
    assert list(compute_spread(values).outliers) == ["odd0"] * is_outlier


def test_single_deviating_run_is_an_outlier() -> None:
    equal = {f"run{number}": 7.0 for number in range(5)}
    assert compute_spread(equal).outliers == {}
    ((run, rule),) = compute_spread(equal | {"run9": 8.0}).outliers.items()
    assert run == "run9"
    assert "mean absolute deviation" in rule
