"""Groups over failure domains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.levels.redundancy.parity_layout import choose_groups
from penstock.errors import UsageError

domains = st.lists(st.sampled_from([f"host-{number}" for number in range(6)]), min_size=1, max_size=60)


@given(domains, st.integers(2, 10))
def test_no_group_meets_a_domain_twice_and_every_rank_is_in_one(names: list[str], members: int) -> None:
    try:
        groups = choose_groups(names, members)
    except UsageError as error:
        assert "failure domains" in str(error)  # noqa: PT017 - a refusal is one of two right answers
        return
    assert sorted(rank for group in groups for rank in group) == list(range(len(names)))
    for group in groups:
        assert 2 <= len(group) <= members
        assert len({names[rank] for rank in group}) == len(group)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


@given(st.integers(2, 8), st.integers(1, 8), st.integers(2, 8))
def test_hosts_of_equal_size_always_make_groups(hosts: int, ranks_a_host: int, members: int) -> None:
    names = [f"host-{rank // ranks_a_host}" for rank in range(hosts * ranks_a_host)]
    members = min(members, hosts)
    if (hosts * ranks_a_host) / max(-(-hosts * ranks_a_host // members), ranks_a_host) >= 2:
        assert choose_groups(names, members)


def test_one_host_cannot_protect_itself() -> None:
    with pytest.raises(UsageError, match=r"4 ranks in 1 failure domains \(4 of them in 'a'\)"):
        choose_groups(["a"] * 4, 2)


def test_a_single_copy_has_groups_of_one() -> None:
    assert choose_groups(["a", "a", "b"], 1) == ((0,), (1,), (2,))
