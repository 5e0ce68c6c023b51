"""What the caches of all nodes can still give of a step: all, all after a rebuild, or not enough.

Pure: each node says what lies in its cache, every rank draws the same conclusion. A node is the unit of loss:
it has its share of a step whole or it has lost it. Invariant: `rebuildable` is only said where each group
lost no more members than its scheme survives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.checkpoint.tiers.holdings import GroupRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHolding:
    """What one node's cache holds of a step. Without a committed copy, `sizes` is empty."""

    ranks: tuple[int, ...]
    """The ranks that use this cache now, the lowest of which speaks for it."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    records: Mapping[int, GroupRecord] = field(default_factory=dict)
    """By the group's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """What can be done with a step. `lost` are the ranks whose node has not got its share."""

    records: Mapping[int, GroupRecord]
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


def assess(holdings: Sequence[NodeHolding], *, damaged: Sequence[int] = ()) -> Assessment:
    """What the caches of all nodes can give of one step; `damaged` ranks' files are as good as lost."""
    records: dict[int, GroupRecord] = {}
    for holding in holdings:
        records.update(holding.records)
    if not records:
        return Assessment(records={}, reason="no cache has it")
    saved = {member.rank for record in records.values() for member in record.members}
    present = {rank for holding in holdings for rank in holding.ranks}
    if saved != present:
        unknown = sorted(present - saved)
        told = (
            f"nothing is known of the share of rank {unknown[0]}, whose cache is lost"
            if unknown
            else f"{len(saved)} ranks saved it, and there are {len(present)}"
        )
        return Assessment(records=records, reason=told)
    lost = tuple(
        sorted(
            rank
            for holding in holdings
            if not all(each not in damaged and _has_share(holding, each, records) for each in holding.ranks)
            for rank in holding.ranks
        )
    )
    return Assessment(records=records, lost=lost, reason=_beyond_repair(records, set(lost)))


def _has_share(holding: NodeHolding, rank: int, records: Mapping[int, GroupRecord]) -> bool:
    """Whether everything that this rank wrote and kept lies in its node's cache, by names and sizes."""
    for record in records.values():
        for place, member in enumerate(record.members):
            if member.rank == rank:
                wanted = (*member.files, *((record.kept[place],) if record.kept else ()))
                return all(holding.sizes.get(file.name) == file.size_bytes for file in wanted)
    return False


def _beyond_repair(records: Mapping[int, GroupRecord], lost: set[int]) -> str:
    for record in records.values():
        missing = [place for place, member in enumerate(record.members) if member.rank in lost]
        if len(missing) > record.losses and not _spared_by_copies(record, missing):
            ranks = ", ".join(str(record.members[place].rank) for place in missing)
            return (
                f"ranks {ranks} of one group lost their caches, and {record.scheme} survives "
                f"{record.losses or 'no'} {'loss' if record.losses < 2 else 'losses'}"
            )
    return ""


def _spared_by_copies(record: GroupRecord, missing: Sequence[int]) -> bool:
    """Copies survive any loss but of neighbours."""
    members = len(record.members)
    return record.scheme == "partner" and not any((place + 1) % members in missing for place in missing)
