"""Where one save writes: the same draft on every rank, committed or abandoned by all together.

Rank 0 alone changes what is visible; the others learn the outcome in the same call. Invariant: `commit`
returns on every rank, with the checkpoint durable, or raises on every rank, with nothing committed harmed.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.checkpoint.commit.base import LEASE_S, Committed, Draft, Drafts, Seal, Shelf
from penstock.checkpoint.commit.folders import FolderDrafts, FolderShelf
from penstock.checkpoint.commit.records import RecordDrafts, RecordShelf
from penstock.cluster.collectives import run_on_rank0
from penstock.errors import StorageError
from penstock.storage.powers import conditional, find_folders, for_large_files

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm
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
    tree = find_folders(storage)
    return FolderDrafts(storage, tree) if tree is not None else RecordDrafts(storage, conditional(storage))


def open_shelf(storage: Storage) -> Shelf:
    """What is committed in this storage."""
    tree = find_folders(storage)
    return FolderShelf(storage, tree) if tree is not None else RecordShelf(storage)


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
        return for_large_files(self.storage)

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
