import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.host_slots import (
    HostSlots,
    count_ranks,
    is_loopback,
    parse_host_names,
    parse_hostfile,
    parse_hostfile_names,
    parse_hosts,
)
from penstock.errors import UsageError

NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), min_size=1, max_size=6, unique=True)


def test_hosts_carry_their_counts() -> None:
    assert parse_hosts("a:4, b:2", ranks=None) == (HostSlots("a", 4), HostSlots("b", 2))


def test_hosts_without_counts_share_the_ranks_evenly() -> None:
    assert parse_hosts("a,b,c", ranks=7) == (HostSlots("a", 3), HostSlots("b", 3), HostSlots("c", 3))


def test_hosts_without_counts_and_ranks_take_one_rank_each() -> None:
    assert parse_hosts("a,b", ranks=None) == (HostSlots("a", 1), HostSlots("b", 1))


def test_addresses_of_ipv6_stand_in_brackets() -> None:
    assert parse_hosts("[fe80::1]:4,[::1]:2", ranks=None) == (HostSlots("fe80::1", 4), HostSlots("::1", 2))
    assert parse_hosts("[::1]", ranks=2) == (HostSlots("::1", 2),)


@given(names=NAMES, counts=st.lists(st.integers(1, 999), min_size=6, max_size=6))
def test_whatever_was_placed_is_read_back(names: list[str], counts: list[int]) -> None:
    slots = tuple(HostSlots(name, count) for name, count in zip(names, counts, strict=False))
    text = ",".join(f"{each.host}:{each.slots}" for each in slots)
    assert parse_hosts(text, ranks=None) == slots
    assert parse_hostfile(text.replace(",", "\n"), ranks=None, where="hosts") == slots


@given(names=NAMES, ranks=st.integers(1, 1000))
def test_an_even_spread_holds_all_ranks_and_wastes_less_than_a_row(names: list[str], ranks: int) -> None:
    slots = sum(each.slots for each in parse_hosts(",".join(names), ranks=ranks))
    assert ranks <= slots < ranks + len(names)


@pytest.mark.parametrize("text", ["a:0", "a:-1", "a:x", "a:", "a:1.5"])
def test_an_invalid_count_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="not a number of ranks") as caught:
        parse_hosts(text, ranks=None)
    assert "node1:4" in caught.value.fix


@pytest.mark.parametrize("text", ["", ",", "a:1,,b:1", ":4", "[::1", "x[::1]:2"])
def test_invalid_hosts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a host"):
        parse_hosts(text, ranks=None)


def test_a_host_named_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="'a' is named twice"):
        parse_hosts("a:1,b:1,a:1", ranks=None)


def test_counts_for_some_hosts_only_are_refused() -> None:
    with pytest.raises(UsageError, match="Only some hosts have a count"):
        parse_hosts("a:1,b", ranks=None)


def test_host_files_of_both_makes_are_read() -> None:
    text = "# the rack\nnode1:4\n\nnode2 slots=2  # the small one\nnode3 slots=1 max_slots=8\n"
    expected = (HostSlots("node1", 4), HostSlots("node2", 2), HostSlots("node3", 1))
    assert parse_hostfile(text, ranks=None, where="hosts") == expected


def test_a_host_file_without_hosts_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="is empty") as caught:
        parse_hostfile("# nothing\n\n", ranks=2, where="rack7.txt")
    assert caught.value.where == "rack7.txt"


def test_the_number_of_ranks_defaults_to_the_slots() -> None:
    hosts = (HostSlots("a", 4), HostSlots("b", 2))
    assert count_ranks(hosts, None, where="") == 6
    assert count_ranks(hosts, 3, where="") == 3


def test_more_ranks_than_slots_are_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError, match="7 ranks do not fit into 6 slots"):
        count_ranks((HostSlots("a", 4), HostSlots("b", 2)), 7, where="--hosts a:4,b:2")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.0.0.3", True), ("::1", True), ("10.0.0.1", False), ("node1", False)],
)
def test_only_loopback_names_are_this_machine_for_sure(host: str, loopback: bool) -> None:  # noqa: FBT001 - a table
    assert is_loopback(host) is loopback


def test_names_alone_are_read_whether_or_not_counts_stand_behind_them() -> None:
    assert parse_host_names("a, b:4,[::1]:2,me@c") == ("a", "b", "::1", "me@c")
    assert parse_hostfile_names("a\nb:4 # fast\n\nc slots=2\n", where="hosts") == ("a", "b", "c")
    with pytest.raises(UsageError, match="'a' is named twice"):
        parse_host_names("a,a:4")
