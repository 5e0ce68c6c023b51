"""The node-local caches of all ranks as one level: steps are written, protected, committed and rebuilt here.

    save     drafts on all nodes -> files and parity -> records -> manifest, metadata -> commit on all nodes
    restore  what each node has -> assessment -> lost shares are rebuilt in the caches that lack them

Each node commits its own share by the same protocol as any checkpoint. Every node has the manifest and
metadata of the whole step, and the records of its own groups. Invariant: a step counts as cached if an
assessment of everything that all nodes have committed says so. A save that died on some of the nodes is not a
step.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.checkpoint.commit.checkpoints import (
    CheckpointRef,
    SaveTransaction,
    local_path,
    open_catalog,
    open_draft_store,
    parse_step,
    sweep_dead_saves,
)
from penstock.checkpoint.commit.protocol import (
    MANIFEST_NAME,
    METADATA_NAME,
    Committed,
    Draft,
    Seal,
    name_draft,
)
from penstock.checkpoint.engine import PreparedSave, RankSaveStats, StagedSave
from penstock.checkpoint.formats.description import checksum_object
from penstock.checkpoint.levels.flush import FlushFolder, FlushNote
from penstock.checkpoint.levels.options import Partner, Scheme, check_schemes, scheme_for
from penstock.checkpoint.levels.protection import FirstFailure, Protector
from penstock.checkpoint.levels.redundancy import (
    BLOCK_BYTES,
    Assessment,
    GroupMember,
    GroupRecord,
    NodeShares,
    RecordedFile,
    assess,
    build_layout,
    fit_scheme,
    list_members,
)
from penstock.checkpoint.tools.verify import find_damage
from penstock.cluster.comm import Comm, all_gather_results, decide_on_rank0, run_on_all_ranks, run_on_rank0
from penstock.errors import (
    DataDamaged,
    ObjectNotFound,
    StorageError,
    Unavailable,
    UsageError,
    proves_damage,
)
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.capabilities import defer_sync, find_folder_tree, prefer_direct_access
from penstock.storage.files.folders import FolderTree
from penstock.storage.files.local_files import sync_file
from penstock.storage.files.system_calls import translate_os_errors
from penstock.storage.in_memory import MemorySource
from penstock.storage.process_id import current_process
from penstock.storage.protocol import Source, WrappedStorage, read_if_any, write_object
from penstock.storage.uri import parse_uri
from penstock.storage.volumes import find_room

RECORD_PREFIX: Final = "redundancy-"
DOUBT_PREFIX: Final = ".penstock-doubt-"
"""The prefix of the note that stays next to a step until all nodes are known to have committed it."""
RUN_NOTE: Final = ".penstock-run"
"""The file that names the durable level of the run whose steps are in a cache."""

logger = logging.getLogger(__name__)


class NodeCache:
    """The cache of one node: its committed shares of steps, and its drafts. `ranks` of the job use it.

    Not collective: only the lead rank of the node calls it. A share is committed as a whole, with the records
    of its groups and the manifest of the whole step.
    """

    def __init__(self, storage: Storage, ranks: tuple[int, ...]) -> None:
        self.storage = storage
        self.ranks = ranks
        self.drafts, self._catalog = open_draft_store(storage), open_catalog(storage)
        self._tree = require_folders(storage)
        self._run = ""
        self.flushes = FlushFolder(local_path(storage, ""))

        self.names = self._catalog.names
        """Lists the names of the steps of which this node has committed a share, in no particular order."""

    def steps(self) -> list[int]:
        """Return the numbers of the steps of which this node has committed a share, in ascending order."""
        return sorted(step for name in self.names() if (step := parse_step(name)) is not None)

    def find(self, name: str) -> CheckpointRef:
        """Return the node's share of a step; raise `ObjectNotFound` if it has none."""
        return CheckpointRef(self.storage, self._catalog.find(name), step=parse_step(name))

    def seal(self, name: str) -> Seal | None:
        """Return the manifest and metadata of the whole step; None unless this node has both undamaged."""
        try:
            return self.find(name).read_seal()[1]
        except (StorageError, Unavailable) as error:
            if isinstance(error, StorageError) and not proves_damage(error):
                raise
            logger.warning("The cache %s cannot describe %s: %s", self.storage.uri, name, error)
            return None

    def shares(self, name: str) -> NodeShares:
        """Return the files and records of a step that this node has, in the form that `assess` takes."""
        unread = ""
        try:
            share = self.find(name)
            sizes, records = share.sizes(), {}
            for file_name in sizes:
                if file_name.startswith(RECORD_PREFIX):
                    number = int(file_name.removeprefix(RECORD_PREFIX).removesuffix(".json"))
                    records[number] = GroupRecord.read(
                        self.storage,
                        share.key(file_name),
                        what="The redundancy record",
                        fix="Restore from another level.",
                    )
                    if records[number].step != name:
                        raise DataDamaged(f"It holds {records[number].step}", where=share.uri)
        except StorageError as error:
            level = logging.INFO if isinstance(error, ObjectNotFound) else logging.WARNING
            logger.log(level, "The cache %s does not have %s: %s", self.storage.uri, name, error)
            sizes, records = {}, {}
            unread = "" if proves_damage(error) else str(error)
        return NodeShares(
            ranks=self.ranks,
            sizes=sizes,
            records={number: record.model_copy(update={"domains": ()}) for number, record in records.items()},
            domains=next((record.domains for record in records.values()), ()),
            room_bytes=find_room(local_path(self.storage, "")),
            unread=unread,
        )

    def claim(self, run: str) -> None:
        """Reserve the cache for this run; raise `UsageError` if it has another run's steps."""
        owner = (read_if_any(self.storage, RUN_NOTE) or b"").decode()
        if owner not in ("", run) and self.names():
            raise UsageError(
                f"This cache has steps of another run, {owner}, and not of {run}",
                where=self.storage.uri,
                fix="Give each run its own cache, or remove these steps (`penstock checkpoint rm`); "
                f"if the run was moved, remove {RUN_NOTE} there.",
            )
        self._run = "" if owner == run else run

    def start(self, draft: Draft) -> None:
        """Begin a draft of a step, after removing what dead saves left behind."""
        sweep_dead_saves(self.drafts, self.storage)
        if self._run:
            write_object(self.storage, RUN_NOTE, [self._run.encode()])
            self._run = ""
        self.drafts.start(draft.name, draft.save_id)

    def publish(
        self,
        draft: Draft,
        seal: Seal,
        records: Mapping[int, GroupRecord],
        saved: Collection[int],
    ) -> None:
        """Commit the shares of the ranks in `saved`, with the records of their groups."""
        sizes: dict[str, int] = {}
        for number, record in records.items():
            here = [place for place, rank in enumerate(record.ranks) if rank in saved]
            if not here:
                continue
            name, text = f"{RECORD_PREFIX}{number}.json", record.model_dump_json().encode()
            # `publish` below makes the names of all files of the draft durable.
            write_object(defer_sync(self.storage, "names"), draft.key(name), [text])
            sizes[name] = len(text)
            for place in here:
                sizes.update({file.name: file.size_bytes for file in record.stored_files(place)})
        self.drafts.publish(draft, replace(seal, sizes=sizes))

    def unconfirmed(self) -> set[str]:
        """Return the steps that this node has committed without knowing whether all other nodes did."""
        notes = {entry.name.removeprefix(DOUBT_PREFIX) for entry in self._tree.entries(prefix=DOUBT_PREFIX)}
        return notes & set(self.names())

    def doubt(self, draft: Draft) -> None:
        """Note, before committing, that other nodes may fail to commit.

        After a crash, this note is the only sign of that.
        """
        write_object(self.storage, DOUBT_PREFIX + draft.name, [draft.save_id.encode()])

    def confirm(self, name: str) -> None:
        """Remove the note of doubt: either all nodes have committed the step, or none keeps it."""
        self._tree.remove(DOUBT_PREFIX + name)

    def rollback(self, draft: Draft) -> None:
        """Undo the commit of a draft, because another node could not commit its share."""
        try:
            self.confirm(draft.name)
            committed = self._catalog.find(draft.name)
            if CheckpointRef(self.storage, committed).read_manifest().save_id == draft.save_id:
                self._catalog.hide(committed)()
        except StorageError as error:
            logger.debug("Nothing to roll back of %s: %s", draft.name, error)

    def hide(self, name: str) -> Callable[[], None]:
        """Hide this node's share of a step from readers. The returned call removes its files."""
        with suppress(ObjectNotFound):
            return self._catalog.hide(self._catalog.find(name))
        return lambda: None


def require_folders(storage: Storage) -> FolderTree:
    """Return a cache as a tree of folders; raise `UsageError` if the storage is not a file system."""
    tree = find_folder_tree(storage)
    if tree is None:
        raise UsageError(
            "A cache must be a local folder on each node",
            where=storage.uri,
            fix="Use a path such as /local/ssd/run.",
        )
    return tree


class CacheLevel:
    """One rank's view of all caches; `node` is the cache of its own node.

    `domain` names the failure domain of this rank; ranks of the same domain never protect each other. All
    calls but `spread_note` are collective.
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
        self.comm = comm
        self._schemes = tuple(schemes)
        self._block_bytes = block_bytes

        def identify() -> tuple[str, int, int]:
            """Identify this rank's cache by the running kernel and the folder's file system and inode."""
            require_folders(storage)
            root = Path(parse_uri(storage.uri).root)
            with translate_os_errors("Making the cache's folder", storage.uri):
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
                facts = root.stat()
                FlushFolder(root)  # here, so that all ranks learn that a cache is refused
            return current_process().kernel or f"rank {comm.rank}", facts.st_dev, facts.st_ino

        awaiting = "all ranks to name their caches"
        own = run_on_all_ranks(comm, identify, awaiting=awaiting)
        places = comm.gather((own, domain or comm.host), awaiting=awaiting)
        self._domains = tuple(domain for _, domain in places)
        first: dict[tuple[str, int, int], int] = {}
        self.leads = [first.setdefault(identity, rank) for rank, (identity, _) in enumerate(places)]
        """For each rank, the lowest rank that uses the same cache and therefore acts for the node."""
        self.is_lead = self.leads[comm.rank] == comm.rank
        self._fitted = {scheme: fit_scheme(scheme, self._domains) for scheme in self._schemes}
        self.shortfalls = [shortfall for *_, shortfall in self._fitted.values() if shortfall]
        """Explanations of why schemes other than the chosen ones are used, and which losses those survive."""
        self._protector = Protector(storage, comm)
        self.close = self._protector.close
        here = [rank for rank, lead in enumerate(self.leads) if lead == self.leads[comm.rank]]
        self.node = NodeCache(storage, tuple(here))

    def start(self, name: str, only: Collection[int] | None = None) -> SaveTransaction:
        """Begin a draft with the same save ID on every node, or on the nodes of the ranks in `only`."""
        save_id = run_on_rank0(self.comm, lambda: secrets.token_hex(8), awaiting="rank 0 to name the save")
        draft = name_draft(name, save_id)
        transaction = SaveTransaction(self.storage, self.comm, self.node.drafts, draft, is_owner=self.is_lead)
        leads = set(self.leads if only is None else (self.leads[rank] for rank in only))
        with ExitStack() as undo:
            undo.callback(transaction.abandon)
            run_on_all_ranks(
                self.comm,
                lambda: self.node.start(draft) if self.is_lead and self.comm.rank in leads else None,
                awaiting=f"all nodes to make room for {name}",
            )
            undo.pop_all()
        return transaction

    def complete(
        self,
        transaction: SaveTransaction,
        prepared: PreparedSave,
        staged: StagedSave,
        *,
        number: int,
        facts: dict[str, Any],
        progress: Progress | None = None,
    ) -> tuple[RankSaveStats, ...]:
        """Write into a draft on all nodes, protect it and commit it; on failure, remove the draft.

        `number` counts checkpoints, from 1, and decides which scheme protects this one. Returns the
        statistics of each rank.
        """
        comm, draft, name = self.comm, transaction.draft, transaction.draft.name
        scheme, groups, _ = self._fitted[scheme_for(number, self._schemes)]
        storage = prefer_direct_access(self.storage)
        parities = 0 if isinstance(scheme, Partner) else scheme.losses
        with ExitStack() as undo, transaction.ending():
            undo.callback(staged.cancel)
            sizes = all_gather_results(
                comm,
                lambda: staged.count_bytes(self.storage, draft.key),
                awaiting=f"all ranks to count what they write of {name}",
            )
            layouts = [
                build_layout(
                    len(ranks),
                    parities,
                    max(sizes[rank] for rank in ranks),
                    block_bytes=self._block_bytes,
                )
                for ranks in groups
            ]
            ranks, layout = next(
                (ranks, layout) for ranks, layout in zip(groups, layouts, strict=True) if comm.rank in ranks
            )
            write = partial(self._protector.write, staged, storage, draft.key, progress=progress)
            share, order, kept = run_on_all_ranks(
                comm,
                lambda: write(ranks=ranks, sizes=[sizes[rank] for rank in ranks], layout=layout),
                awaiting=f"all ranks to write their files of {name} and protect them",
            )
            files = tuple(
                RecordedFile(name=file.name, size_bytes=file.size_bytes, sum="") for file in share.files
            )
            own = GroupMember(rank=comm.rank, domain=self._domains[comm.rank], files=files, order=order)
            reports = comm.gather((own, kept, share.stats), awaiting="all ranks to report what they wrote")
            # Only rank 0 needs to know where each tensor is; the leads receive the files that describe it.
            seal = decide_on_rank0(
                comm,
                lambda: share,
                lambda shares: prepared.seal(shares, {**facts, "save_id": draft.save_id}),
                awaiting="rank 0 to write the manifest",
            )
            records = {
                number: GroupRecord(
                    step=name,
                    save_id=draft.save_id,
                    domains=self._domains,
                    scheme=scheme.name,
                    losses=scheme.losses,
                    chunk_bytes=layouts[number].chunk_bytes,
                    block_bytes=layouts[number].block_bytes,
                    members=tuple(reports[rank][0] for rank in ranks),
                    kept=tuple(file for rank in ranks for file in reports[rank][1]),
                )
                for number, ranks in enumerate(groups)
                if not set(ranks).isdisjoint(self.node.ranks)
            }
            self._publish(draft, seal, records)
            undo.pop_all()
        return tuple(stats for _, _, stats in reports)

    def names(self) -> list[str]:
        """Return the names of all cached steps, in no particular order.

        If a crash prevented a step from being committed on all nodes, the step counts if it can be restored
        from what exists, and is removed otherwise.
        """
        answers = all_gather_results(
            self.comm,
            lambda: (self.node.names(), self.node.unconfirmed()) if self.is_lead else ([], set()),
            awaiting="all nodes to list their caches",
        )
        confirmed = {name for names, doubted in answers for name in names if name not in doubted}
        for name in sorted({name for names, _ in answers for name in names} - confirmed):
            found = self.assess(name)
            if found.unread:
                raise StorageError(
                    f"Cannot determine whether {name} was committed on all nodes: {found.unread}",
                    fix="Repair the storage of this cache, or remove the cache.",
                )
            if reason := found.reason:
                logger.warning("Removing %s, which was never committed on all nodes: %s", name, reason)
                if self.is_lead:
                    self.node.hide(name)()
            else:
                confirmed.add(name)
            if self.is_lead:
                self.node.confirm(name)
        return sorted(confirmed)

    def assess(self, name: str, *, damaged: Collection[int] = ()) -> Assessment:
        """Assess a step from the contents of all caches; the files of `damaged` ranks count as lost."""
        return decide_on_rank0(
            self.comm,
            lambda: self.node.shares(name) if self.is_lead else None,
            lambda nodes: assess([node for node in nodes if node is not None], damaged=damaged),
            awaiting=f"all nodes to list their files of {name}",
        )

    def find_damaged(self, name: str, assessment: Assessment) -> dict[int, str]:
        """Return the ranks that saved the step and whose files differ from their checksums or cannot be read.

        The value for each rank is the reason why its files may be intact after all, or "" if they certainly
        are damaged. If the manifest of a node is damaged, all of its shares count as damaged.
        """

        def check_own() -> dict[int, str]:
            held = [rank for rank, holder in assessment.holders.items() if holder == self.comm.rank]
            own_ranks = [rank for rank in held if rank not in assessment.lost]
            if not own_ranks:
                return {}
            share = self.node.find(name)
            try:
                manifest, _ = share.read_seal()
            except StorageError as error:
                logger.warning("%s: %s", share.uri, error)
                return dict.fromkeys(own_ranks, "" if proves_damage(error) else str(error))
            damaged = {}
            for rank in own_ranks:
                wanted = {file.name: file.sum for file in assessment.files_of(rank)}
                files = [file for file in manifest.files if file.name in wanted]
                damage = find_damage(share.storage, share.committed.folder, manifest, files)
                texts = [*map(str, damage)]
                texts += [
                    f"{name}: its checksum differs"
                    for name in wanted.keys() - {file.name for file in files}
                    if checksum_object(share.storage, share.key(name)).hex() != wanted[name]
                ]
                for text in texts:
                    logger.warning("%s: %s", share.uri, text)
                if texts:
                    is_unread = len(damage) == len(texts) and all(each.is_unread for each in damage)
                    damaged[rank] = texts[0] if is_unread else ""
            return damaged

        answers = all_gather_results(self.comm, check_own, awaiting=f"all ranks to check the files of {name}")
        return {rank: unread for damaged in answers for rank, unread in sorted(damaged.items())}

    def view(self, name: str, assessment: Assessment) -> CheckpointRef:
        """Return a complete step for this rank to read: local files directly, others through their ranks.

        If this node has no share, the manifest and metadata come from a node that has them undamaged.
        """
        lacking = [rank for rank, lead in enumerate(self.leads) if not assessment.shares.get(lead)]
        seal = self._fetch_seal(name, assessment) if lacking else None
        if seal is None or self.comm.rank not in lacking:
            share = self.node.find(name)
            return replace(share, readable=tuple(share.sizes()))
        folder = Committed(name=name, folder=name)
        known = {folder.key(MANIFEST_NAME): seal.manifest, folder.key(METADATA_NAME): seal.metadata}
        described = _DescribedStorage(self.storage, known)
        return CheckpointRef(described, folder, readable=(), step=parse_step(name))

    def repair(self, name: str, assessment: Assessment) -> None:
        """Compute lost shares and commit them to the caches that lack them, or to caches with more room."""
        for rank, holder in assessment.moved.items():
            if self.comm.rank == 0:
                logger.warning(
                    "%s: the cache of rank %d is full, so the files of rank %d are rebuilt in the cache of "
                    "rank %d; remove old steps (`penstock checkpoint rm`), or keep fewer (keep_cached=)",
                    *(name, assessment.homes[rank], rank, holder),
                )
        self._refill(name, assessment, {rank: assessment.holders[rank] for rank in assessment.lost})

    def relocate_shares(self, name: str, assessment: Assessment) -> CheckpointRef:
        """Move each share to its home rank's node, and return the step as `view` does."""
        away = {
            rank: home
            for rank, home in assessment.homes.items()
            if rank not in assessment.shares.get(self.leads[home], ())
        }
        if away:
            self._refill(name, assessment, away)
            assessment = self.assess(name)
        return self.view(name, assessment)

    def spread_note(self, step: int, note: FlushNote) -> None:
        """Request this node's flush of the step: store `note` if the node caches a share and has no note yet.

        Only the node's lead rank does so. Not collective.
        """
        if self.is_lead and step in self.node.steps() and step not in self.node.flushes.notes():
            self.node.flushes.put(step, note)

    def _refill(self, name: str, assessment: Assessment, gains: Mapping[int, int]) -> None:
        """Give nodes the shares in `gains`: for each rank that saved, the rank whose node receives its share.

        Shares are written from what this node has or other nodes send. A node keeps what it has: because a
        committed checkpoint is never written to, its existing files are linked into the new draft.
        """
        own = assessment.shares.get(self.leads[self.comm.rank], frozenset())
        gaining = {self.leads[home] for home in gains.values()}
        gained = {rank for rank, home in gains.items() if self.leads[home] == self.leads[self.comm.rank]}
        seal = self._fetch_seal(name, assessment)
        transaction = self.start(name, only=gains.values())
        draft = transaction.draft
        with transaction.ending():

            def fill() -> None:
                from_key = self.node.find(name).key if own else draft.key
                failure = FirstFailure()
                for _, record in sorted(assessment.records.items()):
                    self._protector.restore(
                        record,
                        assessment.lost,
                        holders=assessment.holders,
                        targets=gains,
                        from_key=from_key,
                        to_key=draft.key,
                        failure=failure,
                    )
                failure.raise_noted()

            run_on_all_ranks(self.comm, fill, awaiting=f"all missing files of {name} to be there")

            def commit() -> None:
                if not self.is_lead or self.comm.rank not in gaining:
                    return
                for record, place in list_members(assessment.records, own - gained):
                    old, new = self.node.find(name), local_path(self.storage, draft.folder)
                    for file in record.stored_files(place):
                        source, target = local_path(self.storage, old.key(file.name)), new / file.name
                        try:
                            target.hardlink_to(source)
                        except OSError as error:
                            logger.debug("%s is copied, as it cannot be linked: %s", source, error)
                            with translate_os_errors("Copying", str(target)):
                                shutil.copyfile(source, target)
                                sync_file(target)
                records = {
                    number: record.model_copy(update={"domains": assessment.domains})
                    for number, record in assessment.records.items()
                }
                self.node.publish(draft, seal, records, own | gained)

            run_on_all_ranks(self.comm, commit, awaiting=f"all nodes to commit {name}")

    def _fetch_seal(self, name: str, assessment: Assessment) -> Seal:
        """Return the manifest and metadata of a step, from the first node that has them undamaged.

        If no node has them, raises `DataDamaged`, or `StorageError` if those of a node could not be read. A
        node whose manifest is lost still contributes its share to a rebuild, so even the first node may lack
        the manifest.
        """
        awaiting = f"all nodes to look for the manifest of {name}"

        def read() -> tuple[Seal | None, str]:
            try:
                return (self.node.seal(name) if assessment.shares.get(self.comm.rank) else None), ""
            except StorageError as error:
                return None, str(error)

        own, unread = run_on_all_ranks(self.comm, read, awaiting=awaiting)
        answers = self.comm.gather((own is not None, unread), awaiting=awaiting)
        has_seal = [has for has, _ in answers]
        if not any(has_seal):
            unread = next((text for _, text in answers if text), "")
            what = f"No cache has the manifest and .metadata of {name} undamaged"
            raise StorageError(f"{what}: {unread}") if unread else DataDamaged(what)
        # Only one rank sends it, because it may be long.
        is_first = self.comm.rank == has_seal.index(True)
        seals = self.comm.gather(own if is_first else None, awaiting=awaiting)
        return next(seal for seal in seals if seal is not None)

    def _publish(self, draft: Draft, seal: Seal, records: Mapping[int, GroupRecord]) -> None:
        """Commit on all nodes; if one of them cannot, roll back on all.

        A crash between the first and the last node's commit leaves the step on some nodes only. Until all
        nodes are known to have it, a note next to the step keeps it in doubt.
        """

        def publish() -> None:
            if self.is_lead:
                self.node.doubt(draft)
                self.node.publish(draft, seal, records, self.node.ranks)

        with ExitStack() as undo:
            if self.is_lead:
                # Only leads commit and roll back; the other ranks of a node have merely written files.
                undo.callback(self.node.rollback, draft)
            run_on_all_ranks(self.comm, publish, awaiting=f"all nodes to commit {draft.name}")
            undo.pop_all()
        if self.is_lead:
            self.node.confirm(draft.name)


class _DescribedStorage(WrappedStorage):
    """A `Storage` that serves some small objects from memory."""

    def __init__(self, inside: Storage, known: Mapping[str, bytes]) -> None:
        super().__init__(inside)
        self._known = known

    def open(self, key: str) -> Source:
        """Open known objects from memory, all others from the storage."""
        if key not in self._known:
            return self.inside.open(key)
        return MemorySource(np.frombuffer(self._known[key], dtype=np.uint8), self.uri, self.counters)

    def past_cache(self, reads: str | None = None) -> Storage:
        """Return a `Storage` that has the same objects in memory and prefers direct access to others."""
        return _DescribedStorage(prefer_direct_access(self.inside, reads=reads), self._known)
