"""Committed checkpoints: found by path, URI or step; kept or removed; made by a save, from draft to commit.

    begin_save -> every rank writes its files and reports them to rank 0 -> rank 0 commits -> retention

Paths and URIs that users give are resolved here. Only rank 0 changes what is visible, once all ranks have
written; the others learn the outcome in the same call. Invariants: a `CheckpointRef` was committed when it
was created; the steps are those that the storage lists as committed, and the pointer `latest` is for people
and other programs: nothing here ever reads it to find a step; `commit` returns on every rank with the
checkpoint durable, or raises on every rank with older checkpoints unharmed.
"""

from __future__ import annotations

import logging
import operator
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from penstock.checkpoint.commit.protocol import (
    HIDDEN_PREFIX,
    LEASE_S,
    MANIFEST_NAME,
    METADATA_NAME,
    Committed,
    Draft,
    DraftStore,
    FolderCatalog,
    FolderDraftStore,
    RecordCatalog,
    RecordDraftStore,
    Seal,
    WriterLease,
    warning_instead,
)
from penstock.checkpoint.engine import PreparedSave, RankSaveStats, StagedSave, Urgency, WrittenShare
from penstock.checkpoint.formats.description import Manifest, checksum_of, read_manifest
from penstock.cluster.comm import Comm, decide_on_rank0, run_on_all_ranks, run_on_rank0
from penstock.errors import (
    AccessRefused,
    DataDamaged,
    PenstockError,
    StorageError,
    Unavailable,
    UsageError,
    name_some,
)
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.capabilities import (
    defer_sync,
    find_folder_tree,
    find_local_root,
    name_mount,
    no_thread,
    prefer_direct_access,
    require_conditional_writes,
    sync_names,
)
from penstock.storage.files.system_calls import translate_os_errors
from penstock.storage.protocol import MOST_WHOLE, exists, read_if_any, read_object, write_object
from penstock.storage.uri import find_opener, open_here, parse_uri

logger = logging.getLogger(__name__)

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointRef:
    """A committed checkpoint and the `Storage` that holds it."""

    storage: Storage
    committed: Committed
    readable: tuple[str, ...] | None = None
    """The files that this rank can open; None on all ranks if every rank can open all files."""
    step: int | None = None
    """The step after which the folder is named, if it was found by its step."""

    @property
    def uri(self) -> str:
        """The name of the checkpoint in messages."""
        return f"{self.storage.uri.rstrip('/')}/{self.committed.name}"

    def key(self, file_name: str) -> str:
        return self.committed.key(file_name)

    def sizes(self) -> dict[str, int]:
        """Return the size of each of the checkpoint's files."""
        prefix = self.key("")
        return {
            info.key.removeprefix(prefix): info.size_bytes
            for info in self.storage.list(self.committed.folder)
        }

    def is_whole(self) -> bool:
        """Return whether the manifest, metadata and all files exist with the right sizes; reads no payloads.

        A checkpoint without a manifest cannot be checked, and counts as incomplete.
        """
        try:
            _, seal = self.read_seal()
            sizes = self.sizes()
        except (StorageError, Unavailable) as error:
            logger.info("%s is incomplete: %s", self.uri, error)
            return False
        return all(sizes.get(name) == size_bytes for name, size_bytes in seal.sizes.items())

    def read_manifest(self) -> Manifest:
        """Return the checkpoint's manifest; raise `ObjectNotFound` if it is another program's checkpoint."""
        content = read_object(self.storage, self.key(MANIFEST_NAME), at_most=MOST_WHOLE)
        manifest = read_manifest(content, self.uri)
        require_step(manifest, self.step, self.uri)
        return manifest

    def read_seal(self) -> tuple[Manifest, Seal]:
        """Return the parsed manifest and the seal; raise `DataDamaged` if either of its files has changed."""
        content = bytes(read_object(self.storage, self.key(MANIFEST_NAME), at_most=MOST_WHOLE))
        manifest = read_manifest(content, self.uri)
        require_step(manifest, self.step, self.uri)
        metadata = bytes(read_object(self.storage, self.key(METADATA_NAME), at_most=MOST_WHOLE))
        if checksum_of(metadata) != manifest.metadata_sum:
            raise DataDamaged("The checksum of its .metadata differs", where=self.uri)
        sizes = {file.name: file.size_bytes for file in manifest.files}
        return manifest, Seal(manifest=content, metadata=metadata, sizes=sizes)


def require_step(manifest: Manifest | None, step: int | None, uri: str) -> None:
    """Raise `DataDamaged` if a folder named after `step` holds another step, as far as its manifest says."""
    if manifest is not None and None not in (step, manifest.step) and manifest.step != step:
        raise DataDamaged(
            f"The folder holds step {manifest.step}, not step {step}: it was copied, renamed or linked",
            where=uri,
            fix=f"Remove it, or rename it to step-{manifest.step}. pc.load loads it by its path.",
        )


def split_path(path: AnyPath) -> tuple[str, str]:
    """Return the URI of a checkpoint's parent folder, with its options, and the checkpoint's name."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            f"The path is a {type(path).__name__}, not a path or URI",
            fix="The state comes first: save(state, path), load(state, path).",
        )
    text = os.fspath(path)
    location = parse_uri(text)
    parts = location.split_name()
    if parts is None:
        # If the scheme is unknown, that is the better error.
        find_opener(location)
        raise UsageError(
            f"{text!r} is a storage root, not a checkpoint",
            fix="Add the name of the checkpoint, as in /data/run/step-100 or s3://bucket/run/step-100.",
        )
    parent, name = parts
    return parent.text, name


def can_be_named(path: AnyPath) -> bool:
    """Return whether the path or URI can be that of a checkpoint."""
    try:
        open_parent(path)
    except (PenstockError, ValueError):
        return False
    return True


def absolute_path(path: Any) -> str:
    """Return `path` in the form in which ranks compare paths.

    Values that are not paths are refused later, when they are opened.
    """
    try:
        return parse_uri(os.fspath(path)).uri
    except (TypeError, UsageError):
        return repr(path)


def open_parent(path: AnyPath, *, rank: int = 0) -> tuple[Storage, str]:
    """Return the storage of a checkpoint's parent folder, and the checkpoint's name in it."""
    above, name = split_path(path)
    return open_here(above, rank=rank), name


def follow_link(storage: Storage, name: str) -> tuple[Storage, str]:
    """Return the storage and name of the checkpoint to which `name` leads if it is a link, for reading.

    A `Storage` itself never follows links out of its root.
    """
    root = find_local_root(storage)
    with translate_os_errors("Following the link", f"{storage.uri}/{name}"):
        if root is None or not (root / name).is_symlink():
            return storage, name
        try:
            target = Path(os.path.realpath(root / name, strict=True))
        except FileNotFoundError as error:
            raise AccessRefused(
                f"{name} is a link to nothing ({(root / name).readlink()} does not exist)",
                uri=storage.uri,
                fix="Mount the file system that it leads to, or remove the link.",
            ) from error
    return open_here(replace(parse_uri(storage.uri), root=str(target.parent)).text), target.name


POINTER_NAME: Final = "latest"
_STEP_NAME: Final = re.compile(r"step-(0|[1-9][0-9]*)")


def step_dirname(step: int) -> str:
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(f"Invalid step {step!r}", fix="Count steps from 0.")
    return f"step-{step}"


def parse_step(name: str) -> int | None:
    """Return the step after which a folder is named; None for other names."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


class StepCatalog:
    """The committed steps of one run. Any rank may read; only rank 0 may change anything."""

    def __init__(self, storage: Storage, *, has_pointer: bool = True) -> None:
        self.storage = storage
        self._catalog = open_catalog(storage)
        self._has_pointer = has_pointer

    def committed(self) -> list[int]:
        """Return all committed steps, in ascending order."""
        steps = (parse_step(name) for name in self._catalog.names())
        return sorted(step for step in steps if step is not None)

    def require_run(self) -> None:
        """Raise an error if this folder without steps is not that of a run that has saved none.

        Raises `UsageError` if it is itself a checkpoint, and `StorageError` if its pointer names a step.
        """
        if exists(self.storage, METADATA_NAME):
            raise UsageError(
                "This is a checkpoint, not the folder of a run",
                where=self.storage.uri,
                fix="Give the manager the folder above it, or use pc.load.",
            )
        others = sorted(name for name in self._catalog.names() if parse_step(name) is None)
        if POINTER_NAME not in others and parse_step(pointed := self._read_pointer()) is not None:
            raise lost_steps(f"{POINTER_NAME} names {pointed}", self.storage.uri)
        if others:
            logger.warning(
                "%s has no step-NUMBER, but other checkpoints: %s. pc.load loads them by name",
                self.storage.uri,
                name_some(others),
            )

    def find(self, step: int) -> CheckpointRef:
        """Return the checkpoint of a step; raise `ObjectNotFound` if the step is not committed."""
        storage, name = follow_link(self.storage, step_dirname(step))
        return CheckpointRef(storage, open_catalog(storage).find(name), step=step)

    def hide(self, step: int) -> Callable[[], None]:
        """Hide a step from readers. The returned call removes its files."""
        return self._catalog.hide(self._catalog.find(step_dirname(step)))

    def set_latest(self, step: int) -> None:
        """Point `latest` to a step, if the run has such a pointer."""
        if self._has_pointer:
            # Its name is not synced: after a power failure, it may point to the previous step.
            storage = defer_sync(self.storage, "names")
            write_object(storage, POINTER_NAME, [f"{step_dirname(step)}\n".encode()])

    def _read_pointer(self) -> str:
        return (read_if_any(self.storage, POINTER_NAME) or b"").decode(errors="replace").strip()

    def point_past(self, removed: str) -> None:
        """Let `latest` name the newest remaining step if it names the removed one."""
        if self._read_pointer() == removed:
            newest = max(self.committed(), default=None)
            if newest is None:
                self.storage.delete(POINTER_NAME)
            else:
                self.set_latest(newest)


def lost_steps(proof: str, uri: str) -> StorageError:
    """Return the error for a run whose steps are gone: starting over would replace what may come back."""
    return StorageError(
        f"No step is here, although {proof}",
        uri=uri,
        fix="Mount the storage, or copy the steps back. To begin again, start a new job in a new folder, or "
        f"remove {POINTER_NAME} first.",
    )


def open_catalog(storage: Storage) -> FolderCatalog | RecordCatalog:
    """Return the catalog of the committed checkpoints in this storage."""
    tree = find_folder_tree(storage)
    if tree is None:
        return RecordCatalog(storage)
    return FolderCatalog(storage, tree, lambda name: parse_step(name) is not None)


def local_path(storage: Storage, key: str) -> Path:
    """Return the path of an object on this machine; raise `Unavailable` if `storage` is not a file system."""
    root = find_local_root(storage)
    if root is None:
        raise Unavailable(
            "manager.output() needs file paths, and this storage is not a file system",
            where=storage.uri,
            fix="Pass cache=, a folder on each node: files are written there and then flushed.",
        )
    return root / key


def choose_surplus(steps: Sequence[int], keep: int | None, is_whole: Callable[[int], bool]) -> list[int]:
    """Return the steps to remove, oldest first, so that the newest `keep` remain; None keeps all.

    If none of those `keep` steps is complete, the newest complete step before them is kept as well: a run
    never loses its last usable checkpoint. `is_whole` is called for the newest steps first, and no more often
    than necessary.
    """
    ordered = sorted(steps)
    if keep is None or len(ordered) <= keep:
        return []
    surplus, newest = ordered[:-keep], ordered[-keep:]
    if any(is_whole(step) for step in reversed(newest)):
        return surplus
    spared = next((step for step in reversed(surplus) if is_whole(step)), None)
    return [step for step in surplus if step != spared]


def apply_retention(catalog: StepCatalog, step: int, keep: int | None) -> Callable[[], None]:
    """Point `latest` to a new step and hide the steps beyond `keep`; the returned call removes their files.

    Neither call raises `StorageError`, because `step` is committed. Steps newer than `step` do not count: a
    job that starts again from the beginning, or from an older step, keeps what it saves.
    """
    hidden: list[Callable[[], None]] = []
    with warning_instead(LEFTOVERS.format(step)):
        committed = catalog.committed()
        if step == max(committed, default=None):
            with warning_instead(f"Step {step} is committed, but {POINTER_NAME!r} does not name it"):
                catalog.set_latest(step)
        for removed in choose_surplus(
            [each for each in committed if each <= step],
            keep,
            lambda each: each == step or catalog.find(each).is_whole(),
        ):
            logger.info("Removing step %d: the newest %s are kept", removed, keep)
            # A step that cannot be removed must not keep the others from being removed.
            with warning_instead(LEFTOVERS.format(step)):
                hidden.append(catalog.hide(removed))
    return partial(remove_leftovers, step, hidden)


LEFTOVERS: Final = "Step {} is committed, but not all old steps could be removed"


def remove_leftovers(step: int, removals: Sequence[Callable[[], None]]) -> None:
    """Remove what a save of `step` has hidden; failures are logged as warnings."""
    for remove in removals:
        with warning_instead(LEFTOVERS.format(step)):
            remove()


def begin_save(
    storage: Storage,
    name: str,
    comm: Comm,
    *,
    drafts: DraftStore | None = None,
    lease: WriterLease | None = None,
) -> SaveTransaction:
    """Begin a save of a checkpoint that will be called `name`, a folder below the root. Collective.

    First removes what dead saves left in the storage. All ranks must use the same storage: raises
    `UsageError` if their URIs differ. With the `lease` of a run, raises `RunInUse` if another job holds that
    lease.
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
                # If the folder cannot be written, the error should name it rather than a hidden file in it.
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
            # Names no checkpoint: if ranks save to different ones, the error shows both.
            awaiting="rank 0 to make room for the checkpoint",
            same=uri,
        )
        undo.pop_all()
    is_owner = comm.rank == 0
    return SaveTransaction(storage, comm, draft_store, draft, is_owner=is_owner, mount=mount, lease=renewer)


def _drop(drafts: DraftStore, draft: Draft) -> None:
    """Remove the draft of a failed save.

    An error here is only logged, because the save's own error tells why it failed.
    """
    with warning_instead(f"Could not remove the unfinished checkpoint {draft.folder}"):
        drafts.drop(draft)


def sweep_dead_saves(drafts: DraftStore, storage: Storage) -> None:
    """Remove what dead saves left in this storage, and log it."""
    for name in drafts.sweep():
        logger.info("Removed %s, the remains of a dead save, below %s", name, storage.uri)


def open_draft_store(storage: Storage) -> DraftStore:
    """Return the commit protocol for this storage: renamed folders, or records."""
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
        is_owner: bool,
        mount: str = "",
        lease: _LeaseRenewer | None = None,
    ) -> None:
        """Join a save whose draft rank 0 has created.

        Only the owner removes the draft; `mount` is the ID of rank 0's mount.
        """
        self.storage = storage
        self.draft = draft
        self._mount = mount
        self._comm = comm
        self.drafts = drafts
        self._is_owner = is_owner
        self._is_over = False
        self._lease = lease
        if lease is not None:
            # If nobody ends this save, as after an error in one of torch's planners, a later save sweeps
            # its draft.
            weakref.finalize(self, lease.stop)

    @cached_property
    def data_storage(self) -> Storage:
        """The storage for data files, which bypasses the page cache if possible and writes in place.

        A draft is invisible anyway, so a temporary name and a rename for each file would gain nothing. The
        commit makes the names of all files durable, and compares their sizes.
        """
        return defer_sync(prefer_direct_access(self.storage), "names")

    def sync_own_names(self) -> None:
        """Make the names of this rank's files durable, unless the commit on rank 0 will do so."""
        # On a shared file system, rank 0's node may know nothing of what other nodes wrote.
        if self._comm.rank and not (self._mount and name_mount(self.storage) == self._mount):
            sync_names(self.storage, self.draft.folder)

    def commit(self, make_seal: Callable[[], Seal]) -> Committed:
        """Turn what all ranks have written into one durable checkpoint; rank 0 makes the seal. Collective.

        Every rank's files must be finished. If this raises, the draft is gone and an older checkpoint of the
        same name is unchanged. The only exception: rank 0 has committed, but the response was lost.
        """
        with self.ending():
            return run_on_rank0(
                self._comm,
                lambda: self.drafts.publish(self.draft, make_seal()),
                awaiting=f"rank 0 to commit {self.draft.name}",
            )

    @contextmanager
    def ending(self) -> Iterator[None]:
        """End the transaction when the `with` block ends: `abandon` it on an error."""
        with ExitStack() as undo:
            undo.callback(self.abandon)
            yield
            self._end()
            undo.pop_all()

    def abandon(self) -> None:
        """Remove what this save has written.

        May be called twice, and after `commit`; never raises `StorageError`. Not collective: call it when no
        rank is writing any more. What a rank writes later is swept by a later save.
        """
        if self._is_over:
            return
        self._end()
        if self._is_owner:
            _drop(self.drafts, self.draft)

    def _end(self) -> None:
        self._is_over = True
        if self._lease is not None:
            self._lease.stop()


class _LeaseRenewer:
    """Renews a draft's lease in a thread until `stop` or the end of this process.

    Renews four times within the life of a lease, so that one renewal may fail or be late before another save
    sweeps the draft.
    """

    def __init__(self, drafts: DraftStore, draft: Draft, *, every_s: float = LEASE_S / 4) -> None:
        self._drafts = drafts
        self._draft = draft
        self._every_s = every_s
        self._stopped = threading.Event()
        self.stop = self._stopped.set
        self._thread = threading.Thread(target=self._run, name=f"lease of {draft.name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise no_thread(error) from error

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            with warning_instead(f"Could not renew the lease of {self._draft.folder}"):
                self._drafts.renew(self._draft)


def write_and_commit(
    prepared: PreparedSave,
    staged: StagedSave,
    storage: Storage,
    name: str,
    comm: Comm,
    *,
    progress: Progress | None = None,
) -> tuple[Committed, tuple[RankSaveStats, ...]]:
    """Write and commit what is staged; return the checkpoint and each rank's statistics. Collective."""
    with ExitStack() as undo:
        undo.callback(staged.cancel)
        transaction = begin_save(storage, name, comm)
        undo.pop_all()
    return write_into(transaction, prepared, staged, comm, facts={}, progress=progress)


def write_into(
    transaction: SaveTransaction,
    prepared: PreparedSave,
    staged: StagedSave,
    comm: Comm,
    *,
    facts: Mapping[str, object],
    progress: Progress | None = None,
) -> tuple[Committed, tuple[RankSaveStats, ...]]:
    """Do what `write_and_commit` does in a transaction that has begun; abandon it on failure. Collective.

    `facts` go into the manifest.
    """
    all_facts = {**facts, "save_id": transaction.draft.save_id}

    def write() -> WrittenShare:
        share = staged.write_to(transaction.data_storage, transaction.draft.key, progress)
        transaction.sync_own_names()
        return share

    def commit(shares: list[WrittenShare]) -> tuple[Committed, tuple[RankSaveStats, ...]]:
        begin_s = time.monotonic()
        seal = prepared.seal(shares, all_facts)
        committed = transaction.drafts.publish(transaction.draft, seal)
        commit_s = time.monotonic() - begin_s
        return committed, tuple(replace(share.stats, commit_s=commit_s) for share in shares)

    awaiting = f"all ranks to write their files of {transaction.draft.name} and rank 0 to commit it"
    with ExitStack() as undo:
        undo.callback(staged.cancel)
        with transaction.ending():
            committed = decide_on_rank0(comm, write, commit, awaiting=awaiting, timeout_s=comm.timeout_s)
        undo.pop_all()
    return committed


def stage_on_all_ranks(prepared: PreparedSave, urgent: Urgency, comm: Comm) -> StagedSave:
    """Begin to copy on all ranks, or cancel and raise on all of them. Collective."""
    staged: StagedSave | None = None

    def stage() -> StagedSave:
        nonlocal staged
        staged = prepared.stage(urgent)
        return staged

    try:
        return run_on_all_ranks(comm, stage, awaiting="all ranks to begin to copy")
    except PenstockError:
        # This rank has begun to copy before it learns that another rank failed to.
        if staged is not None:
            staged.cancel()
        raise
