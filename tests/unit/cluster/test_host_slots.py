from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.host_slots import (
    find_hosts,
    is_loopback,
    place_ranks,
)
from penstock.errors import UsageError

NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), min_size=1, max_size=6, unique=True)


def place(text: str, ranks: int | None = None) -> dict[str, int]:
    counts, where = find_hosts(text, None)
    return place_ranks(counts, ranks, where=where)


def test_hosts_carry_their_counts() -> None:
    assert place("a:4, b:2") == {"a": 4, "b": 2}


def test_hosts_without_counts_share_the_ranks_evenly() -> None:
    assert place("a,b,c", 7) == {"a": 3, "b": 3, "c": 3}


def test_hosts_without_counts_and_ranks_take_one_rank_each() -> None:
    assert place("a,b") == {"a": 1, "b": 1}


def test_addresses_of_ipv6_stand_in_brackets() -> None:
    assert place("[fe80::1]:4,[::1]:2") == {"fe80::1": 4, "::1": 2}
    assert place("[::1]", 2) == {"::1": 2}


@given(names=NAMES, counts=st.lists(st.integers(1, 999), min_size=6, max_size=6))
def test_whatever_was_placed_is_read_back(names: list[str], counts: list[int]) -> None:
    slots = dict(zip(names, counts, strict=False))
    text = ",".join(f"{host}:{count}" for host, count in slots.items())
    assert place(text) == slots


@given(names=NAMES, ranks=st.integers(1, 1000))
def test_an_even_spread_holds_all_ranks_and_wastes_less_than_a_row(names: list[str], ranks: int) -> None:
    slots = sum(place(",".join(names), ranks).values())
    assert ranks <= slots < ranks + len(names)


@pytest.mark.parametrize("text", ["a:0", "a:-1", "a:x", "a:", "a:1.5"])
def test_an_invalid_count_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="not a number of ranks") as caught:
        place(text)
    assert "node1:4" in caught.value.fix


@pytest.mark.parametrize("text", ["", ",", "a:1,,b:1", ":4", "[::1", "x[::1]:2", "-oPort=1", "[-l]:2"])
def test_invalid_hosts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a host"):
        place(text)


@pytest.mark.parametrize("line", ["-oProxyCommand=touch", "a\n  -l:4", "-l slots=2", "[-l]", "a,-l"])
def test_a_line_of_a_host_file_is_never_an_option_of_ssh(line: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"{line}\n")
    with pytest.raises(UsageError, match=r"is not a host.*must not begin with a sign"):
        find_hosts(None, tmp_path / "hosts")


def test_a_host_named_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="'a' is named twice"):
        place("a:1,b:1,a:1")


def test_counts_for_some_hosts_only_are_refused() -> None:
    with pytest.raises(UsageError, match="Only some hosts have a count"):
        place("a:1,b")


def test_host_files_of_both_makes_are_read(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "# the rack\nnode1:4\n\nnode2 slots=2  # the small one\nnode3 slots=1 max_slots=8\nnode4\n"
    )
    counts, where = find_hosts(None, file)
    assert counts == {"node1": 4, "node2": 2, "node3": 1, "node4": None}
    assert where == f"--hostfile {file}"


def test_a_host_file_without_hosts_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "rack7.txt").write_text("# nothing\n\n")
    with pytest.raises(UsageError, match="is empty") as caught:
        find_hosts(None, tmp_path / "rack7.txt")
    assert caught.value.where.endswith("rack7.txt")


def test_a_host_file_that_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        find_hosts(None, tmp_path / "missing")


def test_hosts_and_a_host_file_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="mutually exclusive"):
        find_hosts("a:1", "f")


def test_fewer_ranks_than_slots_are_placed_and_more_are_refused() -> None:
    assert place("a:4,b:2", 3) == {"a": 4, "b": 2}
    with pytest.raises(UsageError, match="7 ranks do not fit into 6 slots"):
        place("a:4,b:2", 7)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.0.0.3", True), ("::1", True), ("10.0.0.1", False), ("node1", False)],
)
def test_only_loopback_names_are_this_machine_for_sure(host: str, loopback: bool) -> None:  # noqa: FBT001 - a table
    assert is_loopback(host) is loopback
