"""What ranks tell each other about their caches: whose is where, what was written, what is whole.

Place in the flow: below `cache`, which acts on it. Invariant: while nothing is lost, what a rank receives
grows with the job by a few bytes for each rank; how a group protects its files is told on the nodes of its
members alone.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.checkpoint.commit.catalog import local_path
from penstock.checkpoint.levels.redundancy.redundancy_record import (
    Assessment,
    NodeShares,
    assess,
    choose_home_rank,
    find_complete_shares,
    place_lost,
)
from penstock.checkpoint.saving.shared_description import pack_report, unpack_figures, unpack_report
from penstock.cluster import rounds
from penstock.cluster.comm import Comm, all_gather_results, run_on_all_ranks
from penstock.cluster.rounds import Rounds
from penstock.errors import DataDamaged
from penstock.storage.volumes import find_room

if TYPE_CHECKING:
    from penstock.checkpoint.engine import RankSaveStats, WrittenShare
    from penstock.checkpoint.levels.cache import NodeCache
    from penstock.checkpoint.levels.redundancy.protector import ReportedShare

_IDENTITY_BYTES = 16

logger = logging.getLogger(__name__)


class Nodes:
    """Which ranks share a cache, and what fails together."""

    def __init__(self, leads: Sequence[int], domains: Sequence[str]) -> None:
        self.leads = tuple(leads)
        """By rank: the lowest rank that uses the same cache; it acts for its node."""
        self.domains = tuple(domains)
        by_lead: dict[int, list[int]] = {}
        for rank, lead in enumerate(self.leads):
            by_lead.setdefault(lead, []).append(rank)
        self.ranks_of = {lead: tuple(ranks) for lead, ranks in by_lead.items()}
        """The ranks of each cache, by its lead, ascending."""


def locate_caches(rank: int, size: int, identity: object, domain: str) -> Rounds[Nodes]:
    """Ranks whose caches have the same identity share it."""
    own = hashlib.sha256(repr(identity).encode()).digest()[:_IDENTITY_BYTES]
    told = yield from rounds.all_of_all(rank, size, own + domain.encode("utf-8", "surrogatepass"))
    first: dict[bytes, int] = {}
    leads = [first.setdefault(text[:_IDENTITY_BYTES], rank) for rank, text in enumerate(told)]
    names = [text[_IDENTITY_BYTES:].decode("utf-8", "surrogatepass") for text in told]
    return Nodes(leads, names)


def tell_sizes(rank: int, ranks: Sequence[int], size_bytes: int) -> Rounds[tuple[int, ...]]:
    """What each member of a group is about to write."""
    told = yield from rounds.exchange(rank, ranks, size_bytes.to_bytes(8, "little"))
    return tuple(int.from_bytes(told[other], "little") for other in ranks)


def tell_files(
    rank: int, size: int, share: WrittenShare
) -> Rounds[tuple[tuple[Mapping[str, int], ...], tuple[RankSaveStats, ...]]]:
    """By rank: the sizes of the files that it wrote, and what that cost."""
    told = yield from rounds.all_of_all(rank, size, pack_report(share))
    known = [unpack_report(text) for text in told]
    return tuple(files for _, files in known), unpack_figures(b"".join(figures for figures, _ in known))


def tell_groups(
    rank: int, size: int, nodes: Nodes, group: Sequence[int], own: ReportedShare
) -> Rounds[dict[int, ReportedShare]]:
    """On the lead of each node: what the members of all groups reported of which one is on this node."""
    packed = pickle.dumps(own)
    to_leads = sorted({nodes.leads[member] for member in group})
    told = yield from rounds.route_texts(rank, size, [(lead, packed) for lead in to_leads])
    # Ranks of one job trust each other: a process that can send here already runs code as this user.
    return {sender: pickle.loads(text) for sender, text in told}  # noqa: S301 - as said


def tell_seal(
    rank: int, ranks: Sequence[int], seal: tuple[bytes, bytes] | None
) -> Rounds[tuple[bytes, bytes] | None]:
    """Manifest and metadata of the first of some ranks, on all of them; None elsewhere."""
    if rank not in ranks:
        return None
    manifest = yield from rounds.from_first(rank, ranks, seal[0] if seal else b"")
    metadata = yield from rounds.from_first(rank, ranks, seal[1] if seal else b"")
    return manifest, metadata


def _tell_domains(rank: int, size: int, node: NodeShares, save_id: str) -> Rounds[tuple[str, ...]]:
    """The domains of all ranks of the job that saved a step."""
    own = pickle.dumps(node.domains) if node.save_id == save_id else b""
    # As said above.
    domains: tuple[str, ...] = pickle.loads((yield from rounds.first_of_all(rank, size, own)))  # noqa: S301
    return domains


def agree_on_names(rank: int, size: int, names: Sequence[str], *, is_certain: bool) -> Rounds[bool]:
    """Whether all caches have the same steps, and none doubts any of them."""
    told = hashlib.sha256("\0".join(sorted(names)).encode("utf-8", "surrogatepass")).digest()
    return (yield from rounds.all_equal(rank, size, told, is_known=is_certain))


def list_names(comm: Comm, node: NodeCache) -> tuple[set[str], set[str]]:
    """The steps that a node knows to be on all nodes, and those that no node knows to be. Collective."""
    awaiting = "all nodes to list their caches"
    own = run_on_all_ranks(comm, lambda: (node.names(), node.unconfirmed()), awaiting=awaiting)
    names, doubted = own
    if comm.carry(agree_on_names(comm.rank, comm.size, names, is_certain=not doubted), awaiting=awaiting):
        return set(names), set()
    answers = comm.gather(own if comm.rank == node.ranks[0] else ([], set()), awaiting=awaiting)
    confirmed = {name for names, doubted in answers for name in names if name not in doubted}
    return confirmed, {name for names, _ in answers for name in names} - confirmed


def fetch_seal(
    comm: Comm, node: NodeCache, name: str, assessment: Assessment, ranks: Collection[int]
) -> tuple[bytes, bytes] | None:
    """Manifest and metadata of a step on some ranks, from the first node that has them undamaged. Collective.

    A share whose manifest is lost still counts for a rebuild, so the first node need not have it.
    `DataDamaged` on all ranks if no node does.
    """
    if not ranks:
        return None
    awaiting = f"all nodes to look for the manifest of {name}"
    has_share = bool(assessment.shares.get(comm.rank))
    own = run_on_all_ranks(comm, lambda: node.seal(name) if has_share else None, awaiting=awaiting)
    first = comm.carry(
        rounds.lowest_of_all(comm.rank, comm.size, comm.rank.to_bytes(8) if own else b""), awaiting=awaiting
    )
    if not first:
        raise DataDamaged(f"No cache has manifest and .metadata of {name} undamaged")
    sender = int.from_bytes(first)
    others = sorted(set(ranks) - {sender})
    told = comm.carry(
        tell_seal(comm.rank, [sender, *others], own),
        awaiting=f"rank {sender} to send the manifest of {name}",
    )
    return told if comm.rank in ranks else None


def agree_on_whole(rank: int, size: int, nodes: Nodes, node: NodeShares) -> Rounds[Assessment | None]:
    """The assessment of a step of which each node has all that its ranks need; None of any other.

    Of the groups' records it has those on this node: nobody needs others where nothing is lost.
    """
    num_saved = len(node.domains)
    homes = {saved: choose_home_rank(saved, num_saved, size) for saved in range(num_saved)}
    wanted = {saved for saved, home in homes.items() if home in node.ranks}
    is_whole = bool(wanted) and wanted <= find_complete_shares(node, node.records)
    alike = hashlib.sha256(f"{node.save_id} {num_saved}".encode()).digest()
    if not (yield from rounds.all_equal(rank, size, alike, is_known=is_whole)):
        return None
    shares: dict[int, set[int]] = {lead: set() for lead in nodes.ranks_of}
    for saved, home in homes.items():
        shares[nodes.leads[home]].add(saved)
    return Assessment(
        records=node.records,
        save_id=node.save_id,
        shares={lead: frozenset(there) for lead, there in shares.items()},
        holders=homes,
        homes=homes,
    )


def assess_all(comm: Comm, own: NodeShares, damaged: Collection[int], awaiting: str) -> Assessment:
    """The assessment of any step, with the records of all groups. Collective."""
    # Every record names the domains of all ranks, the same in each of a save: they travel once.
    told = own.with_domains(()) if comm.rank == own.ranks[0] else None
    answers = [each for each in comm.gather(told, awaiting=awaiting) if each is not None]
    domains = {
        save_id: comm.carry(_tell_domains(comm.rank, comm.size, own, save_id), awaiting=awaiting)
        for save_id in sorted({each.save_id for each in answers} - {""})
    }
    nodes = [each.with_domains(domains.get(each.save_id, ())) for each in answers]
    return assess(nodes, damaged=damaged)


def place_lost_shares(
    name: str, assessment: Assessment, comm: Comm, node: NodeCache, nodes: Sequence[tuple[int, ...]]
) -> dict[int, int]:
    """By rank whose share is lost, the rank that gets it: another node's where its own cache is full."""
    node_of = {rank: ranks for ranks in nodes for rank in ranks}

    def look() -> tuple[str, int]:
        # A node that gains a share copies what it has of the step.
        own_bytes = sum(node.shares(name).sizes.values()) if comm.rank == node_of[comm.rank][0] else 0
        return comm.host, find_room(local_path(node.storage, "")) - own_bytes

    rooms = all_gather_results(comm, look, awaiting="all nodes to say how much their caches have room for")
    placed = place_lost(assessment, nodes, {ranks[0]: rooms[ranks[0]][1] for ranks in nodes})
    for rank, holder in placed.items():
        home = assessment.holders[rank]
        if node_of[holder] != node_of[home] and comm.rank == 0:
            logger.warning(
                "%s: the cache of %s is full, so the files of rank %d are rebuilt in that of %s; "
                "remove old steps there (`penstock checkpoint drop`), or keep fewer (keep_cached=)",
                *(name, rooms[home][0], rank, rooms[holder][0]),
            )
    return placed
