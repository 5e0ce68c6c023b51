"""The node-local caches of all ranks as one level: steps are written, protected, committed and rebuilt.

    save     drafts on all nodes -> files -> parity -> records -> manifest, metadata -> commit on all nodes
    restore  what each node has -> assessment -> lost shares are rebuilt into the caches that miss them

Each node commits its own share by the protocol of any checkpoint; manifest, metadata and the records of its
groups are on every node. Invariant: a step counts as cached if an assessment of what all nodes have committed
says so. A save that died on some of the nodes is not a step.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.checkpoint.commit.catalog import CheckpointRef
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME, Committed, Draft, Seal
from penstock.checkpoint.formats.checkpoint_source import DescribedStorage
from penstock.checkpoint.levels.node_cache import NodeCache, require_folders
from penstock.checkpoint.levels.options import Partner, Scheme, check_schemes, scheme_for
from penstock.checkpoint.levels.redundancy.parity_layout import build_layout, choose_groups
from penstock.checkpoint.levels.redundancy.recoverability import Assessment, assess
from penstock.checkpoint.levels.redundancy.redundancy_record import GroupMember, GroupRecord, RecordedFile
from penstock.checkpoint.levels.redundancy.ring import BLOCK_BYTES, KeyOf, Protector
from penstock.cluster.comm import Comm, all_gather_results
from penstock.storage import Storage
from penstock.storage.capabilities import prefer_direct_access
from penstock.storage.process_id import current_process
from penstock.storage.uri import parse_uri

if TYPE_CHECKING:
    from penstock.checkpoint.engine import PreparedSave, RankSaveStats, StagedSave, WrittenShare
    from penstock.progress import Progress

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedSave:
    """A step that was just saved to the caches, with what a flush needs to know of it."""

    name: str
    save_id: str
    shares: tuple[WrittenShare, ...]
    seal: Seal
    """Of the whole step, over all nodes."""

    @property
    def stats(self) -> tuple[RankSaveStats, ...]:
        """The statistics of each rank."""
        return tuple(share.stats for share in self.shares)


class CacheLevel:
    """One rank's view of all caches. All is collective but `holds`, `names_here`, `drop` and `remove`.

    `domain` names what fails together with this rank; ranks of one domain never protect each other.
    """

    def __init__(
        self,
        storage: Storage,
        comm: Comm,
        *,
        schemes: Sequence[Scheme],
        domain: str | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        check_schemes(schemes)
        self.storage = storage
        self._comm = comm
        self._schemes = tuple(schemes)
        self._block_bytes = block_bytes
        answers = all_gather_results(
            self._comm,
            lambda: (_identify_cache(storage, comm.rank), domain or comm.host),
            awaiting="all ranks to name their caches",
        )
        self._domains = tuple(each for _, each in answers)
        self._leads = tuple([node for node, _ in answers].index(node) for node, _ in answers)
        """By rank: the lowest rank that uses the same cache; it acts for its node."""
        self._lead = self._leads[comm.rank]
        self._groups = {
            scheme: choose_groups(
                self._domains, scheme.members, smallest=min(scheme.losses + 1, scheme.members)
            )
            for scheme in self._schemes
        }
        self._protector = Protector(storage, comm)
        self._node = NodeCache(storage, next(ranks for ranks in self.nodes if comm.rank in ranks))

    @property
    def leads(self) -> bool:
        """Whether this rank acts for its node."""
        return self._lead == self._comm.rank

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each cache, in the order of their lowest ones."""
        return tuple(
            tuple(rank for rank, each in enumerate(self._leads) if each == lead)
            for lead in sorted(set(self._leads))
        )

    def save(
        self,
        name: str,
        prepared: PreparedSave,
        staged: StagedSave,
        *,
        number: int,
        facts: dict[str, Any],
        progress: Progress | None = None,
    ) -> CachedSave:
        """Write, protect and commit a step on all nodes. `number` counts checkpoints, from 1."""
        with ExitStack() as undo:
            undo.callback(staged.cancel)
            draft = self.start(name)
            cached = self.complete(draft, prepared, staged, number=number, facts=facts, progress=progress)
            undo.pop_all()
        return cached

    def start(self, name: str, only: Collection[int] | None = None) -> Draft:
        """Begin a draft with the same save ID on every node, or on the nodes of some ranks."""
        save_id = self._comm.broadcast(secrets.token_hex(8), awaiting="rank 0 to name the save")
        leads = set(self._leads if only is None else [self._leads[rank] for rank in only])
        drafts = all_gather_results(
            self._comm,
            lambda: self._node.start(name, save_id) if self.leads and self._lead in leads else None,
            awaiting=f"all nodes to make room for {name}",
        )
        return drafts[self._lead] or Draft(name=name, folder="", save_id=save_id)

    def complete(
        self,
        draft: Draft,
        prepared: PreparedSave,
        staged: StagedSave,
        *,
        number: int,
        facts: dict[str, Any],
        progress: Progress | None = None,
    ) -> CachedSave:
        """Write into a draft on all nodes, protect and commit it; on failure, the draft is removed."""
        with ExitStack() as undo:
            undo.callback(staged.cancel)
            undo.callback(self.drop, draft)
            shares = all_gather_results(
                self._comm,
                lambda: staged.write_to(prefer_direct_access(self.storage), draft.key, progress),
                awaiting=f"all ranks to write their files of {draft.name}",
            )
            records = self._protect(draft, shares, scheme_for(number, self._schemes))
            seal = self._sealed(prepared, shares, {**facts, "save_id": draft.save_id})
            self._publish(draft, seal, records)
            undo.pop_all()
        return CachedSave(name=draft.name, save_id=draft.save_id, shares=tuple(shares), seal=seal)

    def drop(self, draft: Draft) -> None:
        """Remove an unfinished draft: the lead of each node its own."""
        if self.leads and draft.folder:
            self._node.drop(draft)

    def names(self) -> list[str]:
        """Every cached step, in no particular order.

        A step that a crash kept from being committed on all nodes counts if what exists is enough, else it is
        removed.
        """
        answers = all_gather_results(
            self._comm,
            lambda: (self._node.names(), self._node.unconfirmed()) if self.leads else ([], set()),
            awaiting="all nodes to list their caches",
        )
        confirmed = {name for names, unconfirmed in answers for name in names if name not in unconfirmed}
        for name in sorted({name for names, _ in answers for name in names} - confirmed):
            found = self.assess(name)
            if found.reason:
                logger.warning("Removing %s, which was never committed on all nodes: %s", name, found.reason)
                self.remove(name)
            else:
                confirmed.add(name)
            if self.leads:
                self._node.confirm(name)
        return sorted(confirmed)

    def names_here(self) -> list[str]:
        """Every step that this node has committed, in no particular order."""
        return self._node.names()

    def assess(self, name: str, *, damaged: Collection[int] = ()) -> Assessment:
        """What the caches can provide of a step; the files of `damaged` ranks count as lost."""
        answers = all_gather_results(
            self._comm,
            lambda: self._node.holding(name) if self.leads else None,
            awaiting=f"all nodes to say what they hold of {name}",
        )
        return assess([holding for holding in answers if holding is not None], damaged=damaged)

    def holds(self, name: str) -> CheckpointRef:
        """The share of a step on this node."""
        return self._node.held(name)

    def view(self, name: str, found: Assessment) -> CheckpointRef:
        """A complete step as this rank can read it: the files of its node, the others through other ranks.

        Manifest and metadata come from one node that has them, as this node may have nothing.
        """
        if self._comm.size == 1:
            return self.holds(name)
        manifest, metadata = self.fetch_seal(name, found)
        if found.shares.get(self._lead):
            held = self.holds(name)
            return replace(held, readable=tuple(self._node.files(held)))
        folder = Committed(name=name, folder=name)
        known = {folder.key(MANIFEST_NAME): manifest, folder.key(METADATA_NAME): metadata}
        return CheckpointRef(DescribedStorage(self.storage, known), folder, readable=())

    def repair(self, name: str, found: Assessment) -> None:
        """Compute the lost shares and commit them to the caches that miss them."""
        self._refill(
            name,
            found,
            {rank: found.holders[rank] for rank in found.lost},
            lambda from_key, to_key: self._rebuild(found, from_key, to_key),
        )

    def relocate_shares(self, name: str, found: Assessment) -> CheckpointRef:
        """A complete step as this rank can read it, after moving each share to the node of its home rank."""
        away = {
            rank: home
            for rank, home in found.homes.items()
            if rank not in found.shares.get(self._leads[home], ())
        }
        if away:
            self._refill(
                name,
                found,
                away,
                lambda from_key, to_key: self._protector.transfer_shares(
                    found.records, away, holders=found.holders, from_key=from_key, to_key=to_key
                ),
            )
            found = self.assess(name)
        return self.view(name, found)

    def fetch_seal(self, name: str, found: Assessment) -> tuple[bytes, bytes]:
        """Manifest and metadata of a step, broadcast by the first node that has a share of it."""
        sender = min(lead for lead, shares in found.shares.items() if shares)
        seal = all_gather_results(
            self._comm,
            lambda: self._node.seal(name) if self._comm.rank == sender else None,
            awaiting=f"rank {sender} to send the manifest of {name}",
        )[sender]
        assert seal is not None, "a node that holds shares has their manifest"
        return seal

    def remove(self, name: str) -> None:
        """Remove a step from all caches: the lead of each node removes its share."""
        if self.leads:
            self._node.remove(name)

    def close(self) -> None:
        """Close the connections between ranks."""
        self._protector.close()

    def _rebuild(self, found: Assessment, from_key: KeyOf, to_key: KeyOf) -> None:
        for record in found.records.values():
            self._protector.rebuild_into(
                record, found.lost, holders=found.holders, from_key=from_key, to_key=to_key
            )

    def _refill(
        self, name: str, found: Assessment, gains: Mapping[int, int], fill: Callable[[KeyOf, KeyOf], None]
    ) -> None:
        """Give the nodes of some ranks shares that they do not have; `gains` is by the rank that saved.

        `fill` writes them, from what is on this node or comes from others. A node keeps what it has: a
        committed checkpoint is never written to, so its old shares are copied into the new draft.
        """
        own = found.shares.get(self._lead, frozenset())
        gained = {rank for rank, home in gains.items() if self._leads[home] == self._lead}
        manifest, metadata = self.fetch_seal(name, found)
        draft = self.start(name, only=gains.values())
        with ExitStack() as undo:
            undo.callback(self.drop, draft)
            from_key = self.holds(name).key if own else draft.key
            all_gather_results(
                self._comm,
                lambda: fill(from_key, draft.key),
                awaiting=f"all missing files of {name} to be there",
            )

            def commit() -> None:
                if gained and self.leads:
                    self._protector.carry_over(found.records, own, from_key=from_key, to_key=draft.key)
                    self._node.publish(draft, manifest, metadata, found.records, own | gained)

            all_gather_results(self._comm, commit, awaiting=f"all nodes to commit {name}")
            undo.pop_all()

    def _protect(
        self, draft: Draft, shares: Sequence[WrittenShare], scheme: Scheme
    ) -> dict[int, GroupRecord]:
        """Compute and write the parity of all groups; returns their records."""
        groups = self._groups[scheme]
        number = next(number for number, group in enumerate(groups) if self._comm.rank in group)
        plans = [
            _plan_record(draft, group, shares, scheme, domains=self._domains, block_bytes=self._block_bytes)
            for group in groups
        ]
        kept = all_gather_results(
            self._comm,
            lambda: self._protector.protect(plans[number], draft.key),
            awaiting=f"all ranks to protect {draft.name} by {scheme.name}",
        )
        return {
            each: plan.model_copy(update={"kept": tuple(file for rank in plan.ranks if (file := kept[rank]))})
            for each, plan in enumerate(plans)
        }

    def _sealed(self, prepared: PreparedSave, shares: Sequence[WrittenShare], facts: dict[str, Any]) -> Seal:
        return self._comm.broadcast(
            all_gather_results(
                self._comm,
                lambda: prepared.seal(shares, facts) if self._comm.rank == 0 else None,
                awaiting="rank 0 to write the manifest",
            )[0],
            awaiting="the manifest",
        )

    def _publish(self, draft: Draft, seal: Seal, records: Mapping[int, GroupRecord]) -> None:
        """Commit on all nodes; if one cannot, roll back on all.

        Between the first and the last node's commit, a crash leaves the step on some nodes only. A note
        beside it says that it is unconfirmed, until all nodes are known to have it.
        """

        def publish() -> None:
            if self.leads:
                self._node.mark_unconfirmed(draft)
                self._node.publish(draft, seal.manifest, seal.metadata, records, self._node.ranks)

        with ExitStack() as undo:
            if self.leads:
                undo.callback(self._node.rollback, draft)
            all_gather_results(self._comm, publish, awaiting=f"all nodes to commit {draft.name}")
            undo.pop_all()
        if self.leads:
            self._node.confirm(draft.name)


def _plan_record(
    draft: Draft,
    group: tuple[int, ...],
    shares: Sequence[WrittenShare],
    scheme: Scheme,
    *,
    domains: tuple[str, ...],
    block_bytes: int,
) -> GroupRecord:
    """The record of a group, without the parity, which is not computed yet."""
    members = tuple(
        GroupMember(
            rank=rank,
            domain=domains[rank],
            files=tuple(
                RecordedFile(name=file.name, size_bytes=file.size_bytes, sum="")
                for file in shares[rank].files
            ),
        )
        for rank in group
    )
    largest = max(member.size_bytes for member in members)
    has_parity = scheme.losses and not isinstance(scheme, Partner)
    chunk = build_layout(len(group), scheme.losses, largest).chunk_bytes if has_parity else 0
    return GroupRecord(
        step=draft.name,
        save_id=draft.save_id,
        domains=domains,
        scheme=scheme.name,
        losses=scheme.losses,
        chunk_bytes=chunk,
        block_bytes=block_bytes,
        members=members,
        kept=(),
    )


def _identify_cache(storage: Storage, rank: int) -> tuple[str, int, int]:
    """Identifies a cache: the running kernel, and the folder on it."""
    require_folders(storage)
    root = parse_uri(storage.uri).root
    os.makedirs(root, exist_ok=True)  # noqa: PTH103 - the storage's own root, which may not be there yet
    facts = os.stat(root)  # noqa: PTH116 - likewise
    return current_process().kernel or f"rank {rank}", facts.st_dev, facts.st_ino
