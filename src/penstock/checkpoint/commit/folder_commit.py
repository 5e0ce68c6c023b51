"""Commit on file systems: a hidden folder takes the checkpoint's name when everything in it is durable.

    .penstock-save-ID-NAME         the draft: data files, then penstock.json, then .metadata
    .penstock-save-ID-NAME.lease   the process it belongs to; exists before the draft and until after it
    .penstock-old-ID-NAME          the older checkpoint, where folders cannot be exchanged in one step
    .penstock-gone-ID              a checkpoint or a draft that is being removed

publish: check all files -> manifest -> metadata -> rename (or exchange with the older one) -> fsync of the
parent. Invariant: the folder called NAME is complete at every moment, and so is the one it replaces.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.commit.protocol import (
    LEASE_S,
    MANIFEST_NAME,
    METADATA_NAME,
    Committed,
    Draft,
    Seal,
    is_lease_expired,
    lease_text,
    require_complete,
)
from penstock.checkpoint.formats.manifest import read_manifest
from penstock.errors import AlreadyThere, ObjectNotFound, StorageError, Unavailable, UsageError
from penstock.storage.files.file_storage import is_unfinished
from penstock.storage.process_id import ProcessId, current_process
from penstock.storage.protocol import exists, read_object, write_object

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.storage import Storage
    from penstock.storage.capabilities import FolderEntry, FolderTree

HIDDEN_PREFIX: Final = ".penstock-"
"""The beginning of all names that are not checkpoints."""
LEASE_ENDING: Final = ".lease"
_DRAFT: Final = re.compile(r"\.penstock-save-[0-9a-f]{16}-.+")
_OLD: Final = re.compile(r"\.penstock-old-[0-9a-f]{16}-(?P<name>.+)")
_GONE: Final = re.compile(r"\.penstock-gone-[0-9a-f]{16}")
_MARKS: Final = re.compile(r"\.penstock-flush-(?P<draft>[0-9a-f]{16}-.+)")
_PART: Final = re.compile(
    r"\.metadata(\.tmp)?|penstock\.json|.*\.(distcp|metadata|safetensors|index\.json)"
    r"|parity-\d+\.bin|redundancy-\d+\.json"
)
"""The files of a checkpoint, ours or torch's: a folder with only these may be replaced."""

logger = logging.getLogger(__name__)


class FolderDraftStore:
    """`Drafts` in folders. `owner` is asked at each use, because a forked child is another process."""

    def __init__(
        self,
        storage: Storage,
        tree: FolderTree,
        *,
        owner: Callable[[], ProcessId] = current_process,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._tree = tree
        self._owner = owner
        self._clock = clock
        self._published: set[str] = set()

    def start(self, name: str, save_id: str) -> Draft:
        """Write the lease, then make the draft's folder."""
        # In this order: a draft without a lease would look dead to another process that sweeps.
        require_replaceable(self._storage, self._tree, name)
        draft = Draft(name=name, folder=f"{HIDDEN_PREFIX}save-{save_id}-{name}", save_id=save_id)
        self.renew(draft)
        self._tree.make(draft.folder)
        return draft

    def renew(self, draft: Draft) -> None:
        """Write the lease again: its age is what others look at."""
        write_object(self._storage, draft.folder + LEASE_ENDING, [lease_text(self._owner())])

    def publish(self, draft: Draft, seal: Seal) -> Committed:
        """Check, seal and rename the draft, as the module describes."""
        found = {entry.name: entry.size_bytes for entry in self._tree.entries(draft.folder)}
        require_complete(found, seal.sizes, f"{self._storage.uri}/{draft.folder}")
        # `.metadata` comes last: without it, neither Penstock nor torch takes the folder for a checkpoint, so
        # a save killed at any earlier line leaves nothing that could be loaded.
        write_object(self._storage, draft.key(MANIFEST_NAME), [seal.manifest])
        write_object(self._storage, draft.key(METADATA_NAME), [seal.metadata])
        left_behind = self._give_name(draft)
        self._published.add(draft.save_id)
        self._tree.sync()
        self._clear_up(left_behind, draft)
        return Committed(name=draft.name, folder=draft.name)

    def drop(self, draft: Draft) -> None:
        """Remove the draft, unless it was published: then its folder holds the older checkpoint by now."""
        if draft.save_id not in self._published:
            remove_folder(self._tree, draft.folder)
        self._end_lease(draft)

    def sweep(self) -> list[str]:
        """Remove drafts of dead saves and interrupted removals, as far as this user has the rights."""
        swept = []
        entries = {entry.name: entry for entry in self._tree.entries(prefix=HIDDEN_PREFIX)}
        for entry in entries.values():
            try:
                if self._sweep_one(entry, has_draft=entry.name.removesuffix(LEASE_ENDING) in entries):
                    swept.append(entry.name)
            except StorageError as error:
                logger.debug("Could not sweep %s: %s", entry.name, error)
        return swept

    def _sweep_one(self, entry: FolderEntry, *, has_draft: bool) -> bool:
        name, age_s = entry.name, self._clock() - entry.modified_s
        if entry.is_folder:
            return self._sweep_folder(name, age_s)
        if not entry.is_plain:
            return False
        draft = name.removesuffix(LEASE_ENDING)
        is_lease_alone = draft != name and _DRAFT.fullmatch(draft) is not None and not has_draft
        if (is_lease_alone and self._is_expired(draft, age_s)) or (is_unfinished(name) and age_s > LEASE_S):
            self._tree.remove(name)
            return True
        return False

    def _sweep_folder(self, name: str, age_s: float) -> bool:
        if _GONE.fullmatch(name):
            self._tree.remove(name)
        elif old := _OLD.fullmatch(name):
            self._settle_old(name, old["name"])
        elif marks := _MARKS.fullmatch(name):
            return self._sweep_marks(name, f"{HIDDEN_PREFIX}save-{marks['draft']}", age_s)
        elif _DRAFT.fullmatch(name) and self._is_expired(name, age_s):
            remove_folder(self._tree, name)
            with suppress(ObjectNotFound):
                self._storage.delete(name + LEASE_ENDING)
        else:
            return False
        return True

    def _sweep_marks(self, name: str, draft_folder: str, age_s: float) -> bool:
        """Remove the marks of a shared draft once the draft is gone."""
        is_over = age_s > LEASE_S and not exists(self._storage, draft_folder + LEASE_ENDING)
        if is_over:
            self._tree.remove(name)
        return is_over

    def _is_expired(self, draft_folder: str, age_s: float) -> bool:
        key = draft_folder + LEASE_ENDING
        try:
            renewed_s = self._storage.stat(key).modified_s
            text = read_object(self._storage, key)
        except ObjectNotFound:
            return age_s > LEASE_S
        return is_lease_expired(text, age_s=self._clock() - renewed_s, observer=self._owner())

    def _settle_old(self, folder: str, name: str) -> None:
        """Finish or roll back an interrupted replacement on a file system without exchange."""
        if exists(self._storage, f"{name}/{METADATA_NAME}"):
            remove_folder(self._tree, folder)
        else:
            self._tree.move(folder, name)
            self._tree.sync()

    def _give_name(self, draft: Draft) -> str:
        """Make the draft visible under its name; the folder that has what it replaced, if anything."""
        try:
            self._tree.move(draft.folder, draft.name)
        except AlreadyThere:
            require_replaceable(self._storage, self._tree, draft.name)
        else:
            return draft.folder
        try:
            self._tree.exchange(draft.folder, draft.name)
        except Unavailable as error:
            logger.info("%s The older checkpoint is renamed first instead.", error)
        else:
            return draft.folder
        aside = f"{HIDDEN_PREFIX}old-{draft.save_id}-{draft.name}"
        self._tree.move(draft.name, aside)
        self._tree.move(draft.folder, draft.name)
        return aside

    def _clear_up(self, left_behind: str, draft: Draft) -> None:
        """Remove the older checkpoint and the lease. The save is committed: failures are left to a sweep."""
        try:
            remove_folder(self._tree, left_behind)
        except StorageError as error:
            logger.warning("Could not remove the older checkpoint that %s replaced: %s", draft.name, error)
        self._end_lease(draft)

    def _end_lease(self, draft: Draft) -> None:
        try:
            self._storage.delete(draft.folder + LEASE_ENDING)
        except ObjectNotFound:
            logger.debug("The lease of %s was gone", draft.folder)
        except StorageError as error:
            logger.warning("Could not remove the lease of %s: %s", draft.folder, error)


class FolderCatalog:
    """`Shelf` of folders: whatever holds a `.metadata` is a checkpoint, also one of stock DCP."""

    def __init__(self, storage: Storage, tree: FolderTree) -> None:
        self._storage = storage
        self._tree = tree

    def names(self) -> list[str]:
        """The folders with metadata, and older ones that an interrupted replacement left renamed."""
        names = set()
        for entry in self._tree.entries():
            old = _OLD.fullmatch(entry.name)
            if (
                entry.is_folder
                and (old or not entry.name.startswith(HIDDEN_PREFIX))
                and self._holds(entry.name)
            ):
                names.add(old["name"] if old else entry.name)
        return list(names)

    def find(self, name: str) -> Committed:
        """The folder of this name, or the older one that an interrupted replacement left renamed."""
        if self._holds(name):
            return Committed(name=name, folder=name)
        for entry in self._tree.entries(prefix=f"{HIDDEN_PREFIX}old-"):
            old = _OLD.fullmatch(entry.name)
            if old and old["name"] == name and self._holds(entry.name):
                return Committed(name=name, folder=entry.name)
        raise ObjectNotFound(
            f"No checkpoint is called {name}",
            uri=f"{self._storage.uri}/{name}",
            fix="`penstock checkpoint ls` lists the committed ones.",
        )

    def remove(self, committed: Committed) -> None:
        """Rename it durably to a name that is no checkpoint's, then remove its files."""
        remove_folder(self._tree, committed.folder)

    def _holds(self, folder: str) -> bool:
        return exists(self._storage, f"{folder}/{METADATA_NAME}")


def require_replaceable(storage: Storage, tree: FolderTree, name: str) -> None:
    """`UsageError` if that name belongs to something other than a checkpoint, which would be lost."""
    strange = [
        entry.name
        for entry in tree.entries(name)
        if not entry.is_plain or not (_PART.fullmatch(entry.name) or is_unfinished(entry.name))
    ]
    # Files of manager.output() have names of the user's choice: the manifest lists them.
    if strange and not set(strange) <= _names_in_manifest(storage, name):
        raise UsageError(
            f"{name} is not a checkpoint: it contains {strange[0]}, which would be lost",
            where=storage.uri,
            fix="Save to a new name, or to that of a checkpoint.",
        )


def _names_in_manifest(storage: Storage, folder: str) -> set[str]:
    try:
        manifest = read_manifest(read_object(storage, f"{folder}/{MANIFEST_NAME}"), f"{storage.uri}/{folder}")
    except (StorageError, Unavailable) as error:
        logger.debug("%s has no readable manifest: %s", folder, error)
        return set()
    return {file.name for file in manifest.files}


def remove_folder(tree: FolderTree, folder: str) -> None:
    """Take a folder's name away durably, then remove its files: a kill leaves nothing that looks complete."""
    gone = f"{HIDDEN_PREFIX}gone-{secrets.token_hex(8)}"
    try:
        tree.move(folder, gone)
    except ObjectNotFound:
        return
    tree.sync()
    tree.remove(gone)
