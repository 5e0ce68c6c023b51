"""What each member of a redundancy group has of one step, and what all nodes together can still provide.

The record of a group is in the cache of every member, so it survives whatever the group survives. Parity
does not know files: it sees the bytes of a member's in the order in which they were written, followed by
zeros. Assessing is pure: each
node says what is in its cache, and every rank draws the same conclusion. The job that restores may have other
ranks than the one that saved: each rank that saved has a share, on whichever node. Invariant: a record has
the names, sizes and checksums of all files that a rebuild must give back; `is_rebuildable` is true only if no
group lost more shares than its scheme survives.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.checkpoint.formats.manifest import start_checksum
from penstock.checkpoint.levels.redundancy.parity_layout import ParityLayout
from penstock.errors import DataDamaged, name_some
from penstock.storage.protocol import Sink, Source


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RecordedFile(_Strict):
    """One file: its name below the step's folder, its size, and the XXH3-128 of its bytes in hexadecimal."""

    name: str
    size_bytes: int
    sum: str


Order = tuple[tuple[int, int], ...]
"""How parity sees the bytes of a member's files, which are written several at a time: the number of a file
and how many of its next bytes follow, again and again. Empty: one file after another."""


class GroupMember(_Strict):
    """One rank and the files that it wrote."""

    rank: int
    domain: str
    files: tuple[RecordedFile, ...]
    order: Order = ()

    @property
    def size_bytes(self) -> int:
        """The bytes of all its files."""
        return sum(file.size_bytes for file in self.files)


class GroupRecord(_Strict):
    """How the members of one group protect each other in one step. JSON on disk."""

    format: Literal[2, 3] = 3
    """In format 2, a member's chunks are contiguous, and `order` is always empty."""
    step: str
    save_id: str
    """The save that wrote this: a step may have been saved twice, and one node may have missed the second."""
    domains: tuple[str, ...]
    """Of all ranks of the job that saved, in rank order."""
    scheme: str
    losses: int
    chunk_bytes: int
    block_bytes: int
    members: tuple[GroupMember, ...]
    kept: tuple[RecordedFile, ...]
    """What each member keeps for the others: parity, or a copy of its neighbour's files."""

    @property
    def layout(self) -> ParityLayout:
        """Where the pieces of parity are."""
        return ParityLayout(
            members=len(self.members),
            parities=self.losses,
            chunk_bytes=self.chunk_bytes,
            interleaved=self.format > 2,
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks."""
        return tuple(member.rank for member in self.members)

    def stored_files(self, place: int) -> tuple[RecordedFile, ...]:
        """The files that a member wrote, and then what it keeps for the others."""
        return (*self.members[place].files, *self.kept[place : place + 1])


def record_bytes(record: GroupRecord) -> bytes:
    """The content of a record file."""
    return record.model_dump_json().encode()


def read_record(content: bytes | bytearray, uri: str) -> GroupRecord:
    """Parse a record; `DataDamaged` if it is not one."""
    try:
        return GroupRecord.model_validate_json(bytes(content))
    except ValidationError as error:
        raise DataDamaged(
            f"The redundancy record cannot be parsed: {error.errors()[0]['msg']}",
            uri=uri,
            fix="Restore from another level.",
        ) from error


def list_members(
    records: Mapping[int, GroupRecord], ranks: Collection[int] | None = None
) -> Iterator[tuple[GroupRecord, int]]:
    """The places of some ranks, or of all, in their groups; in the same order on all ranks."""
    for _, record in sorted(records.items()):
        for place, rank in enumerate(record.ranks):
            if ranks is None or rank in ranks:
                yield record, place


def list_extents(sizes: Sequence[int], order: Order = ()) -> list[tuple[int, int, int]]:
    """The bytes of files in an order: number of the file, offset in it, length."""
    offsets = [0] * len(sizes)
    extents = []
    for number, length in order or enumerate(sizes):
        if length:
            extents.append((number, offsets[number], length))
            offsets[number] += length
    return extents


class ConcatenatedReader:
    """Reads a member's files as one endless sequence of bytes: zeros follow the last ones."""

    def __init__(
        self, files: Sequence[RecordedFile], open_file: Callable[[str], Source], order: Order = ()
    ) -> None:
        self._extents = list_extents([file.size_bytes for file in files], order)
        self._ends = np.cumsum([length for _, _, length in self._extents], dtype=np.int64)
        self._names = [file.name for file in files]
        self._open_file = open_file
        self._sources: dict[int, Source] = {}

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of the sequence."""
        filled = 0
        while filled < buffer.nbytes:
            place = int(np.searchsorted(self._ends, offset + filled, side="right"))
            if place == len(self._extents):
                np.frombuffer(buffer[filled:], np.uint8)[:] = 0
                return
            number, begin, length = self._extents[place]
            inside = offset + filled - (int(self._ends[place]) - length)
            wanted = min(buffer.nbytes - filled, length - inside)
            self._source(number).read_into(begin + inside, buffer[filled : filled + wanted])
            filled += wanted

    def _source(self, number: int) -> Source:
        if number not in self._sources:
            self._sources[number] = self._open_file(self._names[number])
        return self._sources[number]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()


class _GrowingFile:
    """A file that is being written, with its running checksum."""

    def __init__(self, sink: Sink, size_bytes: int) -> None:
        self.sink = sink
        self.left_bytes = size_bytes
        self.sum = start_checksum()

    def append(self, part: memoryview) -> None:
        """Write the next bytes; `part` may change once this returns."""
        released = threading.Event()
        self.sink.submit(part, released.set)
        self.sum.update(part)
        released.wait()
        self.left_bytes -= part.nbytes


class ConcatenatedWriter:
    """Writes a sequence of bytes to the files whose bytes they are; what follows the last ones is dropped.

    Each file is finished as soon as it is full. Leaving the block before that aborts it.
    """

    def __init__(
        self, sizes: Sequence[tuple[str, int]], create_file: Callable[[str, int], Sink], order: Order = ()
    ) -> None:
        self._sizes = list(sizes)
        self._create_file = create_file
        self._extents = deque(
            (number, length) for number, _, length in list_extents([size for _, size in sizes], order)
        )
        self._growing: dict[int, _GrowingFile] = {}
        self._finished: dict[int, RecordedFile] = {}
        with ExitStack() as undo:
            undo.push(self)
            for number, (_, size_bytes) in enumerate(self._sizes):
                if not size_bytes:
                    self._begin(number)
                    self._finish(number)
            undo.pop_all()

    @property
    def written(self) -> list[RecordedFile]:
        """The files that are finished, in their order."""
        return [file for _, file in sorted(self._finished.items())]

    def write(self, buffer: memoryview) -> None:
        """Write the next bytes; `buffer` may change once this returns."""
        while buffer.nbytes and self._extents:
            number, length = self._extents.popleft()
            file = self._growing.get(number) or self._begin(number)
            part = buffer[:length]
            file.append(part)
            if part.nbytes < length:
                self._extents.appendleft((number, length - part.nbytes))
            if not file.left_bytes:
                self._finish(number)
            buffer = buffer[part.nbytes :]

    def _begin(self, number: int) -> _GrowingFile:
        file = _GrowingFile(self._create_file(*self._sizes[number]), self._sizes[number][1])
        self._growing[number] = file
        return file

    def _finish(self, number: int) -> None:
        file, (name, size_bytes) = self._growing[number], self._sizes[number]
        file.sink.finish()
        del self._growing[number]
        self._finished[number] = RecordedFile(name=name, size_bytes=size_bytes, sum=file.sum.digest().hex())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._growing.values():
            file.sink.abort()
        self._growing.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShares:
    """What one node's cache has of a step; `sizes` is empty if it has not committed a share."""

    ranks: tuple[int, ...]
    """The ranks that use this cache now; the lowest acts for it."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    records: Mapping[int, GroupRecord] = field(default_factory=dict)
    """By the group's number."""

    @property
    def save_id(self) -> str:
        """Which save of the step this is; empty if there is none."""
        return next((record.save_id for record in self.records.values()), "")

    @property
    def domains(self) -> tuple[str, ...]:
        """Those of all ranks of the job that saved the step."""
        return next((record.domains for record in self.records.values()), ())

    def with_domains(self, domains: tuple[str, ...]) -> Self:
        """The same with other ones in all records."""
        records = {
            number: record.model_copy(update={"domains": domains}) for number, record in self.records.items()
        }
        return replace(self, records=records)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """What can be done with a step. `lost` are the ranks that saved and whose share no node has."""

    records: Mapping[int, GroupRecord]
    save_id: str = ""
    shares: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """By the lowest rank of a node now: the ranks that saved whose shares are there."""
    holders: Mapping[int, int] = field(default_factory=dict)
    """By rank that saved: the rank that has its share now, or will get it if it is lost."""
    homes: Mapping[int, int] = field(default_factory=dict)
    """By rank that saved: the rank that needs its share now, on whose node it should be."""
    lost: tuple[int, ...] = ()
    reason: str = ""
    """Why it cannot be restored from caches; empty if it can."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is lost."""
        return not self.lost and not self.reason

    @property
    def is_rebuildable(self) -> bool:
        """Whether something is lost that can be computed from the rest."""
        return bool(self.lost) and not self.reason

    def files_of(self, rank: int) -> tuple[RecordedFile, ...]:
        """The files that a rank wrote."""
        members = list_members(self.records, [rank])
        return next((record.members[place].files for record, place in members), ())

    def kept_by(self, rank: int) -> tuple[RecordedFile, ...]:
        """The parity or copy that a rank keeps for its group: one file or none."""
        members = list_members(self.records, [rank])
        return next((record.kept[place : place + 1] for record, place in members), ())


def assess(nodes: Sequence[NodeShares], *, damaged: Collection[int] = ()) -> Assessment:
    """What the caches of all nodes can provide of one step; the files of `damaged` ranks count as lost.

    If nodes have different saves of the step, the one that can be restored and of which most is left counts.
    """
    save_ids = sorted({node.save_id for node in nodes} - {""})
    assessments = [_assess_save(save_id, nodes, damaged) for save_id in save_ids]
    if not assessments:
        return Assessment(records={}, reason="no cache has it")
    return min(assessments, key=lambda result: (bool(result.reason), len(result.lost), -len(result.records)))


def find_complete_shares(node: NodeShares, records: Mapping[int, GroupRecord]) -> frozenset[int]:
    """The ranks whose files and parity are all in this cache, by names and sizes."""
    return frozenset(
        record.ranks[place]
        for record, place in list_members(records)
        if all(node.sizes.get(file.name) == file.size_bytes for file in record.stored_files(place))
    )


def choose_home_rank(rank: int, num_saved: int, num_present: int) -> int:
    """The rank that takes over what `rank` saved: itself, or its proportional place among other numbers."""
    return rank if num_saved == num_present else rank * num_present // num_saved


def place_lost(
    assessment: Assessment, nodes: Sequence[tuple[int, ...]], room_bytes: Mapping[int, int]
) -> dict[int, int]:
    """By rank whose share is lost: the rank that gets it, on its own node, or where most room is left.

    `nodes` are the ranks of each node, and `room_bytes` has what fits there by the lowest of them.
    """
    left = dict(room_bytes)
    node_of = {rank: ranks for ranks in nodes for rank in ranks}
    placed = {}
    for rank in assessment.lost:
        files = (*assessment.files_of(rank), *assessment.kept_by(rank))
        size_bytes = sum(file.size_bytes for file in files)
        home = assessment.holders[rank]
        at, widest = node_of[home][0], max(left, key=left.__getitem__)
        if left[at] < size_bytes <= left[widest]:
            at = widest
            home = node_of[widest][rank % len(node_of[widest])]
        left[at] -= size_bytes
        placed[rank] = home
    return placed


def _assess_save(save_id: str, nodes: Sequence[NodeShares], damaged: Collection[int]) -> Assessment:
    having = [node for node in nodes if node.save_id == save_id]
    records = {number: record for node in having for number, record in node.records.items()}
    complete = {node.ranks: find_complete_shares(node, records) for node in having}
    shares = {ranks[0]: found - set(damaged) for ranks, found in complete.items()}
    saved = range(len(next(iter(records.values())).domains))
    num_present = sum(len(node.ranks) for node in nodes)
    homes = {rank: choose_home_rank(rank, len(saved), num_present) for rank in saved}
    # A damaged share is rebuilt where it was read: a node that kept it would go on reading it.
    having_damaged = {rank: [ranks for ranks, found in complete.items() if rank in found] for rank in damaged}
    holders = homes | {rank: _choose_holder(rank, ranks) for rank, ranks in having_damaged.items() if ranks}
    present: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in saved}
    for node in having:
        for rank in shares[node.ranks[0]]:
            present[rank].append(node.ranks)
    holders |= {rank: _choose_holder(rank, ranks) for rank, ranks in present.items() if ranks}
    lost = [rank for rank, ranks in present.items() if not ranks]
    return Assessment(
        records=records,
        save_id=save_id,
        shares=shares,
        holders=holders,
        homes=homes,
        lost=tuple(lost),
        reason=_explain_loss(records, lost),
    )


def _choose_holder(rank: int, nodes: Sequence[tuple[int, ...]]) -> int:
    """The rank itself if its share is on its node, else one of the ranks where the share is, in turn."""
    home = next((ranks for ranks in nodes if rank in ranks), nodes[0])
    return rank if rank in home else home[rank % len(home)]


def _explain_loss(records: Mapping[int, GroupRecord], lost: Collection[int]) -> str:
    known = {rank for record in records.values() for rank in record.ranks}
    unknown = [rank for rank in lost if rank not in known]
    if unknown:
        domain = next(iter(records.values())).domains[unknown[0]]
        return f"no record of the share of rank {unknown[0]} is left; the cache of {domain} is lost"
    for record in records.values():
        missing = [place for place, member in enumerate(record.members) if member.rank in lost]
        if len(missing) > record.losses and not _has_copies_left(record, missing):
            members = [record.members[place] for place in missing]
            files = [file.name for member in members for file in member.files]
            domains = dict.fromkeys(member.domain for member in members)
            return (
                f"ranks {name_some([str(member.rank) for member in members])} of one group lost their files "
                f"({name_some(files)}; saved on {name_some(list(domains))}), and {record.scheme} survives "
                f"{record.losses or 'no'} {'loss' if record.losses < 2 else 'losses'}"
            )
    return ""


def _has_copies_left(record: GroupRecord, missing: Sequence[int]) -> bool:
    """Whether copies survive this loss: any but that of two neighbours."""
    members = len(record.members)
    return record.scheme == "partner" and not any((place + 1) % members in missing for place in missing)
