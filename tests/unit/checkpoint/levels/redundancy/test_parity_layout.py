"""Layouts of parity: every piece comes back, whoever is lost, as long as no more are lost than promised."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.levels.redundancy import gf256
from penstock.checkpoint.levels.redundancy.parity_layout import (
    ParityLayout,
    PieceRole,
    StripePiece,
    build_layout,
    recover,
)

CHUNK_BYTES = 16

layouts = st.integers(1, 2).flatmap(
    lambda parities: st.builds(
        ParityLayout,
        members=st.integers(parities + 1, 10),
        parities=st.just(parities),
        chunk_bytes=st.just(CHUNK_BYTES),
    )
)


@given(layouts)
def test_every_chunk_of_every_member_is_in_one_stripe(layout: ParityLayout) -> None:
    seen = [
        (piece.member, piece.chunk)
        for stripe in range(layout.members)
        for piece in layout.data(stripe)
        if layout.stripe_of(piece.member, piece.chunk) == stripe
    ]
    assert sorted(seen) == [
        (member, chunk) for member in range(layout.members) for chunk in range(layout.num_chunks)
    ]


@given(layouts)
def test_every_member_keeps_one_piece_of_each_parity_and_has_one_role_a_stripe(layout: ParityLayout) -> None:
    kept = [piece for stripe in range(layout.members) for piece in layout.parity(stripe)]
    for role in (PieceRole.PLAIN, PieceRole.WEIGHTED)[: layout.parities]:
        assert sorted(piece.member for piece in kept if piece.role is role) == list(range(layout.members))
    for stripe in range(layout.members):
        members = [piece.member for piece in (*layout.data(stripe), *layout.parity(stripe))]
        assert sorted(members) == list(range(layout.members))


@given(layouts, st.integers(0, 2**32 - 1))
def test_every_lost_piece_is_recovered_bit_for_bit(layout: ParityLayout, seed: int) -> None:
    stripes = [_encoded(layout, stripe, seed) for stripe in range(layout.members)]
    for num_lost in range(1, layout.parities + 1):
        for lost in combinations(range(layout.members), num_lost):
            for stripe, pieces in enumerate(stripes):
                sums = recover(layout, stripe, lost)
                assert {piece.member for piece in sums} == set(lost)
                for piece, terms in sums.items():
                    assert not {term.member for term in terms} & set(lost)
                    total = memoryview(bytearray(CHUNK_BYTES))
                    for term, factor in terms.items():
                        gf256.add_scaled(total, pieces[term], factor)
                    assert total == pieces[piece]


def _encoded(layout: ParityLayout, stripe: int, seed: int) -> dict[StripePiece, memoryview]:
    random = np.random.default_rng([seed, stripe])
    pieces = {piece: memoryview(bytearray(random.bytes(CHUNK_BYTES))) for piece in layout.data(stripe)}
    plain, weighted = memoryview(bytearray(CHUNK_BYTES)), memoryview(bytearray(CHUNK_BYTES))
    for piece in layout.data(stripe):
        gf256.add(plain, pieces[piece])
        gf256.double_and_add(weighted, pieces[piece])
    return {**pieces, **dict(zip(layout.parity(stripe), (plain, weighted), strict=False))}


def test_more_losses_than_parities_are_refused() -> None:
    with pytest.raises(ValueError, match="2 members are lost, but the group survives 1"):
        recover(ParityLayout(members=4, parities=1, chunk_bytes=8), 0, (0, 1))


@given(st.integers(3, 20), st.integers(1, 2), st.integers(0, 10**6))
def test_chunks_hold_the_largest_member_and_begin_at_whole_pages(
    members: int, parities: int, size: int
) -> None:
    layout = build_layout(members, parities, size)
    assert layout.chunk_bytes % 4096 == 0
    assert layout.num_chunks * layout.chunk_bytes >= size
    assert layout.num_chunks * (layout.chunk_bytes - 4096) <= size
