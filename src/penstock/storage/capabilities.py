"""Optional capabilities of a `Storage`, each a `Supports...` protocol, and the functions that look for them.

Callers ask what a `Storage` can do and never look at its URI, so a back end from another package works like a
built-in one. Invariant: visible state changes atomically, so that a crash leaves the state either before or
after the change.
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
    """A `Storage` whose objects are files of a file system that is mounted on this machine."""

    local_root: str
    """The absolute path of the folder that holds all objects. It may not exist yet."""

    uses_page_cache: bool
    """True if reads and writes go through this machine's page cache."""

    def local_path(self, key: str) -> str:
        """Return the path of the object's file; raise `ObjectNotFound` if the file's folder is missing."""


@runtime_checkable
class SupportsEndpoints(Protocol):
    """A `Storage` that communicates with a service: its bytes cross this machine's network interfaces."""

    endpoints: Sequence[str]
    """The URLs of the service."""


@runtime_checkable
class SupportsFolders(Protocol):
    """A `Storage` on a file system."""

    tree: FolderTree
    """The storage's folders."""


@runtime_checkable
class SupportsConditionalWrites(Protocol):
    """A `Storage` that writes a small object only if no other writer came first."""

    has_conditions: bool
    """True if the storage's client and service support conditional writes."""

    def write_if(self, key: str, content: bytes, *, replaces: str | None) -> ObjectInfo:
        """Write an object if the existing one has the checksum `replaces` or, for None, if none exists.

        Raises `AlreadyThere` if the condition does not hold.
        """


@runtime_checkable
class SupportsDirectAccess(Protocol):
    """A `Storage` on a file system that can also access its files past the page cache."""

    def past_cache(self, reads: str | None = None) -> Storage:
        """Return a storage of this tree that bypasses the page cache, or itself if that is impossible.

        It is for large files and callers with their own commit: files are written under their final names
        immediately, and the names survive a power failure only after `sync_names`. Callers that only read
        pass the key of a file to read, and then nothing is written to find out what the file system supports.
        """


Deferred = Literal["names", "all"]


@runtime_checkable
class SupportsDeferredSync(Protocol):
    """A `Storage` that can leave a part of finishing each object to its caller.

    For files, that is making their names durable; for objects, comparing their sizes.
    """

    def deferring(self, what: Deferred) -> Storage:
        """Return a storage of this tree that omits the work `what`; see `defer_sync`."""


SpanValue = int | float | str
"""The value of a span's argument."""

RecordSpan = Callable[[str, str, int, int, Mapping[str, SpanValue]], None]
"""Records what the calling thread did: name, category, start and end in ns of CLOCK_MONOTONIC, arguments."""


Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def unwrap(storage: Storage) -> Storage:
    """Return the storage inside all wrappers."""
    while isinstance(storage, WrappedStorage):
        storage = storage.inside
    return storage


def find_local_paths(storage: Storage) -> SupportsLocalPaths | None:
    """Return the storage inside all wrappers if its objects are local files; otherwise None."""
    inside = unwrap(storage)
    return inside if isinstance(inside, SupportsLocalPaths) else None


def find_local_root(storage: Storage) -> Path | None:
    """Return the root folder of a storage of local files, wrapped or not; None for any other storage."""
    paths = find_local_paths(storage)
    return None if paths is None else Path(paths.local_root)


def uses_page_cache(storage: Storage) -> bool:
    """Return True if reads may be served from this machine's page cache."""
    paths = find_local_paths(storage)
    return paths is not None and paths.uses_page_cache


def find_folder_tree(storage: Storage) -> FolderTree | None:
    """Return the folders of a storage on a file system, wrapped or not; None for any other storage."""
    inside = unwrap(storage)
    return inside.tree if isinstance(inside, SupportsFolders) else None


def prefer_direct_access(storage: Storage, *, reads: str | None = None) -> Storage:
    """Return the best access to the same tree for large files that stay invisible until the caller commits.

    With `reads`, the key of one of the files, the result is for reading only, and nothing is written.
    """
    return storage.past_cache(reads) if isinstance(storage, SupportsDirectAccess) else storage


def defer_sync(storage: Storage, what: Deferred) -> Storage:
    """Return the same storage, but leave part of the work that makes objects durable to the caller.

    With "names", an object's bytes are durable, and its name survives once the rank that wrote it has called
    `sync_names`. With "all", nothing is durable, which suits notes to other running processes. Object storage
    skips verifying sizes in both cases: the caller must compare them with a listing.
    """
    return storage.deferring(what) if isinstance(storage, SupportsDeferredSync) else storage


def sync_names(storage: Storage, folder: str) -> None:
    """Make the names directly in a folder durable. Does nothing on object storage."""
    if (tree := find_folder_tree(storage)) is not None:
        tree.sync(folder)


def submit_or_run(
    threads: Executor,
    work: Callable[Arguments, Result],
    *arguments: Arguments.args,
    **options: Arguments.kwargs,
) -> Future[Result]:
    """Run `work` in another thread, or, if no more threads can be started, in this one, which is slower."""
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
    """Return the error to raise if no thread can be started for work that must not block the caller."""
    return Unavailable(
        f"No more threads can be started: {error}",
        fix="Raise the job's limit on threads (ulimit -u, the container's pids) or on memory (ulimit -v).",
    )


def name_mount(storage: Storage) -> str:
    """Return an ID shared by processes that can make each other's changes in a folder durable, or "".

    Such processes run on the same kernel and reach the file system through the same mount.
    """
    root, kernel = find_local_root(storage), current_process().kernel
    return f"{kernel} {os.stat(root).st_dev}" if root and kernel and os.path.exists(root) else ""


def find_span_trace(storage: Storage) -> RecordSpan | None:
    """Return the function that adds spans to the trace of `storage`, or None if there is no trace."""
    while isinstance(storage, WrappedStorage):
        record: RecordSpan | None = getattr(storage, "record_span", None)
        if record is not None:
            return record
        storage = storage.inside
    return None


def require_conditional_writes(storage: Storage) -> SupportsConditionalWrites:
    """Return the storage inside all wrappers; raise `Unavailable` if it has no conditional writes."""
    inside = unwrap(storage)
    if not isinstance(inside, SupportsConditionalWrites) or not inside.has_conditions:
        raise Unavailable(
            "This storage has neither folders that can be renamed nor conditional writes",
            where=storage.uri,
            fix="Commit checkpoints to file:// or direct://, or to s3:// or az:// with client=obstore.",
        )
    return inside
