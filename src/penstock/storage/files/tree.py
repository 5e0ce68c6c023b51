"""Whole folders of one root: made, listed, renamed, exchanged and removed.

Above `folders`, which knows what lies inside the root. Invariant: a rename that raises has not happened;
whoever renames calls `sync` afterwards, so that failing to make it durable is told from failing to do it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.errors import AlreadyThere, ObjectNotFound, StorageError, Unavailable
from penstock.storage.files.calls import FileCalls, explaining, storage_failure
from penstock.storage.powers import Entry
from penstock.storage.uri import check_key, check_prefix

if TYPE_CHECKING:
    from penstock.storage.files.folders import Folders

_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


class FileTree:
    """The folders below one root; see `penstock.storage.powers.FolderTree`."""

    def __init__(self, folders: Folders, calls: FileCalls) -> None:
        self._folders = folders
        self._calls = calls

    def make(self, folder: str) -> None:
        """Make a new folder and what is missing above it."""
        path = self._path(folder, make_parent=True)
        try:
            self._calls.mkdir(path)
        except OSError as error:
            raise self._refusal(error, "Making a folder", path) from error
        self._folders.sync_folder(os.path.dirname(path))

    def entries(self, folder: str = "", *, prefix: str = "") -> Iterator[Entry]:
        """What lies directly in a folder; what vanishes meanwhile is left out."""
        try:
            path = self._folders.existing(check_prefix(folder, self._folders.uri_of(self._folders.root)))
            with explaining("Listing", self._folders.uri_of(path)):
                listing = self._calls.scandir(path)
        except ObjectNotFound:
            return
        with listing, explaining("Listing", self._folders.uri_of(path)):
            for found in listing:
                if not found.name.startswith(prefix):
                    continue
                try:
                    facts = found.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield Entry(
                    name=found.name,
                    is_folder=stat.S_ISDIR(facts.st_mode),
                    is_plain=stat.S_ISREG(facts.st_mode),
                    size_bytes=facts.st_size,
                    modified_s=facts.st_mtime,
                )

    def move(self, folder: str, to: str) -> None:
        """Rename a folder; rename(2) itself refuses to replace one that is not empty."""
        old, new = self._path(folder), self._path(to, make_parent=True)
        try:
            self._calls.rename(old, new)
        except OSError as error:
            raise self._refusal(error, "Renaming", new) from error
        self._folders.forget()

    def exchange(self, one: str, other: str) -> None:
        """Let two folders change names in one step."""
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
        self._folders.forget()

    def sync(self, folder: str = "") -> None:
        """Make the names directly in a folder survive a power cut."""
        self._folders.sync_folder(
            self._folders.existing(check_prefix(folder, self._folders.uri_of(self._folders.root)))
        )

    def remove(self, name: str) -> None:
        """Remove a file, or a folder and all in it."""
        try:
            path = self._path(name)
        except ObjectNotFound:
            return
        with explaining("Removing", self._folders.uri_of(path)):
            try:
                facts = self._calls.lstat(path)
            except FileNotFoundError:
                return
            if stat.S_ISDIR(facts.st_mode):
                self._remove_below(path)
                self._folders.forget()
            else:
                self._unlink(path)

    def _path(self, key: str, *, make_parent: bool = False) -> str:
        parent, _, name = check_key(key, self._folders.uri_of(self._folders.root)).rpartition("/")
        above = self._folders.ready(parent) if make_parent else self._folders.existing(parent)
        return os.path.join(above, name)

    def _remove_below(self, path: str) -> None:
        """Everything below, then the folder: one level of names is held in memory for each level of depth."""
        try:
            with self._calls.scandir(path) as listing:
                found = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in listing]
        except FileNotFoundError:
            return
        for below, is_folder in found:
            if is_folder:
                self._remove_below(below)
            else:
                self._unlink(below)
        try:
            self._calls.rmdir(path)
        except FileNotFoundError:
            return

    def _unlink(self, path: str) -> None:
        try:
            self._calls.unlink(path)
        except FileNotFoundError:
            return

    def _refusal(self, error: OSError, doing: str, path: str) -> StorageError:
        uri = self._folders.uri_of(path)
        if error.errno in _TAKEN:
            return AlreadyThere(
                f"{doing} failed: the name is taken", uri=uri, fix="Choose another name.", errno=error.errno
            )
        return storage_failure(error, doing, uri)
