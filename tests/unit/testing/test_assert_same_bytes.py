"""Comparing bytes: equal ones pass, otherwise the first difference is reported at once."""

import pytest

from penstock.testing.storage_contract import assert_same_bytes


def test_equal_bytes_of_any_kind_pass() -> None:
    assert_same_bytes(b"abc", bytearray(b"abc"))
    assert_same_bytes(memoryview(b""), b"")


def test_the_first_difference_is_reported() -> None:
    with pytest.raises(AssertionError, match=r"from byte 3 onward b'X' instead of b'd'"):
        assert_same_bytes(b"abcX", b"abcd")


def test_a_missing_end_is_reported() -> None:
    with pytest.raises(
        AssertionError, match=r"2 bytes instead of 4; from byte 2 onward b'' instead of b'cd'"
    ):
        assert_same_bytes(b"ab", b"abcd")


def test_large_differences_are_reported_in_one_line() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_same_bytes(bytes(1 << 24), b"\x01" * (1 << 24))
    assert len(str(caught.value)) < 300
