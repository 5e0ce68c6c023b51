"""Layouts of parity: every piece comes back, whoever is lost, as long as no more are lost than promised."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.levels.redundancy import Layout, add, add_scaled, build_layout, double_and_add

CHUNK_BYTES = 16

layouts = st.integers(1, 2).flatmap(
    lambda parities: st.builds(
        Layout,
        members=st.integers(parities + 1, 10),
        parities=st.just(parities),
        chunk_bytes=st.just(CHUNK_BYTES),
        block_bytes=st.just(CHUNK_BYTES),
    )
)


@given(layouts)
def test_every_member_has_one_piece_of_each_stripe(layout: Layout) -> None:
    for member in range(layout.members):
        stripes = [layout.stripe_of(member, chunk) for chunk in range(layout.num_chunks)]
        assert sorted(stripes + layout.kept_stripes(member)) == list(range(layout.members))
        for chunk, stripe in enumerate(stripes):
            assert layout.locate(member, stripe, 0, CHUNK_BYTES) == (False, chunk * CHUNK_BYTES)
        for number, stripe in enumerate(layout.kept_stripes(member)):
            assert layout.locate(member, stripe, 0, CHUNK_BYTES) == (True, number * CHUNK_BYTES)


@given(layouts, st.integers(0, 2**32 - 1))
def test_every_lost_piece_is_recovered_bit_for_bit(layout: Layout, seed: int) -> None:
    for stripe in range(layout.members):
        pieces = _encoded(layout, stripe, seed)
        for num_lost in range(1, layout.parities + 1):
            for lost in combinations(range(layout.members), num_lost):
                for member in lost:
                    factors = layout.recover(stripe, lost, member)
                    assert not factors.keys() & set(lost)
                    total = memoryview(bytearray(CHUNK_BYTES))
                    for other, factor in factors.items():
                        add_scaled(total, pieces[other], factor)
                    assert total == pieces[member]


def _encoded(layout: Layout, stripe: int, seed: int) -> dict[int, memoryview]:
    """The pieces of a stripe by member: data, and parity by Horner's rule, the first chunk first."""
    random = np.random.default_rng([seed, stripe])
    plain, weighted = memoryview(bytearray(CHUNK_BYTES)), memoryview(bytearray(CHUNK_BYTES))
    pieces = {}
    for chunk in range(layout.num_chunks):
        piece = memoryview(bytearray(random.bytes(CHUNK_BYTES)))
        (member,) = (each for each in range(layout.members) if layout.stripe_of(each, chunk) == stripe)
        pieces[member] = piece
        add(plain, piece)
        double_and_add(weighted, piece)
    kept = [plain, weighted][: layout.parities]
    return pieces | {(stripe + number) % layout.members: piece for number, piece in enumerate(kept)}


def test_more_losses_than_parities_are_refused() -> None:
    with pytest.raises(ValueError, match="2 members are lost, but the group survives 1"):
        Layout(members=4, parities=1, chunk_bytes=8, block_bytes=8).recover(0, (0, 1), 0)


@given(st.integers(3, 20), st.integers(0, 2), st.integers(0, 10**8))
def test_chunks_hold_the_largest_member_in_equal_blocks_of_whole_pages(
    members: int, parities: int, size: int
) -> None:
    layout = build_layout(members, parities, size)
    assert layout.block_bytes % 4096 == 0
    assert layout.chunk_bytes % layout.block_bytes == 0
    assert layout.block_bytes <= 2 << 20
    assert layout.num_chunks * layout.chunk_bytes >= size
    rows = layout.chunk_bytes // layout.block_bytes
    assert layout.num_chunks * (layout.chunk_bytes - 4096 * rows) <= size
