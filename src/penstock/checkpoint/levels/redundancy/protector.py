"""From a rank's files to its group and back: writing them protected, restoring them, moving them.

Place in the flow: below `cache`, which knows folders and commits; above `encoding` and `ring`, which know
bytes. Invariant: files are written only under the keys that were passed in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from penstock.checkpoint.levels.options import Partner
from penstock.checkpoint.levels.redundancy.encoding import (
    NUM_SPARE,
    NUM_SUMS,
    Encoder,
    SumWriter,
    plan_copies,
    plan_routes,
)
from penstock.checkpoint.levels.redundancy.feed import ByteFeed, FedStorage
from penstock.checkpoint.levels.redundancy.parity_layout import ParityLayout
from penstock.checkpoint.levels.redundancy.redundancy_record import (
    ConcatenatedReader,
    ConcatenatedWriter,
    GroupMember,
    GroupRecord,
    Order,
    RecordedFile,
    list_members,
)
from penstock.checkpoint.levels.redundancy.ring import (
    BLOCK_BYTES,
    TAGS,
    FirstFailure,
    RestoredMember,
    Ring,
    Survivor,
    rebuild,
    restore_copies,
)
from penstock.cluster.comm import Comm, PointToPoint
from penstock.errors import StorageError
from penstock.storage import Storage
from penstock.storage.aligned import PAGE_BYTES, aligned_buffer, round_up
from penstock.storage.capabilities import no_thread, prefer_direct_access
from penstock.transfer.buffers import WarmMemory

if TYPE_CHECKING:
    from penstock.checkpoint.commit.protocol import Draft
    from penstock.checkpoint.engine import StagedSave, WrittenShare
    from penstock.checkpoint.levels.redundancy.parity_layout import FittedScheme
    from penstock.progress import Progress

KeyOf = Callable[[str], str]

logger = logging.getLogger(__name__)


DISTINCT_EXCHANGES: Final = 4096
"""What was sent in an exchange that failed never answers one of the next so many; MPI has few tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """How one group protects a step that is about to be written; `sizes` are the bytes of its members."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    layout: ParityLayout
    is_copy: bool
    block_bytes: int

    @property
    def num_kept(self) -> int:
        """How many sums or copies a member keeps."""
        return 1 if self.is_copy else self.layout.parities

    @property
    def total_bytes(self) -> int:
        """The bytes of each chunk."""
        return max(self.sizes) if self.is_copy else self.layout.chunk_bytes

    def kept_bytes(self, place: int) -> int:
        """The size of what a member keeps."""
        return self.sizes[place - 1] if self.is_copy else self.layout.parities * self.layout.chunk_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectedShare:
    """What one rank reports when its files, and what it keeps for its group, are durable."""

    share: WrittenShare
    kept: RecordedFile | None = None
    order: Order = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedShare:
    """What a group's nodes learn of one member's share; it does not grow with the number of tensors."""

    files: tuple[RecordedFile, ...]
    kept: RecordedFile | None
    order: Order
    chunk_bytes: int
    """Of the group's layout; 0 for copies, and if nothing is kept."""
    block_bytes: int

    @classmethod
    def of(cls, protected: ProtectedShare, plan: GroupPlan | None) -> Self:
        """The part of it that is not about single tensors."""
        files = (
            RecordedFile(name=file.name, size_bytes=file.size_bytes, sum="") for file in protected.share.files
        )
        return cls(
            files=tuple(files),
            kept=protected.kept,
            order=protected.order,
            chunk_bytes=plan.layout.chunk_bytes if plan and not plan.is_copy else 0,
            block_bytes=plan.block_bytes if plan else BLOCK_BYTES,
        )


@dataclass(frozen=True, slots=True)
class _Memory:
    """Buffers of one size, one after another in `whole`."""

    whole: memoryview
    blocks: Sequence[memoryview]


class Protector:
    """One rank's part in protecting and rebuilding steps; making and closing one is collective.

    Writes only below the draft that it was given.
    """

    def __init__(self, storage: Storage, comm: Comm) -> None:
        self._storage = storage
        self._comm = comm
        self._memory: _Memory | None = None
        self._num_exchanges = 0
        self._transfer: PointToPoint | None = comm.transfer() if comm.size > 1 else None

    def write(
        self,
        staged: StagedSave,
        storage: Storage,
        key: KeyOf,
        plan: GroupPlan | None,
        progress: Progress | None,
    ) -> ProtectedShare:
        """Write this rank's files and, in step with its group, what it keeps for others.

        `plan` is None if nothing is kept. What parity sees of the files are the buffers that are written.
        """
        if plan is None:
            return ProtectedShare(share=staged.write_to(storage, key, progress))
        self._num_exchanges += 1
        block_bytes = min(plan.block_bytes, max(plan.total_bytes, 1))
        memory = self._take_memory(block_bytes, 1 + (NUM_SUMS + NUM_SPARE) * plan.num_kept)
        feed = ByteFeed(memory.blocks[0])
        with ThreadPoolExecutor(1, thread_name_prefix="penstock-parity") as thread:
            encode = partial(self._encode, plan, feed, memory, storage, key)
            try:
                encoding = thread.submit(encode)
            except RuntimeError as error:
                # The others of the group wait for blocks of this rank, with any content.
                feed.abandon()
                with suppress(StorageError):
                    encode()
                raise no_thread(error) from error
            with ExitStack() as undo:
                undo.callback(feed.abandon)
                share = staged.write_to(FedStorage(storage, feed), key, progress)
                undo.pop_all()
            feed.close()
            kept = encoding.result()
        # After a failure, bytes may still arrive in them.
        self._memory = memory
        order = feed.order_of(share.files, [key(file.name) for file in share.files])
        return ProtectedShare(share=share, kept=kept, order=order)

    def _encode(
        self, plan: GroupPlan, feed: ByteFeed, memory: _Memory, storage: Storage, key: KeyOf
    ) -> RecordedFile | None:
        blocks = memory.blocks[1:]
        ring = self._ring(plan.ranks, blocks[0].nbytes)
        place = plan.ranks.index(self._comm.rank)
        routes = plan_copies(len(plan.ranks), place) if plan.is_copy else plan_routes(plan.layout, place)
        file = [(parity_file_name(self._comm.rank), plan.kept_bytes(place))]
        sets = [blocks[start : start + plan.num_kept] for start in range(0, len(blocks), plan.num_kept)]
        with ExitStack() as undo:
            undo.callback(feed.abandon)
            out = undo.enter_context(
                SumWriter(
                    lambda: ConcatenatedWriter(file, lambda name, size: storage.create(key(name), size)),
                    ring.failure,
                    sets[:NUM_SUMS],
                    memory.whole,
                )
            )
            Encoder(ring, routes, feed, out, sets[NUM_SUMS:]).run(plan.total_bytes)
            written = out.finish()
            ring.failure.raise_noted()
        return written

    def _take_memory(self, size_bytes: int, number: int) -> _Memory:
        """Buffers for one save, those of the last one if they fit: touching new memory takes its time."""
        memory, self._memory = self._memory, None
        if memory and len(memory.blocks) == number and memory.blocks[0].nbytes == size_bytes:
            return memory
        # Devices write from huge pages in fewer and larger requests.
        spaced_bytes = round_up(size_bytes, PAGE_BYTES)
        warm = WarmMemory(number * spaced_bytes)
        warm.touch()
        return _Memory(warm.view, [warm.view[at * spaced_bytes :][:size_bytes] for at in range(number)])

    def rebuild_into(
        self,
        records: Mapping[int, GroupRecord],
        lost: Collection[int],
        *,
        holders: Mapping[int, int],
        from_key: KeyOf,
        to_key: KeyOf,
    ) -> None:
        """Take part in restoring the files of lost members of all groups.

        `holders[member's rank]` is the rank of this job that has a member's files, or will get them.
        `from_key` gives the keys of files on this node, `to_key` those of restored ones.
        """
        self._num_exchanges += 1
        failure = FirstFailure()
        for _, record in sorted(records.items()):
            self._rebuild_group(record, lost, failure, holders=holders, from_key=from_key, to_key=to_key)
        failure.raise_noted()

    def _rebuild_group(
        self,
        record: GroupRecord,
        lost: Collection[int],
        failure: FirstFailure,
        *,
        holders: Mapping[int, int],
        from_key: KeyOf,
        to_key: KeyOf,
    ) -> None:
        places = [place for place, rank in enumerate(record.ranks) if rank in lost]
        ring = self._ring(tuple(holders[rank] for rank in record.ranks), record.block_bytes, failure)
        here = [place for place in range(len(record.ranks)) if ring.is_here(place)]
        if not places or not here:
            return
        sizes = [member.size_bytes for member in record.members]
        restored: dict[int, RestoredMember] = {}
        with ExitStack() as files:
            survivors = {
                place: Survivor(
                    own=files.enter_context(
                        self._reader(record.members[place].files, from_key, record.members[place].order)
                    ),
                    kept=files.enter_context(self._reader([record.kept[place]], from_key)),
                )
                for place in here
                if place not in places
            }
            for place in set(here) & set(places):
                # A rank that cannot create them takes part all the same.
                with failure.noted():
                    member = record.members[place]
                    restored[place] = RestoredMember(
                        files.enter_context(self._writer(member.files, to_key, member.order)),
                        files.enter_context(self._writer([record.kept[place]], to_key)),
                    )
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
        failure = FirstFailure()
        block = aligned_buffer(BLOCK_BYTES)
        for record, place in list_members(records, homes):
            rank, files = record.ranks[place], record.stored_files(place)
            ring = self._ring((holders[rank], homes[rank]), BLOCK_BYTES, failure)
            self._transfer_files(files, ring, block, from_key, to_key)
        failure.raise_noted()

    def _transfer_files(
        self, files: Sequence[RecordedFile], ring: Ring, block: memoryview, from_key: KeyOf, to_key: KeyOf
    ) -> None:
        with ExitStack() as opened:
            old = opened.enter_context(self._reader(files, from_key)) if ring.is_here(0) else None
            new: ConcatenatedWriter | None = None
            if ring.is_here(1):
                with ring.failure.noted():
                    new = opened.enter_context(self._writer(files, to_key))
            for start, length in ring.blocks(sum(file.size_bytes for file in files)):
                part = block[:length]
                if old is not None:
                    ring.failure.attempt(partial(old.read_into, start, part))
                    ring.send_to(1, part)
                if ring.is_here(1):
                    ring.receive_from(0, part)
                    if new is not None:
                        ring.failure.attempt(partial(new.write, part))

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

    def _ring(self, ranks: tuple[int, ...], block_bytes: int, failure: FirstFailure | None = None) -> Ring:
        return Ring(
            ranks=ranks,
            own_rank=self._comm.rank,
            transfer=self._transfer,
            block_bytes=block_bytes,
            timeout_s=self._comm.timeout_s,
            failure=failure or FirstFailure(),
            first_tag=self._num_exchanges % DISTINCT_EXCHANGES * TAGS,
        )

    def _writer(self, files: Sequence[RecordedFile], key: KeyOf, order: Order = ()) -> ConcatenatedWriter:
        large = prefer_direct_access(self._storage)
        return ConcatenatedWriter(
            [(file.name, file.size_bytes) for file in files],
            lambda name, size_bytes: large.create(key(name), size_bytes),
            order,
        )

    def _reader(self, files: Sequence[RecordedFile], key: KeyOf, order: Order = ()) -> ConcatenatedReader:
        return ConcatenatedReader(files, lambda name: self._storage.open(key(name)), order)


def parity_file_name(rank: int) -> str:
    """The file of the parity or copy that a rank keeps for its group."""
    return f"parity-{rank}.bin"


def build_records(
    draft: Draft,
    fitted: FittedScheme,
    reported: Mapping[int, ReportedShare],
    domains: tuple[str, ...],
) -> dict[int, GroupRecord]:
    """The records of the groups whose members reported, by their numbers."""

    def describe(rank: int) -> GroupMember:
        report = reported[rank]
        return GroupMember(rank=rank, domain=domains[rank], files=report.files, order=report.order)

    return {
        number: GroupRecord(
            step=draft.name,
            save_id=draft.save_id,
            domains=domains,
            scheme=fitted.scheme.name,
            losses=fitted.scheme.losses,
            chunk_bytes=reported[group[0]].chunk_bytes,
            block_bytes=reported[group[0]].block_bytes,
            members=tuple(describe(rank) for rank in group),
            kept=tuple(kept for rank in group if (kept := reported[rank].kept) is not None),
        )
        for number, group in enumerate(fitted.groups)
        if reported.keys() >= set(group)
    }
