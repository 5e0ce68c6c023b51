"""Parity and copies of a group, computed while blocks travel around a ring: each member reads its bytes once.

    encode    partial sums travel from member to member, each adds its block; the last one has the parity
    mirror    each member sends its blocks to the next one, which stores them
    rebuild   sums of what is left travel along the survivors to the member that lost its files

Encoding ends at the member that keeps the parity, so no rank ever collects the data of a group. `Protector`
goes from files to the ring and back. All members of a group call with the same arguments except their own; in
a rebuild, one rank may act for several members, as ranks may have moved. Memory is a few blocks, whatever the
size. Invariant: results go to the sink that was passed in and nowhere else, so a call that fails leaves
nothing.
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
from penstock.checkpoint.levels.redundancy.parity_layout import ParityLayout, PieceRole, StripePiece, recover
from penstock.checkpoint.levels.redundancy.redundancy_record import (
    ConcatenatedReader,
    ConcatenatedWriter,
    GroupRecord,
    RecordedFile,
)
from penstock.cluster.comm import open_point_to_point
from penstock.storage.aligned import aligned_buffer
from penstock.storage.capabilities import prefer_direct_access

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm, PointToPoint
    from penstock.storage import Storage
    from penstock.storage.protocol import Sink, Source


BLOCK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSeat:
    """One member's place in the ring: which ranks it receives from and sends to."""

    ranks: tuple[int, ...]
    member: int
    transfer: PointToPoint
    block_bytes: int = BLOCK_BYTES
    timeout_s: float = 300.0

    def rank_of(self, member: int) -> int:
        """The rank of a member, counted around the ring."""
        return self.ranks[member % len(self.ranks)]

    def exchange(self, sent: memoryview, received: memoryview) -> None:
        """Send to the next member and receive from the one before."""
        before, after = self.rank_of(self.member - 1), self.rank_of(self.member + 1)
        coming = self.transfer.receive(before, received)
        going = self.transfer.send(after, sent)
        coming.wait(awaiting=f"parity from rank {before}", timeout_s=self.timeout_s)
        going.wait(awaiting=f"rank {after} to take parity", timeout_s=self.timeout_s)

    def blocks(self, total_bytes: int) -> Iterator[tuple[int, int]]:
        """Start and length of each block of `total_bytes`."""
        return _block_spans(total_bytes, self.block_bytes)


def encode(seat: RingSeat, layout: ParityLayout, own: ConcatenatedReader, kept: ConcatenatedWriter) -> None:
    """Compute the parity of the group; this member's part goes to `kept`, by blocks, plain then weighted."""
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
            # The two parities of a stripe must be on different members, or one loss would take both: the
            # weighted one goes to the next member, and that of the member before arrives here.
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


def mirror(seat: RingSeat, sizes: Sequence[int], own: ConcatenatedReader, kept: ConcatenatedWriter) -> None:
    """Send this member's bytes to the next one, store those of the one before; `sizes` are of all members."""
    mine, theirs = (aligned_buffer(seat.block_bytes) for _ in range(2))
    for start, length in seat.blocks(max(sizes)):
        own.read_into(start, mine[:length])
        seat.exchange(mine[:length], theirs[:length])
        kept.write(theirs[:length])


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """What a surviving member can contribute: its own bytes, and the parity or copy that it keeps."""

    own: ConcatenatedReader
    kept: ConcatenatedReader

    def read(self, layout: ParityLayout, piece: StripePiece, start: int, block: memoryview) -> None:
        """Fill `block` from position `start` of one of this member's pieces."""
        if piece.role is PieceRole.DATA:
            self.own.read_into(piece.chunk * layout.chunk_bytes + start, block)
        else:
            behind = block.nbytes if piece.role is PieceRole.WEIGHTED else 0
            self.kept.read_into(layout.parities * start + behind, block)


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildGroup:
    """A group in a rebuild: which rank acts for each member; one rank may act for several.

    `transfer` may be None if one rank acts for all.
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
        """Start and length of each block of `total_bytes`."""
        return _block_spans(total_bytes, self.block_bytes)

    def receive_from(self, block: memoryview, *, before: int) -> None:
        """Receive from the rank of member `before`; does nothing if that is this rank."""
        rank = self.ranks[before]
        if rank != self.own_rank:
            moving = self._way().receive(rank, block)
            moving.wait(awaiting=f"lost bytes from rank {rank}", timeout_s=self.timeout_s)

    def send_to(self, block: memoryview, *, after: int) -> None:
        """Send to the rank of member `after`; does nothing if that is this rank."""
        rank = self.ranks[after]
        if rank != self.own_rank:
            moving = self._way().send(rank, block)
            moving.wait(awaiting=f"rank {rank} to take lost bytes", timeout_s=self.timeout_s)

    def _way(self) -> PointToPoint:
        assert self.transfer is not None, "several ranks have a transfer"
        return self.transfer


def rebuild(
    table: RebuildGroup,
    layout: ParityLayout,
    lost: Sequence[int],
    have: Mapping[int, Survivor],
    out: Mapping[int, LostMemberFiles],
) -> None:
    """Restore what the `lost` members had, one after another: their data, then their parity.

    The rank that acts for a lost member passes where its bytes go (`out`), others what they have (`have`).
    """
    block, total = aligned_buffer(table.block_bytes), aligned_buffer(table.block_bytes)
    for member in lost:
        for wanted in _list_lost_blocks(table, layout, member):
            terms = recover(layout, wanted.stripe, lost)[wanted.piece]
            way = [*(term.piece.member for term in terms), member]
            sums, part = total[: wanted.length], block[: wanted.length]
            for place, stop in enumerate(way):
                if not table.is_here(stop):
                    continue
                if place:
                    table.receive_from(sums, before=way[place - 1])
                else:
                    np.frombuffer(sums, np.uint8)[:] = 0
                if place == len(terms):
                    out[member].write(wanted.piece, sums)
                    continue
                have[stop].read(layout, terms[place].piece, wanted.start, part)
                gf256.add_scaled(sums, part, terms[place].factor)
                table.send_to(sums, after=way[place + 1])


def restore_copies(
    table: RebuildGroup,
    sizes: Sequence[int],
    lost: Sequence[int],
    have: Mapping[int, Survivor],
    out: Mapping[int, LostMemberFiles],
) -> None:
    """`rebuild` for members that `mirror` each other; `sizes` are the bytes of all members."""
    block = aligned_buffer(table.block_bytes)
    members = len(table.ranks)
    for member in lost:
        before, after = (member - 1) % members, (member + 1) % members
        # The next member has a copy of its bytes; what it kept is a copy of the bytes of the member before.
        for giver, owner, role in ((after, member, PieceRole.DATA), (before, before, PieceRole.PLAIN)):
            for start, length in table.blocks(sizes[owner]):
                part = block[:length]
                if table.is_here(giver):
                    source = have[giver].kept if role is PieceRole.DATA else have[giver].own
                    source.read_into(start, part)
                    table.send_to(part, after=member)
                if table.is_here(member):
                    table.receive_from(part, before=giver)
                    out[member].write(StripePiece(member, role), part)


@dataclass(frozen=True, slots=True)
class LostMemberFiles:
    """Where the bytes of a lost member go."""

    own: ConcatenatedWriter
    kept: ConcatenatedWriter

    def write(self, piece: StripePiece, block: memoryview) -> None:
        """Write the next block of its data, or of what it kept."""
        (self.own if piece.role is PieceRole.DATA else self.kept).write(block)


def _block_spans(total_bytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total_bytes, block_bytes):
        yield start, min(block_bytes, total_bytes - start)


@dataclass(frozen=True, slots=True)
class _LostBlock:
    """One block of one lost piece."""

    stripe: int
    piece: StripePiece
    start: int
    length: int


def _list_lost_blocks(table: RebuildGroup, layout: ParityLayout, member: int) -> Iterator[_LostBlock]:
    for chunk in range(layout.num_chunks):
        piece = StripePiece(member, PieceRole.DATA, chunk)
        for start, length in table.blocks(layout.chunk_bytes):
            yield _LostBlock(layout.stripe_of(member, chunk), piece, start, length)
    plain = _LostBlock(member, StripePiece(member, PieceRole.PLAIN), 0, 0)
    weighted = _LostBlock((member - 1) % layout.members, StripePiece(member, PieceRole.WEIGHTED), 0, 0)
    for start, length in table.blocks(layout.chunk_bytes):
        for kept in (plain, weighted)[: layout.parities]:
            yield replace(kept, start=start, length=length)


def _copy(target: memoryview, source: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


KeyOf = Callable[[str], str]

logger = logging.getLogger(__name__)


class Protector:
    """One rank's part in protecting and rebuilding steps; making and closing one is collective.

    Writes only below the draft that it was given.
    """

    def __init__(self, storage: Storage, comm: Comm) -> None:
        self._storage = storage
        self._comm = comm
        self._transfer: PointToPoint | None = open_point_to_point(comm) if comm.size > 1 else None

    def protect(self, record: GroupRecord, key: KeyOf) -> RecordedFile | None:
        """Compute and write what this rank keeps for its group; None if the scheme keeps nothing."""
        if not record.losses:
            return None
        seat = self._seat(record)
        own_files = record.members[seat.member].files
        sizes = [member.size_bytes for member in record.members]
        is_copy = record.scheme == Partner.name
        kept_bytes = sizes[seat.member - 1] if is_copy else record.losses * record.chunk_bytes
        with (
            ConcatenatedReader(own_files, self._opener(key)) as own,
            ConcatenatedWriter([(parity_file_name(self._comm.rank), kept_bytes)], self._creator(key)) as kept,
        ):
            if is_copy:
                mirror(seat, sizes, own, kept)
            else:
                encode(seat, record.layout, own, kept)
        return kept.written[0]

    def rebuild_into(
        self,
        record: GroupRecord,
        lost: Collection[int],
        *,
        holders: Mapping[int, int],
        from_key: KeyOf,
        to_key: KeyOf,
    ) -> None:
        """Take part in restoring the files of a group's lost members; returns at once if not concerned.

        `holders[member's rank]` is the rank of this job that has a member's files, or will get them.
        `from_key` gives the keys of files on this node, `to_key` those of restored ones.
        """
        places = [place for place, each in enumerate(record.ranks) if each in lost]
        table = self._table(tuple(holders[rank] for rank in record.ranks), record.block_bytes)
        here = [place for place in range(len(record.ranks)) if table.is_here(place)]
        if not places or not here:
            return
        sizes = [member.size_bytes for member in record.members]
        with ExitStack() as files:
            have = {
                place: Survivor(
                    own=files.enter_context(
                        ConcatenatedReader(record.members[place].files, self._opener(from_key))
                    ),
                    kept=files.enter_context(
                        ConcatenatedReader([record.kept[place]], self._opener(from_key))
                    ),
                )
                for place in here
                if place not in places
            }
            out = {
                place: LostMemberFiles(
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

    def transfer_shares(
        self,
        records: Mapping[int, GroupRecord],
        homes: Mapping[int, int],
        *,
        holders: Mapping[int, int],
        from_key: KeyOf,
        to_key: KeyOf,
    ) -> None:
        """Take part in sending shares from the ranks that have them to those of `homes`."""
        block = aligned_buffer(BLOCK_BYTES)
        for record, place in _list_members(records, homes):
            member = record.members[place]
            files = (*member.files, *record.kept[place : place + 1])
            table = self._table((holders[member.rank], homes[member.rank]), BLOCK_BYTES)
            with ExitStack() as opened:
                old = (
                    opened.enter_context(ConcatenatedReader(files, self._opener(from_key)))
                    if table.is_here(0)
                    else None
                )
                new = opened.enter_context(self._out(files, to_key)) if table.is_here(1) else None
                for start, length in table.blocks(sum(file.size_bytes for file in files)):
                    part = block[:length]
                    if old is not None:
                        old.read_into(start, part)
                        table.send_to(part, after=1)
                    if new is not None:
                        table.receive_from(part, before=0)
                        new.write(part)

    def carry_over(
        self, records: Mapping[int, GroupRecord], ranks: Collection[int], *, from_key: KeyOf, to_key: KeyOf
    ) -> None:
        """Copy what these ranks wrote and kept from one folder of this node to another."""
        block = aligned_buffer(BLOCK_BYTES)
        for record, place in _list_members(records, ranks):
            files = (*record.members[place].files, *record.kept[place : place + 1])
            with ConcatenatedReader(files, self._opener(from_key)) as old, self._out(files, to_key) as new:
                left_bytes = sum(file.size_bytes for file in files)
                for start in range(0, left_bytes, BLOCK_BYTES):
                    part = block[: min(BLOCK_BYTES, left_bytes - start)]
                    old.read_into(start, part)
                    new.write(part)

    def close(self) -> None:
        """Close the connections."""
        if self._transfer is not None:
            self._transfer.close()

    def _seat(self, record: GroupRecord) -> RingSeat:
        assert self._transfer is not None, "a group has two members or more"
        return RingSeat(
            ranks=record.ranks,
            member=record.ranks.index(self._comm.rank),
            transfer=self._transfer,
            block_bytes=record.block_bytes,
            timeout_s=self._comm.timeout_s,
        )

    def _table(self, ranks: tuple[int, ...], block_bytes: int) -> RebuildGroup:
        return RebuildGroup(
            ranks=ranks,
            own_rank=self._comm.rank,
            transfer=self._transfer,
            block_bytes=block_bytes,
            timeout_s=self._comm.timeout_s,
        )

    def _out(self, files: Sequence[RecordedFile], key: KeyOf) -> ConcatenatedWriter:
        return ConcatenatedWriter([(file.name, file.size_bytes) for file in files], self._creator(key))

    def _opener(self, key: KeyOf) -> Callable[[str], Source]:
        return lambda name: self._storage.open(key(name))

    def _creator(self, key: KeyOf) -> Callable[[str, int], Sink]:
        large = prefer_direct_access(self._storage)
        return lambda name, size_bytes: large.create(key(name), size_bytes)


def _list_members(
    records: Mapping[int, GroupRecord], ranks: Collection[int]
) -> Iterator[tuple[GroupRecord, int]]:
    """The places of some ranks in their groups, in the same order on all ranks."""
    for _, record in sorted(records.items()):
        for place, rank in enumerate(record.ranks):
            if rank in ranks:
                yield record, place


def parity_file_name(rank: int) -> str:
    """The file of the parity or copy that a rank keeps for its group."""
    return f"parity-{rank}.bin"
