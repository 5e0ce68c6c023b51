"""Differences are counted by bits and measured as numbers, for every element type that has numbers."""

import copy
import math
from typing import Any

import numpy as np
import pytest

from penstock.checkpoint.formats.restricted_pickle import Opaque
from penstock.checkpoint.tools.diff import are_same, count_differences, format_value


def view(array: Any) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "uint16", "int64", "complex64", "complex128"]
)
def test_the_largest_difference_of_numbers(dtype: str) -> None:
    first = np.arange(10).astype(dtype)
    second = first.copy()
    second[2] += 3
    second[7] += 1
    assert count_differences(view(first), view(second), dtype, first.itemsize) == (2, 3.0)
    assert count_differences(view(first), view(first), dtype, first.itemsize) == (0, None)


def test_bfloat16_differences_are_measured_without_numpy_support() -> None:
    first = np.array([1.0, 2.0], dtype=np.float32)
    second = np.array([1.0, 4.0], dtype=np.float32)
    upper = [(each.view(np.uint32) >> 16).astype(np.uint16) for each in (first, second)]
    assert count_differences(view(upper[0]), view(upper[1]), "bfloat16", 2) == (1, 2.0)


def test_types_without_numbers_here_are_counted_only() -> None:
    first, second = np.array([1, 2], dtype=np.uint8), np.array([1, 3], dtype=np.uint8)
    assert count_differences(view(first), view(second), "float8_e4m3fn", 1) == (1, None)


def test_signs_of_zero_and_nans_are_bits_and_no_differences() -> None:
    zeros, nans = np.array([0.0, np.nan]), np.array([-0.0, np.nan])
    assert count_differences(view(zeros), view(nans), "float64", 8) == (1, 0.0)
    assert count_differences(view(np.array([np.inf])), view(np.array([1.0])), "float64", 8) == (1, None)


def test_bools_are_numbers_too() -> None:
    assert count_differences(view(np.array([True])), view(np.array([False])), "bool", 1) == (1, 1.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        ("x" * 200, "<str>"),
        pytest.param(1 << 20_000, "<int>", id="a number of more digits than Python writes"),
        ([1, None], "[1, None]"),
        (Opaque(), "<Opaque>"),
        ([Opaque()], "<list>"),
    ],
)
def test_values_are_formatted_briefly(value: object, text: str) -> None:
    assert format_value(value) == text


ALIKE: list[tuple[Any, Any]] = [
    (1, True),
    (1, 1.0),
    (1, 1 + 0j),
    (0.0, -0.0),
    ([1], (1,)),
    ({1: 2}, {"1": 2}),
    ({1: 2}, {True: 2}),
    ({"a": [0.0]}, {"a": [-0.0]}),
    ({1}, {1.0}),
    (b"a", bytearray(b"a")),
    ([1], [1, 2]),
]


@pytest.mark.parametrize(("one", "other"), ALIKE, ids=str)
def test_values_that_are_only_equal_differ(one: Any, other: Any) -> None:
    assert not are_same(one, other)
    assert not are_same(other, one)
    assert are_same(one, copy.deepcopy(one))


def test_a_nan_is_the_same_in_another_checkpoint() -> None:
    assert are_same(
        {"best": [float("nan"), (1 + float("nan") * 1j,)]}, {"best": [math.nan, (1 + math.nan * 1j,)]}
    )
