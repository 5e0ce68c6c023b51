"""The search for the largest number that passes: right, and sparing with what it asks."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workflows.accelerator_sweep import (
    SweepRun,
    find_most_accelerators,
    largest_passing,
    make_sweep_page,
    sum_up,
)


def _try(accelerators: int, *, fed: int) -> SweepRun:
    return SweepRun(
        accelerators=accelerators,
        meets_threshold=accelerators <= fed,
        au_compat=95.0 if accelerators <= fed else 60.0,
        samples_per_s=10.0 * accelerators,
        bottleneck="none" if accelerators <= fed else "storage",
        results_dir=f"runs/{accelerators}",
    )


def _sweep(fed: int, most: int) -> tuple[int, list[SweepRun]]:
    return find_most_accelerators(lambda accelerators: _try(accelerators, fed=fed), most=most)


@given(st.integers(0, 5000), st.integers(1, 5000))
def test_the_largest_number_that_passes_is_found(fed: int, most: int) -> None:
    asked: list[int] = []

    def passes(number: int) -> bool:
        asked.append(number)
        return number <= fed

    assert largest_passing(passes, most=most) == min(fed, most)
    assert len(set(asked)) == len(asked)
    assert max(asked) <= most
    assert len(asked) <= 2 * math.log2(most) + 2


def test_a_sweep_keeps_its_tries_in_their_order() -> None:
    accelerators, tries = _sweep(fed=5, most=100)
    assert accelerators == 5
    assert [seen.accelerators for seen in tries] == [1, 2, 4, 8, 6, 5]


def test_a_sweep_says_that_it_never_saw_a_limit() -> None:
    accelerators, tries = _sweep(fed=99, most=6)
    assert (accelerators, tries) == (6, [_try(number, fed=99) for number in (1, 2, 4, 6)])
    figure = make_sweep_page(accelerators, tries, "unet3d", "/data").banner.figure
    assert figure == "The storage feeds at least 6 accelerators: all that were tried"
    assert sum_up(accelerators, tries) == (6, None)


def test_storage_too_slow_for_one_accelerator_needs_one_run() -> None:
    accelerators, tries = _sweep(fed=0, most=100)
    assert (accelerators, len(tries)) == (0, 1)
    assert make_sweep_page(accelerators, tries, "unet3d", "/data").banner.figure.startswith(
        "Too slow for one"
    )


@pytest.mark.parametrize("bottleneck", ["client CPU", "barrier"])
def test_a_client_that_does_not_keep_up_is_not_the_storages_limit(bottleneck: str) -> None:
    def run(accelerators: int) -> SweepRun:
        found = _try(accelerators, fed=2)
        return found if found.meets_threshold else replace(found, bottleneck=bottleneck)

    passed, tries = find_most_accelerators(run, most=16)
    assert (passed, sum_up(passed, tries)) == (2, (4, "client"))
    banner = make_sweep_page(passed, tries, "unet3d", "/data").banner
    assert (
        banner.figure
        == "The storage feeds at least 4 accelerators; this client keeps 2 busy and is the limit"
    )
    assert banner.limited_by == "client"
