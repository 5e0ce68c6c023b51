"""One rank's part in protecting a step and in rebuilding it: from files to ring to files.

Between `cache.py`, which decides when and commits, and `ring.py`, which moves bytes. Invariant: it writes
below the draft that it was given and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from penstock.checkpoint.tiers.holdings import FilesIn, FilesOut, GroupRecord, HeldFile
from penstock.checkpoint.tiers.ring import (
    BLOCK_BYTES,
    Outlet,
    Seat,
    Survivor,
    Table,
    encode,
    mirror,
    rebuild,
    restore_copies,
)
from penstock.checkpoint.tiers.schemes import Partner
from penstock.cluster.transfer import open_transfer
from penstock.storage.aligned import aligned_buffer
from penstock.storage.powers import for_large_files

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm
    from penstock.cluster.transfer import Transfer
    from penstock.storage import Storage
    from penstock.storage.base import Sink, Source

KeyOf = Callable[[str], str]

logger = logging.getLogger(__name__)


class Protector:
    """The connections of one rank to the members of its groups; making and closing one is collective."""

    def __init__(self, storage: Storage, comm: Comm) -> None:
        self._storage = storage
        self._comm = comm
        self._transfer: Transfer | None = open_transfer(comm) if comm.size > 1 else None

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
                place: Outlet(
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
        large = for_large_files(self._storage)
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
