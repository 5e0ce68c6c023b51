"""One save from an empty draft to a committed checkpoint: begun, written and committed by all ranks.

    begin_save -> every rank writes its files, and meanwhile tells rank 0 their checksums -> commit

Rank 0 alone changes what is visible, once it has heard that all have written; the others learn the outcome
in the same call. Invariant: `commit` returns on every rank with the checkpoint durable, or raises on every
rank with older checkpoints unharmed.
"""

from __future__ import annotations

import logging
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Self, TypeVar

from penstock.checkpoint.commit.protocol import (
    HIDDEN_PREFIX,
    LEASE_S,
    Committed,
    Draft,
    DraftStore,
    FolderDraftStore,
    Seal,
    SealParts,
    WriterLease,
)
from penstock.checkpoint.commit.record_commit import RecordDraftStore
from penstock.checkpoint.engine import SupportsDescribing, SupportsTelling
from penstock.checkpoint.plan.shared_plan import Place
from penstock.cluster import rounds
from penstock.cluster.comm import Comm, conclude_on_rank0, run_on_all_ranks, run_on_rank0
from penstock.cluster.rounds import FAN_IN
from penstock.errors import PenstockError, StorageError
from penstock.storage import Storage
from penstock.storage.capabilities import (
    defer_sync,
    find_folder_tree,
    name_mount,
    no_thread,
    offers,
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
            # Without the name: where it differs, that is told, instead of ranks that are out of step.
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
        return self._on_rank0(lambda: self._drafts.publish(self.draft, make_seal()))

    def commit_written(
        self, write: Callable[[], RankSaveStats], make_seal: Callable[[], Seal], *, timeout_s: float
    ) -> tuple[Committed, tuple[RankSaveStats, ...]]:
        """`commit` when `write` has returned on each of fewer than `FAN_IN` ranks, as one agreement."""

        def conclude(all_stats: list[RankSaveStats]) -> tuple[Committed, tuple[RankSaveStats, ...]]:
            begin_s = time.monotonic()
            committed = self._drafts.publish(self.draft, make_seal())
            return committed, _timed(all_stats, begin_s)

        awaiting = f"all ranks to write their files of {self.draft.name} and rank 0 to commit it"
        return self._ending(
            lambda: conclude_on_rank0(self._comm, write, conclude, awaiting=awaiting, timeout_s=timeout_s)
        )

    def commit_parts(self, parts: AbstractContextManager[SealParts | None]) -> Committed:
        """`commit` with a seal that rank 0 puts together within `parts`; others give None."""

        def publish() -> Committed:
            with parts as seal:
                assert seal is not None, "rank 0 puts the seal together"
                return self._drafts.publish(self.draft, seal)

        return self._on_rank0(publish)

    def _on_rank0(self, publish: Callable[[], Committed]) -> Committed:
        awaiting = f"rank 0 to commit {self.draft.name}"
        return self._ending(lambda: run_on_rank0(self._comm, publish, awaiting=awaiting))

    def _ending(self, commit: Callable[[], Result]) -> Result:
        with ExitStack() as undo:
            undo.callback(self.abandon)
            result = commit()
            self._end()
        return result

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
    with ExitStack() as undo:
        undo.callback(staged.cancel)
        undo.callback(transaction.abandon)
        all_facts = {**facts, "save_id": transaction.draft.save_id}
        share: WrittenShare | None = None

        def write_share(tell: Callable[[WrittenShare], None]) -> RankSaveStats:
            nonlocal share
            storage, key = transaction.data_storage, transaction.key
            if offers(staged, SupportsTelling):
                share = staged.write_and_tell(storage, key, progress, tell=tell)
            else:
                share = staged.write_to(storage, key, progress)
                tell(share)
            transaction.sync_own_names()
            return share.stats

        if comm.size >= FAN_IN and offers(prepared, SupportsDescribing):
            run_on_all_ranks(
                comm,
                lambda: write_share(lambda _: None),
                awaiting=f"all ranks to write their files of {transaction.draft.name}",
                timeout_s=timeout_s,
            )
            assert share is not None, "writing gave a share or raised"
            committed, stats = _describe_and_commit(transaction, prepared, share, comm, all_facts)
        else:
            sealing = _Sealing(prepared, all_facts, comm, timeout_s)

            def write() -> RankSaveStats:
                with sealing:
                    return write_share(sealing.tell)

            committed, stats = transaction.commit_written(write, sealing.take, timeout_s=timeout_s)
        undo.pop_all()
    return committed, stats


class _Sealing:
    """Lets rank 0 of a few describe the checkpoint while ranks still write. Each enters it, and tells once.

    Few ranks: rank 0 may hear all of them at a time, which takes fewer messages.
    """

    def __init__(
        self, prepared: PreparedSave, facts: Mapping[str, object], comm: Comm, timeout_s: float
    ) -> None:
        self._prepared = prepared
        self._facts = facts
        self._comm = comm
        self._timeout_s = timeout_s
        self._has_told = False
        self._seal: Seal | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The others wait for each rank's share: one that has failed before says that it has none.
        if not self._has_told:
            self.tell(None)

    def tell(self, share: WrittenShare | None) -> None:
        """What this rank writes, to rank 0, which makes the seal. Collective."""
        comm = self._comm
        packed = pickle.dumps(share) if comm.rank else b""
        self._has_told = True
        shares = [share]
        if comm.size > 1:
            # Not `gather_on_rank0`, before which all ranks agree that theirs can be sent: this one can.
            telling = rounds.tell_rank0(comm.rank, comm.size, packed)
            told = comm.carry(telling, awaiting="the checksums of all ranks", timeout_s=self._timeout_s)
            shares += [pickle.loads(each) for each in told[1:]]  # noqa: S301 - ranks of one job trust each other
        whole = [each for each in shares if each is not None]
        if comm.rank == 0 and len(whole) == comm.size:
            self._seal = self._prepared.seal(whole, self._facts)

    def take(self) -> Seal:
        """The seal, on rank 0, once all have written what they told."""
        assert self._seal is not None, "all ranks have written their files"
        return self._seal


def _describe_and_commit(
    transaction: SaveTransaction,
    prepared: SupportsDescribing,
    share: WrittenShare,
    comm: Comm,
    facts: Mapping[str, object],
) -> tuple[Committed, tuple[RankSaveStats, ...]]:
    """Let rank 0 write the description as it receives it from all ranks."""
    begin_s = time.monotonic()
    described = comm.carry(
        prepared.describe(Place(comm.rank, comm.size), share),
        awaiting="all ranks to describe what they wrote",
    )
    awaiting = "rank 0 to write what describes the checkpoint"
    if comm.rank != 0:
        comm.carry(described.send_spans(), awaiting=awaiting)
        committed = transaction.commit_parts(nullcontext())
        return committed, _timed(described.stats, begin_s)

    @contextmanager
    def parts() -> Iterator[SealParts]:
        failure: PenstockError | None = None
        with comm.receiving(awaiting=awaiting) as receive:
            reader = prepared.seal_parts(described, facts, receive)
            try:
                reader.survey()
                yield reader
            except PenstockError as error:
                failure = error
            reader.drain()
        if failure is not None:
            raise failure

    committed = transaction.commit_parts(parts())
    return committed, _timed(described.stats, begin_s)


def _timed(all_stats: Sequence[RankSaveStats], begin_s: float) -> tuple[RankSaveStats, ...]:
    """With the time since the beginning of the commit."""
    commit_s = time.monotonic() - begin_s
    return tuple(replace(stats, commit_s=commit_s) for stats in all_stats)


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
