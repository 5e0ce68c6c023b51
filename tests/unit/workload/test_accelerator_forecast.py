"""What-if: the forecast is the largest number of accelerators that its own model allows."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.workload.load_workload import load, shipped
from penstock.workload.quantities import Duration
from penstock.workload.sizing import MODEL, forecast_accelerators
from penstock.workload.spec import Workload

GIB = 1 << 30
WORKLOADS = [loaded.workload for loaded in shipped()]
BANDWIDTHS = st.fractions(min_value=1, max_value=10**13, max_denominator=1000)


def utilization(workload: Workload, num: int, bandwidth: Fraction, step_bytes: Fraction) -> Fraction:
    computation = Fraction(str(workload.train.computation_time.expected_s))
    reading = num * step_bytes / bandwidth
    return computation / max(computation, reading)


@given(st.sampled_from(WORKLOADS), BANDWIDTHS)
def test_one_more_accelerator_would_miss_the_threshold(workload: Workload, bandwidth: Fraction) -> None:
    found = forecast_accelerators(workload, bandwidth)
    threshold = Fraction(str(workload.metric.au))
    if found.num_accelerators:
        assert utilization(workload, found.num_accelerators, bandwidth, found.step_read_bytes) >= threshold
    assert utilization(workload, found.num_accelerators + 1, bandwidth, found.step_read_bytes) < threshold


@given(st.sampled_from(WORKLOADS), BANDWIDTHS, BANDWIDTHS)
def test_more_bandwidth_never_feeds_fewer(workload: Workload, first: Fraction, more: Fraction) -> None:
    assert (
        forecast_accelerators(workload, first + more).num_accelerators
        >= forecast_accelerators(workload, first).num_accelerators
    )


@given(st.sampled_from(WORKLOADS), st.integers(1, 5000))
def test_exactly_the_bandwidth_needed_is_enough(workload: Workload, num: int) -> None:
    needed = forecast_accelerators(workload, Fraction(1))
    threshold = Fraction(str(workload.metric.au))
    exactly = num * needed.bytes_per_accelerator_per_s * threshold
    assert forecast_accelerators(workload, exactly).num_accelerators == num
    assert forecast_accelerators(workload, exactly - Fraction(1, 10**9)).num_accelerators == num - 1


def test_the_known_case_states_its_model_and_its_arithmetic() -> None:
    found = forecast_accelerators(load("unet3d_h100").workload, Fraction(40 * GIB))
    assert found.num_accelerators == 15
    assert found.proof[0] == f"model: {MODEL}"
    assert "40 GiB/s x 0.323 s / (0.9 x 1026204396 B) = 15.02 -> 15 accelerators" in found.proof
    assert "15 accelerators: utilization 90.12 % >= 90.00 %" in found.proof
    assert "16 accelerators: utilization 84.49 % < 90.00 %" in found.proof


def test_of_parquet_only_the_columns_that_are_read_count() -> None:
    found = forecast_accelerators(load("dlrm_b200").workload, Fraction(40 * GIB))
    assert found.step_read_bytes == 16384 * 160
    assert any("40 of 200 columns, rows of 761 B" in line for line in found.proof)
    flux = forecast_accelerators(load("flux_b200").workload, Fraction(GIB))
    assert flux.step_read_bytes == 48 * 2164832
    assert not any("columns" in line for line in flux.proof)


def test_too_little_for_one_says_how_far_one_gets() -> None:
    found = forecast_accelerators(load("unet3d_b200").workload, Fraction(4 * GIB))
    assert found.num_accelerators == 0
    assert found.au == found.au_with_one_more < Fraction(9, 10)
    assert found.proof[-1] == "1 accelerator: utilization 67.80 % < 90.00 %"


def test_a_threshold_barely_missed_is_not_rounded_up_to_it() -> None:
    workload = load("unet3d_h100").workload
    needed = forecast_accelerators(workload, Fraction(1)).bytes_per_accelerator_per_s * Fraction(9, 10)
    found = forecast_accelerators(workload, needed - 1)
    assert found.proof[-1] == "1 accelerator: utilization 89.99 % < 90.00 %"


@pytest.mark.parametrize(
    ("change", "bandwidth", "said"),
    [
        ("none", 0, "bandwidth must be above 0"),
        ("none", -1, "bandwidth must be above 0"),
        ("no computation", 1, "no bandwidth is ever enough"),
        ("no threshold", 1, "any number passes"),
    ],
)
def test_questions_without_an_answer_are_refused(change: str, bandwidth: int, said: str) -> None:
    workload = load("unet3d_h100").workload
    if change == "no computation":
        workload = replace(workload, train=replace(workload.train, computation_time=Duration()))
    if change == "no threshold":
        workload = replace(workload, metric=replace(workload.metric, au=0.0))
    with pytest.raises(UsageError, match=said):
        forecast_accelerators(workload, Fraction(bandwidth))
