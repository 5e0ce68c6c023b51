"""What ranks tell each other about their caches: whose is where, which steps they have, what is whole.

Place in the flow: below `cache`, which acts on it. Every function here is collective.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Sequence
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
from penstock.cluster.comm import Comm, all_gather_results, run_on_all_ranks
from penstock.errors import DataDamaged
from penstock.storage.volumes import find_room

if TYPE_CHECKING:
    from penstock.checkpoint.levels.cache import NodeCache

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


def locate_caches(comm: Comm, identity: object, domain: str, *, awaiting: str) -> Nodes:
    """Find out which ranks share a cache: those whose caches have the same identity. Collective."""
    known = comm.gather((hashlib.sha256(repr(identity).encode()).digest(), domain), awaiting=awaiting)
    first: dict[bytes, int] = {}
    leads = [first.setdefault(digest, rank) for rank, (digest, _) in enumerate(known)]
    return Nodes(leads, [domain for _, domain in known])


def list_names(comm: Comm, node: NodeCache) -> tuple[set[str], set[str]]:
    """The steps that a node knows to be on all nodes, and those that no node knows to be. Collective."""
    awaiting = "all nodes to list their caches"
    own = run_on_all_ranks(comm, lambda: (node.names(), node.unconfirmed()), awaiting=awaiting)
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
    have_it = comm.gather(own is not None, awaiting=awaiting)
    sender = have_it.index(True) if True in have_it else None
    if sender is None:
        raise DataDamaged(f"No cache has manifest and .metadata of {name} undamaged")
    sealed = comm.gather(
        own if comm.rank == sender else None, awaiting=f"rank {sender} to send the manifest of {name}"
    )
    return sealed[sender] if comm.rank in ranks else None


def agree_on_whole(comm: Comm, nodes: Nodes, node: NodeShares, *, awaiting: str) -> Assessment | None:
    """Assess a step of which each node has all that its ranks need; None for any other. Collective.

    Of the groups' records it has those on this node: nobody needs others where nothing is lost.
    """
    num_saved = len(node.domains)
    homes = {saved: choose_home_rank(saved, num_saved, comm.size) for saved in range(num_saved)}
    wanted = {saved for saved, home in homes.items() if home in node.ranks}
    is_whole = bool(wanted) and wanted <= find_complete_shares(node, node.records)
    if set(comm.gather((is_whole, node.save_id, num_saved), awaiting=awaiting)) != {
        (True, node.save_id, num_saved)
    }:
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
    # Every record names the domains of all ranks, the same ones for each save: they travel once.
    stripped = own.with_domains(()) if comm.rank == own.ranks[0] else None
    answers = [each for each in comm.gather(stripped, awaiting=awaiting) if each is not None]
    senders: dict[str, int] = {}
    for each in answers:
        senders.setdefault(each.save_id, each.ranks[0])
    domains = comm.gather(own.domains if comm.rank in senders.values() else (), awaiting=awaiting)
    nodes = [each.with_domains(domains[senders[each.save_id]]) for each in answers]
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
