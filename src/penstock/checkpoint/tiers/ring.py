"""Parity and copies of a group, computed while blocks go round: each member reads its own bytes once.

    encode    sums go from member to member, each adds its block; the last hands the finished parity to its
    keeper mirror    each member sends its blocks to the next one, which keeps them
    rebuild   sums of what is left go along the survivors to the member that lost its files

All members of a group call with the same arguments but their own. Memory is a few blocks, whatever the size.
Invariant: nothing is kept but through the sink that was handed in, so a call that fails leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.checkpoint.tiers import kernels
from penstock.checkpoint.tiers.stripes import Layout, Piece, Role, recover
from penstock.storage.aligned import aligned_buffer

if TYPE_CHECKING:
    from penstock.checkpoint.tiers.holdings import FilesIn, FilesOut
    from penstock.cluster.transfer import Transfer

BLOCK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One member's place in a group: whom it hears from and whom it tells."""

    ranks: tuple[int, ...]
    member: int
    transfer: Transfer
    block_bytes: int = BLOCK_BYTES
    timeout_s: float = 300.0

    def rank_of(self, member: int) -> int:
        """The rank of a member, counted round the ring."""
        return self.ranks[member % len(self.ranks)]

    def exchange(self, sent: memoryview, received: memoryview) -> None:
        """Send to the next member and receive from the one before."""
        before, after = self.rank_of(self.member - 1), self.rank_of(self.member + 1)
        coming = self.transfer.receive(before, received)
        going = self.transfer.send(after, sent)
        coming.wait(awaiting=f"parity from rank {before}", timeout_s=self.timeout_s)
        going.wait(awaiting=f"rank {after} to take parity", timeout_s=self.timeout_s)

    def blocks(self, total_bytes: int) -> Iterator[tuple[int, int]]:
        """Start and length of each block of so many bytes."""
        for start in range(0, total_bytes, self.block_bytes):
            yield start, min(self.block_bytes, total_bytes - start)


def encode(seat: Seat, layout: Layout, own: FilesIn, kept: FilesOut) -> None:
    """Compute the group's parity; this member's part goes to `kept`, by blocks, plain before weighted."""
    mine = aligned_buffer(seat.block_bytes)
    sums, others = (aligned_buffer(layout.parities * seat.block_bytes) for _ in range(2))
    for start, length in seat.blocks(layout.chunk_bytes):
        block, wide = mine[:length], layout.parities * length
        for chunk in range(layout.num_chunks):
            own.read_into(chunk * layout.chunk_bytes + start, block)
            _add_own(sums[:wide], block, is_first=chunk == 0)
            seat.exchange(sums[:wide], others[:wide])
            sums, others = others, sums
        kept.write(sums[:length])
        if layout.parities == 2:
            # The weighted sum of this stripe belongs to the next member, as that of the one before is ours.
            seat.exchange(sums[length:wide], others[:length])
            kept.write(others[:length])


def _add_own(sums: memoryview, block: memoryview, *, is_first: bool) -> None:
    length = block.nbytes
    if is_first:
        for start in range(0, sums.nbytes, length):
            _copy(sums[start : start + length], block)
    elif sums.nbytes == length:
        kernels.add(sums, block)
    else:
        kernels.add_to_both(sums[:length], sums[length:], block)


def mirror(seat: Seat, sizes: Sequence[int], own: FilesIn, kept: FilesOut) -> None:
    """Send this member's bytes to the next one, keep those of the one before; `sizes` are all members'."""
    mine, theirs = (aligned_buffer(seat.block_bytes) for _ in range(2))
    for start, length in seat.blocks(max(sizes)):
        own.read_into(start, mine[:length])
        seat.exchange(mine[:length], theirs[:length])
        kept.write(theirs[:length])


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """What a member that was not lost can contribute: its own bytes, and what it keeps of the others."""

    own: FilesIn
    kept: FilesIn

    def read(self, layout: Layout, piece: Piece, start: int, block: memoryview) -> None:
        """Fill `block` from position `start` of one of this member's pieces."""
        if piece.role is Role.DATA:
            self.own.read_into(piece.chunk * layout.chunk_bytes + start, block)
        else:
            behind = block.nbytes if piece.role is Role.WEIGHTED else 0
            self.kept.read_into(layout.parities * start + behind, block)


def rebuild(
    seat: Seat, layout: Layout, lost: Sequence[int], have: Survivor | None, out: Outlet | None
) -> None:
    """Give the `lost` members back what they had, one after another: their data, then their parity.

    A lost member hands in where its bytes go (`out`), each other one what it has.
    """
    block, total = aligned_buffer(seat.block_bytes), aligned_buffer(seat.block_bytes)
    for member in lost:
        for wanted in _in_order_of_writing(seat, layout, member):
            terms = recover(layout, wanted.stripe, lost)[wanted.piece]
            way = [*(term.piece.member for term in terms), member]
            if seat.member not in way:
                continue
            here, length = way.index(seat.member), wanted.length
            _take_over(seat, total[:length], before=way[here - 1] if here else None)
            if seat.member == member:
                assert out is not None, "a lost member says where its bytes go"
                out.write(wanted.piece, total[:length])
                continue
            assert have is not None, "a member that was not lost has its bytes"
            have.read(layout, terms[here].piece, wanted.start, block[:length])
            kernels.add_scaled(total[:length], block[:length], terms[here].factor)
            _hand_on(seat, total[:length], after=way[here + 1])


def restore_copies(
    seat: Seat, sizes: Sequence[int], lost: Sequence[int], have: Survivor | None, out: Outlet | None
) -> None:
    """The same for members that `mirror` each other: `sizes` are all members' bytes."""
    block = aligned_buffer(seat.block_bytes)
    members = len(seat.ranks)
    for member in lost:
        before, after = (member - 1) % members, (member + 1) % members
        # Its own bytes are the copy of the next one; the copy that it kept is what the one before has.
        for giver, owner, role in ((after, member, Role.DATA), (before, before, Role.PLAIN)):
            for start, length in seat.blocks(sizes[owner]):
                if seat.member == giver:
                    assert have is not None, "a member that was not lost has its bytes"
                    source = have.kept if role is Role.DATA else have.own
                    source.read_into(start, block[:length])
                    _hand_on(seat, block[:length], after=member)
                elif seat.member == member:
                    assert out is not None, "a lost member says where its bytes go"
                    _take_over(seat, block[:length], before=giver)
                    out.write(Piece(member, role), block[:length])


@dataclass(frozen=True, slots=True)
class Outlet:
    """Where a lost member's bytes go."""

    own: FilesOut
    kept: FilesOut

    def write(self, piece: Piece, block: memoryview) -> None:
        """Write the next block of the data, or of what was kept."""
        (self.own if piece.role is Role.DATA else self.kept).write(block)


def _take_over(seat: Seat, total: memoryview, *, before: int | None) -> None:
    """The sum so far: nothing at the head of the way, else what the member before has of it."""
    if before is None:
        np.frombuffer(total, np.uint8)[:] = 0
        return
    rank = seat.rank_of(before)
    seat.transfer.receive(rank, total).wait(awaiting=f"lost bytes from rank {rank}", timeout_s=seat.timeout_s)


def _hand_on(seat: Seat, total: memoryview, *, after: int) -> None:
    rank = seat.rank_of(after)
    seat.transfer.send(rank, total).wait(awaiting=f"rank {rank} to take lost bytes", timeout_s=seat.timeout_s)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One block of one lost piece."""

    stripe: int
    piece: Piece
    start: int
    length: int


def _in_order_of_writing(seat: Seat, layout: Layout, member: int) -> Iterator[_Wanted]:
    for chunk in range(layout.num_chunks):
        piece = Piece(member, Role.DATA, chunk)
        for start, length in seat.blocks(layout.chunk_bytes):
            yield _Wanted(layout.stripe_of(member, chunk), piece, start, length)
    plain = _Wanted(member, Piece(member, Role.PLAIN), 0, 0)
    weighted = _Wanted((member - 1) % layout.members, Piece(member, Role.WEIGHTED), 0, 0)
    for start, length in seat.blocks(layout.chunk_bytes):
        for kept in (plain, weighted)[: layout.parities]:
            yield replace(kept, start=start, length=length)


def _copy(target: memoryview, source: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
