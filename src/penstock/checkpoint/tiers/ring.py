"""Parity and copies of a group, computed while blocks go round: each member reads its own bytes once.

    encode    sums go from member to member, each adds its block; the last hands the finished parity to its
    keeper mirror    each member sends its blocks to the next one, which keeps them
    rebuild   sums of what is left go along the survivors to the member that lost its files

All members of a group call with the same arguments but their own; at a rebuild, one rank may act for several,
as ranks may have moved. Memory is a few blocks, whatever the size.
Invariant: nothing is kept but through the sink that was handed in, so a call that fails leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
        return _blocks(total_bytes, self.block_bytes)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A group at a rebuild: which rank acts for each member. After a move, one rank may act for several.

    `transfer` may be None where one rank acts for all.
    """

    ranks: tuple[int, ...]
    own_rank: int
    transfer: Transfer | None
    block_bytes: int = BLOCK_BYTES
    timeout_s: float = 300.0

    def is_here(self, member: int) -> bool:
        """Whether this rank acts for a member."""
        return self.ranks[member] == self.own_rank

    def blocks(self, total_bytes: int) -> Iterator[tuple[int, int]]:
        """Start and length of each block of so many bytes."""
        return _blocks(total_bytes, self.block_bytes)

    def take_over(self, block: memoryview, *, before: int) -> None:
        """Receive what the rank of the member before has; nothing to do where that is this one."""
        rank = self.ranks[before]
        if rank != self.own_rank:
            moving = self._way().receive(rank, block)
            moving.wait(awaiting=f"lost bytes from rank {rank}", timeout_s=self.timeout_s)

    def hand_on(self, block: memoryview, *, after: int) -> None:
        """Send to the rank of the member after, unless that is this one."""
        rank = self.ranks[after]
        if rank != self.own_rank:
            moving = self._way().send(rank, block)
            moving.wait(awaiting=f"rank {rank} to take lost bytes", timeout_s=self.timeout_s)

    def _way(self) -> Transfer:
        assert self.transfer is not None, "ranks that meet have a transfer"
        return self.transfer


def rebuild(
    table: Table,
    layout: Layout,
    lost: Sequence[int],
    have: Mapping[int, Survivor],
    out: Mapping[int, Outlet],
) -> None:
    """Give the `lost` members back what they had, one after another: their data, then their parity.

    Whoever acts for a lost member hands in where its bytes go (`out`), and for each other one what it has.
    """
    block, total = aligned_buffer(table.block_bytes), aligned_buffer(table.block_bytes)
    for member in lost:
        for wanted in _in_order_of_writing(table, layout, member):
            terms = recover(layout, wanted.stripe, lost)[wanted.piece]
            way = [*(term.piece.member for term in terms), member]
            sums, part = total[: wanted.length], block[: wanted.length]
            for place, stop in enumerate(way):
                if not table.is_here(stop):
                    continue
                if place:
                    table.take_over(sums, before=way[place - 1])
                else:
                    np.frombuffer(sums, np.uint8)[:] = 0
                if place == len(terms):
                    out[member].write(wanted.piece, sums)
                    continue
                have[stop].read(layout, terms[place].piece, wanted.start, part)
                kernels.add_scaled(sums, part, terms[place].factor)
                table.hand_on(sums, after=way[place + 1])


def restore_copies(
    table: Table,
    sizes: Sequence[int],
    lost: Sequence[int],
    have: Mapping[int, Survivor],
    out: Mapping[int, Outlet],
) -> None:
    """The same for members that `mirror` each other: `sizes` are all members' bytes."""
    block = aligned_buffer(table.block_bytes)
    members = len(table.ranks)
    for member in lost:
        before, after = (member - 1) % members, (member + 1) % members
        # Its own bytes are the copy of the next one; the copy that it kept is what the one before has.
        for giver, owner, role in ((after, member, Role.DATA), (before, before, Role.PLAIN)):
            for start, length in table.blocks(sizes[owner]):
                part = block[:length]
                if table.is_here(giver):
                    source = have[giver].kept if role is Role.DATA else have[giver].own
                    source.read_into(start, part)
                    table.hand_on(part, after=member)
                if table.is_here(member):
                    table.take_over(part, before=giver)
                    out[member].write(Piece(member, role), part)


@dataclass(frozen=True, slots=True)
class Outlet:
    """Where a lost member's bytes go."""

    own: FilesOut
    kept: FilesOut

    def write(self, piece: Piece, block: memoryview) -> None:
        """Write the next block of the data, or of what was kept."""
        (self.own if piece.role is Role.DATA else self.kept).write(block)


def _blocks(total_bytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total_bytes, block_bytes):
        yield start, min(block_bytes, total_bytes - start)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One block of one lost piece."""

    stripe: int
    piece: Piece
    start: int
    length: int


def _in_order_of_writing(table: Table, layout: Layout, member: int) -> Iterator[_Wanted]:
    for chunk in range(layout.num_chunks):
        piece = Piece(member, Role.DATA, chunk)
        for start, length in table.blocks(layout.chunk_bytes):
            yield _Wanted(layout.stripe_of(member, chunk), piece, start, length)
    plain = _Wanted(member, Piece(member, Role.PLAIN), 0, 0)
    weighted = _Wanted((member - 1) % layout.members, Piece(member, Role.WEIGHTED), 0, 0)
    for start, length in table.blocks(layout.chunk_bytes):
        for kept in (plain, weighted)[: layout.parities]:
            yield replace(kept, start=start, length=length)


def _copy(target: memoryview, source: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
