"""What the caches of all nodes can still give of a step: all, all after a rebuild, or not enough.

Pure: each node says what lies in its cache, every rank draws the same conclusion. Who saved need not be who
restores: each rank that saved has a share, which some node holds, wherever its rank runs now. Invariant:
`is_rebuildable` is only said where each group lost no more shares than its scheme survives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from penstock.checkpoint.levels.redundancy.redundancy_record import GroupRecord, HeldFile, Member

NUM_NAMED: Final = 3
"""So many files and ranks are named where something is lost; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHolding:
    """What one node's cache holds of a step. Without a committed copy, `sizes` is empty."""

    ranks: tuple[int, ...]
    """The ranks that use this cache now, the lowest of which speaks for it."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    records: Mapping[int, GroupRecord] = field(default_factory=dict)
    """By the group's number."""

    @property
    def save_id(self) -> str:
        """Which save of the step this is; empty where nothing is held."""
        return next((record.save_id for record in self.records.values()), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """What can be done with a step. `lost` are the ranks that saved whose share no node has."""

    records: Mapping[int, GroupRecord]
    save_id: str = ""
    shares: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """By the lowest rank of a node now: the ranks that saved whose shares it has."""
    actors: Mapping[int, int] = field(default_factory=dict)
    """By rank that saved: the rank that now has its share at hand, or is to get it if it is lost."""
    homes: Mapping[int, int] = field(default_factory=dict)
    """By rank that saved: the rank that asks for its share now, and on whose node it should lie."""
    lost: tuple[int, ...] = ()
    reason: str = ""
    """Why it cannot be restored from caches; empty where it can."""

    @property
    def is_whole(self) -> bool:
        """Nothing is lost."""
        return not self.lost and not self.reason

    @property
    def is_rebuildable(self) -> bool:
        """Something is lost, and can be computed from what is left."""
        return bool(self.lost) and not self.reason

    def files_of(self, rank: int) -> tuple[HeldFile, ...]:
        """What a rank wrote."""
        return next((each.member.files for each in _members(self.records) if each.member.rank == rank), ())

    def kept_by(self, rank: int) -> tuple[HeldFile, ...]:
        """What a rank keeps of its group: one file, or none."""
        files = next((each.files for each in _members(self.records) if each.member.rank == rank), ())
        return files[len(self.files_of(rank)) :]


def assess(holdings: Sequence[NodeHolding], *, damaged: Collection[int] = ()) -> Assessment:
    """What the caches of all nodes can give of one step; `damaged` ranks' files are as good as lost.

    Where nodes hold different saves of the step, the one counts that can be restored, and of which most is
    left.
    """
    save_ids = sorted({holding.save_id for holding in holdings} - {""})
    found = [_of_one_save(save_id, holdings, damaged) for save_id in save_ids]
    if not found:
        return Assessment(records={}, reason="no cache has it")
    return min(found, key=lambda each: (bool(each.reason), len(each.lost), -len(each.records)))


def shares_of(holding: NodeHolding, records: Mapping[int, GroupRecord]) -> frozenset[int]:
    """The ranks all of whose files, and what they kept, lie in this cache by names and sizes."""
    return frozenset(
        each.member.rank
        for each in _members(records)
        if all(holding.sizes.get(file.name) == file.size_bytes for file in each.files)
    )


def home_of(rank: int, num_saved: int, num_present: int) -> int:
    """Who of another number of ranks takes over what a rank saved: itself, or its place in proportion."""
    return rank if num_saved == num_present else rank * num_present // num_saved


def _of_one_save(save_id: str, holdings: Sequence[NodeHolding], damaged: Collection[int]) -> Assessment:
    own = [holding for holding in holdings if holding.save_id == save_id]
    records: dict[int, GroupRecord] = {}
    for holding in own:
        records.update(holding.records)
    shares = {holding.ranks[0]: shares_of(holding, records) - set(damaged) for holding in own}
    saved = range(len(next(iter(records.values())).domains))
    num_present = sum(len(holding.ranks) for holding in holdings)
    homes = {rank: home_of(rank, len(saved), num_present) for rank in saved}
    actors: dict[int, int] = {}
    lost = []
    for rank in saved:
        holders = [holding.ranks for holding in own if rank in shares[holding.ranks[0]]]
        if holders:
            actors[rank] = _actor(rank, holders)
        else:
            lost.append(rank)
            actors[rank] = homes[rank]
    return Assessment(
        records=records,
        save_id=save_id,
        shares=shares,
        actors=actors,
        homes=homes,
        lost=tuple(lost),
        reason=_beyond_repair(records, lost),
    )


def _actor(rank: int, holders: Sequence[tuple[int, ...]]) -> int:
    """The rank itself, where its share lies with it; else one of the ranks there, in turn."""
    home = next((ranks for ranks in holders if rank in ranks), holders[0])
    return rank if rank in home else home[rank % len(home)]


@dataclass(frozen=True, slots=True)
class _Membership:
    member: Member
    files: tuple[HeldFile, ...]
    """What it wrote, and what it keeps of its group."""


def _members(records: Mapping[int, GroupRecord]) -> Iterator[_Membership]:
    for record in records.values():
        for place, member in enumerate(record.members):
            yield _Membership(member, (*member.files, *record.kept[place : place + 1]))


def _beyond_repair(records: Mapping[int, GroupRecord], lost: Collection[int]) -> str:
    known = {each.member.rank for each in _members(records)}
    unknown = [rank for rank in lost if rank not in known]
    if unknown:
        domain = next(iter(records.values())).domains[unknown[0]]
        return f"nothing is known of the share of rank {unknown[0]}, which {domain} had; its cache is lost"
    for record in records.values():
        missing = [place for place, member in enumerate(record.members) if member.rank in lost]
        if len(missing) > record.losses and not _spared_by_copies(record, missing):
            members = [record.members[place] for place in missing]
            files = [file.name for member in members for file in member.files]
            domains = dict.fromkeys(member.domain for member in members)
            return (
                f"ranks {_named([str(member.rank) for member in members])} of one group lost their files "
                f"({_named(files)}; saved on {_named(list(domains))}), and {record.scheme} survives "
                f"{record.losses or 'no'} {'loss' if record.losses < 2 else 'losses'}"
            )
    return ""


def _spared_by_copies(record: GroupRecord, missing: Sequence[int]) -> bool:
    """Copies survive any loss but of neighbours."""
    members = len(record.members)
    return record.scheme == "partner" and not any((place + 1) % members in missing for place in missing)


def _named(names: Sequence[str]) -> str:
    rest = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
