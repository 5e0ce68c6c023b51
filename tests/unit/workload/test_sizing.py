"""Sizing: exactly minimal, monotone, and its proof can be checked by hand."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.workload.load_workload import load
from penstock.workload.sizing import (
    FILES_PER_FOLDER,
    DatasetSizingRequest,
    bytes_text,
    make_sizing_request,
    quotient_text,
    size_dataset,
)

GIB = 1 << 30

REQUESTS = st.builds(
    DatasetSizingRequest,
    record_bytes=st.integers(1, 10**12).map(lambda hundredths: Fraction(hundredths, 100)),
    read_bytes_per_sample=st.just(Fraction(1)),
    num_samples_per_file=st.integers(1, 10**7),
    batch_size=st.integers(1, 10**5),
    computation_s=st.integers(0, 10**7).map(lambda microseconds: Fraction(microseconds, 10**6)),
    num_accelerators=st.integers(1, 10**5),
    host_memory_bytes=st.lists(st.integers(1, 1 << 45), min_size=1, max_size=5).map(tuple),
)


def holds(request: DatasetSizingRequest, num_files: int) -> bool:
    """Both rules, said again from the other side: products instead of quotients."""
    num_samples = num_files * request.num_samples_per_file
    enough_steps = num_samples >= 500 * request.batch_size * request.num_accelerators
    return enough_steps and num_samples * request.record_bytes >= 5 * sum(request.host_memory_bytes)


@given(REQUESTS)
def test_the_files_suffice_and_one_fewer_does_not(request: DatasetSizingRequest) -> None:
    found = size_dataset(request)
    assert holds(request, found.min_files)
    assert not holds(request, found.min_files - 1)


@given(REQUESTS, st.integers(-3, 3))
def test_the_judge_says_what_the_rules_say(request: DatasetSizingRequest, more: int) -> None:
    found = size_dataset(request)
    num_files = max(0, found.min_files + more)
    passed, comparison = found.check_files(num_files)
    assert passed == holds(request, num_files)
    assert f"{num_files:,} files" in comparison
    assert f"{found.min_files:,} files needed" in comparison


@given(REQUESTS, st.integers(1, 1 << 40), st.integers(1, 1000))
def test_more_of_anything_never_needs_less(
    request: DatasetSizingRequest, memory: int, accelerators: int
) -> None:
    least = size_dataset(request).min_files
    hosts = (*request.host_memory_bytes, memory)
    assert size_dataset(replace(request, host_memory_bytes=hosts)).min_files >= least
    assert (
        size_dataset(replace(request, num_accelerators=request.num_accelerators + accelerators)).min_files
        >= least
    )
    assert size_dataset(replace(request, batch_size=request.batch_size + 1)).min_files >= least


@given(REQUESTS)
def test_the_data_set_holds_the_samples_that_were_counted(request: DatasetSizingRequest) -> None:
    found = size_dataset(request)
    assert found.min_samples == max(found.min_samples_by_steps, found.min_samples_by_memory)
    assert (found.min_files - 1) * request.num_samples_per_file < found.min_samples
    assert found.dataset_bytes == math.ceil(
        found.min_files * request.num_samples_per_file * request.record_bytes
    )


@given(REQUESTS)
def test_folders_are_suggested_when_one_would_hold_too_many(request: DatasetSizingRequest) -> None:
    found = size_dataset(request)
    if found.min_files <= FILES_PER_FOLDER:
        assert found.num_subfolders == 0
    else:
        assert found.min_files <= found.num_subfolders * FILES_PER_FOLDER
        assert found.min_files > (found.num_subfolders - 1) * FILES_PER_FOLDER


@given(REQUESTS)
def test_the_host_order_does_not_matter(request: DatasetSizingRequest) -> None:
    turned = replace(request, host_memory_bytes=request.host_memory_bytes[::-1])
    assert size_dataset(turned).min_files == size_dataset(request).min_files
    assert size_dataset(turned).proof == size_dataset(request).proof


def test_the_known_case_is_one_file_more_than_the_floor() -> None:
    request = make_sizing_request(
        load("unet3d_h100").workload, num_accelerators=8, host_memory_bytes=(512 * GIB, 512 * GIB)
    )
    found = size_dataset(request)
    assert found.min_files == 37_501
    assert "memory: 5 x 1024 GiB / 146600628 B = 37,500.2 -> 37,501 files" in found.proof
    assert "steps: 500 steps x 7 samples x 8 accelerators = 28,000 files" in found.proof
    assert "larger: memory, 37,501 files" in found.proof
    assert found.check_files(37_500) == (False, "37,500 files < 37,501 files needed")
    assert found.check_files(37_501) == (True, "37,501 files >= 37,501 files needed")
    assert found.num_subfolders == 4


def test_many_accelerators_make_the_steps_decide() -> None:
    request = make_sizing_request(
        load("unet3d_b200").workload, num_accelerators=100, host_memory_bytes=(GIB,)
    )
    found = size_dataset(request)
    assert found.min_files == 350_000
    assert "larger: steps, 350,000 files" in found.proof


def test_several_samples_a_file_are_divided_last_and_a_fractional_length_stays_exact() -> None:
    request = make_sizing_request(
        load("resnet50_h100").workload, num_accelerators=8, host_memory_bytes=(512 * GIB, 256 * GIB)
    )
    found = size_dataset(request)
    assert found.min_samples == math.ceil(Fraction(5 * 768 * GIB * 100, 11466007))
    assert found.min_files == math.ceil(Fraction(found.min_samples, 1251))
    assert "(1 x 512 GiB + 1 x 256 GiB) / 114660.07 B" in found.proof[1]
    assert found.proof[-1].endswith(f"-> {found.min_files:,} files")


def test_parquet_is_counted_by_its_columns_and_judged_by_samples() -> None:
    request = make_sizing_request(
        load("dlrm_b200").workload, num_accelerators=8, host_memory_bytes=(512 * GIB,)
    )
    found = size_dataset(request)
    assert request.record_bytes == 761
    assert found.min_samples == math.ceil(Fraction(5 * 512 * GIB, 761))
    assert found.min_files == 766
    assert found.check_files(1024)[0]


def test_rates_count_what_is_read_and_vanish_without_computation() -> None:
    dlrm = make_sizing_request(load("dlrm_b200").workload, num_accelerators=4, host_memory_bytes=(GIB,))
    found = size_dataset(dlrm)
    assert found.bytes_per_accelerator_per_s == Fraction(16384 * 160) / Fraction("0.000375")
    assert found.bytes_per_s == 4 * found.bytes_per_accelerator_per_s
    idle = size_dataset(replace(dlrm, computation_s=Fraction(0)))
    assert idle.bytes_per_accelerator_per_s is None
    assert idle.bytes_per_s is None


@pytest.mark.parametrize(
    ("name", "gib_per_s"),
    [
        ("unet3d_b200", 5.90),
        ("unet3d_h100", 2.96),
        ("unet3d_a100", 1.50),
        ("retinanet_b200", 0.152),
        ("retinanet_mi355", 0.152),
        ("cosmoflow_h100", 0.753),
        ("cosmoflow_a100", 0.478),
        ("resnet50_h100", 0.191),
        ("resnet50_a100", 0.098),
        ("flux_b200", 0.072),
        ("flux_mi355", 0.072),
        ("dlrm_b200", 6.5),
        ("dlrm_mi355", 4.3),
    ],
)
def test_the_demand_of_an_accelerator_is_the_known_one(name: str, gib_per_s: float) -> None:
    found = size_dataset(
        make_sizing_request(load(name).workload, num_accelerators=1, host_memory_bytes=(GIB,))
    )
    assert found.bytes_per_accelerator_per_s is not None
    assert float(found.bytes_per_accelerator_per_s) / GIB == pytest.approx(gib_per_s, rel=0.01)


@pytest.mark.parametrize(("accelerators", "memory"), [(0, (GIB,)), (1, ()), (1, (GIB, 0))])
def test_no_cluster_is_refused(accelerators: int, memory: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="are not a cluster"):
        make_sizing_request(
            load("unet3d_h100").workload, num_accelerators=accelerators, host_memory_bytes=memory
        )


def test_memory_that_is_no_whole_gib_is_said_in_bytes() -> None:
    request = make_sizing_request(
        load("unet3d_h100").workload, num_accelerators=1, host_memory_bytes=(GIB + 1,)
    )
    assert "5 x 1073741825 B / 146600628 B" in size_dataset(request).proof[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction("37500.21"), "37,500.2"),
        (Fraction("37500.96"), "37,500.96"),
        (Fraction("37500.04"), "37,500.04"),
        (Fraction(37500) + Fraction(1, 10**9), "37,500.000000001"),
        (Fraction(37500), "37,500"),
        (Fraction(3, 4), "0.8"),
    ],
)
def test_a_quotient_is_never_shown_as_a_whole_number_that_it_is_not(value: Fraction, text: str) -> None:
    assert quotient_text(value) == text


def test_bytes_are_shown_as_they_were_given() -> None:
    assert bytes_text(Fraction(146600628)) == "146600628"
    assert bytes_text(Fraction("114660.07")) == "114660.07"
