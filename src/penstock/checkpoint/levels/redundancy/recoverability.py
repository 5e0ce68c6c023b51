"""What the caches of all nodes can still provide of a step: all of it, all after a rebuild, or not enough.

Pure: each node says what is in its cache, and every rank draws the same conclusion. The job that restores may
have other ranks than the one that saved: each rank that saved has a share, which some node holds, wherever
ranks run now. Invariant: `is_rebuildable` is true only if no group lost more shares than its scheme survives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from penstock.checkpoint.levels.redundancy.redundancy_record import GroupMember, GroupRecord, RecordedFile

NUM_NAMED: Final = 3
"""How many lost files and ranks a message names; the rest is counted."""


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
    def is_whole(self) -> bool:
        """Whether nothing is lost."""
        return not self.lost and not self.reason

    @property
    def is_rebuildable(self) -> bool:
        """Whether something is lost that can be computed from the rest."""
        return bool(self.lost) and not self.reason

    def files_of(self, rank: int) -> tuple[RecordedFile, ...]:
        """The files that a rank wrote."""
        return next((each.member.files for each in _members(self.records) if each.member.rank == rank), ())

    def kept_by(self, rank: int) -> tuple[RecordedFile, ...]:
        """The parity or copy that a rank keeps for its group: one file or none."""
        files = next((each.files for each in _members(self.records) if each.member.rank == rank), ())
        return files[len(self.files_of(rank)) :]


def assess(holdings: Sequence[NodeShares], *, damaged: Collection[int] = ()) -> Assessment:
    """What the caches of all nodes can provide of one step; the files of `damaged` ranks count as lost.

    If nodes have different saves of the step, the one that can be restored and of which most is left counts.
    """
    save_ids = sorted({holding.save_id for holding in holdings} - {""})
    assessments = [_assess_save(save_id, holdings, damaged) for save_id in save_ids]
    if not assessments:
        return Assessment(records={}, reason="no cache has it")
    return min(assessments, key=lambda each: (bool(each.reason), len(each.lost), -len(each.records)))


def find_complete_shares(holding: NodeShares, records: Mapping[int, GroupRecord]) -> frozenset[int]:
    """The ranks whose files and parity are all in this cache, by names and sizes."""
    return frozenset(
        each.member.rank
        for each in _members(records)
        if all(holding.sizes.get(file.name) == file.size_bytes for file in each.files)
    )


def choose_home_rank(rank: int, num_saved: int, num_present: int) -> int:
    """The rank that takes over what `rank` saved: itself, or its proportional place among other numbers."""
    return rank if num_saved == num_present else rank * num_present // num_saved


def _assess_save(save_id: str, holdings: Sequence[NodeShares], damaged: Collection[int]) -> Assessment:
    own = [holding for holding in holdings if holding.save_id == save_id]
    records: dict[int, GroupRecord] = {}
    for holding in own:
        records.update(holding.records)
    shares = {holding.ranks[0]: find_complete_shares(holding, records) - set(damaged) for holding in own}
    saved = range(len(next(iter(records.values())).domains))
    num_present = sum(len(holding.ranks) for holding in holdings)
    homes = {rank: choose_home_rank(rank, len(saved), num_present) for rank in saved}
    holders: dict[int, int] = {}
    lost = []
    for rank in saved:
        nodes = [holding.ranks for holding in own if rank in shares[holding.ranks[0]]]
        if nodes:
            holders[rank] = _choose_holder(rank, nodes)
        else:
            lost.append(rank)
            holders[rank] = homes[rank]
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


@dataclass(frozen=True, slots=True)
class _Membership:
    member: GroupMember
    files: tuple[RecordedFile, ...]
    """The files that it wrote, and the parity that it keeps."""


def _members(records: Mapping[int, GroupRecord]) -> Iterator[_Membership]:
    for record in records.values():
        for place, member in enumerate(record.members):
            yield _Membership(member, (*member.files, *record.kept[place : place + 1]))


def _explain_loss(records: Mapping[int, GroupRecord], lost: Collection[int]) -> str:
    known = {each.member.rank for each in _members(records)}
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
                f"ranks {_named([str(member.rank) for member in members])} of one group lost their files "
                f"({_named(files)}; saved on {_named(list(domains))}), and {record.scheme} survives "
                f"{record.losses or 'no'} {'loss' if record.losses < 2 else 'losses'}"
            )
    return ""


def _has_copies_left(record: GroupRecord, missing: Sequence[int]) -> bool:
    """Whether copies survive this loss: any but that of two neighbours."""
    members = len(record.members)
    return record.scheme == "partner" and not any((place + 1) % members in missing for place in missing)


def _named(names: Sequence[str]) -> str:
    rest = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
