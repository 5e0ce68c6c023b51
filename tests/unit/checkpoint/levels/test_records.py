"""What all nodes together conclude of a step, from what each says it holds."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.levels.redundancy import (
    GroupMember,
    GroupRecord,
    NodeShares,
    RecordedFile,
    assess,
    choose_groups,
    choose_home_rank,
)

NUM_SAVED = 8
DOMAINS = tuple(f"host-{rank // 2}" for rank in range(NUM_SAVED))


def records_of(scheme: str, losses: int, members: int, save_id: str = "a") -> dict[int, GroupRecord]:
    groups = choose_groups(DOMAINS, members)
    return {
        number: GroupRecord(
            step="step-1",
            save_id=save_id,
            domains=(),
            scheme=scheme,
            losses=losses,
            chunk_bytes=64 if losses else 0,
            block_bytes=64,
            members=tuple(
                GroupMember(
                    rank=rank,
                    domain=DOMAINS[rank],
                    files=(RecordedFile(name=f"__{rank}_0.distcp", size_bytes=100 + rank, sum=""),),
                )
                for rank in group
            ),
            kept=tuple(RecordedFile(name=f"parity-{rank}.bin", size_bytes=64, sum="") for rank in group)
            if losses
            else (),
        )
        for number, group in enumerate(groups)
    }


def node(ranks: tuple[int, ...], saved: Sequence[int], records: dict[int, GroupRecord]) -> NodeShares:
    """The node of `ranks` now, which has the shares of ranks that `saved`."""
    sizes = {f"__{rank}_0.distcp": 100 + rank for rank in saved}
    sizes |= {f"parity-{rank}.bin": 64 for rank in saved}
    known = {number: record for number, record in records.items() if set(record.ranks) & set(saved)}
    return NodeShares(ranks=ranks, sizes=sizes, records=known, domains=DOMAINS)


def at_home(records: dict[int, GroupRecord], lost_hosts: Sequence[int] = ()) -> list[NodeShares]:
    return [
        NodeShares(ranks=(2 * host, 2 * host + 1))
        if host in lost_hosts
        else node((2 * host, 2 * host + 1), (2 * host, 2 * host + 1), records)
        for host in range(4)
    ]


def test_as_many_losses_as_the_scheme_survives_are_rebuildable_and_one_more_is_not() -> None:
    for scheme, losses in (("xor", 1), ("double-parity", 2)):
        records = records_of(scheme, losses, 4)
        for num_lost in range(losses + 2):
            for hosts in combinations(range(4), num_lost):
                found = assess(at_home(records, hosts))
                assert found.lost == tuple(rank for rank in range(NUM_SAVED) if rank // 2 in hosts)
                assert (not found.lost and not found.reason) is (num_lost == 0)
                assert found.is_rebuildable is (0 < num_lost <= losses)
                assert bool(found.reason) is (num_lost > losses)


def test_one_loss_too_many_is_explained_with_files_and_hosts() -> None:
    reason = assess(at_home(records_of("xor", 1, 4), (1, 3))).reason
    assert "ranks 2, 6 of one group lost their files (__2_0.distcp, __6_0.distcp" in reason
    assert "saved on host-1, host-3" in reason
    assert reason.endswith("xor survives 1 loss")


def test_a_lost_unprotected_share_is_explained_with_its_host() -> None:
    found = assess(at_home(records_of("single", 0, 1), (2,)))
    assert found.reason == "no record of the share of rank 4 is left; the cache of host-2 is lost"


def test_a_step_that_no_cache_has_is_explained() -> None:
    assert assess([NodeShares(ranks=(0, 1))]).reason == "no cache has it"


def test_ranks_that_moved_find_their_shares_and_who_acts_for_them() -> None:
    records = records_of("xor", 1, 4)
    moved = [node((2 * host, 2 * host + 1), (7 - 2 * host, 6 - 2 * host), records) for host in range(4)]
    found = assess(moved)
    assert (found.lost, found.reason) == ((), "")
    assert {rank: actor // 2 for rank, actor in found.holders.items()} == {
        rank: (7 - rank) // 2 for rank in range(NUM_SAVED)
    }


def test_damaged_shares_count_as_lost_and_leave_the_others_of_their_node() -> None:
    found = assess(at_home(records_of("xor", 1, 4)), damaged=(3,))
    assert found.lost == (3,)
    assert found.shares[2] == {2}
    assert found.is_rebuildable


def test_of_two_saves_of_a_step_the_one_that_can_be_restored_counts() -> None:
    old, new = records_of("xor", 1, 4, "old"), records_of("xor", 1, 4, "new")
    mixed = [*at_home(new)[:3], node((6, 7), (6, 7), old)]
    found = assess(mixed)
    assert found.save_id == "new"
    assert found.lost == (6, 7)
    assert found.is_rebuildable


def test_a_share_goes_to_the_node_with_most_room_if_its_own_is_full() -> None:
    nodes = at_home(records_of("double-parity", 2, 4), (1,))
    rooms = (200, 200, 5000, 200)
    found = assess([replace(node, room_bytes=room) for node, room in zip(nodes, rooms, strict=True)])
    assert found.lost == (2, 3)
    assert found.moved == {3: 5}, "the first of them fits into its own cache"
    assert (found.holders[2], found.holders[3]) == (2, 5)


@given(st.integers(1, 40), st.integers(1, 40))
def test_every_share_has_a_home_among_the_present_ranks(num_saved: int, num_present: int) -> None:
    homes = [choose_home_rank(rank, num_saved, num_present) for rank in range(num_saved)]
    assert all(0 <= home < num_present for home in homes)
    assert homes == sorted(homes)
    assert homes == list(range(num_saved)) or num_saved != num_present


@given(st.integers(1, 12), st.sets(st.integers(0, 3)), st.data())
def test_the_holder_of_a_share_has_it_or_is_its_home(
    num_present: int, lost_hosts: set[int], data: st.DataObject
) -> None:
    records = records_of("double-parity", 2, 4)
    owners = [data.draw(st.integers(0, num_present - 1)) for _ in range(4)]
    holdings = [
        node(
            (rank,),
            [
                saved
                for host in range(4)
                if host not in lost_hosts and owners[host] == rank
                for saved in (2 * host, 2 * host + 1)
            ],
            records,
        )
        for rank in range(num_present)
    ]
    found = assess(holdings)
    for saved, actor in found.holders.items():
        if saved in found.lost:
            assert actor == found.homes[saved] == choose_home_rank(saved, NUM_SAVED, num_present)
        else:
            assert saved in found.shares[actor]
    if len(lost_hosts) <= 2:
        assert not found.reason
