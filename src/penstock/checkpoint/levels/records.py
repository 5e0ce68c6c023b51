"""What each member of a redundancy group has of one step, and what all nodes together can still provide.

The record of a group is in the cache of every member, so it survives whatever the group survives. Assessing
is pure: rank 0 draws the conclusion from what each node lists. The job that restores may have other ranks
than the one that saved: each rank that saved has a share (its files, and what it keeps for its group), on
whichever node. Invariant: a record has the names, sizes and checksums of all files that a rebuild must give
back; `is_rebuildable` is true only if no group lost more shares than its scheme survives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.checkpoint.levels.parity import Layout
from penstock.errors import DataDamaged, name_some


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RecordedFile(_Strict):
    """One file: its name below the step's folder, its size, and the XXH3-128 of its bytes in hexadecimal."""

    name: str
    size_bytes: int
    sum: str


Order = tuple[tuple[int, int], ...]
"""How parity sees the bytes of a member's files, which are written several at a time: the number of a file
and how many of its next bytes follow, again and again. ((0, 4), (1, 4), (0, 2)) is four bytes of the first
file, four of the second, two more of the first. Empty: one file after another."""


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
    """The failure domains of all ranks of the job that saved, in rank order."""
    scheme: str
    losses: int
    chunk_bytes: int
    block_bytes: int
    members: tuple[GroupMember, ...]
    kept: tuple[RecordedFile, ...]
    """What each member keeps for the others: parity, or a copy of its neighbour's files."""

    @property
    def layout(self) -> Layout:
        """Where the pieces of parity are, or the copies."""
        is_copied = self.scheme == "partner"
        return Layout(
            members=len(self.members),
            parities=0 if is_copied else self.losses,
            chunk_bytes=max(member.size_bytes for member in self.members) if is_copied else self.chunk_bytes,
            block_bytes=self.block_bytes,
            interleaved=self.format > 2,
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks."""
        return tuple(member.rank for member in self.members)

    def stored_files(self, place: int) -> tuple[RecordedFile, ...]:
        """The files that a member wrote, and then what it keeps for the others."""
        return (*self.members[place].files, *self.kept[place : place + 1])


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShares:
    """What one node's cache has of a step; `sizes` is empty if it has not committed a share.

    `records` come without their `domains`, which are the same in all of them and long: here they are once.
    """

    ranks: tuple[int, ...]
    """The ranks that use this cache now; the lowest acts for it."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    records: Mapping[int, GroupRecord] = field(default_factory=dict)
    """By the group's number."""
    domains: tuple[str, ...] = ()
    room_bytes: int = 0
    """How much more fits into the cache."""

    @property
    def save_id(self) -> str:
        """Which save of the step this is; empty if there is none."""
        return next((record.save_id for record in self.records.values()), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """What can be done with a step. `lost` are the ranks that saved and whose share no node has."""

    records: Mapping[int, GroupRecord] = field(default_factory=dict)
    """By the group's number, without `domains`."""
    domains: tuple[str, ...] = ()
    save_id: str = ""
    shares: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """By the lowest rank of a node now: the ranks that saved whose shares are there."""
    holders: Mapping[int, int] = field(default_factory=dict)
    """By rank that saved: the rank that has its share now, or will get it if it is lost."""
    homes: Mapping[int, int] = field(default_factory=dict)
    """By rank that saved: the rank that needs its share now, on whose node it should be."""
    lost: tuple[int, ...] = ()
    moved: Mapping[int, int] = field(default_factory=dict)
    """By lost rank whose own cache is too full for its share: the rank of another node that gets it."""
    reason: str = ""
    """Why it cannot be restored from caches; empty if it can."""

    @property
    def is_rebuildable(self) -> bool:
        """Whether something is lost that can be computed from the rest."""
        return bool(self.lost) and not self.reason

    def files_of(self, rank: int) -> tuple[RecordedFile, ...]:
        """The files that a rank wrote, and what it keeps for its group."""
        return next((record.stored_files(place) for record, place in list_members(self.records, [rank])), ())


def assess(nodes: Sequence[NodeShares], *, damaged: Collection[int] = ()) -> Assessment:
    """What the caches of all nodes can provide of one step; the files of `damaged` ranks count as lost.

    If nodes have different saves of the step, the one that can be restored and of which most is left counts.
    """
    save_ids = sorted({node.save_id for node in nodes} - {""})
    assessments = [_assess_save(save_id, nodes, damaged) for save_id in save_ids]
    if not assessments:
        return Assessment(reason="no cache has it")
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


def _assess_save(save_id: str, nodes: Sequence[NodeShares], damaged: Collection[int]) -> Assessment:
    having = [node for node in nodes if node.save_id == save_id]
    records = {number: record for node in having for number, record in node.records.items()}
    domains = having[0].domains
    complete = {node.ranks: find_complete_shares(node, records) for node in having}
    num_present = sum(len(node.ranks) for node in nodes)
    homes = {rank: choose_home_rank(rank, len(domains), num_present) for rank in range(len(domains))}
    holders, lost = dict(homes), []
    for rank, home in homes.items():
        here = [ranks for ranks, found in complete.items() if rank in found]
        if here:
            # A damaged share is rebuilt where it was read: a node that kept it would go on reading it.
            at = next((ranks for ranks in here if home in ranks), here[0])
            holders[rank] = home if home in at else at[rank % len(at)]
        if not here or rank in damaged:
            lost.append(rank)
    found = Assessment(
        records=records,
        domains=domains,
        save_id=save_id,
        shares={ranks[0]: shares - set(damaged) for ranks, shares in complete.items()},
        holders=holders,
        homes=homes,
        lost=tuple(lost),
        reason=_explain_loss(records, domains, lost),
    )
    moved = _find_room(found, nodes)
    return replace(found, holders=holders | moved, moved=moved)


def _find_room(found: Assessment, nodes: Sequence[NodeShares]) -> dict[int, int]:
    """By lost share that does not fit into its own cache: the rank of the node with most room."""
    node_of = {rank: node.ranks for node in nodes for rank in node.ranks}
    left = {node.ranks: node.room_bytes for node in nodes}
    moved = {}
    for rank in found.lost:
        size_bytes = sum(file.size_bytes for file in found.files_of(rank))
        home, widest = node_of[found.holders[rank]], max(left, key=left.__getitem__)
        if left[home] < size_bytes <= left[widest]:
            moved[rank] = widest[rank % len(widest)]
            home = widest
        left[home] -= size_bytes
    return moved


def _explain_loss(records: Mapping[int, GroupRecord], domains: Sequence[str], lost: Collection[int]) -> str:
    known = {rank for record in records.values() for rank in record.ranks}
    if unknown := [rank for rank in lost if rank not in known]:
        return (
            f"no record of the share of rank {unknown[0]} is left; the cache of {domains[unknown[0]]} is lost"
        )
    for record in records.values():
        missing = [place for place, rank in enumerate(record.ranks) if rank in lost]
        # Copies survive any loss except two neighbours, as each member keeps a copy of the one before.
        neighbours = any((place + 1) % len(record.members) in missing for place in missing)
        if len(missing) > record.losses and (record.scheme != "partner" or neighbours):
            members = [record.members[place] for place in missing]
            domains = list(dict.fromkeys(member.domain for member in members))
            files = [file.name for member in members for file in member.files]
            return (
                f"ranks {name_some([str(member.rank) for member in members])} of one group lost their files "
                f"({name_some(files)}; saved on {name_some(domains)}), and {record.scheme} survives "
                f"{record.losses or 'no'} {'loss' if record.losses < 2 else 'losses'}"
            )
    return ""
