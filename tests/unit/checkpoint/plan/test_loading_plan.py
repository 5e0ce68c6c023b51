"""Load plans: every wanted element arrives once, shared bytes are read once, loads are level."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.checkpoint.plan.states import grids, jobs, painted, region, tensor_lists

from penstock.checkpoint.plan.load_plan import (
    LoadOptions,
    LoadPlan,
    NobodyCanRead,
    missing_elements,
    payload_starts,
    rank_load_plan,
    share_loading,
)
from penstock.checkpoint.plan.save_plan import Held, SaveOptions, share_saving
from penstock.checkpoint.state.regions import (
    Boxes,
    Ints,
    StoredBoxes,
    TensorFacts,
    item_bytes_of,
    whole_boxes,
)

FINE = LoadOptions(min_cut_bytes=1, min_gap_bytes=8, message_bytes=16, exchange_bytes=128)
OPTIONS = st.sampled_from(
    [FINE, LoadOptions(), LoadOptions(min_cut_bytes=1, min_gap_bytes=1, message_bytes=1)]
)


def stored_as(boxes: Boxes, file: Ints, item_bytes: Ints) -> StoredBoxes:
    """Boxes one behind another in each file, without envelopes."""
    num_bytes = boxes.num_bytes(item_bytes)
    offset = np.zeros(len(boxes), dtype=np.int64)
    for number in np.unique(file):
        rows = file == number
        offset[rows] = np.cumsum(num_bytes[rows]) - num_bytes[rows]
    packed = np.zeros(len(boxes), dtype=np.bool_)
    return StoredBoxes(boxes, file, offset, num_bytes, offset, packed)


def saved(job: list[Held]) -> tuple[tuple[TensorFacts, ...], StoredBoxes]:
    shared = share_saving(job, SaveOptions(min_cut_bytes=1))
    return shared.tensors, stored_as(shared.boxes, shared.rank, item_bytes_of(shared.tensors))


def plans_of(
    tensors: tuple[TensorFacts, ...], stored: StoredBoxes, wanted: list[Boxes], options: LoadOptions
) -> list[LoadPlan]:
    item_bytes = item_bytes_of(tensors)
    shared = share_loading(stored, item_bytes, wanted, options)
    return [rank_load_plan(shared, item_bytes, rank, options) for rank in range(len(wanted))]


@st.composite
def reshardings(draw: st.DrawFn) -> tuple[tuple[TensorFacts, ...], StoredBoxes, list[Boxes]]:
    """Something saved by one job and wanted by another."""
    tensors = draw(tensor_lists())
    tensors, stored = saved(draw(jobs(tensors)))
    wanted = [each.boxes for each in draw(jobs(tensors))]
    return tensors, stored, wanted


@given(reshardings(), OPTIONS)
def test_every_wanted_element_arrives_once(
    resharding: tuple[tuple[TensorFacts, ...], StoredBoxes, list[Boxes]], options: LoadOptions
) -> None:
    tensors, stored, wanted = resharding
    for plan in plans_of(tensors, stored, wanted, options):
        mine = wanted[plan.rank]
        for transfers in (plan.local, plan.receives):
            for row in range(len(transfers)):
                assert transfers.boxes.tensor[row] == mine.tensor[transfers.want[row]]
        for number in range(len(mine)):
            parts = [each.boxes.take(each.want == number) for each in (plan.local, plan.receives)]
            counts = painted(tensors, Boxes.concatenated(parts))
            one = mine.take(np.array([number]))
            for count, expected in zip(counts, painted(tensors, one), strict=True):
                assert (count == expected).all()


@given(reshardings(), OPTIONS)
def test_what_one_rank_sends_is_what_the_other_expects(
    resharding: tuple[tuple[TensorFacts, ...], StoredBoxes, list[Boxes]], options: LoadOptions
) -> None:
    tensors, stored, wanted = resharding
    plans = plans_of(tensors, stored, wanted, options)
    for sender in plans:
        for receiver in plans:
            out = sender.sends.peer == receiver.rank
            into = receiver.receives.peer == sender.rank
            assert sender.sends.message[out].tolist() == receiver.receives.message[into].tolist()
            assert sender.sends.in_round[out].tolist() == receiver.receives.in_round[into].tolist()
            assert sender.sends.want[out].tolist() == receiver.receives.want[into].tolist()
            assert (sender.sends.boxes.offsets[out] == receiver.receives.boxes.offsets[into]).all()
            assert (sender.sends.boxes.sizes[out] == receiver.receives.boxes.sizes[into]).all()


@given(reshardings(), OPTIONS)
def test_reads_are_contiguous_in_their_items_and_hold_what_is_passed_on(
    resharding: tuple[tuple[TensorFacts, ...], StoredBoxes, list[Boxes]], options: LoadOptions
) -> None:
    tensors, stored, wanted = resharding
    for plan in plans_of(tensors, stored, wanted, options):
        outer = stored.boxes.take(plan.row)
        start = payload_starts(plan.boxes, outer)
        for row in range(len(plan.row)):
            facts = tensors[int(plan.boxes.tensor[row])]
            shape = outer.box(row, len(facts.shape))[1]
            places = np.arange(int(np.prod(shape))).reshape(shape)
            corner = outer.offsets[row]
            shifted = Boxes(plan.boxes.tensor, plan.boxes.offsets - corner, plan.boxes.sizes)
            inside = places[region(shifted, row, len(facts.shape))].reshape(-1)
            assert inside.tolist() == list(range(int(start[row]), int(start[row]) + len(inside)))
        for transfers in (plan.local, plan.sends):
            read = plan.boxes.take(transfers.read)
            assert (transfers.boxes.offsets >= read.offsets).all()
            assert (transfers.boxes.offsets + transfers.boxes.sizes <= read.offsets + read.sizes).all()


@given(reshardings())
def test_replicas_read_each_wanted_byte_once_between_them(
    resharding: tuple[tuple[TensorFacts, ...], StoredBoxes, list[Boxes]],
) -> None:
    tensors, stored, wanted = resharding
    everybody = [Boxes.concatenated(wanted)] * 3
    for plans in (plans_of(tensors, stored, everybody, FINE), plans_of(tensors, stored, wanted, FINE)):
        reads = Boxes.concatenated([plan.boxes for plan in plans])
        for count in painted(tensors, reads):
            assert (count >= 1).all(), "here every element is wanted by somebody"
    whole = [whole_boxes(tensors)] * 3
    reads = Boxes.concatenated([plan.boxes for plan in plans_of(tensors, stored, whole, FINE)])
    for count in painted(tensors, reads):
        assert (count == 1).all()


def one_tensor(*shape: int) -> tuple[tuple[TensorFacts, ...], StoredBoxes]:
    tensors = (TensorFacts("w", "float32", shape, 4),)
    return tensors, stored_as(whole_boxes(tensors), np.zeros(1, dtype=np.int64), item_bytes_of(tensors))


def bytes_read(tensors: tuple[TensorFacts, ...], plans: list[LoadPlan]) -> list[int]:
    return [int(plan.boxes.num_bytes(item_bytes_of(tensors)).sum()) for plan in plans]


def box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Boxes:
    return Boxes.from_rows([(0, offsets, sizes)])


def test_replicas_share_the_reading_equally() -> None:
    tensors, stored = one_tensor(4096, 1024)
    plans = plans_of(tensors, stored, [whole_boxes(tensors)] * 4, LoadOptions())
    assert bytes_read(tensors, plans) == [4 << 20] * 4


def test_an_eighth_of_the_rows_is_an_eighth_of_the_bytes() -> None:
    tensors, stored = one_tensor(4096, 1024)
    plans = plans_of(tensors, stored, [box((512, 0), (512, 1024))], LoadOptions())
    assert bytes_read(tensors, plans) == [2 << 20]


def test_columns_of_long_rows_are_read_without_the_gaps() -> None:
    tensors, stored = one_tensor(8, 1 << 20)
    plans = plans_of(tensors, stored, [box((0, 0), (8, 1 << 18))], LoadOptions())
    assert bytes_read(tensors, plans) == [8 << 20]


def test_columns_that_ranks_want_of_short_rows_are_read_once_and_exchanged() -> None:
    tensors, stored = one_tensor(1024, 1024)
    halves = [box((0, 0), (1024, 512)), box((0, 512), (1024, 512))]
    plans = plans_of(tensors, stored, halves, LoadOptions())
    assert bytes_read(tensors, plans) == [2 << 20] * 2
    assert [len(plan.receives) for plan in plans] == [1, 1]


def test_items_far_below_a_fair_share_are_not_cut_so_that_one_rank_can_check_them() -> None:
    tensors = tuple(TensorFacts(f"w{number}", "float32", (1000, 1000), 4) for number in range(64))
    stored = stored_as(whole_boxes(tensors), np.zeros(64, dtype=np.int64), item_bytes_of(tensors))
    plans = plans_of(tensors, stored, [whole_boxes(tensors)] * 3, LoadOptions())
    assert sum(len(plan.row) for plan in plans) == 64
    assert max(len(plan.row) for plan in plans) <= 22


def test_a_file_is_read_by_a_rank_that_can_open_it_and_sent_to_those_that_cannot() -> None:
    tensors, _ = one_tensor(8, 4)
    boxes = Boxes.from_rows([(0, (0, 0), (4, 4)), (0, (4, 0), (4, 4))])
    stored = stored_as(boxes, np.array([0, 1]), item_bytes_of(tensors))
    readable = np.array([[True, False], [False, False], [False, True]])
    wanted = [whole_boxes(tensors), whole_boxes(tensors), Boxes.from_rows([])]
    item_bytes = item_bytes_of(tensors)
    shared = share_loading(stored, item_bytes, wanted, LoadOptions(), readable=readable)
    plans = [rank_load_plan(shared, item_bytes, rank, LoadOptions()) for rank in range(3)]
    assert [plan.row.tolist() for plan in plans] == [[0], [], [1]]
    assert [plan.sends.peer.tolist() for plan in plans] == [[1], [], [0, 1]]
    assert [plan.receives.peer.tolist() for plan in plans] == [[2], [0, 2], []]


def test_a_file_that_nobody_can_open_is_named() -> None:
    tensors, stored = one_tensor(8)
    readable = np.zeros((2, 1), dtype=np.bool_)
    wanted = [whole_boxes(tensors)] * 2
    with pytest.raises(NobodyCanRead) as caught:
        share_loading(stored, item_bytes_of(tensors), wanted, LoadOptions(), readable=readable)
    assert caught.value.file == 0


@given(st.data())
def test_what_nobody_stored_is_counted_as_missing(data: st.DataObject) -> None:
    (facts,) = data.draw(tensor_lists(max_tensors=1).filter(len))
    rows = [(0, *each) for each in data.draw(grids(facts.shape))]
    kept = [row for row in rows if data.draw(st.booleans())]
    wanted = Boxes.from_rows([(0, *each) for each in data.draw(grids(facts.shape))])
    (there,) = painted((facts,), Boxes.from_rows(kept).widened(len(facts.shape)))
    expected = [int((there[region(wanted, row, len(facts.shape))] == 0).sum()) for row in range(len(wanted))]
    assert missing_elements(Boxes.from_rows(kept), wanted).tolist() == expected


def test_a_rank_that_wants_nothing_reads_nothing() -> None:
    tensors, stored = one_tensor(64, 64)
    plans = plans_of(tensors, stored, [Boxes.from_rows([]), whole_boxes(tensors)], FINE)
    assert bytes_read(tensors, plans) == [0, 64 * 64 * 4]


def test_nobody_wanting_anything_is_a_plan_without_reads() -> None:
    tensors, stored = one_tensor(64)
    (plan,) = plans_of(tensors, stored, [Boxes.from_rows([])], FINE)
    assert len(plan.row) == len(plan.local) == 0
