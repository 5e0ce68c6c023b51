"""The commit protocol: drafts, leases, and one step that turns a draft into a checkpoint.

A `DraftStore` makes a draft that no reader sees, ranks write their files into it, and `publish` turns all of
it into one checkpoint. Invariants: a committed checkpoint is never written to, only replaced as a whole; of
two saves of one name, one wins completely and the other fails. File systems rename folders:

    .penstock-save-ID-NAME         the draft: data files, then penstock.json, then .metadata
    .penstock-save-ID-NAME.lease   the process that owns the draft; created before it, removed after it
    .penstock-old-ID-NAME          the older checkpoint, where folders cannot be exchanged in one step
    .penstock-gone-ID              a checkpoint or a draft that is being removed
    .penstock-writer.lease         the process whose steps these are, see `WriterLease`

publish: check all files -> manifest -> metadata -> fsync of both and of the draft, at once -> rename (or
exchange with the older one) -> fsync of the parent. The folder called NAME is complete at every moment, as is
the one it replaces. The files of a draft need no order: no reader looks there, whatever a kill or a power
failure leaves of it, and all of it is durable before the rename. What is already hidden is removed without
another fsync. A lease concerns running processes and need not survive a power failure, because its process
does not.

Object storage has no rename: a checkpoint cannot be moved into place, but a small object can be replaced in
one conditional write. Every save writes its own keys, and a record says which save a name refers to:

    NAME/ID/...                the files of one save, which no other save writes
    NAME/ID.lease              the process that owns the save, until it is committed
    NAME/penstock-commit.json  the record: written last, on condition that no other save has changed it
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, Self
from weakref import WeakSet

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.checkpoint.formats.description import checksum_object, read_manifest, require_complete
from penstock.errors import (
    AccessRefused,
    AlreadyThere,
    DataDamaged,
    ObjectNotFound,
    StorageError,
    Unavailable,
    UsageError,
)
from penstock.storage import Storage
from penstock.storage.capabilities import (
    SupportsConditionalWrites,
    defer_sync,
    find_folder_tree,
    find_local_root,
)
from penstock.storage.files.file_storage import is_unfinished
from penstock.storage.files.folders import FolderTree
from penstock.storage.process_id import ProcessId, current_process
from penstock.storage.protocol import (
    MOST_WHOLE,
    ObjectInfo,
    exists,
    read_described,
    read_if_any,
    read_object,
    write_object,
)

MANIFEST_NAME: Final = "penstock.json"
METADATA_NAME: Final = ".metadata"
LEASE_ENDING: Final = ".lease"
HIDDEN_PREFIX: Final = ".penstock-"
"""The prefix of all names that are not checkpoints."""
WRITER_LEASE: Final = f"{HIDDEN_PREFIX}writer{LEASE_ENDING}"

LEASE_S: Final = 900.0
"""A lease that was not renewed for this long has expired, if its process cannot be looked up from here."""
RETRY_PAUSES_S: Final = (0.5, 2.0, 5.0)
"""The pauses before each retry of a request to storage that failed."""

logger = logging.getLogger(__name__)


@contextmanager
def warning_instead(what: str) -> Iterator[None]:
    """Log a warning in place of a `StorageError`, where what failed matters less than what else is done."""
    try:
        yield
    except StorageError as error:
        logger.warning("%s: %s", what, error)


class StoredRecord(BaseModel):
    """A record stored as JSON. If it has a field that this version does not know, it cannot be parsed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, storage: Storage, key: str, *, what: str, fix: str) -> Self:
        """Read the record in an object; raise `DataDamaged` if it cannot be parsed.

        `what` names the record in the message.
        """
        return cls.parse(read_object(storage, key), f"{storage.uri}/{key}", what=what, fix=fix)

    @classmethod
    def parse(cls, content: bytes | bytearray, uri: str, *, what: str, fix: str) -> Self:
        """Parse a record that was read from `uri`; raise `DataDamaged` if that fails.

        `what` names the record in the message.
        """
        try:
            return cls.model_validate_json(bytes(content))
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise DataDamaged(f"{what} cannot be parsed: {reason}", uri=uri, fix=fix) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """The content that turns files into a checkpoint. Rank 0 builds it from reports and writes it last."""

    manifest: bytes
    """The content of `penstock.json`."""
    metadata: bytes
    """The content of `.metadata`, which stock DCP reads; the last file to be written."""
    sizes: Mapping[str, int]
    """The size of every data file of every rank, by name: rank 0 must find exactly these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A save that readers cannot see yet. It will be called `name`; its files are written below `folder`."""

    name: str
    folder: str
    save_id: str

    def key(self, file_name: str) -> str:
        return f"{self.folder}/{file_name}"


def name_draft(name: str, save_id: str) -> Draft:
    """Return the draft of a save on a file system. Each rank can name it without asking the others."""
    return Draft(name=name, folder=f"{HIDDEN_PREFIX}save-{save_id}-{name}", save_id=save_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A complete and durable checkpoint called `name`, with its files below `folder`.

    On file systems, name and folder are the same. Replacing or removing it is conditional on `version`.
    """

    name: str
    folder: str
    version: str = ""

    def key(self, file_name: str) -> str:
        return f"{self.folder}/{file_name}"


class DraftStore(ABC):
    """The writing half of a commit protocol; called only by rank 0.

    Call `start`, then `publish` or `drop`; in between, call `renew` from any thread. If the process is killed
    in between, what it leaves never shows up in a catalog, and `sweep` in a later process removes it. `owner`
    is called each time it is needed, because a forked child is a different process.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        owner: Callable[[], ProcessId] = current_process,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._owner = owner
        self._clock = clock
        self._published: set[str] = set()
        self._notes = defer_sync(storage, "all")
        self._seals = defer_sync(storage, "names")

    @abstractmethod
    def start(self, name: str, save_id: str) -> Draft:
        """Begin a draft of a checkpoint that will be called `name`, under a lease.

        Raises `UsageError` if something other than a checkpoint has that name, because it must not be
        replaced.
        """

    @abstractmethod
    def publish(self, draft: Draft, seal: Seal) -> Committed:
        """Check all files, write the manifest and metadata, and make the checkpoint visible atomically.

        An older checkpoint of that name is replaced and removed. On return, the new one survives a power
        failure.
        """

    @abstractmethod
    def drop(self, draft: Draft) -> None:
        """Remove a draft and all of its files."""

    def renew(self, draft: Draft) -> None:
        """Renew the lease, whose age tells other processes that this save is alive."""
        write_object(self._notes, draft.folder + LEASE_ENDING, [lease_text(self._owner())])

    def sweep(self) -> list[str]:
        """Remove what dead saves and interrupted removals left, and return the names.

        Drafts of live saves stay.
        """
        swept = []
        for name, remove_if_dead in list(self._find_remains()):
            try:
                if remove_if_dead():
                    swept.append(name)
            except StorageError as error:
                logger.debug("Could not sweep %s: %s", name, error)
        return swept

    @abstractmethod
    def _find_remains(self) -> Iterator[tuple[str, Callable[[], bool]]]:
        """List what a dead save may have left, each with a call that removes it if the save is dead."""

    def _write_seal(self, draft: Draft, seal: Seal) -> None:
        """Write the manifest and metadata, the last two files of a draft."""
        # `.metadata` comes last: without it, neither Penstock nor torch treats the folder as a checkpoint, so
        # a save killed earlier leaves nothing that could be loaded.
        write_object(self._seals, draft.key(MANIFEST_NAME), [seal.manifest])
        write_object(self._seals, draft.key(METADATA_NAME), [seal.metadata])

    def _clear_up(self, draft: Draft, *removals: Callable[[], None]) -> None:
        """Remove the lease and, after a commit, the older checkpoint.

        What cannot be removed is left to a sweep.
        """
        steps: tuple[Callable[[], None], ...] = (*removals, partial(self.end_lease, draft))
        for remove in steps:
            with warning_instead(f"Could not remove all that a save of {draft.name} left"):
                remove()

    def end_lease(self, draft: Draft) -> None:
        """Remove the lease of a draft that is committed or dropped."""
        with suppress(ObjectNotFound):
            self._storage.delete(draft.folder + LEASE_ENDING)

    def _has_expired(self, lease_key: str, renewed_s: float) -> bool:
        text = read_object(self._storage, lease_key)
        return is_lease_expired(text, age_s=self._clock() - renewed_s, observer=self._owner())


def lease_text(owner: ProcessId) -> bytes:
    """Return the content of a lease file: the process that owns an unfinished save."""
    return json.dumps({"lease_version": 1, "owner": asdict(owner)}).encode()


def is_lease_expired(text: bytes | bytearray, *, age_s: float, observer: ProcessId) -> bool:
    """Return whether the save with this lease, renewed `age_s` ago, is over.

    If its process can be looked up from here, the save is over once that has ended; otherwise, the age of the
    lease decides. A lease that cannot be parsed is also judged by its age: it must never make a save fail.
    """
    owner = ProcessId.of_lease(text)
    has_ended = None if owner is None else owner.has_ended(observer=observer)
    return age_s > LEASE_S if has_ended is None else has_ended


class RunInUse(UsageError):
    """Another job saves steps to the same location."""


class WriterLease:
    """Records which job may save steps to a storage location.

    Two jobs saving to the same location would replace and remove each other's steps. Not collective: the
    process that commits uses it. A live process on this machine keeps its lease. Whether a process on another
    machine is alive cannot be known, and a restarted job must not wait: it takes the lease, and the other job
    learns of that at its next save.
    """

    def __init__(self, storage: Storage, *, owner: Callable[[], ProcessId] = current_process) -> None:
        self._storage = storage
        self._notes = defer_sync(storage, "all")
        self._owner = owner
        self._is_held = False

    def hold(self) -> None:
        """Take the lease before a save, or check that it is held; raise `RunInUse` if another job has it."""
        if self.require_free():
            write_object(self._notes, WRITER_LEASE, [lease_text(self._owner())])
        self._is_held = True
        _HOLDERS.setdefault(self._storage.uri, WeakSet()).add(self)

    def require_free(self) -> bool:
        """Raise `RunInUse` if another, live job has the lease; return True if it must still be taken.

        Also called by programs that remove or change steps but save none.
        """
        found = read_if_any(self._storage, WRITER_LEASE) or b""
        if found == lease_text(self._owner()):
            return False
        other = ProcessId.of_lease(found)
        if other is not None and (self._is_held or other.has_ended(observer=self._owner()) is False):
            raise RunInUse(
                f"Process {other.pid} on {other.host} saves steps here, too"
                f"{', since this one began' if self._is_held else ''}",
                where=self._storage.uri,
                fix="Stop one of the two jobs, or give each its own run folder and cache.",
            )
        if self._is_held:
            lease = f"{self._storage.uri}/{WRITER_LEASE}"
            logger.warning("%s is no longer this job's. Did another job save steps here?", lease)
        return True

    def release(self) -> None:
        """Give the lease back if this process holds it and no other manager here uses it.

        May be called twice.
        """
        (holders := _HOLDERS.setdefault(self._storage.uri, WeakSet())).discard(self)
        try:
            own = lease_text(self._owner())
            if self._is_held and not holders and (read_if_any(self._storage, WRITER_LEASE) or b"") == own:
                self._storage.delete(WRITER_LEASE)
        except StorageError as error:
            logger.debug("Could not remove %s: %s", WRITER_LEASE, error)
        self._is_held = False


_HOLDERS: Final[dict[str, WeakSet[WriterLease]]] = {}
_DRAFT: Final = re.compile(r"\.penstock-save-[0-9a-f]{16}-.+")
_OLD: Final = re.compile(r"\.penstock-old-[0-9a-f]{16}-(?P<name>.+)")
_GONE: Final = re.compile(r"\.penstock-gone-[0-9a-f]{16}")
_PART: Final = re.compile(
    r"\.metadata(\.tmp)?|penstock\.json|.*\.(distcp|metadata)|parity-\d+\.bin|redundancy-\d+\.json"
)
"""The files of a checkpoint, Penstock's or torch's: a folder that has only these may be replaced."""


class FolderDraftStore(DraftStore):
    """Drafts in hidden folders, which are renamed on commit."""

    def __init__(self, storage: Storage, tree: FolderTree, **choices: Any) -> None:
        super().__init__(storage, **choices)
        self._tree = tree
        self._seals = self._notes  # synced together, in `publish`
        self._older: dict[str, bytes] = {}
        """The identity of the checkpoint that a draft will replace, by the draft's save ID."""

    def start(self, name: str, save_id: str) -> Draft:
        """Write the lease, then create the draft's folder."""
        # In this order: to a process that sweeps, a draft without a lease would look dead.
        is_there = require_replaceable(self._storage, self._tree, name)
        self._older[save_id] = read_identity(self._storage, name) if is_there else b""
        draft = name_draft(name, save_id)
        with ExitStack() as undo:
            undo.callback(self._clear_up, draft)  # raises nothing that would hide the original error
            self.renew(draft)
            self._tree.make(draft.folder, keep_name=False)
            undo.pop_all()
        return draft

    def publish(self, draft: Draft, seal: Seal) -> Committed:
        """Check, seal and rename the draft, as the module describes."""
        sizes = {entry.name: entry.size_bytes for entry in self._tree.entries(draft.folder)}
        require_complete(sizes, seal.sizes, f"{self._storage.uri}/{draft.folder}")
        self._write_seal(draft, seal)
        # Files were written without syncing their names. Sync first: the new name must not survive without
        # its files.
        self._tree.sync(draft.folder, files=(MANIFEST_NAME, METADATA_NAME))
        try:
            left_behind = self._give_name(draft)
        except StorageError:
            # On a network file system, the rename may have happened although its response was lost and a
            # retry failed.
            if read_identity(self._storage, draft.name) != seal.manifest[:IDENTITY_BYTES]:
                raise
            left_behind = draft.folder
        self._older.pop(draft.save_id, None)
        self._published.add(draft.save_id)
        self._tree.sync()
        # Under the draft's name, the older checkpoint is invisible, and after the sync above durably so.
        is_hidden = left_behind == draft.folder
        tree, hide = self._tree, hide_folder
        self._clear_up(draft, lambda: tree.remove(left_behind) if is_hidden else hide(tree, left_behind)())
        return Committed(name=draft.name, folder=draft.name)

    def drop(self, draft: Draft) -> None:
        """Remove the draft, unless it was published: its folder then holds the older checkpoint."""
        if draft.save_id not in self._published:
            hide_folder(self._tree, draft.folder)()
        self.end_lease(draft)

    def _find_remains(self) -> Iterator[tuple[str, Callable[[], bool]]]:
        entries = {entry.name: entry for entry in self._tree.entries(prefix=HIDDEN_PREFIX)}
        for name, entry in entries.items():
            age_s = self._clock() - entry.modified_s
            if entry.is_folder:
                yield name, partial(self._sweep_folder, name, age_s)
            elif entry.is_plain:
                has_draft = name.removesuffix(LEASE_ENDING) in entries
                yield name, partial(self._sweep_file, name, age_s, has_draft=has_draft)

    def _sweep_file(self, name: str, age_s: float, *, has_draft: bool) -> bool:
        draft = name.removesuffix(LEASE_ENDING)
        is_lease_alone = draft != name and _DRAFT.fullmatch(draft) is not None and not has_draft
        if (is_lease_alone and self._is_dead(draft, age_s)) or (is_unfinished(name) and age_s > LEASE_S):
            self._tree.remove(name)
            return True
        return False

    def _sweep_folder(self, name: str, age_s: float) -> bool:
        if _GONE.fullmatch(name):
            self._tree.remove(name)
        elif old := _OLD.fullmatch(name):
            self._settle_old(name, old["name"])
        elif _DRAFT.fullmatch(name) and self._is_dead(name, age_s):
            hide_folder(self._tree, name)()
            with suppress(ObjectNotFound):
                self._storage.delete(name + LEASE_ENDING)
        else:
            return False
        return True

    def _is_dead(self, draft_folder: str, age_s: float) -> bool:
        key = draft_folder + LEASE_ENDING
        try:
            return self._has_expired(key, self._storage.stat(key).modified_s)
        except ObjectNotFound:
            return age_s > LEASE_S

    def _settle_old(self, folder: str, name: str) -> None:
        """Finish or roll back an interrupted replacement on a file system without exchange."""
        if exists(self._storage, f"{name}/{METADATA_NAME}"):
            hide_folder(self._tree, folder)()
        else:
            self._tree.move(folder, name)
            self._tree.sync()

    def _give_name(self, draft: Draft) -> str:
        """Make the draft visible under its name; return the folder that now holds what it replaced."""
        try:
            self._tree.move(draft.folder, draft.name)
        except AlreadyThere:
            require_replaceable(self._storage, self._tree, draft.name)
            self._require_older(draft, draft.name)
        else:
            return draft.folder
        try:
            # One system call swaps both names, so a reader finds either the old or the new checkpoint, never
            # none.
            self._tree.exchange(draft.folder, draft.name)
        except Unavailable as error:
            logger.info("%s The older checkpoint is renamed first instead.", error)
        else:
            # Check again, because only now is it certain what was replaced.
            with ExitStack() as undo:
                undo.callback(self._tree.exchange, draft.folder, draft.name)
                self._require_older(draft, draft.folder)
                undo.pop_all()
            return draft.folder
        # A kill between these two lines leaves no NAME; readers and `sweep` still find the older checkpoint.
        aside = f"{HIDDEN_PREFIX}old-{draft.save_id}-{draft.name}"
        self._tree.move(draft.name, aside)
        self._tree.move(draft.folder, draft.name)
        return aside

    def _require_older(self, draft: Draft, folder: str) -> None:
        """Raise if the checkpoint in `folder` got the draft's name only after the draft had begun."""
        older = self._older.get(draft.save_id)
        if older is not None and older != read_identity(self._storage, folder):
            raise overtaken(self._storage.uri, draft.name)


_NUM_LISTINGS: Final = 20


class FolderCatalog:
    """The committed checkpoints in folders: those with `.metadata`, and older ones that a dead save renamed.

    Any rank may call its methods.
    """

    def __init__(self, storage: Storage, tree: FolderTree, is_step: Callable[[str], bool]) -> None:
        self._storage = storage
        self._tree = tree
        self._is_step = is_step

    def names(self) -> list[str]:
        """Return the names of all committed checkpoints, in no particular order."""
        for _ in range(_NUM_LISTINGS):
            folders = self._visible_folders()
            others = {
                folder
                for folder, is_link in folders.items()
                if not (is_link or self._may_be_checkpoint(folder))
            }
            # If a folder has disappeared, a new one may have appeared: list again rather than treat the
            # run as empty.
            if not others or others <= self._visible_folders().keys():
                found = ((_OLD.fullmatch(folder), folder) for folder in folders.keys() - others)
                return list({old["name"] if old else folder for old, folder in found})
        raise StorageError(
            "Checkpoints were removed each time while they were listed",
            uri=self._storage.uri,
            fix="Try again.",
        )

    def _visible_folders(self) -> dict[str, bool]:
        """Return all folders, checkpoints or not, except those hidden for good; True marks a link.

        A link with the name of a step may lead to the newest checkpoint, even if its target is missing now.
        """
        return {
            entry.name: not entry.is_folder
            for entry in self._tree.entries()
            if (entry.is_folder and (_OLD.fullmatch(entry.name) or not entry.name.startswith(HIDDEN_PREFIX)))
            or not (entry.is_folder or entry.is_plain or not self._is_step(entry.name))
        }

    def find(self, name: str) -> Committed:
        """Return the committed checkpoint of this name; raise `ObjectNotFound` if there is none.

        It may be the older checkpoint that an interrupted replacement left renamed.
        """
        if exists(self._storage, f"{name}/{METADATA_NAME}"):
            return Committed(name=name, folder=name)
        for entry in self._tree.entries(prefix=f"{HIDDEN_PREFIX}old-"):
            old = _OLD.fullmatch(entry.name)
            if old and old["name"] == name and exists(self._storage, f"{entry.name}/{METADATA_NAME}"):
                return Committed(name=name, folder=entry.name)
        if self._has_lost_metadata(name):
            return Committed(name=name, folder=name)
        raise ObjectNotFound(
            f"No checkpoint is called {name}",
            uri=f"{self._storage.uri}/{name}",
            fix="`penstock checkpoint ls` lists the committed ones.",
        )

    def hide(self, committed: Committed) -> Callable[[], None]:
        """Hide a checkpoint at once and durably, if it exists. The returned call removes its files.

        Raises `AccessRefused` for a link, because its target may belong to someone else.
        """
        root = find_local_root(self._storage)
        if root is not None and (root / committed.folder).is_symlink():
            raise AccessRefused(
                f"{committed.folder} is a link, and is not removed",
                uri=self._storage.uri,
                fix="Remove it, and what it leads to, yourself.",
            )
        return hide_folder(self._tree, committed.folder)

    def finish_hiding(self, name: str) -> list[ObjectInfo]:  # noqa: ARG002 - a hidden folder has no name
        """Do nothing: what an interrupted removal left is in a hidden folder, which the next save sweeps."""
        return []

    def _has_lost_metadata(self, folder: str) -> bool:
        """Return True for a damaged step without its hidden files, as after `cp step-4/* there`.

        As an uncommitted one it would be ignored, and replaced by the next save of this step.
        """
        return self._is_step(folder) and exists(self._storage, f"{folder}/{MANIFEST_NAME}")

    def _may_be_checkpoint(self, folder: str) -> bool:
        try:
            return exists(self._storage, f"{folder}/{METADATA_NAME}") or self._has_lost_metadata(folder)
        except AccessRefused:
            # As in lost+found. A folder with the name of a step may be the newest step; `find` gives the
            # reason.
            return self._is_step(folder)


def overtaken(uri: str, name: str) -> AlreadyThere:
    """Return the error for a save whose name another save has taken since it began."""
    return AlreadyThere(
        f"Another save committed {name} first; this one was discarded",
        uri=f"{uri}/{name}",
        fix="Let one job at a time save to this folder, or give each job its own.",
    )


IDENTITY_BYTES: Final = 128
"""The length of a manifest's beginning, which contains the checksum of all of it."""
_FOLDER_OF_OBJECTS: Final = re.compile(r"[^/]+/[0-9a-f]{16}")


def is_written_once(storage: Storage, folder: str) -> bool:
    """Return whether the folder has the files of one save, which no other save will ever replace."""
    return _FOLDER_OF_OBJECTS.fullmatch(folder) is not None and find_folder_tree(storage) is None


def read_identity(storage: Storage, folder: str) -> bytes:
    """Return bytes that identify the checkpoint in a folder; empty if there is none."""
    below = f"{folder}/" if folder else ""
    with suppress(ObjectNotFound), closing(storage.open(below + MANIFEST_NAME)) as source:
        head = bytearray(min(IDENTITY_BYTES, source.size_bytes))
        source.read_into(0, memoryview(head))
        return bytes(head)
    with suppress(ObjectNotFound):
        return checksum_object(storage, below + METADATA_NAME)
    return b""


def require_replaceable(storage: Storage, tree: FolderTree, name: str) -> bool:
    """Raise `UsageError` if the name belongs to something other than a checkpoint, which would be lost.

    Returns whether a folder of that name contains anything.
    """
    parent, _, last = name.rpartition("/")
    found = next((entry for entry in tree.entries(parent, prefix=last) if entry.name == last), None)
    if found is None:
        return False
    if not found.is_folder:
        raise UsageError(
            f"{name} is a {'file' if found.is_plain else 'link or device'}, which would be lost",
            where=storage.uri,
            fix="Save to a new name; for a link, give the folder that it leads to.",
        )
    entries = list(tree.entries(name))
    strange = [
        entry.name
        for entry in entries
        if not entry.is_plain or not (_PART.fullmatch(entry.name) or is_unfinished(entry.name))
    ]
    known: set[str] = set()
    if strange:
        # Files of manager.output() have names that the user chose; the manifest lists them.
        try:
            content = read_object(storage, f"{name}/{MANIFEST_NAME}", at_most=MOST_WHOLE)
            known = {file.name for file in read_manifest(content, f"{storage.uri}/{name}").files}
        except (StorageError, Unavailable) as error:
            logger.debug("%s has no readable manifest: %s", name, error)
    if not set(strange) <= known:
        raise UsageError(
            f"{name} is not a checkpoint: it contains {strange[0]}, which would be lost",
            where=storage.uri,
            fix="Save to a new name, or to the name of a checkpoint.",
        )
    return bool(entries)


def hide_folder(tree: FolderTree, folder: str) -> Callable[[], None]:
    """Hide a folder durably, because files are removed one by one. The returned call removes them."""
    gone = f"{HIDDEN_PREFIX}gone-{secrets.token_hex(8)}"
    try:
        tree.move(folder, gone)
    except ObjectNotFound:
        return lambda: None
    tree.sync()
    return partial(tree.remove, gone)


RECORD_NAME: Final = "penstock-commit.json"
_SAVE: Final = re.compile(r"(?P<folder>(?P<name>[^/]+)/[0-9a-f]{16})(\.lease|/.+)")
_VERSION: Final = 1
_DROP_RECORD: Final = "Delete this record, then save the step again. Other steps are not affected."
NUM_DELETING_THREADS: Final = 4


class RecordDraftStore(DraftStore):
    """Drafts on object storage: each has its own keys, and a record makes it visible."""

    def __init__(self, storage: Storage, conditional: SupportsConditionalWrites, **choices: Any) -> None:
        super().__init__(storage, **choices)
        # The response to the write has everything that is needed from the record: no further request is made.
        quick = defer_sync(storage, "names")
        self._conditional = quick if isinstance(quick, SupportsConditionalWrites) else conditional
        self._catalog = RecordCatalog(storage)
        self._older: dict[str, Committed | None] = {}
        """The checkpoint that a draft will replace, by the draft's save ID."""

    def start(self, name: str, save_id: str) -> Draft:
        """Write the lease; objects need no folder."""
        draft = Draft(name=name, folder=f"{name}/{save_id}", save_id=save_id)
        self._older[save_id] = self._catalog.find_if_any(name)
        self.renew(draft)
        return draft

    def publish(self, draft: Draft, seal: Seal) -> Committed:
        """Write the manifest and metadata, check all files, then write the record."""
        # In this order, one listing checks all files. No record refers to the folder yet.
        self._write_seal(draft, seal)
        expected = {
            **seal.sizes,
            MANIFEST_NAME: len(seal.manifest),
            METADATA_NAME: len(seal.metadata),
        }
        prefix = f"{draft.folder}/"
        objects = self._storage.list(draft.folder)
        sizes = {info.key.removeprefix(prefix): info.size_bytes for info in objects}
        require_complete(sizes, expected, f"{self._storage.uri}/{draft.folder}")
        older = self._catalog.find_if_any(draft.name)
        # If the older checkpoint was removed in the meantime, there is no conflict; any other change is
        # another save's.
        if older is not None and older != self._older.pop(draft.save_id, older):
            raise overtaken(self._storage.uri, draft.name)
        committed = self._write_record(draft, older)

        def remove_older() -> None:
            if older is not None and older.folder != draft.folder:
                _delete_all(self._storage, self._storage.list(older.folder))

        self._clear_up(draft, remove_older)
        return committed

    def drop(self, draft: Draft) -> None:
        """Delete the draft's objects, unless a delayed record may still refer to them.

        In that case, a later sweep deletes them if no record does.
        """
        if draft.save_id not in self._published:
            _delete_all(self._storage, self._storage.list(draft.folder))
        self.end_lease(draft)

    def _find_remains(self) -> Iterator[tuple[str, Callable[[], bool]]]:
        for folder, objects in _group_by_save(self._storage.list()).items():
            yield folder, partial(self._sweep_save, folder, objects)

    def _sweep_save(self, folder: str, objects: list[ObjectInfo]) -> bool:
        """Delete the objects of a save to which no record refers and whose lease has expired."""
        # Lease first, then record: a save that commits in between has its record by the time it is read.
        if not self._is_dead(folder, objects):
            return False
        committed = self._catalog.find_if_any(folder.rpartition("/")[0])
        if committed is not None and committed.folder == folder:
            objects = [info for info in objects if info.key == folder + LEASE_ENDING]
        _delete_all(self._storage, objects)
        return bool(objects)

    def _is_dead(self, folder: str, objects: list[ObjectInfo]) -> bool:
        times = {info.key: info.modified_s for info in objects}
        key = folder + LEASE_ENDING
        if key not in times:
            return self._clock() - max(times.values()) > LEASE_S
        try:
            return self._has_expired(key, times[key])
        except ObjectNotFound:
            return False

    def _write_record(self, draft: Draft, older: Committed | None) -> Committed:
        record = _Record(save_id=draft.save_id, folder=draft.folder, record_version=_VERSION)
        # Whatever the response, the request may have been carried out, or may still be.
        self._published.add(draft.save_id)
        try:
            info = self._conditional.write_if(
                f"{draft.name}/{RECORD_NAME}",
                record.model_dump_json().encode(),
                replaces=older.version if older else None,
            )
        except StorageError as error:
            current = self._read_back(draft, error)
            if current is not None and current.folder == draft.folder:
                return current
            if isinstance(error, AlreadyThere) and current != older:
                # The condition of a delayed request can no longer be met.
                self._published.discard(draft.save_id)
                raise overtaken(self._storage.uri, draft.name) from error
            raise
        return Committed(name=draft.name, folder=draft.folder, version=info.checksum or "")

    def _read_back(self, draft: Draft, error: StorageError) -> Committed | None:
        """Read which save a name refers to, after an error that leaves this open, such as a lost response."""
        for pause_s in (*RETRY_PAUSES_S, None):
            try:
                return self._catalog.find_if_any(draft.name)
            except StorageError as unread:
                if pause_s is None:
                    raise StorageError(
                        f"It is unknown whether {draft.name} was committed: {error.what}; "
                        f"and its record cannot be read: {unread.what}",
                        uri=f"{self._storage.uri}/{draft.name}",
                        fix="Nothing was removed. Once the storage answers, check whether it is listed.",
                    ) from error
                logger.warning("The record of %s cannot be read, trying again: %s", draft.name, unread)
                time.sleep(pause_s)
        raise AssertionError


class RecordCatalog:
    """The committed checkpoints: by their records or, if another program saved them, by their `.metadata`."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def names(self) -> list[str]:
        """Return all names with a record, or with metadata directly below them."""
        ends = (RECORD_NAME, METADATA_NAME)
        keys = (info.key.rpartition("/") for info in self._storage.list())
        return sorted({name for name, _, last in keys if name and "/" not in name and last in ends})

    def find(self, name: str) -> Committed:
        """Return the save to which the record of this name refers, or a checkpoint of another program."""
        committed = self.find_if_any(name)
        if committed is not None:
            return committed
        foreign = Committed(name=name, folder=name)
        self._storage.stat(foreign.key(METADATA_NAME))
        return foreign

    def find_if_any(self, name: str) -> Committed | None:
        """Return the save to which the record of this name refers, or None if there is no record."""
        key = f"{name}/{RECORD_NAME}"
        try:
            info, text = read_described(self._storage, key)
        except ObjectNotFound:
            return None
        uri = f"{self._storage.uri}/{key}"
        record = _Record.parse(
            text,
            uri,
            what="The commit record of this checkpoint",
            fix=_DROP_RECORD,
        )
        if record.record_version != _VERSION:
            raise StorageError(
                f"The commit record of this checkpoint has version {record.record_version}; "
                f"this Penstock reads version {_VERSION}",
                uri=uri,
                fix="Use the Penstock that wrote it, or a newer one.",
            )
        # Removing or replacing a checkpoint deletes its folder: it must not be another one's, or the root.
        own = f"{name}/{record.save_id}"
        if record.folder != own or not _SAVE.fullmatch(own + LEASE_ENDING):
            raise DataDamaged(
                f"The commit record of this checkpoint names {record.folder!r}, which is not its own folder",
                uri=uri,
                fix=_DROP_RECORD,
            )
        return Committed(name=name, folder=record.folder, version=info.checksum or "")

    def hide(self, committed: Committed) -> Callable[[], None]:
        """Delete the record. The returned call deletes the files."""
        if committed.folder == committed.name:
            self._storage.delete(committed.key(METADATA_NAME))
        else:
            self._storage.delete(f"{committed.name}/{RECORD_NAME}")
        return lambda: _delete_all(self._storage, self._storage.list(committed.folder))

    def finish_hiding(self, name: str) -> list[ObjectInfo]:
        """Remove and return the objects of this name that no record lists and whose save holds no lease.

        A save holds its lease from before its first object until after its record, so these are leftovers. A
        sweep of the whole folder is less sure of them: it waits until they are old.
        """
        saves = _group_by_save(self._storage.list(name))
        # Leases after the listing, in which a save that has just begun may lack its lease; then the record.
        left = [folder for folder in saves if not exists(self._storage, folder + LEASE_ENDING)]
        committed = self.find_if_any(name)
        removed = [
            info
            for folder in left
            if committed is None or committed.folder != folder
            for info in saves[folder]
            if not info.key.endswith(LEASE_ENDING)
        ]
        _delete_all(self._storage, removed)
        return removed


class _Record(StoredRecord):
    """The content of a record: which save a name refers to."""

    record_version: int
    save_id: str
    folder: str


def _group_by_save(objects: Iterable[ObjectInfo]) -> dict[str, list[ObjectInfo]]:
    """Return the objects of each save, by the folder to which it writes."""
    saves: dict[str, list[ObjectInfo]] = {}
    for info in objects:
        if save := _SAVE.fullmatch(info.key):
            saves.setdefault(save["folder"], []).append(info)
    return saves


def _delete_all(storage: Storage, objects: Iterable[ObjectInfo]) -> None:
    """Delete these objects, several at a time; another process may be deleting them at the same time."""

    def delete(info: ObjectInfo) -> None:
        with suppress(ObjectNotFound):
            storage.delete(info.key)

    with ThreadPoolExecutor(NUM_DELETING_THREADS) as threads:
        for _ in threads.map(delete, list(objects)):
            continue
