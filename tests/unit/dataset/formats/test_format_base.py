import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataset.formats.format_protocol import draw_bytes, draw_shape, near_square
from penstock.errors import UsageError
from penstock.workload.spec import Dataset

UNET3D = Dataset(record_length_bytes=Fraction(146_600_628), record_length_bytes_stdev=Fraction(68_341_808))
GOLDEN = [141492189, 98771715, 170049878]


def test_without_spread_every_file_has_the_rounded_mean() -> None:
    resnet = Dataset(record_length_bytes=Fraction("114660.07"))
    assert {draw_bytes(resnet, 5, index) for index in range(50)} == {114_660}


def test_draws_have_the_mean_and_spread_asked_for() -> None:
    wide = replace(UNET3D, record_length_bytes_stdev=Fraction(20_000_000))
    drawn = np.array([draw_bytes(wide, 3, index) for index in range(20_000)])
    assert drawn.mean() == pytest.approx(146_600_628, rel=0.005)
    assert drawn.std() == pytest.approx(20_000_000, rel=0.02)


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    assert [draw_bytes(UNET3D, 1, index) for index in (5, 3)] == [
        draw_bytes(UNET3D, 1, 5),
        draw_bytes(UNET3D, 1, 3),
    ]
    assert len({draw_bytes(UNET3D, seed, index) for seed in range(20) for index in range(20)}) == 400


def test_draws_are_the_same_for_ever() -> None:
    assert [draw_bytes(UNET3D, 42, index) for index in range(3)] == GOLDEN


def test_a_shape_is_never_empty_however_wide_the_spread() -> None:
    wild = replace(UNET3D, record_length_bytes_stdev=Fraction(10**12))
    shapes = [draw_shape(wild, 1, index) for index in range(40)]
    assert min(shape.size_bytes for shape in shapes) == 1


@given(number=st.integers(1, 10**12))
def test_two_factors_give_the_number_and_the_first_is_the_smaller(number: int) -> None:
    rows, columns = near_square(number)
    assert rows * columns == number
    assert rows <= columns


@given(number=st.integers(1, 5000))
def test_no_pair_of_factors_is_closer_to_a_square(number: int) -> None:
    rows, _ = near_square(number)
    assert not any(number % better == 0 for better in range(rows + 1, math.isqrt(number) + 1))


@given(size=st.integers(1, 10**7), kind=st.sampled_from(["uint8", "int16", "float32", "complex128"]))
def test_a_shape_has_the_size_to_the_nearest_element(size: int, kind: str) -> None:
    shape = draw_shape(Dataset(record_length_bytes=Fraction(size), record_element_type=kind), 1, 1)
    step = np.dtype(kind).itemsize
    assert shape.size_bytes % step == 0
    assert abs(shape.size_bytes - size) <= max(step / 2, step - size)


@given(size=st.integers(1, 10**6), multiple=st.integers(1, 7))
def test_rows_can_be_cut_into_equal_parts(size: int, multiple: int) -> None:
    shape = draw_shape(Dataset(record_length_bytes=Fraction(size)), 1, 1, elements_multiple=multiple)
    assert shape.dims[0] % multiple == 0
    assert abs(shape.size_bytes - size) <= max(multiple / 2, multiple - size)


def test_dimensions_asked_for_count_instead_of_a_length() -> None:
    shape = draw_shape(Dataset(record_dims=(2, 3, 4), record_element_type="float32"), 1, 1)
    assert shape.dims == (2, 3, 4)
    assert shape.size_bytes == 96


@pytest.mark.parametrize("kind", ["bool", "datetime64[s]"])
def test_types_that_not_every_bytes_are_valid_for_are_refused(kind: str) -> None:
    with pytest.raises(UsageError, match="arbitrary bytes"):
        draw_shape(Dataset(record_element_type=kind), 1, 1)
