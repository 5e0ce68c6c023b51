"""One save from an empty draft to a committed checkpoint: begun, written and committed by all ranks.

    begin_save -> every rank writes its files and reports them to rank 0 -> rank 0 commits

Rank 0 alone changes what is visible, once all ranks have written; the others learn the outcome in the same
call. Invariant: `commit` returns on every rank with the checkpoint durable, or raises on every
rank with older checkpoints unharmed.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from penstock.checkpoint.commit.protocol import (
    HIDDEN_PREFIX,
    LEASE_S,
    Committed,
    Draft,
    DraftStore,
    FolderDraftStore,
    Seal,
    WriterLease,
)
from penstock.checkpoint.commit.record_commit import RecordDraftStore
from penstock.cluster.comm import Comm, decide_on_rank0, run_on_all_ranks, run_on_rank0
from penstock.errors import PenstockError, StorageError
from penstock.storage import Storage
from penstock.storage.capabilities import (
    defer_sync,
    find_folder_tree,
    name_mount,
    no_thread,
    prefer_direct_access,
    require_conditional_writes,
    sync_names,
)

if TYPE_CHECKING:
    from penstock.checkpoint.engine import PreparedSave, RankSaveStats, StagedSave, Urgency, WrittenShare
    from penstock.progress import Progress


logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def begin_save(
    storage: Storage,
    name: str,
    comm: Comm,
    *,
    drafts: DraftStore | None = None,
    lease: WriterLease | None = None,
) -> SaveTransaction:
    """Begin a save of a checkpoint that will be called `name`, a folder below the root. Collective.

    Sweeps what dead saves left there first. All ranks must reach the same storage: `UsageError` where its URI
    differs. With the `lease` of a run, `RunInUse` if another job has that.
    """
    draft_store = drafts or open_draft_store(storage)
    uri = f"{storage.uri.rstrip('/')}/{name}"
    renewer: _LeaseRenewer | None = None

    with ExitStack() as undo:

        def start() -> Draft:
            nonlocal renewer
            try:
                if lease is not None:
                    lease.hold()
                sweep_dead_saves(draft_store, storage)
                draft = draft_store.start(name, secrets.token_hex(8))
            except StorageError as error:
                # A folder that cannot be written is the user's; hidden names in it are ours.
                if HIDDEN_PREFIX in error.where:
                    error.where = error.uri = uri
                raise
            undo.callback(_drop, draft_store, draft)
            renewer = _LeaseRenewer(draft_store, draft)
            undo.callback(renewer.stop)
            return draft

        draft, mount = run_on_rank0(
            comm,
            lambda: (start(), name_mount(storage)),
            # Without the name: where it differs, the error names both folders.
            awaiting="rank 0 to make room for the checkpoint",
            same=uri,
        )
        undo.pop_all()
    return SaveTransaction(storage, comm, draft_store, draft, mount=mount, lease=renewer)


def _drop(drafts: DraftStore, draft: Draft) -> None:
    """Remove a draft of a save that has failed, which says why: this may fail too, and is only logged."""
    try:
        drafts.drop(draft)
    except StorageError as error:
        logger.warning("Could not remove the unfinished checkpoint %s: %s", draft.folder, error)


def sweep_dead_saves(drafts: DraftStore, storage: Storage) -> None:
    """Remove what dead saves left in this storage, and log it."""
    for name in drafts.sweep():
        logger.info("Removed %s, the remains of a dead save, below %s", name, storage.uri)


def open_draft_store(storage: Storage) -> DraftStore:
    """The commit protocol for this storage: folders that are renamed, or records."""
    if (tree := find_folder_tree(storage)) is not None:
        return FolderDraftStore(storage, tree)
    return RecordDraftStore(storage, require_conditional_writes(storage))


class SaveTransaction:
    """One rank's view of a save in progress. `abandon` it on every rank if anything fails before `commit`."""

    def __init__(
        self,
        storage: Storage,
        comm: Comm,
        drafts: DraftStore,
        draft: Draft,
        *,
        mount: str,
        lease: _LeaseRenewer | None,
    ) -> None:
        """`mount` is by which rank 0 reaches the storage; rank 0 has the `lease`."""
        self.storage = storage
        self.draft = draft
        self._mount = mount
        self._comm = comm
        self._drafts = drafts
        self._is_over = False
        self._lease = lease

    def key(self, file_name: str) -> str:
        """The key that this checkpoint's file of that name is written to, on whichever rank."""
        return self.draft.key(file_name)

    @cached_property
    def data_storage(self) -> Storage:
        """The storage for data files: bypasses the page cache where possible, and writes in place.

        In place, because a draft is invisible anyway: a second name and rename for each file gain nothing.
        The commit makes their names durable, and compares their sizes.
        """
        return defer_sync(prefer_direct_access(self.storage), "names")

    def sync_own_names(self) -> None:
        """Make the names of what this rank has written durable, unless the commit will on rank 0."""
        # Of what other nodes wrote to a shared file system it may know nothing.
        if self._comm.rank and not (self._mount and name_mount(self.storage) == self._mount):
            sync_names(self.storage, self.draft.folder)

    def commit(self, make_seal: Callable[[], Seal]) -> Committed:
        """Make what all ranks have written one durable checkpoint; rank 0 makes the seal. Collective.

        Every rank's files must be finished. If this raises, the draft is gone, and an older checkpoint of
        this name is as it was.
        """
        with self.ending():
            return run_on_rank0(
                self._comm, lambda: self.publish(make_seal()), awaiting=f"rank 0 to commit {self.draft.name}"
            )

    def publish(self, seal: Seal) -> Committed:
        """On rank 0, within `ending`: make the checkpoint visible and durable."""
        return self._drafts.publish(self.draft, seal)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """End the transaction: `abandon` it on an error."""
        with ExitStack() as undo:
            undo.callback(self.abandon)
            yield
            self._end()
            undo.pop_all()

    def abandon(self) -> None:
        """Remove what this save has written. Safe twice, and after `commit`; never raises `StorageError`.

        Not collective: call it when no rank writes any more. What a rank still writes is swept later.
        """
        if self._is_over:
            return
        self._end()
        if self._comm.rank != 0:
            return
        _drop(self._drafts, self.draft)

    def _end(self) -> None:
        self._is_over = True
        if self._lease is not None:
            self._lease.stop()


class _LeaseRenewer:
    """Renews a draft's lease on its own thread, until `stop` or the end of this process.

    Four times in the life of a lease, so that a renewal may fail or be late before others sweep the draft.
    """

    def __init__(self, drafts: DraftStore, draft: Draft, *, every_s: float = LEASE_S / 4) -> None:
        self._drafts = drafts
        self._draft = draft
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease of {draft.name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise no_thread(error) from error

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self._drafts.renew(self._draft)
            except StorageError as error:
                logger.warning("Could not renew the lease of %s: %s", self._draft.folder, error)


def write_and_commit(
    prepared: PreparedSave,
    staged: StagedSave,
    storage: Storage,
    name: str,
    comm: Comm,
    *,
    timeout_s: float,
    progress: Progress | None = None,
) -> tuple[Committed, tuple[RankSaveStats, ...]]:
    """Write what is staged and commit it; the statistics of each rank, in rank order. Collective."""
    with ExitStack() as undo:
        undo.callback(staged.cancel)
        transaction = begin_save(storage, name, comm)
        undo.pop_all()
    return write_into(transaction, prepared, staged, comm, facts={}, timeout_s=timeout_s, progress=progress)


def write_into(
    transaction: SaveTransaction,
    prepared: PreparedSave,
    staged: StagedSave,
    comm: Comm,
    *,
    facts: Mapping[str, object],
    timeout_s: float,
    progress: Progress | None = None,
) -> tuple[Committed, tuple[RankSaveStats, ...]]:
    """`write_and_commit` in a transaction that has begun; abandons it on failure. Collective.

    `facts` go into the manifest.
    """
    all_facts = {**facts, "save_id": transaction.draft.save_id}

    def write() -> WrittenShare:
        share = staged.write_to(transaction.data_storage, transaction.key, progress)
        transaction.sync_own_names()
        return share

    def commit(shares: list[WrittenShare]) -> tuple[Committed, tuple[RankSaveStats, ...]]:
        begin_s = time.monotonic()
        committed = transaction.publish(prepared.seal(shares, all_facts))
        commit_s = time.monotonic() - begin_s
        return committed, tuple(replace(share.stats, commit_s=commit_s) for share in shares)

    awaiting = f"all ranks to write their files of {transaction.draft.name} and rank 0 to commit it"
    with ExitStack() as undo:
        undo.callback(staged.cancel)
        with transaction.ending():
            committed = decide_on_rank0(comm, write, commit, awaiting=awaiting, timeout_s=timeout_s)
        undo.pop_all()
    return committed


def stage_on_all_ranks(prepared: PreparedSave, urgent: Urgency, comm: Comm) -> StagedSave:
    """Begin to copy on all ranks, or cancel and fail on all. Collective."""
    staged: StagedSave | None = None

    def stage() -> StagedSave:
        nonlocal staged
        staged = prepared.stage(urgent)
        return staged

    try:
        return run_on_all_ranks(comm, stage, awaiting="all ranks to begin to copy")
    except PenstockError:
        # Begun here, but not elsewhere: the failure of another rank arrives after this rank's copy began.
        if staged is not None:
            staged.cancel()
        raise
