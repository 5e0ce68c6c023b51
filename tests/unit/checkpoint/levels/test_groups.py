"""Groups over failure domains."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.levels.options import DoubleParity, Partner, Scheme, Single, Xor
from penstock.checkpoint.levels.redundancy import choose_groups, fit_scheme
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


@pytest.mark.parametrize(
    ("wanted", "hosts", "used"),
    [
        (DoubleParity(), "abc", DoubleParity()),
        (DoubleParity(every=4), "ab", Xor(every=4)),
        (DoubleParity(), "a", Single()),
        (DoubleParity(group=3), "abcd", DoubleParity(group=4)),
        (DoubleParity(group=4), "aabb", Xor(group=4)),
        (Xor(), "aaaa", Single()),
        (Xor(group=2), "abc", Xor(group=3)),
        (Partner(), "abcde", Partner(group=3)),
        (Partner(every=2), "a", Single(every=2)),
        (Single(), "a", Single()),
    ],
    ids=str,
)
def test_a_scheme_that_does_not_fit_is_replaced_by_the_best_that_does(
    wanted: Scheme, hosts: str, used: Scheme
) -> None:
    scheme, groups, shortfall = fit_scheme(wanted, list(hosts))
    assert scheme == used
    assert min(map(len, groups)) > used.losses
    assert (shortfall == "") is (used == wanted)
    if shortfall:
        assert f"{wanted} does not fit" in shortfall
        assert "single copy" in shortfall if used.name == "single" else used.name in shortfall


@given(domains, st.sampled_from([Partner, Xor, DoubleParity]), st.integers(3, 10))
def test_whatever_the_hosts_some_scheme_fits_and_keeps_domains_apart(
    names: list[str], kind: type[Xor], members: int
) -> None:
    scheme, groups, _ = fit_scheme(kind(group=members, every=3), names)
    assert scheme.every == 3
    assert sorted(rank for group in groups for rank in group) == list(range(len(names)))
    assert all(len({names[rank] for rank in group}) == len(group) for group in groups)


def test_a_strict_scheme_is_refused_where_it_does_not_fit() -> None:
    with pytest.raises(UsageError, match=r"groups of 3 or more.*double-parity in groups of 8, strict=True"):
        fit_scheme(DoubleParity(strict=True), ["a", "b"])
