"""Load plans: every wanted element arrives once, shared bytes are read once, loads are equal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.checkpoint.plan.states import grids, jobs, painted, region, tensor_lists

from penstock.checkpoint.plan.load_plan import (
    LoadOptions,
    LoadPlan,
    UnreadableFile,
    divide_plan,
    missing_elements,
    payload_starts,
    plan_load,
    plan_rank_load,
)
from penstock.checkpoint.plan.save_plan import Holdings, SaveOptions, plan_save
from penstock.checkpoint.state.regions import (
    Ints,
    Regions,
    StoredRegions,
    TensorFacts,
    element_sizes,
    whole_regions,
)

FINE = LoadOptions(min_cut_bytes=1, min_gap_bytes=8, message_bytes=16, exchange_bytes=128)
OPTIONS = st.sampled_from(
    [FINE, LoadOptions(), LoadOptions(min_cut_bytes=1, min_gap_bytes=1, message_bytes=1)]
)


def stored_as(regions: Regions, file: Ints, item_bytes: Ints) -> StoredRegions:
    """Boxes one behind another in each file, without envelopes."""
    num_bytes = regions.num_bytes(item_bytes)
    offset = np.zeros(len(regions), dtype=np.int64)
    for number in np.unique(file):
        rows = file == number
        offset[rows] = np.cumsum(num_bytes[rows]) - num_bytes[rows]
    packed = np.zeros(len(regions), dtype=np.bool_)
    return StoredRegions(regions, file, offset, num_bytes, offset, packed)


def saved(job: list[Holdings]) -> tuple[tuple[TensorFacts, ...], StoredRegions]:
    shared = plan_save(job, SaveOptions(min_cut_bytes=1))
    return shared.tensors, stored_as(shared.regions, shared.rank, element_sizes(shared.tensors))


def plans_of(
    tensors: tuple[TensorFacts, ...],
    stored: StoredRegions,
    wanted: list[Regions],
    options: LoadOptions,
    hosts: Ints | None = None,
) -> list[LoadPlan]:
    item_bytes = element_sizes(tensors)
    parts = divide_plan(plan_load(stored, item_bytes, wanted, options), len(wanted))
    near = [None if hosts is None else np.flatnonzero(hosts == hosts[rank]) for rank in range(len(wanted))]
    return [
        plan_rank_load(part, item_bytes, rank, options, near=each)
        for rank, (part, each) in enumerate(zip(parts, near, strict=True))
    ]


def by_twos(wanted: list[Regions]) -> Ints:
    """Hosts of two ranks each."""
    return np.arange(len(wanted)) // 2


@st.composite
def reshardings(draw: st.DrawFn) -> tuple[tuple[TensorFacts, ...], StoredRegions, list[Regions]]:
    """Something saved by one job and wanted by another."""
    tensors = draw(tensor_lists())
    tensors, stored = saved(draw(jobs(tensors)))
    wanted = [each.regions for each in draw(jobs(tensors))]
    return tensors, stored, wanted


@given(reshardings(), OPTIONS)
def test_every_wanted_element_arrives_once(
    resharding: tuple[tuple[TensorFacts, ...], StoredRegions, list[Regions]], options: LoadOptions
) -> None:
    tensors, stored, wanted = resharding
    shared_hosts = plans_of(tensors, stored, wanted, options, by_twos(wanted))
    for plan in [*plans_of(tensors, stored, wanted, options), *shared_hosts]:
        mine = wanted[plan.rank]
        for transfers in (plan.local, plan.receives):
            for row in range(len(transfers)):
                assert transfers.regions.tensor[row] == mine.tensor[transfers.want[row]]
        for number in range(len(mine)):
            parts = [each.regions.take(each.want == number) for each in (plan.local, plan.receives)]
            counts = painted(tensors, Regions.concatenated(parts))
            one = mine.take(np.array([number]))
            for count, expected in zip(counts, painted(tensors, one), strict=True):
                assert (count == expected).all()


@given(reshardings(), OPTIONS)
def test_a_rank_finds_in_its_part_what_it_finds_in_the_whole_plan(
    resharding: tuple[tuple[TensorFacts, ...], StoredRegions, list[Regions]], options: LoadOptions
) -> None:
    tensors, stored, wanted = resharding
    item_bytes = element_sizes(tensors)
    whole = plan_load(stored, item_bytes, wanted, options)
    for plan in plans_of(tensors, stored, wanted, options):
        expected = plan_rank_load(whole, item_bytes, plan.rank, options)
        assert plan.row.tolist() == expected.row.tolist()
        assert plan.reader.tolist() == expected.reader.tolist()
        for own, other in (
            (plan.local, expected.local),
            (plan.sends, expected.sends),
            (plan.receives, expected.receives),
        ):
            for column in ("peer", "want", "in_round", "message"):
                assert getattr(own, column).tolist() == getattr(other, column).tolist()
            assert own.regions.offsets.tolist() == other.regions.offsets.tolist()


@given(reshardings(), OPTIONS)
def test_what_one_rank_sends_is_what_the_other_expects(
    resharding: tuple[tuple[TensorFacts, ...], StoredRegions, list[Regions]], options: LoadOptions
) -> None:
    tensors, stored, wanted = resharding
    hosts = by_twos(wanted)
    plans = plans_of(tensors, stored, wanted, options, hosts)
    for sender in plans:
        assert (hosts[sender.sends.peer] != hosts[sender.rank]).all()
        for receiver in plans:
            shown = sender.regions.take(sender.shown_read[sender.shown_to == receiver.rank])
            seen = receiver.regions.take(receiver.reader == sender.rank)
            if sender is not receiver:
                assert shown.tensor.tolist() == seen.tensor.tolist()
                assert shown.offsets.tolist() == seen.offsets.tolist()
                assert shown.sizes.tolist() == seen.sizes.tolist()
            out = sender.sends.peer == receiver.rank
            into = receiver.receives.peer == sender.rank
            assert sender.sends.message[out].tolist() == receiver.receives.message[into].tolist()
            assert sender.sends.in_round[out].tolist() == receiver.receives.in_round[into].tolist()
            assert sender.sends.want[out].tolist() == receiver.receives.want[into].tolist()
            assert (sender.sends.regions.offsets[out] == receiver.receives.regions.offsets[into]).all()
            assert (sender.sends.regions.sizes[out] == receiver.receives.regions.sizes[into]).all()


@given(reshardings(), OPTIONS)
def test_where_no_two_ranks_want_the_same_bytes_nothing_is_exchanged(
    resharding: tuple[tuple[TensorFacts, ...], StoredRegions, list[Regions]], options: LoadOptions
) -> None:
    tensors, stored, wanted = resharding
    item_bytes = element_sizes(tensors)
    exchanges = any(
        len(plan.sends) or len(plan.receives) for plan in plans_of(tensors, stored, wanted, options)
    )
    assert plan_load(stored, item_bytes, wanted, options).may_exchange or not exchanges


@given(reshardings(), OPTIONS)
def test_reads_are_contiguous_in_their_items_and_hold_what_is_passed_on(
    resharding: tuple[tuple[TensorFacts, ...], StoredRegions, list[Regions]], options: LoadOptions
) -> None:
    tensors, stored, wanted = resharding
    for plan in plans_of(tensors, stored, wanted, options):
        outer = stored.regions.take(plan.row)
        start = payload_starts(plan.regions, outer)
        for row in range(len(plan.row)):
            facts = tensors[int(plan.regions.tensor[row])]
            shape = outer.region(row, len(facts.shape))[1]
            places = np.arange(int(np.prod(shape))).reshape(shape)
            corner = outer.offsets[row]
            shifted = Regions(plan.regions.tensor, plan.regions.offsets - corner, plan.regions.sizes)
            inside = places[region(shifted, row, len(facts.shape))].reshape(-1)
            assert inside.tolist() == list(range(int(start[row]), int(start[row]) + len(inside)))
        for transfers in (plan.local, plan.sends, plan.receives):
            assert (transfers.regions.sizes > 0).all(), "nothing empty is passed on"
        for transfers in (plan.local, plan.sends):
            read = plan.regions.take(transfers.read)
            assert (transfers.regions.offsets >= read.offsets).all()
            assert (transfers.regions.offsets + transfers.regions.sizes <= read.offsets + read.sizes).all()


@given(reshardings())
def test_replicas_read_each_wanted_byte_once_between_them(
    resharding: tuple[tuple[TensorFacts, ...], StoredRegions, list[Regions]],
) -> None:
    tensors, stored, wanted = resharding
    everybody = [Regions.concatenated(wanted)] * 3
    for plans in (plans_of(tensors, stored, everybody, FINE), plans_of(tensors, stored, wanted, FINE)):
        reads = Regions.concatenated([plan.regions for plan in plans])
        for count in painted(tensors, reads):
            assert (count >= 1).all(), "here every element is wanted by somebody"
    whole = [whole_regions(tensors)] * 3
    reads = Regions.concatenated([plan.regions for plan in plans_of(tensors, stored, whole, FINE)])
    for count in painted(tensors, reads):
        assert (count == 1).all()


def one_tensor(*shape: int) -> tuple[tuple[TensorFacts, ...], StoredRegions]:
    tensors = (TensorFacts("w", "float32", shape, 4),)
    return tensors, stored_as(whole_regions(tensors), np.zeros(1, dtype=np.int64), element_sizes(tensors))


def bytes_read(tensors: tuple[TensorFacts, ...], plans: list[LoadPlan]) -> list[int]:
    return [int(plan.regions.num_bytes(element_sizes(tensors)).sum()) for plan in plans]


def one_region(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Regions:
    return Regions.from_rows([(0, offsets, sizes)])


def test_replicas_share_the_reading_equally() -> None:
    tensors, stored = one_tensor(4096, 1024)
    plans = plans_of(tensors, stored, [whole_regions(tensors)] * 4, LoadOptions())
    assert bytes_read(tensors, plans) == [4 << 20] * 4


def test_an_eighth_of_the_rows_is_an_eighth_of_the_bytes() -> None:
    tensors, stored = one_tensor(4096, 1024)
    plans = plans_of(tensors, stored, [one_region((512, 0), (512, 1024))], LoadOptions())
    assert bytes_read(tensors, plans) == [2 << 20]


def test_columns_of_long_rows_are_read_without_the_gaps() -> None:
    tensors, stored = one_tensor(8, 1 << 20)
    plans = plans_of(tensors, stored, [one_region((0, 0), (8, 1 << 18))], LoadOptions())
    assert bytes_read(tensors, plans) == [8 << 20]


def test_columns_that_ranks_want_of_short_rows_are_read_once_and_exchanged() -> None:
    tensors, stored = one_tensor(1024, 1024)
    halves = [one_region((0, 0), (1024, 512)), one_region((0, 512), (1024, 512))]
    plans = plans_of(tensors, stored, halves, LoadOptions())
    assert bytes_read(tensors, plans) == [2 << 20] * 2
    assert [len(plan.receives) for plan in plans] == [1, 1]


def test_items_far_below_a_fair_share_are_not_cut_so_that_one_rank_can_check_them() -> None:
    tensors = tuple(TensorFacts(f"w{number}", "float32", (1000, 1000), 4) for number in range(64))
    stored = stored_as(whole_regions(tensors), np.zeros(64, dtype=np.int64), element_sizes(tensors))
    plans = plans_of(tensors, stored, [whole_regions(tensors)] * 3, LoadOptions())
    assert sum(len(plan.row) for plan in plans) == 64
    assert max(len(plan.row) for plan in plans) <= 22


@pytest.mark.parametrize(("lengths", "reads"), [((1087, 961), [1087, 961]), ((1088, 960), [1024, 1024])])
def test_no_part_is_smaller_than_a_sixteenth_of_a_fair_share(
    lengths: tuple[int, int], reads: list[int]
) -> None:
    tensors = tuple(TensorFacts(f"w{length}", "int8", (length,), 1) for length in lengths)
    stored = stored_as(whole_regions(tensors), np.zeros(2, dtype=np.int64), element_sizes(tensors))
    plans = plans_of(tensors, stored, [whole_regions(tensors)] * 2, LoadOptions(min_cut_bytes=1))
    assert bytes_read(tensors, plans) == reads


def test_a_file_is_read_by_a_rank_that_can_open_it_and_sent_to_those_that_cannot() -> None:
    tensors, _ = one_tensor(8, 4)
    regions = Regions.from_rows([(0, (0, 0), (4, 4)), (0, (4, 0), (4, 4))])
    stored = stored_as(regions, np.array([0, 1]), element_sizes(tensors))
    readable = np.array([[True, False], [False, False], [False, True]])
    wanted = [whole_regions(tensors), whole_regions(tensors), Regions.from_rows([])]
    item_bytes = element_sizes(tensors)
    shared = plan_load(stored, item_bytes, wanted, LoadOptions(), readable=readable)
    plans = [plan_rank_load(shared, item_bytes, rank, LoadOptions()) for rank in range(3)]
    assert [plan.row.tolist() for plan in plans] == [[0], [], [1]]
    assert [plan.sends.peer.tolist() for plan in plans] == [[1], [], [0, 1]]
    assert [plan.receives.peer.tolist() for plan in plans] == [[2], [0, 2], []]


def test_a_file_that_no_rank_can_open_is_named() -> None:
    tensors, stored = one_tensor(8)
    readable = np.zeros((2, 1), dtype=np.bool_)
    wanted = [whole_regions(tensors)] * 2
    with pytest.raises(UnreadableFile) as caught:
        plan_load(stored, element_sizes(tensors), wanted, LoadOptions(), readable=readable)
    assert caught.value.file == 0


@given(st.data())
def test_elements_that_are_not_stored_are_missing(data: st.DataObject) -> None:
    (facts,) = data.draw(tensor_lists(max_tensors=1).filter(len))
    rows = [(0, *each) for each in data.draw(grids(facts.shape))]
    kept = [row for row in rows if data.draw(st.booleans())]
    wanted = Regions.from_rows([(0, *each) for each in data.draw(grids(facts.shape))])
    (there,) = painted((facts,), Regions.from_rows(kept).widened(len(facts.shape)))
    expected = [int((there[region(wanted, row, len(facts.shape))] == 0).sum()) for row in range(len(wanted))]
    assert missing_elements(Regions.from_rows(kept), wanted).tolist() == expected


def test_a_rank_that_wants_nothing_reads_nothing() -> None:
    tensors, stored = one_tensor(64, 64)
    plans = plans_of(tensors, stored, [Regions.from_rows([]), whole_regions(tensors)], FINE)
    assert bytes_read(tensors, plans) == [0, 64 * 64 * 4]


def test_without_requests_the_plan_has_no_reads() -> None:
    tensors, stored = one_tensor(64)
    (plan,) = plans_of(tensors, stored, [Regions.from_rows([])], FINE)
    assert len(plan.row) == len(plan.local) == 0


@pytest.mark.parametrize(("min_gap_bytes", "bytes_of_plan"), [(1536, 8 * 512), (1537, 8 * 2048)])
def test_a_gap_is_skipped_from_the_size_given_on(min_gap_bytes: int, bytes_of_plan: int) -> None:
    tensors, stored = one_tensor(8, 512)  # rows of 2048 bytes, of which 512 are wanted; whole rows otherwise
    wanted = [one_region((0, 0), (8, 128))]
    plans = plans_of(tensors, stored, wanted, LoadOptions(min_gap_bytes=min_gap_bytes))
    assert bytes_read(tensors, plans)[0] == bytes_of_plan


def relay(sizes: list[int], options: LoadOptions, *, num_receivers: int = 1) -> LoadPlan:
    """What rank 0 sends, which alone can open the file, if the others want tensors of these sizes."""
    tensors = tuple(TensorFacts(f"w{number}", "int8", (size,), 1) for number, size in enumerate(sizes))
    item_bytes = element_sizes(tensors)
    stored = stored_as(whole_regions(tensors), np.zeros(len(sizes), dtype=np.int64), item_bytes)
    wanted = [Regions.from_rows([]), *[whole_regions(tensors)] * num_receivers]
    readable = np.zeros((len(wanted), 1), dtype=np.bool_)
    readable[0] = True
    shared = plan_load(stored, item_bytes, wanted, options, readable=readable)
    return plan_rank_load(shared, item_bytes, 0, options)


SMALL = LoadOptions(message_bytes=16, exchange_bytes=256)  # rounds of 64 bytes


@pytest.mark.parametrize(
    ("sizes", "options", "messages"),
    [
        # By where they begin: 0, 8, 12 and 14 are in the first 16 bytes, 20, 24 and 28 in the next.
        ([8, 4, 2, 6, 4, 4, 2], SMALL, [0, 0, 0, 0, 1, 1, 1]),
        # Rounds of 24 bytes: those that begin at 24 and later have a message of their own.
        ([8, 4, 2, 6, 4, 4, 2], LoadOptions(message_bytes=16, exchange_bytes=96), [0, 0, 0, 0, 1, 2, 2]),
        ([4, 15, 4], SMALL, [0, 0, 1]),
        ([4, 16, 4, 4], SMALL, [0, 1, 2, 2]),
        ([4, 20, 40, 2], SMALL, [0, 1, 2, 3]),
    ],
)
def test_small_transfers_share_a_message_and_large_ones_do_not(
    sizes: list[int], options: LoadOptions, messages: list[int]
) -> None:
    assert relay(sizes, options).sends.message.tolist() == messages


def test_messages_to_each_rank_are_numbered_from_its_own_first_transfer() -> None:
    sends = relay([8, 4, 2, 6, 4, 4, 2], SMALL, num_receivers=3).sends
    for peer in (1, 2, 3):
        assert sends.message[sends.peer == peer].tolist() == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("exchange_bytes", "num_ranks", "round_bytes"),
    [
        (4096, 1, 1024),  # the next round is read while one is exchanged: never more than a quarter
        (4096, 4, 1024),
        (4096, 8, 512),  # a rank receives from 8 at once
        (64, 8, 16),  # no less than a message
        (32, 8, 8),  # unless that is more than a quarter
    ],
)
def test_a_round_of_all_ranks_fits_what_one_may_receive(
    exchange_bytes: int, num_ranks: int, round_bytes: int
) -> None:
    tensors = (TensorFacts("w", "int8", (num_ranks * 4 * round_bytes,), 1),)
    item_bytes = element_sizes(tensors)
    stored = stored_as(whole_regions(tensors), np.zeros(1, dtype=np.int64), item_bytes)
    options = LoadOptions(min_cut_bytes=1, message_bytes=16, exchange_bytes=exchange_bytes)
    shared = plan_load(stored, item_bytes, [whole_regions(tensors)] * num_ranks, options)
    assert set(shared.share_regions.num_elements.tolist()) == {round_bytes}
    for rank in range(num_ranks):
        assert shared.share_round[shared.share_rank == rank].tolist() == [0, 1, 2, 3]
