"""The node-local caches of all ranks as one level: steps are written, protected, committed and rebuilt.

    save     drafts on all nodes -> files and parity -> records -> manifest, metadata -> commit on all nodes
    restore  what each node has -> assessment -> lost shares are rebuilt into the caches that miss them

Each node commits its own share by the protocol of any checkpoint; manifest, metadata and the records of its
groups are on every node. Invariant: a step counts as cached if an assessment of what all nodes have committed
says so. A save that died on some of the nodes is not a step.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.checkpoint.commit.catalog import CheckpointRef, open_catalog
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME, Committed, Draft, Seal
from penstock.checkpoint.commit.transaction import open_draft_store, sweep_dead_saves
from penstock.checkpoint.formats.checkpoint_source import DescribedStorage
from penstock.checkpoint.levels import agreement
from penstock.checkpoint.levels.options import Partner, Scheme, check_schemes, scheme_for
from penstock.checkpoint.levels.redundancy.parity_layout import build_layout, fit_scheme
from penstock.checkpoint.levels.redundancy.protector import (
    GroupPlan,
    KeyOf,
    Protector,
    ReportedShare,
    build_records,
)
from penstock.checkpoint.levels.redundancy.redundancy_record import (
    Assessment,
    GroupRecord,
    NodeShares,
    read_record,
    record_bytes,
)
from penstock.checkpoint.levels.redundancy.ring import BLOCK_BYTES
from penstock.cluster.comm import Comm, decide_on_rank0, run_on_all_ranks
from penstock.errors import ObjectNotFound, StorageError, Unavailable, UsageError
from penstock.storage import Storage
from penstock.storage.capabilities import FolderTree, defer_sync, find_folder_tree, prefer_direct_access
from penstock.storage.files.system_calls import translate_os_errors
from penstock.storage.process_id import current_process
from penstock.storage.protocol import read_object, write_object
from penstock.storage.uri import parse_uri

if TYPE_CHECKING:
    from penstock.checkpoint.engine import PreparedSave, RankSaveStats, StagedSave
    from penstock.progress import Progress


RECORD_PREFIX: Final = "redundancy-"
DOUBT_PREFIX: Final = ".penstock-doubt-"
"""Prefix of a note beside a step, until all nodes are known to have committed it."""
RUN_NOTE: Final = ".penstock-run"
"""The durable level of the run whose steps are in a cache."""


class NodeCache:
    """The cache of one node, which `ranks` of the job use: its committed shares of steps, and its drafts.

    Not collective: the lead rank of the node calls. A share is committed as a whole, with the records of its
    groups and the manifest of the whole step.
    """

    def __init__(self, storage: Storage, ranks: tuple[int, ...]) -> None:
        self.storage = storage
        self.ranks = ranks
        self._drafts, self._catalog = open_draft_store(storage), open_catalog(storage)
        self._tree = require_folders(storage)
        self._run = ""
        self._begun: Draft | None = None

    def names(self) -> list[str]:
        """The steps of which this node has committed a share, in no particular order."""
        return self._catalog.names()

    def find(self, name: str) -> CheckpointRef:
        """The share of a step on this node; `ObjectNotFound` if it has none."""
        return CheckpointRef(self.storage, self._catalog.find(name))

    def sizes(self, share: CheckpointRef) -> dict[str, int]:
        """The size of each file of a share."""
        prefix = f"{share.committed.folder}/"
        objects = self.storage.list(share.committed.folder)
        return {info.key.removeprefix(prefix): info.size_bytes for info in objects}

    def seal(self, name: str) -> tuple[bytes, bytes] | None:
        """Manifest and metadata of the whole step; None if this node does not have both undamaged."""
        try:
            _, seal = self.find(name).read_seal()
        except (StorageError, Unavailable) as error:
            logger.warning("The cache %s cannot describe %s: %s", self.storage.uri, name, error)
            return None
        return seal.manifest, seal.metadata

    def shares(self, name: str) -> NodeShares:
        """What this node can contribute to a step."""
        try:
            share = self.find(name)
            sizes = self.sizes(share)
            records = self._records(share, sizes)
        except StorageError as error:
            logger.info("The cache %s does not have %s: %s", self.storage.uri, name, error)
            return NodeShares(ranks=self.ranks)
        return NodeShares(ranks=self.ranks, sizes=sizes, records=records)

    def claim(self, run: str) -> None:
        """From now on, save steps of this run; `UsageError` if the cache has those of another."""
        try:
            owner = bytes(read_object(self.storage, RUN_NOTE)).decode()
        except ObjectNotFound:
            owner = ""
        if owner not in ("", run) and self.names():
            raise UsageError(
                f"This cache has steps of another run, {owner}, and not of {run}",
                where=self.storage.uri,
                fix="Give each run a cache of its own, or empty this one (`penstock checkpoint drop`); "
                f"if the run was moved, remove {RUN_NOTE} there.",
            )
        self._run = "" if owner == run else run

    def start(self, name: str, save_id: str) -> Draft:
        """Begin a draft of a step, after sweeping what dead saves left."""
        sweep_dead_saves(self._drafts, self.storage)
        if self._run:
            write_object(self.storage, RUN_NOTE, [self._run.encode()])
            self._run = ""
        self._begun = self._drafts.start(name, save_id)
        return self._begun

    def drop_begun(self, save_id: str) -> None:
        """Remove the draft of a save that another node could not begin, if this one has."""
        if self._begun is not None and self._begun.save_id == save_id:
            self.drop(self._begun)

    def drop(self, draft: Draft) -> None:
        """Remove a draft."""
        try:
            self._drafts.drop(draft)
        except StorageError as error:
            logger.warning("Could not remove the unfinished %s: %s", draft.folder, error)

    def publish(
        self,
        draft: Draft,
        manifest: bytes,
        metadata: bytes,
        records: Mapping[int, GroupRecord],
        saved: Collection[int],
    ) -> None:
        """Commit the shares of the ranks in `saved`, with the records of their groups."""
        sizes: dict[str, int] = {}
        for number, record in records.items():
            if set(record.ranks).isdisjoint(saved):
                continue
            # Publishing makes the names of all files of the draft durable.
            storage = defer_sync(self.storage, "names")
            written = write_object(storage, draft.key(_record_name(number)), [record_bytes(record)])
            sizes[_record_name(number)] = written.size_bytes
            for place, rank in enumerate(record.ranks):
                if rank in saved:
                    sizes.update({file.name: file.size_bytes for file in record.stored_files(place)})
        self._drafts.publish(draft, Seal(manifest=manifest, metadata=metadata, sizes=sizes))

    def unconfirmed(self) -> set[str]:
        """The steps that this node has committed without knowing that all nodes did."""
        notes = {entry.name.removeprefix(DOUBT_PREFIX) for entry in self._tree.entries(prefix=DOUBT_PREFIX)}
        return notes & set(self.names())

    def mark_unconfirmed(self, draft: Draft) -> None:
        """Note, before committing, that other nodes may not: after a crash, nothing else would say so."""
        write_object(self.storage, DOUBT_PREFIX + draft.name, [draft.save_id.encode()])

    def confirm(self, name: str) -> None:
        """Remove the note: all nodes have committed the step, or none keeps it."""
        self._tree.remove(DOUBT_PREFIX + name)

    def rollback(self, draft: Draft) -> None:
        """Remove what was committed of a draft, because another node could not commit its own."""
        try:
            self.confirm(draft.name)
            committed = self._catalog.find(draft.name)
            if draft.save_id.encode() in read_object(self.storage, committed.key(MANIFEST_NAME)):
                self._catalog.hide(committed)()
        except StorageError as error:
            logger.debug("Nothing to roll back of %s: %s", draft.name, error)

    def hide(self, name: str) -> Callable[[], None]:
        """Take the name of this node's share of a step away; the call that this gives removes its files."""
        try:
            return self._catalog.hide(self._catalog.find(name))
        except ObjectNotFound:
            logger.debug("%s was not in the cache %s", name, self.storage.uri)
            return lambda: None

    def _records(self, share: CheckpointRef, names: Iterable[str]) -> dict[int, GroupRecord]:
        """The records in a share, by the number of the group."""
        records = {}
        for name in names:
            if name.startswith(RECORD_PREFIX):
                number = int(name.removeprefix(RECORD_PREFIX).removesuffix(".json"))
                content = read_object(self.storage, share.key(name))
                records[number] = read_record(content, f"{self.storage.uri}/{share.key(name)}")
        return records


def require_folders(storage: Storage) -> FolderTree:
    """The folders of a cache; `UsageError` if the storage is not a file system."""
    tree = find_folder_tree(storage)
    if tree is None:
        raise UsageError(
            "A cache must be a local folder of each node",
            where=storage.uri,
            fix="Use a path such as /local/ssd/run.",
        )
    return tree


def _record_name(group: int) -> str:
    return f"{RECORD_PREFIX}{group}.json"


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedSave:
    """A step that was just saved to the caches, with what a flush needs to know of it."""

    name: str
    save_id: str
    files: tuple[Mapping[str, int], ...]
    """By rank: the sizes of its files."""
    stats: tuple[RankSaveStats, ...]
    """By rank."""
    seal: Seal | None
    """Of the whole step, over all nodes; on rank 0."""


class CacheLevel:
    """One rank's view of all caches; `node` is that of its own. All is collective but `drop` and `remove`.

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
        awaiting = "all ranks to name their caches"
        own = run_on_all_ranks(comm, lambda: identify_cache(storage, comm.rank), awaiting=awaiting)
        self._nodes = agreement.locate_caches(comm, own, domain or comm.host, awaiting=awaiting)
        self._lead = self._nodes.leads[comm.rank]
        self._fitted = {scheme: fit_scheme(scheme, self._nodes.domains) for scheme in self._schemes}
        self._protector = Protector(storage, comm)
        self.node = NodeCache(storage, self._nodes.ranks_of[self._lead])

    def claim(self, run: str) -> None:
        """Save steps of this run; `UsageError` if a node's cache has those of another. Writes nothing yet."""
        run_on_all_ranks(
            self._comm,
            lambda: self.node.claim(run) if self.is_lead else None,
            awaiting="all nodes to look whose steps their caches have",
        )

    @property
    def shortfalls(self) -> list[str]:
        """Why schemes are not the ones that were chosen, and what they survive."""
        return [fitted.shortfall for fitted in self._fitted.values() if fitted.shortfall]

    @property
    def is_lead(self) -> bool:
        """Whether this rank acts for its node."""
        return self._lead == self._comm.rank

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each cache, in the order of their lowest ones."""
        return tuple(self._nodes.ranks_of.values())

    def start(self, name: str, only: Collection[int] | None = None) -> Draft:
        """Begin a draft with the same save ID on every node, or on the nodes of some ranks."""
        save_id = self._comm.broadcast(secrets.token_hex(8), awaiting="rank 0 to name the save")
        leads = {self._nodes.leads[rank] for rank in only} if only is not None else self._nodes.ranks_of
        awaiting = f"all nodes to make room for {name}"
        with ExitStack() as undo:
            undo.callback(self.node.drop_begun, save_id)
            is_asked = self.is_lead and self._lead in leads
            begin = partial(self.node.start, name, save_id) if is_asked else lambda: None
            draft = run_on_all_ranks(self._comm, begin, awaiting=awaiting)
            undo.pop_all()
        folders = self._comm.gather(draft.folder if draft else "", awaiting=awaiting)
        return draft or Draft(name=name, folder=folders[self._lead], save_id=save_id)

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
        """Write into a draft on all nodes, protect and commit it; on failure, the draft is removed.

        `number` counts checkpoints, from 1, and decides which scheme protects this one.
        """
        with ExitStack() as undo:
            undo.callback(staged.cancel)
            undo.callback(self.drop, draft)
            fitted = self._fitted[scheme_for(number, self._schemes)]
            group = next(ranks for ranks in fitted.groups if self._comm.rank in ranks)
            plan = self._plan_group(draft, staged, fitted.scheme, group)
            awaiting = f"all ranks to write their files of {draft.name} and protect them"
            protected = run_on_all_ranks(
                self._comm,
                lambda: self._protector.write(
                    staged, prefer_direct_access(self.storage), draft.key, plan, progress
                ),
                awaiting=awaiting,
            )
            share = protected.share
            reports = self._comm.gather(ReportedShare.of(protected, plan), awaiting=awaiting)
            # A node keeps the records of the groups that one of its ranks is in.
            kept = {
                rank: reports[rank]
                for ranks in fitted.groups
                if any(self._nodes.leads[member] == self._comm.rank for member in ranks)
                for rank in ranks
            }
            records = build_records(draft, fitted, kept, self._nodes.domains)
            written = self._comm.gather(
                ({file.name: file.size_bytes for file in share.files}, share.stats), awaiting=awaiting
            )
            # Only rank 0 needs to know where each tensor went, and leads the files that describe it.
            seal = decide_on_rank0(
                self._comm,
                lambda: share,
                lambda shares: prepared.seal(shares, {**facts, "save_id": draft.save_id}),
                awaiting="rank 0 to write the manifest",
            )
            told = (seal.manifest, seal.metadata) if self.is_lead else None
            self._publish(draft, told, records)
            undo.pop_all()
        return CachedSave(
            name=draft.name,
            save_id=draft.save_id,
            files=tuple(files for files, _ in written),
            stats=tuple(stats for _, stats in written),
            seal=seal if self._comm.rank == 0 else None,
        )

    def drop(self, draft: Draft) -> None:
        """Remove an unfinished draft: the lead of each node its own."""
        if self.is_lead and draft.folder:
            self.node.drop(draft)

    def names(self) -> list[str]:
        """Every cached step, in no particular order.

        A step that a crash kept from being committed on all nodes counts if what exists is enough, else it is
        removed.
        """
        confirmed, doubted = agreement.list_names(self._comm, self.node)
        for name in sorted(doubted):
            reason = self.assess(name).reason
            if reason:
                logger.warning("Removing %s, which was never committed on all nodes: %s", name, reason)
                self.remove(name)
            else:
                confirmed.add(name)
            if self.is_lead:
                self.node.confirm(name)
        return sorted(confirmed)

    def assess(self, name: str, *, damaged: Collection[int] = ()) -> Assessment:
        """What the caches can provide of a step; the files of `damaged` ranks count as lost.

        Of a step that is whole where it is needed, it has the records of this node alone.
        """
        awaiting = f"all nodes to list their files of {name}"
        own = run_on_all_ranks(self._comm, lambda: self.node.shares(name), awaiting=awaiting)
        if not damaged:
            whole = agreement.agree_on_whole(self._comm, self._nodes, own, awaiting=awaiting)
            if whole is not None:
                return whole
        return agreement.assess_all(self._comm, own, damaged, awaiting)

    def assess_all(self, name: str) -> Assessment:
        """The same with the records of all groups, always."""
        awaiting = f"all nodes to list their files of {name}"
        own = run_on_all_ranks(self._comm, lambda: self.node.shares(name), awaiting=awaiting)
        return agreement.assess_all(self._comm, own, (), awaiting)

    def view(self, name: str, assessment: Assessment) -> CheckpointRef:
        """A complete step as this rank can read it: the files of its node, the others through other ranks.

        Manifest and metadata come from one node that has them undamaged, as this node may have nothing.
        """
        lacking = [rank for rank, lead in enumerate(self._nodes.leads) if not assessment.shares.get(lead)]
        seal = agreement.fetch_seal(self._comm, self.node, name, assessment, lacking)
        if seal is None:
            share = self.node.find(name)
            return replace(share, readable=tuple(self.node.sizes(share)))
        folder = Committed(name=name, folder=name)
        known = dict(zip((folder.key(MANIFEST_NAME), folder.key(METADATA_NAME)), seal, strict=True))
        return CheckpointRef(DescribedStorage(self.storage, known), folder, readable=())

    def repair(self, name: str, assessment: Assessment) -> None:
        """Compute the lost shares and commit them to the caches that miss them, or to others with room."""
        placed = agreement.place_lost_shares(name, assessment, self._comm, self.node, self.nodes)
        holders = {**assessment.holders, **placed}

        def rebuild(from_key: KeyOf, to_key: KeyOf) -> None:
            self._protector.rebuild_into(
                assessment.records,
                assessment.lost,
                holders=holders,
                from_key=from_key,
                to_key=to_key,
            )

        self._refill(name, assessment, placed, rebuild)

    def relocate_shares(self, name: str, assessment: Assessment) -> CheckpointRef:
        """A complete step as this rank can read it, after moving each share to the node of its home rank."""
        away = {
            rank: home
            for rank, home in assessment.homes.items()
            if rank not in assessment.shares.get(self._nodes.leads[home], ())
        }
        if away:
            self._refill(
                name,
                assessment,
                away,
                lambda from_key, to_key: self._protector.transfer_shares(
                    assessment.records, away, holders=assessment.holders, from_key=from_key, to_key=to_key
                ),
            )
            assessment = self.assess(name)
        return self.view(name, assessment)

    def remove(self, name: str) -> None:
        """Remove a step from all caches: the lead of each node removes its share."""
        if self.is_lead:
            self.node.hide(name)()

    def close(self) -> None:
        """Close the connections between ranks."""
        self._protector.close()

    def _refill(
        self,
        name: str,
        assessment: Assessment,
        gains: Mapping[int, int],
        fill: Callable[[KeyOf, KeyOf], None],
    ) -> None:
        """Give the nodes of some ranks shares that they do not have; `gains` is by the rank that saved.

        `fill` writes them, from what is on this node or comes from others. A node keeps what it has: a
        committed checkpoint is never written to, so its old shares are copied into the new draft.
        """
        own = assessment.shares.get(self._lead, frozenset())
        leads = self._nodes.leads
        gained = {rank for rank, home in gains.items() if leads[home] == self._lead}
        seal = agreement.fetch_seal(
            self._comm, self.node, name, assessment, {leads[home] for home in gains.values()}
        )
        draft = self.start(name, only=gains.values())
        with ExitStack() as undo:
            undo.callback(self.drop, draft)
            from_key = self.node.find(name).key if own else draft.key
            run_on_all_ranks(
                self._comm,
                lambda: fill(from_key, draft.key),
                awaiting=f"all missing files of {name} to be there",
            )

            def commit() -> None:
                if seal is not None:
                    self._protector.carry_over(assessment.records, own, from_key=from_key, to_key=draft.key)
                    self.node.publish(draft, *seal, assessment.records, own | gained)

            run_on_all_ranks(self._comm, commit, awaiting=f"all nodes to commit {name}")
            undo.pop_all()

    def _plan_group(
        self, draft: Draft, staged: StagedSave, scheme: Scheme, group: tuple[int, ...]
    ) -> GroupPlan | None:
        """How this rank's group protects what it is about to write; None if nothing is kept for others."""
        if not scheme.losses:
            return None
        awaiting = f"all ranks to count what they write of {draft.name}"
        own = run_on_all_ranks(
            self._comm, lambda: staged.count_bytes(self.storage, draft.key), awaiting=awaiting
        )
        all_sizes = self._comm.gather(own, awaiting=awaiting)
        sizes = tuple(all_sizes[rank] for rank in group)
        return GroupPlan(
            ranks=group,
            sizes=sizes,
            layout=build_layout(len(group), scheme.losses, max(sizes)),
            is_copy=isinstance(scheme, Partner),
            block_bytes=self._block_bytes,
        )

    def _publish(
        self, draft: Draft, seal: tuple[bytes, bytes] | None, records: Mapping[int, GroupRecord]
    ) -> None:
        """Commit on all nodes; if one cannot, roll back on all.

        Between the first and the last node's commit, a crash leaves the step on some nodes only. A note
        beside it says that it is unconfirmed, until all nodes are known to have it.
        """

        def publish() -> None:
            if seal is not None:
                self.node.mark_unconfirmed(draft)
                self.node.publish(draft, *seal, records, self.node.ranks)

        with ExitStack() as undo:
            if self.is_lead:
                # Leads alone: the other ranks of a node have written files, but never commit.
                undo.callback(self.node.rollback, draft)
            run_on_all_ranks(self._comm, publish, awaiting=f"all nodes to commit {draft.name}")
            undo.pop_all()
        if self.is_lead:
            self.node.confirm(draft.name)


def identify_cache(storage: Storage, rank: int) -> tuple[str, int, int]:
    """Identifies a cache: the running kernel, and the folder on it."""
    require_folders(storage)
    root = parse_uri(storage.uri).root
    with translate_os_errors("Making the cache's folder", storage.uri):
        os.makedirs(root, exist_ok=True)  # noqa: PTH103 - the storage's own root, which may not be there yet
        facts = os.stat(root)  # noqa: PTH116 - likewise
    return current_process().kernel or f"rank {rank}", facts.st_dev, facts.st_ino
