"""Ranks that plan a load together: all that is wanted arrives once, by messages that both ends expect."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.simulated_ranks import SimulatedRanks, simulate
from tests.unit.checkpoint.plan.states import painted
from tests.unit.checkpoint.plan.test_load_plan import OPTIONS, reshardings

from penstock.checkpoint.plan import shared_load
from penstock.checkpoint.plan.load_plan import LoadOptions, LoadPlan
from penstock.checkpoint.plan.shared_load import DescribedRows, FoundRows, find_rows, plan_own_load
from penstock.checkpoint.plan.shared_plan import Place
from penstock.checkpoint.state.regions import (
    Ints,
    Regions,
    StoredRegions,
    TensorFacts,
    element_sizes,
)
from penstock.errors import DataDamaged


def find(
    tensors: tuple[TensorFacts, ...], parts: list[StoredRegions], wanted: list[Regions]
) -> list[FoundRows]:
    """What each rank learns; `parts` are what each has read of the description."""

    def begin(rank: int) -> object:
        part = parts[rank]
        sums = np.column_stack([part.file, part.item_offset, part.item_bytes, part.item_offset])
        return find_rows(
            Place(rank, len(wanted)),
            tensors=tensors,
            num_objects=0,
            described=DescribedRows(part, sums),
            wanted=wanted[rank],
            shares=lambda _: np.ones(len(wanted[rank]), dtype=np.bool_),
            where="here",
        )

    return simulate(len(wanted), begin)  # type: ignore[arg-type]


def dealt(stored: StoredRegions, num_ranks: int, seed: int) -> list[StoredRegions]:
    """The rows of a description as they may be read by ranks, in any order."""
    owner = np.random.default_rng(seed).integers(0, num_ranks, len(stored))
    return [stored.take(np.flatnonzero(owner == rank)) for rank in range(num_ranks)]


def plans_of(
    tensors: tuple[TensorFacts, ...],
    stored: StoredRegions,
    wanted: list[Regions],
    options: LoadOptions,
    *,
    seed: int,
    hosts: Ints,
) -> list[tuple[LoadPlan, FoundRows]]:
    with patch.object(shared_load, "FAN_IN", 3):
        found = find(tensors, dealt(stored, len(wanted), seed), wanted)
    return [
        (
            plan_own_load(
                rank,
                own.described.stored,
                element_sizes(tensors),
                wanted[rank],
                found=own,
                options=options,
                near=np.flatnonzero(hosts == hosts[rank]),
            ),
            own,
        )
        for rank, own in enumerate(found)
    ]


@given(reshardings(), OPTIONS, st.integers(0, 1000), st.integers(1, 3))
def test_every_element_arrives_once_by_messages_that_both_ends_expect(
    resharding: tuple[tuple[TensorFacts, ...], StoredRegions, list[Regions]],
    options: LoadOptions,
    seed: int,
    on_host: int,
) -> None:
    tensors, stored, wanted = resharding
    hosts = np.arange(len(wanted)) // on_host
    found = plans_of(tensors, stored, wanted, options, seed=seed, hosts=hosts)
    for plan, own in found:
        rows = own.described
        assert (rows.sums[:, 1] == rows.stored.item_offset).all()
        mine = wanted[plan.rank]
        for number in range(len(mine)):
            parts = [each.regions.take(each.want == number) for each in (plan.local, plan.receives)]
            counts = painted(tensors, Regions.concatenated(parts))
            one = mine.take(np.array([number]))
            for count, expected in zip(counts, painted(tensors, one), strict=True):
                assert (count == expected).all()
        assert len(set(plan.receives.peer.tolist()) | set(plan.sends.peer.tolist())) <= 2 * max(
            1, len(own.members)
        )
        # What is read for one round waits for no later one.
        assert (np.diff(plan.sends.in_round) >= 0).all()
    for sender, _ in found:
        assert (hosts[sender.sends.peer] != hosts[sender.rank]).all()
        for receiver, _ in found:
            shown = sender.regions.take(sender.shown_read[sender.shown_to == receiver.rank])
            seen = receiver.regions.take(receiver.reader == sender.rank)
            out = sender.sends.regions.take(sender.sends.peer == receiver.rank)
            into = receiver.receives.regions.take(receiver.receives.peer == sender.rank)
            pairs = [(out, into)] if sender is receiver else [(shown, seen), (out, into)]
            for one_end, other in pairs:
                assert one_end.tensor.tolist() == other.tensor.tolist()
                assert one_end.offsets.tolist() == other.offsets.tolist()
                assert one_end.sizes.tolist() == other.sizes.tolist()
            of_sender = sender.sends.message[sender.sends.peer == receiver.rank]
            assert (
                of_sender.tolist()
                == receiver.receives.message[receiver.receives.peer == sender.rank].tolist()
            )


@given(reshardings(), st.integers(0, 1000), st.integers(0))
def test_what_is_not_stored_or_stored_twice_is_damage_on_all_ranks(
    resharding: tuple[tuple[TensorFacts, ...], StoredRegions, list[Regions]], seed: int, at: int
) -> None:
    tensors, stored, wanted = resharding
    assume(len(stored))
    at %= len(stored)
    hit = stored.regions.take(np.array([at]))
    assume(hit.num_elements[0] > 0 and any((each.tensor == hit.tensor[0]).any() for each in wanted))
    rows = np.arange(len(stored))
    for kept in (rows[rows != at], np.append(rows, at)):
        parts = dealt(stored.take(kept), len(wanted), seed)
        wholes = [Regions.concatenated([each, _whole(tensors, int(hit.tensor[0]))]) for each in wanted]
        with pytest.raises(DataDamaged, match="of the checkpoint"):
            find(tensors, parts, wholes)


def _whole(tensors: tuple[TensorFacts, ...], number: int) -> Regions:
    shape = tensors[number].shape
    return Regions.from_rows([(number, (0,) * len(shape), shape)])


def test_ranks_with_the_same_shards_share_their_reads_among_few() -> None:
    size, rows = 200, 4096
    facts = TensorFacts("w", "float32", (rows, 256), 4)
    stored = StoredRegions(
        Regions.from_rows([(0, (0, 0), facts.shape)]),
        np.array([0]),
        np.array([0]),
        np.array([facts.size_bytes]),
        np.array([0]),
        np.zeros(1, dtype=np.bool_),
    )
    nothing = stored.take(slice(0))
    wanted = Regions.from_rows([(0, (0, 0), facts.shape)])
    job = SimulatedRanks[FoundRows](size)
    found = dict(
        job.run(
            lambda rank: find_rows(
                Place(rank, size),
                tensors=(facts,),
                num_objects=0,
                described=DescribedRows(
                    stored if rank == 7 else nothing, np.zeros((int(rank == 7), 4), np.int64)
                ),
                wanted=wanted,
                shares=lambda _: np.array([True]),
                where="here",
            )
        )
    )
    assert [found[rank].members[0].tolist() for rank in (0, 100, 199)] == [
        list(range(64)),
        list(range(64, 128)),
        list(range(192, 200)),
    ]
    assert max(cost.fan_in for cost in job.costs) <= 63
    read = np.zeros(4, dtype=np.int64)
    for rank, own in found.items():
        plan = plan_own_load(
            rank,
            own.described.stored,
            np.array([4]),
            wanted,
            found=own,
            options=LoadOptions(),
            near=np.array([rank]),
        )
        read[rank // 64] += plan.regions.num_elements.sum() * 4
        assert len(np.unique(plan.receives.peer)) == len(own.members[0]) - 1
    # Each set of 64 reads everything once.
    assert read.tolist() == [facts.size_bytes] * 4
