"""Parity and copies of a group, computed while blocks go round: each member reads its own bytes once.

    encode    sums go from member to member, each adds its block; the last hands the finished parity to its
    keeper mirror    each member sends its blocks to the next one, which keeps them
    rebuild   sums of what is left go along the survivors to the member that lost its files

All members of a group call with the same arguments but their own; at a rebuild, one rank may act for several,
as ranks may have moved. Memory is a few blocks, whatever the size.
Invariant: nothing is kept but through the sink that was handed in, so a call that fails leaves nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.checkpoint.levels.options import Partner
from penstock.checkpoint.levels.redundancy import gf256
from penstock.checkpoint.levels.redundancy.parity_layout import Layout, Piece, Role, recover
from penstock.checkpoint.levels.redundancy.redundancy_record import FilesIn, FilesOut, GroupRecord, HeldFile
from penstock.cluster.comm import open_point_to_point
from penstock.storage.aligned import aligned_buffer
from penstock.storage.capabilities import prefer_direct_access

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm, PointToPoint
    from penstock.storage import Storage
    from penstock.storage.protocol import Sink, Source


BLOCK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One member's place in a group: whom it hears from and whom it tells."""

    ranks: tuple[int, ...]
    member: int
    transfer: PointToPoint
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
        return _block_spans(total_bytes, self.block_bytes)


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
        gf256.add(sums, block)
    else:
        gf256.add_to_both(sums[:length], sums[length:], block)


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
    transfer: PointToPoint | None
    block_bytes: int = BLOCK_BYTES
    timeout_s: float = 300.0

    def is_here(self, member: int) -> bool:
        """Whether this rank acts for a member."""
        return self.ranks[member] == self.own_rank

    def blocks(self, total_bytes: int) -> Iterator[tuple[int, int]]:
        """Start and length of each block of so many bytes."""
        return _block_spans(total_bytes, self.block_bytes)

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

    def _way(self) -> PointToPoint:
        assert self.transfer is not None, "ranks that meet have a transfer"
        return self.transfer


def rebuild(
    table: Table,
    layout: Layout,
    lost: Sequence[int],
    have: Mapping[int, Survivor],
    out: Mapping[int, FilesSink],
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
                gf256.add_scaled(sums, part, terms[place].factor)
                table.hand_on(sums, after=way[place + 1])


def restore_copies(
    table: Table,
    sizes: Sequence[int],
    lost: Sequence[int],
    have: Mapping[int, Survivor],
    out: Mapping[int, FilesSink],
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
class FilesSink:
    """Where a lost member's bytes go."""

    own: FilesOut
    kept: FilesOut

    def write(self, piece: Piece, block: memoryview) -> None:
        """Write the next block of the data, or of what was kept."""
        (self.own if piece.role is Role.DATA else self.kept).write(block)


def _block_spans(total_bytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
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


KeyOf = Callable[[str], str]

logger = logging.getLogger(__name__)


class Protector:
    """The connections of one rank to the members of its groups; making and closing one is collective."""

    def __init__(self, storage: Storage, comm: Comm) -> None:
        self._storage = storage
        self._comm = comm
        self._transfer: PointToPoint | None = open_point_to_point(comm) if comm.size > 1 else None

    def keep(self, record: GroupRecord, key: KeyOf) -> HeldFile | None:
        """Compute and write what this rank keeps of its group; None where its scheme keeps nothing."""
        if not record.losses:
            return None
        seat = self._seat(record)
        own_files = record.members[seat.member].files
        sizes = [member.size_bytes for member in record.members]
        is_copy = record.scheme == Partner.name
        kept_bytes = sizes[seat.member - 1] if is_copy else record.losses * record.chunk_bytes
        with (
            FilesIn(own_files, self._opener(key)) as own,
            FilesOut([(kept_name(self._comm.rank), kept_bytes)], self._creator(key)) as kept,
        ):
            if is_copy:
                mirror(seat, sizes, own, kept)
            else:
                encode(seat, record.layout, own, kept)
        return kept.written[0]

    def give_back(
        self,
        record: GroupRecord,
        lost: Collection[int],
        *,
        actors: Mapping[int, int],
        from_key: KeyOf,
        to_key: KeyOf,
    ) -> None:
        """Give one group's lost members their files back, or take part in it, or look on.

        `actors[member's rank]` is the rank of this job that has a member's files, or is to get them.
        `from_key` tells where files lie on this node, `to_key` where lost ones go.
        """
        places = [place for place, each in enumerate(record.ranks) if each in lost]
        table = self._table(tuple(actors[rank] for rank in record.ranks), record.block_bytes)
        here = [place for place in range(len(record.ranks)) if table.is_here(place)]
        if not places or not here:
            return
        sizes = [member.size_bytes for member in record.members]
        with ExitStack() as files:
            have = {
                place: Survivor(
                    own=files.enter_context(FilesIn(record.members[place].files, self._opener(from_key))),
                    kept=files.enter_context(FilesIn([record.kept[place]], self._opener(from_key))),
                )
                for place in here
                if place not in places
            }
            out = {
                place: FilesSink(
                    files.enter_context(self._out(record.members[place].files, to_key)),
                    files.enter_context(self._out([record.kept[place]], to_key)),
                )
                for place in here
                if place in places
            }
            if record.scheme == Partner.name:
                restore_copies(table, sizes, places, have, out)
            else:
                rebuild(table, record.layout, places, have, out)
        for place in out:
            logger.info("Rebuilt %s of rank %d from its group", record.step, record.ranks[place])

    def send_home(
        self,
        records: Mapping[int, GroupRecord],
        homes: Mapping[int, int],
        *,
        actors: Mapping[int, int],
        from_key: KeyOf,
        to_key: KeyOf,
    ) -> None:
        """Send shares from the ranks that have them at hand to those of `homes`, or take part, or look on."""
        block = aligned_buffer(BLOCK_BYTES)
        for record, place in _places(records, homes):
            member = record.members[place]
            files = (*member.files, *record.kept[place : place + 1])
            table = self._table((actors[member.rank], homes[member.rank]), BLOCK_BYTES)
            with ExitStack() as opened:
                old = (
                    opened.enter_context(FilesIn(files, self._opener(from_key))) if table.is_here(0) else None
                )
                new = opened.enter_context(self._out(files, to_key)) if table.is_here(1) else None
                for start, length in table.blocks(sum(file.size_bytes for file in files)):
                    part = block[:length]
                    if old is not None:
                        old.read_into(start, part)
                        table.hand_on(part, after=1)
                    if new is not None:
                        table.take_over(part, before=0)
                        new.write(part)

    def bring_along(
        self, records: Mapping[int, GroupRecord], ranks: Collection[int], *, from_key: KeyOf, to_key: KeyOf
    ) -> None:
        """Copy what these ranks wrote and kept from one folder of this node to another."""
        block = aligned_buffer(BLOCK_BYTES)
        for record, place in _places(records, ranks):
            files = (*record.members[place].files, *record.kept[place : place + 1])
            with FilesIn(files, self._opener(from_key)) as old, self._out(files, to_key) as new:
                left_bytes = sum(file.size_bytes for file in files)
                for start in range(0, left_bytes, BLOCK_BYTES):
                    part = block[: min(BLOCK_BYTES, left_bytes - start)]
                    old.read_into(start, part)
                    new.write(part)

    def close(self) -> None:
        """Let go of the connections."""
        if self._transfer is not None:
            self._transfer.close()

    def _seat(self, record: GroupRecord) -> Seat:
        assert self._transfer is not None, "a group has two members or more"
        return Seat(
            ranks=record.ranks,
            member=record.ranks.index(self._comm.rank),
            transfer=self._transfer,
            block_bytes=record.block_bytes,
            timeout_s=self._comm.timeout_s,
        )

    def _table(self, ranks: tuple[int, ...], block_bytes: int) -> Table:
        return Table(
            ranks=ranks,
            own_rank=self._comm.rank,
            transfer=self._transfer,
            block_bytes=block_bytes,
            timeout_s=self._comm.timeout_s,
        )

    def _out(self, files: Sequence[HeldFile], key: KeyOf) -> FilesOut:
        return FilesOut([(file.name, file.size_bytes) for file in files], self._creator(key))

    def _opener(self, key: KeyOf) -> Callable[[str], Source]:
        return lambda name: self._storage.open(key(name))

    def _creator(self, key: KeyOf) -> Callable[[str, int], Sink]:
        large = prefer_direct_access(self._storage)
        return lambda name, size_bytes: large.create(key(name), size_bytes)


def _places(records: Mapping[int, GroupRecord], ranks: Collection[int]) -> Iterator[tuple[GroupRecord, int]]:
    """The places of some ranks in their groups, in one order on all ranks."""
    for _, record in sorted(records.items()):
        for place, rank in enumerate(record.ranks):
            if rank in ranks:
                yield record, place


def kept_name(rank: int) -> str:
    """The file that holds what a rank keeps of its group."""
    return f"parity-{rank}.bin"
