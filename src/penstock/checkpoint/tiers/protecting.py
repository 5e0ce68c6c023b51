"""One rank's part in protecting a step and in rebuilding it: from files to ring to files.

Between `cache.py`, which decides when and commits, and `ring.py`, which moves bytes. Invariant: it writes
below the draft that it was given and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.checkpoint.tiers.holdings import FilesIn, FilesOut, GroupRecord, HeldFile
from penstock.checkpoint.tiers.ring import (
    Outlet,
    Seat,
    Survivor,
    encode,
    mirror,
    rebuild,
    restore_copies,
)
from penstock.checkpoint.tiers.schemes import Partner
from penstock.cluster.transfer import open_transfer
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
        self, record: GroupRecord, lost: Sequence[int], *, from_key: KeyOf | None, to_key: KeyOf
    ) -> None:
        """Give one group's lost members their files back, or take part in it, or look on.

        `from_key` tells where this rank's files lie, if it has not lost them; `to_key` where they go if it
        has.
        """
        rank = self._comm.rank
        places = [place for place, each in enumerate(record.ranks) if each in lost]
        if not places or rank not in record.ranks:
            return
        seat = self._seat(record)
        member, kept = record.members[seat.member], record.kept[seat.member]
        sizes = [each.size_bytes for each in record.members]

        def run(have: Survivor | None, out: Outlet | None) -> None:
            if record.scheme == Partner.name:
                restore_copies(seat, sizes, places, have, out)
            else:
                rebuild(seat, record.layout, places, have, out)

        if from_key is None:
            target = [(file.name, file.size_bytes) for file in member.files]
            with (
                FilesOut(target, self._creator(to_key)) as own,
                FilesOut([(kept.name, kept.size_bytes)], self._creator(to_key)) as others,
            ):
                run(None, Outlet(own, others))
            logger.info("Rebuilt %s of rank %d from its group", record.step, rank)
        else:
            with (
                FilesIn(member.files, self._opener(from_key)) as mine,
                FilesIn([kept], self._opener(from_key)) as keeping,
            ):
                run(Survivor(own=mine, kept=keeping), None)

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

    def _opener(self, key: KeyOf) -> Callable[[str], Source]:
        return lambda name: self._storage.open(key(name))

    def _creator(self, key: KeyOf) -> Callable[[str, int], Sink]:
        large = for_large_files(self._storage)
        return lambda name, size_bytes: large.create(key(name), size_bytes)


def kept_name(rank: int) -> str:
    """The file that holds what a rank keeps of its group."""
    return f"parity-{rank}.bin"
