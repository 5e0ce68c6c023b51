"""The folders below one root: verified to be inside it, created durably, walked, renamed, removed.

Every key becomes a path here. Invariant: no returned path leads out of the root through symbolic links, as
far as the tree shows when a folder is first used; verified folders are remembered.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from penstock.errors import AccessRefused, AlreadyThere, ObjectNotFound, StorageError, Unavailable
from penstock.storage.files.system_calls import FileCalls, map_name_clash, map_os_error, translate_os_errors
from penstock.storage.protocol import check_key, check_prefix

logger = logging.getLogger(__name__)

NUM_REMEMBERED = 4096
"""The largest number of folders remembered as checked; beyond it, the one checked first is forgotten."""
_INSIDE, _MADE, _DURABLE = 1, 2, 3
"""What is known of a folder: it is inside the root; it and its parents also exist; their names are also
durable.
"""


class VerifiedFolders:
    """The folders below one root, shared by a `FileStorage` and those derived from it with other options."""

    def __init__(self, root: str, scheme: str, calls: FileCalls) -> None:
        self.root = root
        self._below_root = os.path.join(root, "")
        self._scheme = scheme
        self._calls = calls
        self._known: dict[str, int] = {}
        self._lock = threading.Lock()
        self._root_facts: os.stat_result | None = None
        """The status of the root when it was first used."""

    def uri_of(self, path: str) -> str:
        """Return the URI of a path, for errors."""
        return f"{self._scheme}://{path}"

    def existing(self, folder: str) -> str:
        """Return the path of an existing folder inside the root."""
        path = f"{self._below_root}{folder}" if folder else self.root
        # Without the lock: a dict lookup is atomic, and a path that is missed is merely checked again.
        if path not in self._known:
            self.resolve(path)
            self._remember(path, _INSIDE)
            self._note_root()
        return path

    def ready(self, folder: str, *, keep_names: bool) -> str:
        """Return the path of a folder inside the root; create the folder and its parents if missing.

        With `keep_names`, the names survive a power failure.
        """
        path = os.path.join(self.root, folder) if folder else self.root
        wanted = _DURABLE if keep_names else _MADE
        if self._known.get(path, 0) >= wanted:
            return path
        self._make_root()
        level = ""
        for name in filter(None, folder.split("/")):
            parent = self.existing(level)
            level = f"{level}/{name}" if level else name
            self._make_folder(os.path.join(parent, name))
            # Checked after it exists: it may be a link that was there before.
            self.existing(level)
            # Even for an existing folder: the process that created it may not have made it durable yet.
            if keep_names:
                self.sync_folder(parent)
        self._remember(path, wanted)
        return path

    def make_inside(self, path: str) -> None:
        """Create a new folder in a verified one; raise `OSError` on failure."""
        self._calls.mkdir(path)
        self._remember(path, _MADE)

    def forget(self, *paths: str) -> None:
        """Forget what is known of these folders and all below them, or of all folders if none is given.

        They are checked and created again at their next use.
        """
        with self._lock:
            self._known = {
                known: level
                for known, level in self._known.items()
                if paths and not any(known == top or known.startswith(f"{top}/") for top in paths)
            }

    def _remember(self, path: str, level: int) -> None:
        with self._lock:
            if path not in self._known and len(self._known) >= NUM_REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[path] = max(level, self._known.get(path, 0))

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        self._sync(path, os.O_DIRECTORY)

    def sync_file(self, path: str) -> None:
        """Make the bytes of a file durable."""
        self._sync(path, os.O_NOFOLLOW)

    def require_root(self) -> None:
        """Raise unless the root exists: a mistyped path should not look like an empty storage."""
        with translate_os_errors("Opening the root folder", self.uri_of(self.root)):
            facts = os.stat(self.root)
        if not stat.S_ISDIR(facts.st_mode):
            raise ObjectNotFound(
                "The root is not a folder",
                uri=self.uri_of(self.root),
                fix="Open its parent folder, and use the file's name as the key.",
            )

    def require_same_root(self) -> None:
        """Raise if the root's file system is no longer mounted: writes would go to the file system below it.

        The root counts as unmounted if it is a different folder, on a different device, with nothing in it
        but leases: an empty mount point. A file system that was mounted again may have a different device or
        inode number.
        """
        before, path = self._root_facts, self.root
        if before is None:
            return
        while not os.path.lexists(path):
            path = os.path.dirname(path)
        with translate_os_errors("Looking at the root folder", self.uri_of(self.root)):
            facts = os.stat(path)
            is_gone = facts.st_dev != before.st_dev
            if is_gone and path == self.root:
                with os.scandir(path) as listing:
                    has_files = not all(entry.name.startswith(".") for entry in listing)
                is_gone = facts.st_ino != before.st_ino and not has_files
        if is_gone:
            raise StorageError(
                "The file system of this folder is no longer mounted",
                uri=self.uri_of(self.root),
                fix="Mount it again, and repeat what failed.",
            )

    def resolve(self, path: str) -> str:
        """Return `path` with all symbolic links followed; raise if it is outside the root."""
        with translate_os_errors("Resolving the path", self.uri_of(path)):
            real = os.path.realpath(path, strict=True)
            real_root = os.path.realpath(self.root, strict=True)
        if real != real_root and not real.startswith(real_root.rstrip("/") + "/"):
            raise AccessRefused(
                f"A symbolic link leads out of the root, to {real}",
                uri=self.uri_of(path),
                fix="Open the target of the link as a separate root.",
            )
        return real

    def walk(self, top: str) -> Iterator[os.DirEntry[str]]:
        """Yield every entry below the folder `top`, even if others vanish; links are never followed.

        Memory grows only with the depth: the names in a folder are streamed, not collected.
        """
        levels = _listing(self._calls, top)
        try:
            while levels:
                entry = next(levels[-1], None)
                if entry is None:
                    levels.pop().close()
                    continue
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    levels += _listing(self._calls, entry.path)
        finally:
            for level in levels:
                level.close()

    def _make_root(self) -> None:
        """Create the root and its missing parents. Their names are always made durable."""
        self.require_same_root()
        missing: list[str] = []
        path = self.root
        while not os.path.lexists(path):
            missing.append(path)
            path = os.path.dirname(path)
        if missing and self._root_facts is not None:
            logger.warning(
                "%s was removed or renamed, with all that was in it: it is created again", self.root
            )
        for folder in reversed(missing):
            self._make_folder(folder)
            self.sync_folder(os.path.dirname(folder))
        self._note_root()

    def _note_root(self) -> None:
        if self._root_facts is None:
            with translate_os_errors("Looking at the root folder", self.uri_of(self.root)):
                self._root_facts = os.stat(self.root)

    def _sync(self, path: str, flags: int) -> None:
        with translate_os_errors("Syncing", self.uri_of(path)):
            descriptor = self._calls.open(path, os.O_RDONLY | flags, 0)
            try:
                self._calls.fsync(descriptor)
            finally:
                self._calls.close(descriptor)

    def _make_folder(self, path: str) -> None:
        try:
            self._calls.mkdir(path)
        except FileExistsError:
            return
        except OSError as error:
            raise map_name_clash(error, self.uri_of(path)) from error


def _listing(calls: FileCalls, path: str) -> list[os._ScandirIterator[str]]:
    """Return the open listing of a folder, or an empty list if it is gone or is not a folder."""
    try:
        return [calls.scandir(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []


_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderEntry:
    """One name in a folder.

    `is_plain` is True for regular files; links, devices and folders are not plain.
    """

    name: str
    is_folder: bool
    is_plain: bool
    size_bytes: int
    modified_s: float


class FolderTree:
    """Operations on whole folders below one root. Folders are named like keys; "" is the root.

    All methods raise `StorageError` or a subclass; if `move` or `exchange` raises, nothing has changed.
    """

    def __init__(self, folders: VerifiedFolders, calls: FileCalls) -> None:
        self._folders = folders
        self._calls = calls

    def make(self, folder: str, *, keep_name: bool = True) -> None:
        """Create a new folder, which must not exist, and its missing parents, durably.

        Without `keep_name`, the folder's own name survives a power failure only after a `sync` of its parent.
        """
        self._folders.require_same_root()
        path = self._path(folder, make_parent=True)
        try:
            self._folders.make_inside(path)
        except OSError as error:
            raise self._refusal(error, "Making a folder", path) from error
        if keep_name:
            self._folders.sync_folder(os.path.dirname(path))

    def entries(self, folder: str = "", *, prefix: str = "") -> Iterator[FolderEntry]:
        """Yield the names directly in a folder that begin with `prefix`, including unfinished objects.

        Empty if the folder does not exist; entries that vanish in the meantime are left out.
        """
        self._folders.require_same_root()
        try:
            path = self._folders.existing(check_prefix(folder, self._folders.uri_of(self._folders.root)))
            with translate_os_errors("Listing", self._folders.uri_of(path)):
                listing = self._calls.scandir(path)
        except ObjectNotFound:
            return
        with listing, translate_os_errors("Listing", self._folders.uri_of(path)):
            for entry in listing:
                if not entry.name.startswith(prefix):
                    continue
                try:
                    facts = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield FolderEntry(
                    name=entry.name,
                    is_folder=stat.S_ISDIR(facts.st_mode),
                    is_plain=stat.S_ISREG(facts.st_mode),
                    size_bytes=facts.st_size,
                    modified_s=facts.st_mtime,
                )

    def move(self, folder: str, to: str) -> None:
        """Rename a folder. Raises `AlreadyThere` if `to` is a file, or a folder that is not empty."""
        old, new = self._path(folder), self._path(to, make_parent=True)
        try:
            self._calls.rename(old, new)
        except OSError as error:
            raise self._refusal(error, "Renaming", new) from error
        self._folders.forget(old, new)

    def exchange(self, one: str, other: str) -> None:
        """Let two folders exchange their names atomically; raise `Unavailable` if the file system cannot."""
        paths = self._path(one), self._path(other)
        try:
            self._calls.exchange(*paths)
        except OSError as error:
            if error.errno in _CANNOT_EXCHANGE:
                raise Unavailable(
                    "This file system cannot exchange two folders in one step",
                    where=self._folders.uri_of(paths[1]),
                    fix="Keep checkpoints on a local or a parallel file system that can.",
                ) from error
            raise self._refusal(error, "Exchanging folders", paths[1]) from error
        self._folders.forget(*paths)

    def sync(self, folder: str = "", *, files: Sequence[str] = ()) -> None:
        """Make the names directly in a folder durable, as is needed after `move` and `exchange`.

        The bytes of `files` in the folder are synced at the same time: one commit of the file system's
        journal then serves all of them.
        """
        path = self._folders.existing(check_prefix(folder, self._folders.uri_of(self._folders.root)))
        with ThreadPoolExecutor(len(files) or 1) as threads:
            pending = []
            for file_path in [os.path.join(path, check_key(name, path)) for name in files]:
                try:
                    pending.append(threads.submit(self._folders.sync_file, file_path))
                except RuntimeError:
                    # No more threads can be started: without them, it only takes longer.
                    self._folders.sync_file(file_path)
            self._folders.sync_folder(path)
        for each in pending:
            each.result()

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content; do nothing if it is missing. Follows no links."""
        try:
            path = self._path(name)
        except ObjectNotFound:
            return
        with translate_os_errors("Removing", self._folders.uri_of(path)), suppress(FileNotFoundError):
            if stat.S_ISDIR(self._calls.lstat(path).st_mode):
                self._remove_below(path)
                self._folders.forget(path)
            else:
                self._calls.unlink(path)

    def _path(self, key: str, *, make_parent: bool = False) -> str:
        parent, _, name = check_key(key, self._folders.uri_of(self._folders.root)).rpartition("/")
        above = (
            self._folders.ready(parent, keep_names=True) if make_parent else self._folders.existing(parent)
        )
        return os.path.join(above, name)

    def _remove_below(self, path: str) -> None:
        """Remove everything below a folder, then the folder.

        Memory holds the names of one folder per level of depth.
        """
        with suppress(FileNotFoundError):
            with self._calls.scandir(path) as listing:
                entries = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in listing]
            for below, is_folder in entries:
                if is_folder:
                    self._remove_below(below)
                else:
                    with suppress(FileNotFoundError):
                        self._calls.unlink(below)
            self._calls.rmdir(path)

    def _refusal(self, error: OSError, doing: str, path: str) -> StorageError:
        uri = self._folders.uri_of(path)
        if error.errno in _TAKEN:
            return AlreadyThere(
                f"{doing} failed: the name is taken", uri=uri, fix="Choose another name.", errno=error.errno
            )
        return map_os_error(error, doing, uri)
