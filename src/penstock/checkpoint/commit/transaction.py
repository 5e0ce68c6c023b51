"""Where one save writes: the same draft on every rank, committed or abandoned by all together.

Rank 0 alone changes what is visible; the others learn the outcome in the same call. Invariant: `commit`
returns on every rank, with the checkpoint durable, or raises on every rank, with nothing committed harmed.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.checkpoint.commit.folder_commit import FolderDrafts
from penstock.checkpoint.commit.protocol import LEASE_S, Committed, Draft, Drafts, Seal
from penstock.checkpoint.commit.record_commit import RecordDrafts
from penstock.cluster.collectives import all_gather_results, run_on_all_ranks, run_on_rank0
from penstock.errors import PenstockError, StorageError
from penstock.storage.capabilities import (
    find_folder_tree,
    prefer_direct_access,
    require_conditional_writes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.checkpoint.engine import PreparedSave, RankShare, ShareStats, StagedSave, Urgency
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress
    from penstock.storage import Storage


logger = logging.getLogger(__name__)


def begin(storage: Storage, name: str, comm: Comm, *, drafts: Drafts | None = None) -> Place:
    """Make a place for a checkpoint that will be called `name`, a folder below the root. Collective.

    What dead saves left there is swept first. All ranks must reach the same storage.
    """
    keeper = drafts or open_drafts(storage)

    def start() -> Draft:
        for swept in keeper.sweep():
            logger.info("Removed %s, which a save left that died, below %s", swept, storage.uri)
        return keeper.start(name, secrets.token_hex(8))

    draft = run_on_rank0(comm, start, awaiting=f"rank 0 to make room for {name}")
    return Place(storage, comm, keeper, draft)


def open_drafts(storage: Storage) -> Drafts:
    """The commit protocol that this storage takes: by renaming folders, or by records."""
    tree = find_folder_tree(storage)
    return (
        FolderDrafts(storage, tree)
        if tree is not None
        else RecordDrafts(storage, require_conditional_writes(storage))
    )


class Place:
    """One rank's view of a save under way. `abandon` it on every rank if anything fails before `commit`."""

    def __init__(self, storage: Storage, comm: Comm, drafts: Drafts, draft: Draft) -> None:
        self.storage = storage
        self.draft = draft
        self._comm = comm
        self._drafts = drafts
        self._is_over = False
        self._lease = _LeaseKeeper(drafts, draft) if comm.rank == 0 else None

    def key(self, file_name: str) -> str:
        """Where this checkpoint's file of that name is to be written, by whichever rank."""
        return self.draft.key(file_name)

    @cached_property
    def for_data(self) -> Storage:
        """The storage to write data files to: past the page cache where that can be, and in place."""
        return prefer_direct_access(self.storage)

    def commit(self, make_seal: Callable[[], Seal]) -> Committed:
        """Make what all ranks have written one durable checkpoint; rank 0 makes the seal. Collective.

        Every rank's files must be finished. Where this raises, the draft is gone and the older checkpoint of
        this name, if there is one, stands as it was.
        """
        with ExitStack() as undo:
            undo.callback(self.abandon)
            committed = run_on_rank0(
                self._comm,
                lambda: self._drafts.publish(self.draft, make_seal()),
                awaiting=f"rank 0 to commit {self.draft.name}",
            )
            self._end()
        return committed

    def abandon(self) -> None:
        """Remove what this save has written. Safe twice, and after `commit`; raises nothing of the storage's.

        Not collective: call it once no rank writes any more. What a rank still writes is swept later.
        """
        if self._is_over:
            return
        self._end()
        if self._comm.rank != 0:
            return
        try:
            self._drafts.drop(self.draft)
        except StorageError as error:
            logger.warning("Could not remove the unfinished checkpoint %s: %s", self.draft.folder, error)

    def _end(self) -> None:
        self._is_over = True
        if self._lease is not None:
            self._lease.stop()


class _LeaseKeeper:
    """Renews a draft's lease from a thread of its own, as long as this process lives and wants the draft."""

    def __init__(self, drafts: Drafts, draft: Draft, *, every_s: float = LEASE_S / 4) -> None:
        self._drafts = drafts
        self._draft = draft
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease of {draft.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Renew no more."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self._drafts.renew(self._draft)
            except StorageError as error:
                logger.warning("Could not renew the lease of %s: %s", self._draft.folder, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a save goes and what its manifest is to say of it."""

    storage: Storage
    name: str
    facts: Mapping[str, object]


def complete(
    prepared: PreparedSave,
    staged: StagedSave,
    target: Target,
    comm: Comm,
    *,
    timeout_s: float,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Committed, tuple[ShareStats, ...]]:
    """Write what is staged and commit it; what each rank spent, in rank order. Collective."""
    with ExitStack() as undo:
        undo.callback(staged.cancel)
        place = begin(target.storage, target.name, comm)
        undo.pop_all()
    return finish(
        place,
        prepared,
        staged,
        comm,
        facts=target.facts,
        timeout_s=timeout_s,
        progress=progress,
        clock=clock,
    )


def finish(
    place: Place,
    prepared: PreparedSave,
    staged: StagedSave,
    comm: Comm,
    *,
    facts: Mapping[str, object],
    timeout_s: float,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Committed, tuple[ShareStats, ...]]:
    """The same in a place that is there already; where this fails, the place is abandoned. Collective."""
    with ExitStack() as undo:
        undo.callback(staged.cancel)
        undo.callback(place.abandon)
        written: list[RankShare] = []

        def write() -> ShareStats:
            written.append(staged.write_to(place.for_data, place.key, progress))
            return written[0].stats

        awaiting = f"all ranks to write their files of {place.draft.name}"
        # A process without other ranks raises its own error, and no `RankFailed`.
        stats = (
            [write()]
            if comm.size == 1
            else all_gather_results(comm, write, awaiting=awaiting, timeout_s=timeout_s)
        )
        begun_s = clock()
        # Places and sums of all items are for who seals; every rank needs what the others spent.
        shares = comm.gather_on_lead(written[0], awaiting="where all ranks wrote what")
        all_facts = {**facts, "save_id": place.draft.save_id}
        committed = place.commit(lambda: prepared.seal(shares, all_facts))
        undo.pop_all()
    return committed, tuple(replace(each, commit_s=clock() - begun_s) for each in stats)


def stage_together(prepared: PreparedSave, urgent: Urgency, comm: Comm) -> StagedSave:
    """Begin to copy on all ranks, or fail on all: what is begun elsewhere is then cancelled. Collective."""
    begun: list[StagedSave] = []
    try:
        run_on_all_ranks(
            comm, lambda: begun.append(prepared.stage(urgent)), awaiting="all ranks to begin to copy"
        )
    except PenstockError:
        for staged in begun:
            staged.cancel()
        raise
    return begun[0]
