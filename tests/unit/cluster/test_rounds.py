"""Operations in rounds of messages, for numbers of ranks around and beyond the fan-in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.simulated_ranks import SimulatedRanks, simulate

from penstock.cluster import rounds

if TYPE_CHECKING:
    from penstock.cluster.rounds import Ints, Rounds

SIZES = pytest.mark.parametrize("size", [1, 2, 5, 64, 65, 200])


def rows_of(rank: int, size: int) -> tuple[Ints, Ints]:
    """Up to 7 rows, to ranks all over the job; some with numbers that need 64 bits."""
    random = np.random.default_rng(rank)
    to = random.integers(0, size, rank % 8)
    rows = np.stack([np.full(len(to), rank), random.integers(0, 1 << 40 if rank % 3 else 9, len(to))], axis=1)
    return to, rows


@SIZES
def test_every_row_arrives_once_where_it_is_sent(size: int) -> None:
    job = SimulatedRanks[NDArray[np.int64]](size)
    arrived = dict(job.run(lambda rank: rounds.route(rank, size, *rows_of(rank, size))))
    expected = [
        (int(to), *row)
        for rank in range(size)
        for to, row in zip(rows_of(rank, size)[0], rows_of(rank, size)[1].tolist(), strict=True)
    ]
    assert sorted((rank, *row) for rank in arrived for row in arrived[rank].tolist()) == sorted(expected)
    assert max(cost.fan_in for cost in job.costs) < rounds.FAN_IN


@SIZES
def test_texts_arrive_in_the_order_of_their_senders(size: int) -> None:
    def texts(rank: int) -> list[tuple[int, bytes]]:
        return [((rank * 7 + number) % size, b"%d/%d" % (rank, number)) for number in range(3)]

    received = simulate(size, lambda rank: rounds.route_texts(rank, size, texts(rank)))
    expected: list[list[tuple[int, bytes]]] = [[] for _ in range(size)]
    for rank in range(size):
        for to, text in texts(rank):
            expected[to].append((rank, text))
    assert received == expected


@SIZES
def test_ranks_learn_what_all_have_together(size: int) -> None:
    def operation(rank: int) -> Rounds[list[object]]:
        return_values: list[object] = [
            (yield from rounds.all_equal(rank, size, b"same")),
            (yield from rounds.all_equal(rank, size, b"\1" if rank == size - 1 else b"\2")),
            (yield from rounds.all_equal(rank, size, b"same", is_known=rank != size - 1)),
            (yield from rounds.any_of_all(rank, size, own=rank == size - 1)),
            (yield from rounds.largest_of_all(rank, size, [-rank, rank])),
            (yield from rounds.first_of_all(rank, size, b"%d" % rank if rank >= size // 2 else b"")),
            (yield from rounds.from_rank0(rank, size, b"from %d" % rank)),
        ]
        ((before, total),) = yield from rounds.count_before(rank, size, [rank])
        assert before == rank * (rank - 1) // 2
        return [*return_values, total]

    sums = size * (size - 1) // 2
    alone = size == 1
    expected = [True, alone, False, True, [0, size - 1], b"%d" % (size // 2), b"from 0", sums]
    assert simulate(size, operation) == [expected] * size


def test_a_comparison_costs_no_rank_more_than_its_digest_twice() -> None:
    job = SimulatedRanks[bool](500)
    assert all(equal for _, equal in job.run(lambda rank: rounds.all_equal(rank, 500, bytes(16))))
    assert max(cost.received_bytes for cost in job.costs) == 2 * 17 + 1


@given(st.lists(st.sampled_from([b"", b"a", b"node-1", b"node-2"]), min_size=1, max_size=9))
def test_ranks_learn_who_has_their_name(names: list[bytes]) -> None:
    found = simulate(len(names), lambda rank: rounds.ranks_alike(rank, len(names), names[rank]))
    for rank, alike in enumerate(found):
        assert alike == [other for other, name in enumerate(names) if name == names[rank]]


def test_few_ranks_tell_each_other_while_others_are_silent() -> None:
    groups = [[0, 2, 3], [1], [0, 2, 3], [0, 2, 3]]
    found = simulate(4, lambda rank: rounds.exchange(rank, groups[rank], bytes([rank])))
    assert found == [{rank: bytes([rank]) for rank in group} for group in groups]


@SIZES
def test_every_rank_hears_of_all_and_some_of_the_first(size: int) -> None:
    some = list(range(0, size, 3))

    def told(rank: int) -> Rounds[tuple[list[bytes], bytes]]:
        every = yield from rounds.all_of_all(rank, size, b"x" * (rank % 4))
        first = b""
        if rank in some:
            first = yield from rounds.from_first(rank, some, b"the first" if rank == 0 else b"")
        return every, first

    for rank, (every, first) in enumerate(simulate(size, told)):
        assert every == [b"x" * (other % 4) for other in range(size)]
        assert first == (b"the first" if rank in some else b"")
