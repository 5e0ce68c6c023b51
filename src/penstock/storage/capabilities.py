"""Optional capabilities of storages, each a `Supports...` protocol, and the functions that ask for them.

Callers ask what a storage can do and never what its URI looks like, so that a back end from another package
works like a built-in one. Invariant: what changes the visible state does so in one step, so that a crash
leaves the state before it or the one after it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Literal, ParamSpec, Protocol, TypeVar, runtime_checkable

from penstock.errors import PenstockError, Unavailable
from penstock.storage.files.folders import FolderTree
from penstock.storage.process_id import current_process
from penstock.storage.protocol import ObjectInfo, Storage, WrappedStorage


@runtime_checkable
class SupportsLocalPaths(Protocol):
    """A storage whose objects are files of a file system that is mounted on this machine."""

    local_root: str
    """The absolute path of the folder that holds all objects. It may not exist yet."""

    uses_page_cache: bool
    """True if its reads and writes go through this machine's page cache."""

    def local_path(self, key: str) -> str:
        """The path of the object's file; `ObjectNotFound` where the folder that would hold it is missing."""


@runtime_checkable
class SupportsEndpoints(Protocol):
    """A storage that talks to a service: its bytes cross this machine's network interfaces."""

    endpoints: Sequence[str]
    """The URLs of the service."""


@runtime_checkable
class SupportsFolders(Protocol):
    """A storage on a file system."""

    tree: FolderTree
    """Its folders."""


@runtime_checkable
class SupportsConditionalWrites(Protocol):
    """A storage that writes a small object only if no other writer came first."""

    has_conditions: bool
    """True if its client and service support that."""

    def write_if(self, key: str, content: bytes, *, replaces: str | None) -> ObjectInfo:
        """Write an object, if the one there has the checksum `replaces`; for None, if there is none.

        `AlreadyThere` where the condition does not hold.
        """


@runtime_checkable
class SupportsDirectAccess(Protocol):
    """A storage on a file system that may also reach its files past the page cache."""

    def past_cache(self, reads: str | None = None) -> Storage:
        """The same tree past the page cache, for large files; itself, where the file system lacks that.

        Its files are written under their final names at once, which survive a power cut after `sync_names`
        only: it is for callers with a commit of their own.
        Callers that only read give the key of a file to read: then nothing is written to find out what the
        file system can do.
        """


Deferred = Literal["names", "all"]


@runtime_checkable
class SupportsDeferredSync(Protocol):
    """A storage that may leave to its caller what it does for each finished object.

    Of files that is to make their names durable, of objects to ask the service for their sizes.
    """

    def deferring(self, what: Deferred) -> Storage:
        """The same tree; see `defer_sync`."""


SpanValue = int | float | str
"""The value of an argument of a span."""

RecordSpan = Callable[[str, str, int, int, Mapping[str, SpanValue]], None]
"""Records what the calling thread did: name, category, begin and end in ns of CLOCK_MONOTONIC, arguments."""


Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def unwrap(storage: Storage) -> Storage:
    """The storage inside all wrappers."""
    while isinstance(storage, WrappedStorage):
        storage = storage.inside
    return storage


def find_local_paths(storage: Storage) -> SupportsLocalPaths | None:
    """The storage inside all wrappers if it is one of local files; None for any other."""
    inside = unwrap(storage)
    return inside if isinstance(inside, SupportsLocalPaths) else None


def find_local_root(storage: Storage) -> Path | None:
    """The root folder of a storage of local files, wrapped or not; None for any other."""
    paths = find_local_paths(storage)
    return None if paths is None else Path(paths.local_root)


def uses_page_cache(storage: Storage) -> bool:
    """True if reads of this storage may come out of this machine's page cache."""
    paths = find_local_paths(storage)
    return paths is not None and paths.uses_page_cache


def find_folder_tree(storage: Storage) -> FolderTree | None:
    """The folders of a storage on a file system, wrapped or not; None for any other."""
    inside = unwrap(storage)
    return inside.tree if isinstance(inside, SupportsFolders) else None


def prefer_direct_access(storage: Storage, *, reads: str | None = None) -> Storage:
    """The best access to the same tree for large files that are invisible until they are committed.

    With `reads`, the key of one of the files, it is for reading alone, and nothing is written.
    """
    return storage.past_cache(reads) if isinstance(storage, SupportsDirectAccess) else storage


def defer_sync(storage: Storage, what: Deferred) -> Storage:
    """The same tree, but what is finished need not survive a power cut yet, or only its bytes do.

    `sync_names` makes the names survive that a rank has written so. Of "all", nothing does: for notes to
    other processes of today. Sizes are compared with what was written when the caller lists all objects.
    """
    return storage.deferring(what) if isinstance(storage, SupportsDeferredSync) else storage


def sync_names(storage: Storage, folder: str) -> None:
    """Make the names directly in a folder survive a power cut; object services have nothing to do."""
    if (tree := find_folder_tree(storage)) is not None:
        tree.sync(folder)


def submit_or_run(
    threads: Executor,
    work: Callable[Arguments, Result],
    *arguments: Arguments.args,
    **options: Arguments.kwargs,
) -> Future[Result]:
    """Run `work` on another thread, or on this one if no more can be started: that only takes longer."""
    try:
        return threads.submit(work, *arguments, **options)
    except RuntimeError:
        done = Future[Result]()
        try:
            done.set_result(work(*arguments, **options))
        except (OSError, PenstockError) as error:
            done.set_exception(error)
        return done


def no_thread(error: RuntimeError) -> Unavailable:
    """The error if no thread can be started for work that must not block this one."""
    return Unavailable(
        f"No more threads can be started: {error}",
        fix="Raise the job's limit of threads (ulimit -u, the container's pids), or of memory (ulimit -v).",
    )


def name_mount(storage: Storage) -> str:
    """An id shared by processes that can make each other's changes in a folder durable; "" if unknown.

    They run on the same kernel and reach the file system through the same mount.
    """
    root, kernel = find_local_root(storage), current_process().kernel
    return f"{kernel} {os.stat(root).st_dev}" if root and kernel and os.path.exists(root) else ""


def find_span_trace(storage: Storage) -> RecordSpan | None:
    """The function that adds spans to the trace of a storage's requests; None if it is not traced."""
    while isinstance(storage, WrappedStorage):
        record: RecordSpan | None = getattr(storage, "record_span", None)
        if record is not None:
            return record
        storage = storage.inside
    return None


def require_conditional_writes(storage: Storage) -> SupportsConditionalWrites:
    """The storage inside all wrappers, if it supports conditional writes; else `Unavailable`."""
    inside = unwrap(storage)
    if not isinstance(inside, SupportsConditionalWrites) or not inside.has_conditions:
        raise Unavailable(
            "This storage has neither folders that can be renamed nor conditional writes",
            where=storage.uri,
            fix="Commit checkpoints to file:// or direct://, or to s3:// or az:// with client=obstore.",
        )
    return inside
