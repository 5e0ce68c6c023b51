"""Slurm's host lists are expanded completely, or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.host_slots import expand_nodelist
from penstock.errors import UsageError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", "a"),
        ("node[01-03,7],gpu1", "node01 node02 node03 node7 gpu1"),
        ("r[1-2]c[8-9].x", "r1c8.x r1c9.x r2c8.x r2c9.x"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("a[5]b,c", "a5b c"),
    ],
)
def test_lists_are_written_out_in_their_order(text: str, hosts: str) -> None:
    assert expand_nodelist(text) == tuple(hosts.split())


@given(first=st.integers(0, 999), num=st.integers(0, 50), width=st.integers(1, 5))
def test_a_range_holds_every_number_with_its_zeros(first: int, num: int, width: int) -> None:
    hosts = expand_nodelist(f"n[{first:0{width}}-{first + num}]")
    assert hosts == tuple(f"n{number:0{width}}" for number in range(first, first + num + 1))


@pytest.mark.parametrize(
    "text", ["", "a,", ",a", "a[", "a[]", "a[3-1]", "a[x]", "a]", "a[1-2", "a[[1]]", "a[1,]"]
)
def test_what_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a host list"):
        expand_nodelist(text)


@pytest.mark.parametrize("text", ["a[0-999999999]", "a[0-999]b[0-999]c[0-999]"])
def test_a_list_beyond_all_machines_is_refused_at_once(text: str) -> None:
    with pytest.raises(UsageError):
        expand_nodelist(text)
