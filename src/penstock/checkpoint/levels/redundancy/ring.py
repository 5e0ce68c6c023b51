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
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.checkpoint.levels.options import Partner
from penstock.checkpoint.levels.redundancy import gf256
from penstock.checkpoint.levels.redundancy.parity_layout import ParityLayout, PieceRole, StripePiece, recover
from penstock.checkpoint.levels.redundancy.redundancy_record import (
    ConcatenatedReader,
    ConcatenatedWriter,
    GroupRecord,
    RecordedFile,
    list_members,
)
from penstock.cluster.comm import Comm, PointToPoint, open_point_to_point
from penstock.storage import Storage
from penstock.storage.aligned import aligned_buffer, copy_bytes
from penstock.storage.capabilities import prefer_direct_access
from penstock.storage.protocol import Sink

BLOCK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The members of a group, which rank acts for each, and the connections between these ranks.

    While encoding, each rank acts for one member; in a rebuild, one rank may act for several, as ranks may
    have moved. `transfer` may be None if one rank acts for all.
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
        for start in range(0, total_bytes, self.block_bytes):
            yield start, min(self.block_bytes, total_bytes - start)

    def exchange(self, sent: memoryview, received: memoryview) -> None:
        """Send to the next member and receive from the one before."""
        member, transfer = self.ranks.index(self.own_rank), self._connections()
        before, after = self.ranks[member - 1], self.ranks[(member + 1) % len(self.ranks)]
        # The receive is posted first, so that arriving bytes need no buffer of the transport.
        receiving, sending = transfer.receive(before, received), transfer.send(after, sent)
        receiving.wait(awaiting=f"parity from rank {before}", timeout_s=self.timeout_s)
        sending.wait(awaiting=f"rank {after} to take parity", timeout_s=self.timeout_s)

    def receive_from(self, member: int, block: memoryview) -> None:
        """Receive from the rank of a member; does nothing if that is this rank."""
        rank = self.ranks[member]
        if rank != self.own_rank:
            receiving = self._connections().receive(rank, block)
            receiving.wait(awaiting=f"lost bytes from rank {rank}", timeout_s=self.timeout_s)

    def send_to(self, member: int, block: memoryview) -> None:
        """Send to the rank of a member; does nothing if that is this rank."""
        rank = self.ranks[member]
        if rank != self.own_rank:
            sending = self._connections().send(rank, block)
            sending.wait(awaiting=f"rank {rank} to take lost bytes", timeout_s=self.timeout_s)

    def _connections(self) -> PointToPoint:
        assert self.transfer is not None, "several ranks have connections"
        return self.transfer


def encode(ring: Ring, layout: ParityLayout, own: ConcatenatedReader, kept: ConcatenatedWriter) -> None:
    """Compute the parity of the group; this member's part goes to `kept`, by blocks, plain then weighted."""
    own_block = aligned_buffer(ring.block_bytes)
    sums, others = (aligned_buffer(layout.parities * ring.block_bytes) for _ in range(2))
    for start, length in ring.blocks(layout.chunk_bytes):
        block, wide = own_block[:length], layout.parities * length
        for chunk in range(layout.num_chunks):
            own.read_into(chunk * layout.chunk_bytes + start, block)
            # Horner's rule: each member doubles the weighted sum that arrived before it adds its block, so
            # the blocks get their weights without a multiplication.
            _add_own(sums[:wide], block, is_first=chunk == 0)
            ring.exchange(sums[:wide], others[:wide])
            sums, others = others, sums
        kept.write(sums[:length])
        if layout.parities == 2:
            # The two parities of a stripe must be on different members, or one loss would take both: the
            # weighted one goes to the next member, and that of the member before arrives here.
            ring.exchange(sums[length:wide], others[:length])
            kept.write(others[:length])


def _add_own(sums: memoryview, block: memoryview, *, is_first: bool) -> None:
    length = block.nbytes
    if is_first:
        for start in range(0, sums.nbytes, length):
            copy_bytes(sums[start : start + length], block)
    elif sums.nbytes == length:
        gf256.add(sums, block)
    else:
        gf256.add_to_both(sums[:length], sums[length:], block)


def mirror(ring: Ring, sizes: Sequence[int], own: ConcatenatedReader, kept: ConcatenatedWriter) -> None:
    """Send this member's bytes to the next one, store those of the one before; `sizes` are of all members."""
    own_block, received = (aligned_buffer(ring.block_bytes) for _ in range(2))
    for start, length in ring.blocks(max(sizes)):
        own.read_into(start, own_block[:length])
        ring.exchange(own_block[:length], received[:length])
        kept.write(received[:length])


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


def rebuild(
    ring: Ring,
    layout: ParityLayout,
    lost: Sequence[int],
    survivors: Mapping[int, Survivor],
    restored: Mapping[int, RestoredMember],
) -> None:
    """Restore what the `lost` members had, one after another: their data, then their parity.

    The rank that acts for a lost member passes where its bytes go (`restored`), others what they have.
    """
    block, total = aligned_buffer(ring.block_bytes), aligned_buffer(ring.block_bytes)
    for lost_member in lost:
        for stripe, piece, start, length in _list_lost_blocks(ring, layout, lost_member):
            terms = list(recover(layout, stripe, lost)[piece].items())
            # The sum travels along the survivors, each of which adds its term, and ends at the lost member.
            path = [*(summand.member for summand, _ in terms), lost_member]
            sums, part = total[:length], block[:length]
            for place, member in enumerate(path):
                if not ring.is_here(member):
                    continue
                if place:
                    ring.receive_from(path[place - 1], sums)
                else:
                    np.frombuffer(sums, np.uint8)[:] = 0
                if place == len(terms):
                    restored[member].write(piece, sums)
                    continue
                summand, factor = terms[place]
                survivors[member].read(layout, summand, start, part)
                gf256.add_scaled(sums, part, factor)
                ring.send_to(path[place + 1], sums)


def restore_copies(
    ring: Ring,
    sizes: Sequence[int],
    lost: Sequence[int],
    survivors: Mapping[int, Survivor],
    restored: Mapping[int, RestoredMember],
) -> None:
    """`rebuild` for members that `mirror` each other; `sizes` are the bytes of all members."""
    block = aligned_buffer(ring.block_bytes)
    for member in lost:
        before, after = (member - 1) % len(sizes), (member + 1) % len(sizes)
        # The next member has a copy of its bytes; what it kept is a copy of the bytes of the member before.
        for giver, owner, role in ((after, member, PieceRole.DATA), (before, before, PieceRole.PLAIN)):
            for start, length in ring.blocks(sizes[owner]):
                part = block[:length]
                if ring.is_here(giver):
                    source = survivors[giver].kept if role is PieceRole.DATA else survivors[giver].own
                    source.read_into(start, part)
                    ring.send_to(member, part)
                if ring.is_here(member):
                    ring.receive_from(giver, part)
                    restored[member].write(StripePiece(member, role), part)


@dataclass(frozen=True, slots=True)
class RestoredMember:
    """Where the bytes of a lost member go."""

    own: ConcatenatedWriter
    kept: ConcatenatedWriter

    def write(self, piece: StripePiece, block: memoryview) -> None:
        """Write the next block of its data, or of what it kept."""
        (self.own if piece.role is PieceRole.DATA else self.kept).write(block)


def _list_lost_blocks(
    ring: Ring, layout: ParityLayout, member: int
) -> Iterator[tuple[int, StripePiece, int, int]]:
    """Stripe, piece, start and length of each block that a member lost, in the order of its files."""
    for chunk in range(layout.num_chunks):
        for start, length in ring.blocks(layout.chunk_bytes):
            yield layout.stripe_of(member, chunk), StripePiece(member, PieceRole.DATA, chunk), start, length
    parity = [
        (member, StripePiece(member, PieceRole.PLAIN)),
        ((member - 1) % layout.members, StripePiece(member, PieceRole.WEIGHTED)),
    ]
    for start, length in ring.blocks(layout.chunk_bytes):
        for stripe, piece in parity[: layout.parities]:
            yield stripe, piece, start, length


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
        ring, place = self._ring(record.ranks, record.block_bytes), record.ranks.index(self._comm.rank)
        own_files = record.members[place].files
        sizes = [member.size_bytes for member in record.members]
        is_copy = record.scheme == Partner.name
        kept_bytes = sizes[place - 1] if is_copy else record.losses * record.chunk_bytes
        with (
            self._reader(own_files, key) as own,
            ConcatenatedWriter([(parity_file_name(self._comm.rank), kept_bytes)], self._creator(key)) as kept,
        ):
            if is_copy:
                mirror(ring, sizes, own, kept)
            else:
                encode(ring, record.layout, own, kept)
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
        places = [place for place, rank in enumerate(record.ranks) if rank in lost]
        ring = self._ring(tuple(holders[rank] for rank in record.ranks), record.block_bytes)
        here = [place for place in range(len(record.ranks)) if ring.is_here(place)]
        if not places or not here:
            return
        sizes = [member.size_bytes for member in record.members]
        with ExitStack() as files:
            survivors = {
                place: Survivor(
                    own=files.enter_context(self._reader(record.members[place].files, from_key)),
                    kept=files.enter_context(self._reader([record.kept[place]], from_key)),
                )
                for place in here
                if place not in places
            }
            restored = {
                place: RestoredMember(
                    files.enter_context(self._writer(record.members[place].files, to_key)),
                    files.enter_context(self._writer([record.kept[place]], to_key)),
                )
                for place in here
                if place in places
            }
            if record.scheme == Partner.name:
                restore_copies(ring, sizes, places, survivors, restored)
            else:
                rebuild(ring, record.layout, places, survivors, restored)
        for place in restored:
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
        for record, place in list_members(records, homes):
            rank, files = record.ranks[place], record.stored_files(place)
            ring = self._ring((holders[rank], homes[rank]), BLOCK_BYTES)
            with ExitStack() as opened:
                old = opened.enter_context(self._reader(files, from_key)) if ring.is_here(0) else None
                new = opened.enter_context(self._writer(files, to_key)) if ring.is_here(1) else None
                for start, length in ring.blocks(sum(file.size_bytes for file in files)):
                    part = block[:length]
                    if old is not None:
                        old.read_into(start, part)
                        ring.send_to(1, part)
                    if new is not None:
                        ring.receive_from(0, part)
                        new.write(part)

    def carry_over(
        self, records: Mapping[int, GroupRecord], ranks: Collection[int], *, from_key: KeyOf, to_key: KeyOf
    ) -> None:
        """Copy what these ranks wrote and kept from one folder of this node to another; not collective."""
        here = dict.fromkeys(ranks, self._comm.rank)
        self.transfer_shares(records, here, holders=here, from_key=from_key, to_key=to_key)

    def close(self) -> None:
        """Close the connections."""
        if self._transfer is not None:
            self._transfer.close()

    def _ring(self, ranks: tuple[int, ...], block_bytes: int) -> Ring:
        return Ring(
            ranks=ranks,
            own_rank=self._comm.rank,
            transfer=self._transfer,
            block_bytes=block_bytes,
            timeout_s=self._comm.timeout_s,
        )

    def _writer(self, files: Sequence[RecordedFile], key: KeyOf) -> ConcatenatedWriter:
        return ConcatenatedWriter([(file.name, file.size_bytes) for file in files], self._creator(key))

    def _reader(self, files: Sequence[RecordedFile], key: KeyOf) -> ConcatenatedReader:
        return ConcatenatedReader(files, lambda name: self._storage.open(key(name)))

    def _creator(self, key: KeyOf) -> Callable[[str, int], Sink]:
        large = prefer_direct_access(self._storage)
        return lambda name, size_bytes: large.create(key(name), size_bytes)


def parity_file_name(rank: int) -> str:
    """The file of the parity or copy that a rank keeps for its group."""
    return f"parity-{rank}.bin"
