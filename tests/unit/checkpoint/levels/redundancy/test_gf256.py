"""The field that parity's coefficients come from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.levels.redundancy.gf256 import GROUP_ORDER, inverse, multiply, power_of_two

elements = st.integers(0, 255)


@given(elements, elements, elements)
def test_products_do_not_depend_on_order_and_distribute_over_sums(a: int, b: int, c: int) -> None:
    assert multiply(a, b) == multiply(b, a)
    assert multiply(a, multiply(b, c)) == multiply(multiply(a, b), c)
    assert multiply(a, b ^ c) == multiply(a, b) ^ multiply(a, c)


def test_every_element_but_zero_has_an_inverse() -> None:
    assert all(multiply(element, inverse(element)) == 1 for element in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        inverse(0)


def test_powers_of_two_are_all_different_until_they_repeat() -> None:
    assert len({power_of_two(exponent) for exponent in range(GROUP_ORDER)}) == GROUP_ORDER
    assert power_of_two(GROUP_ORDER) == power_of_two(0) == 1
    assert multiply(power_of_two(-3), power_of_two(3)) == 1
