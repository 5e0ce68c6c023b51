"""Files as objects: `file:///path` through the page cache, `direct:///path` past it.

`files.folders` maps keys to paths, `files.file_io` transfers bytes, and `FileSink` commits a finished object.
Invariant: whatever `list` shows is a complete object, unless publish=in_place.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Final, Literal

from penstock.environment import Environment
from penstock.errors import (
    AccessRefused,
    ObjectNotFound,
    StorageError,
    Unavailable,
    UsageError,
)
from penstock.storage import Storage, capabilities
from penstock.storage.capabilities import Deferred
from penstock.storage.files.file_io import (
    FileAccess,
    FileSink,
    FileSource,
    FileWriter,
    NewFile,
    OpenFile,
    write_together,
)
from penstock.storage.files.folders import FolderEntry, FolderTree, VerifiedFolders
from penstock.storage.files.system_calls import (
    REAL_CALLS,
    FileCalls,
    close_after_reading,
    map_name_clash,
    map_os_error,
    translate_os_errors,
)
from penstock.storage.protocol import Counters, ObjectInfo, OptionValue, check_key, check_prefix
from penstock.storage.uri import Location, parse_options

logger = logging.getLogger(__name__)

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""O_NONBLOCK, because opening a named pipe would otherwise wait for its other end; O_NOFOLLOW, so that links
are resolved and checked here (`_open_descriptor`).
"""
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)
_UNFINISHED = re.compile(r"\.penstock-[0-9a-f]{16}\.unfinished")


def unfinished_name() -> str:
    """Return a new name for an object that must not be visible yet."""
    return f".penstock-{secrets.token_hex(8)}.unfinished"


def is_unfinished(name: str) -> bool:
    """Return True if the name is one that only unfinished objects have."""
    return name.startswith(".penstock-") and _UNFINISHED.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """Options for writing files."""

    fsync: bool = True
    """True if `finish` waits until the file and its name survive a power failure."""
    publish: Literal["rename", "in_place"] = "rename"
    """"rename": an unfinished object is never visible. "in_place": for callers with their own commit
    protocol.
    """
    writes_in_flight: int = 1
    """The number of a sink's writes in flight: 1 writes in the caller's thread, n > 1 in n threads."""
    preallocate: bool = True
    """Allocate the blocks of an object of declared size before writing, so that a full disk fails early."""

    def __post_init__(self) -> None:
        if self.writes_in_flight < 1:
            raise UsageError("writes_in_flight is below 1", fix="Allow at least one write at a time.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectOptions(FileOptions):
    """Options for writing and reading files past the page cache."""

    alignment_bytes: int = 4096
    """Addresses, offsets and lengths are multiples of this, as the device requires."""
    bounce_bytes: int = 4 * 1024 * 1024
    """The size of the buffers through which unaligned bytes pass."""

    def __post_init__(self) -> None:
        FileOptions.__post_init__(self)
        if self.alignment_bytes < 512 or self.alignment_bytes & (self.alignment_bytes - 1):
            raise UsageError(
                f"alignment_bytes={self.alignment_bytes} is not a power of two of at least 512",
                fix="Use the device's block size, 4096 on nearly all.",
            )
        if self.bounce_bytes < self.alignment_bytes or self.bounce_bytes % self.alignment_bytes:
            raise UsageError(
                f"bounce_bytes={self.bounce_bytes} is not a multiple of alignment_bytes",
                fix=f"Use a multiple of {self.alignment_bytes}.",
            )


def open_files(location: Location, _environment: Environment, _rank: int) -> FileStorage:
    """Return the files below a folder, which the first write creates; `direct://` bypasses the page cache.

    The first use raises `Unavailable` if the file system does not support direct I/O.
    """
    kind = DirectOptions if location.scheme == "direct" else FileOptions
    return FileStorage(location, parse_options(kind, location.options, where=location.uri))


def open_local(folder: str | os.PathLike[str]) -> FileStorage:
    """Return files below a local folder with the default options. For Penstock's own records."""
    return FileStorage(Location("file", os.path.abspath(folder)), FileOptions())


class FileStorage:
    """A `Storage` of files.

    Symbolic links are followed within the root; those that lead out of it are refused.
    """

    def __init__(
        self,
        location: Location,
        options: FileOptions,
        *,
        calls: FileCalls = REAL_CALLS,
        folders: VerifiedFolders | None = None,
        keep_names: bool = True,
    ) -> None:
        """Prepare access; nothing is opened yet. `folders` may be shared with another object for this tree.

        Without `keep_names`, the caller makes the names durable; see `defer_sync`.
        """
        self._access = FileAccess()
        if isinstance(options, DirectOptions):
            self._access = FileAccess(options.alignment_bytes, options.bounce_bytes)
        self._location = location
        self.uri = location.uri
        self.local_root = location.root
        self.uses_page_cache = not self._access.is_direct
        self.options: Mapping[str, OptionValue] = {
            "access": "direct" if self._access.is_direct else "buffered",
            **asdict(options),
        }
        self.counters = Counters()
        self._options = options
        self._calls = calls
        self._keep_names = keep_names and options.fsync
        self._folders = folders or VerifiedFolders(location.root, location.scheme, calls)
        self._others: dict[str, FileStorage] = {}
        self.tree = FolderTree(self._folders, calls)
        """Operations on whole folders: create, list, rename, exchange, remove."""

    def create(self, key: str, size_bytes: int | None = None) -> FileSink:
        """Begin a file, under a hidden name unless publish=in_place; missing folders are created."""
        new = self._begin(key, size_bytes)
        writer = FileWriter(new.file, self._access, self._options.writes_in_flight)
        return FileSink(new, writer, self._folders)

    def write_at_once(self, objects: Iterable[tuple[str, memoryview]]) -> None:
        """Write small files, which become durable together and then visible one after the other."""
        files = ((self._begin(key, len(content)), content) for key, content in objects)
        write_together(files, self._access, self._folders)

    def open(self, key: str) -> FileSource:
        """Open a file in its current state.

        Replacing the file does not affect the source; writing it in place does.
        """
        path = self.local_path(key)
        uri = self._folders.uri_of(path)
        file = OpenFile(self._open_path(path, _READ), uri, self._calls, self.counters)
        try:
            with translate_os_errors("Opening", uri):
                facts = self._calls.fstat(file.descriptor)
            _require_regular(facts, uri)
        except StorageError:
            close_after_reading(self._calls, file.descriptor)
            raise
        return FileSource(file, self._access, facts.st_size)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all files below `prefix`, each once, except unfinished ones; follow no links to folders.

        A missing root raises `ObjectNotFound`; a missing folder below it is empty.
        """
        folder = check_prefix(prefix, self.uri)
        self._folders.require_root()
        return self._list_folder(folder)

    def _list_folder(self, folder: str) -> Iterator[ObjectInfo]:
        num_links_out = 0
        try:
            top = self._folders.existing(folder)
        except ObjectNotFound:
            return
        root_length = len(os.path.join(self._folders.root, ""))
        with translate_os_errors("Listing", self._folders.uri_of(top)):
            for entry in self._folders.walk(top):
                try:
                    facts = self._stat_entry(entry)
                except AccessRefused:
                    num_links_out += 1
                    continue
                if facts is not None:
                    yield _describe(entry.path[root_length:], facts)
        if num_links_out:
            logger.warning(
                "%d symbolic links below %s lead out of the root and are not listed: "
                "open their targets as separate roots.",
                num_links_out,
                self._folders.uri_of(top),
            )

    def stat(self, key: str) -> ObjectInfo:
        path = self.local_path(key)
        uri = self._folders.uri_of(path)
        with translate_os_errors("Looking up", uri):
            facts = self._calls.lstat(path)
            if stat.S_ISLNK(facts.st_mode):
                facts = self._calls.lstat(self._folders.resolve(path))
        _require_regular(facts, uri)
        return _describe(key, facts)

    def delete(self, key: str) -> None:
        """Remove one file or symbolic link. Folders remain, even if empty."""
        path = self.local_path(key)
        with translate_os_errors("Deleting", self._folders.uri_of(path)):
            self._calls.unlink(path)

    def sync(self, prefix: str = "") -> None:
        """Flush every file and folder below `prefix`, and the folders from there up to the root."""
        folder = check_prefix(prefix, self.uri)
        self._folders.require_root()
        with suppress(ObjectNotFound):
            self._sync_tree(self._folders.existing(folder))
        while folder:
            folder = folder.rpartition("/")[0]
            with suppress(ObjectNotFound):
                self._folders.sync_folder(self._folders.existing(folder))

    def past_cache(self, reads: str | None = None) -> FileStorage:
        """Return a storage of the same tree that uses direct I/O where supported, and writes files in place.

        Support is tested on the file `reads`, if given, otherwise on a new file.
        """
        # Kept together with its bounce buffers: testing direct I/O and creating them takes longer than a
        # small file.
        if "direct" in self._others:
            return self._others["direct"]
        in_place = replace(self._options, publish="in_place")
        if not self._access.is_direct and not self._takes_direct_access(reads):
            return self._like_this(in_place)
        self._others["direct"] = self._like_this(DirectOptions(**asdict(in_place)), scheme="direct")
        return self._others["direct"]

    def deferring(self, what: Deferred) -> FileStorage:
        """Return a storage of this tree that leaves syncing names, or everything, to the caller."""
        if what not in self._others:
            options = self._options if what == "names" else replace(self._options, fsync=False)
            self._others[what] = self._like_this(options)
        return self._others[what]

    def _like_this(self, options: FileOptions, *, scheme: str | None = None) -> FileStorage:
        location = replace(self._location, scheme=scheme or self._location.scheme)
        return FileStorage(location, options, calls=self._calls, folders=self._folders, keep_names=False)

    def _takes_direct_access(self, reads: str | None) -> bool:
        """Test direct I/O on the file `reads` or on a new one: file systems report less than they support."""
        path, flags = "", _READ
        if reads is None:
            folder = self._folders.ready("", keep_names=self._keep_names)
            path, flags = os.path.join(folder, unfinished_name()), os.O_CREAT | os.O_EXCL | os.O_WRONLY
        try:
            descriptor = self._open_descriptor(path or self.local_path(reads or ""), flags | os.O_DIRECT)
            close_after_reading(self._calls, descriptor)
            takes = True
        except OSError as error:
            logger.info("%s is reached through the page cache: %s", self.uri, error)
            takes = False
        # Some kernels create the file before they find that they cannot open it with O_DIRECT.
        if path:
            with translate_os_errors("Removing", self._folders.uri_of(path)), suppress(FileNotFoundError):
                self._calls.unlink(path)
        return takes

    def local_path(self, key: str) -> str:
        """Return the path of this key's file, existing or not; its folder exists and is inside the root."""
        folder, name = self._split(key)
        try:
            existing = self._folders.existing(folder)
        except ObjectNotFound as error:
            raise ObjectNotFound(
                "The folder of this object does not exist",
                uri=f"{self.uri.rstrip('/')}/{key}",
                fix=error.fix,
                errno=error.errno,
            ) from error
        return f"{existing}/{name}" if folder else os.path.join(existing, name)

    def _split(self, key: str) -> tuple[str, str]:
        folder, _, name = check_key(key, self.uri).rpartition("/")
        if is_unfinished(name):
            raise AccessRefused(
                f"The key {key!r} is a name for unfinished objects",
                uri=self.uri,
                fix="Choose a name that does not begin with .penstock-",
            )
        return folder, name

    def _begin(self, key: str, size_bytes: int | None) -> NewFile:
        folder, name = self._split(key)
        try:
            return self._begin_in(
                self._folders.ready(folder, keep_names=self._keep_names), key, name, size_bytes
            )
        except ObjectNotFound:
            # A remembered folder has been removed in the meantime: check and create it again, once.
            self._folders.forget()
            return self._begin_in(
                self._folders.ready(folder, keep_names=self._keep_names), key, name, size_bytes
            )

    def _begin_in(self, folder_path: str, key: str, name: str, size_bytes: int | None) -> NewFile:
        written_path = final_path = os.path.join(folder_path, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        if self._options.publish == "rename":
            written_path = os.path.join(folder_path, unfinished_name())
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = self._open_path(written_path, flags, shown_as=final_path)
        new = NewFile(
            key=key,
            file=OpenFile(descriptor, self._folders.uri_of(final_path), self._calls, self.counters),
            written_path=written_path,
            final_path=final_path,
            declared_bytes=size_bytes,
            fsync=self._options.fsync,
            keep_name=self._keep_names,
        )
        if size_bytes and self._options.preallocate:
            try:
                self._calls.fallocate(descriptor, size_bytes)
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    new.discard()
                    raise map_os_error(error, f"Allocating {size_bytes} bytes", new.file.uri) from error
        return new

    def _open_path(self, path: str, flags: int, *, shown_as: str | None = None) -> int:
        try:
            return self._open_descriptor(path, flags | (os.O_DIRECT if self._access.is_direct else 0))
        except StorageError:
            raise
        except OSError as error:
            uri = self._folders.uri_of(shown_as or path)
            if error.errno == errno.EINVAL and self._access.is_direct:
                # open(2) also fails with EINVAL if `path` is not a regular file; that error takes precedence.
                if os.path.exists(path):
                    _require_regular(os.stat(path), uri)
                    # Some kernels create the file before they find that they cannot open it with O_DIRECT.
                    if flags & os.O_EXCL:
                        self._calls.unlink(path)
                raise Unavailable(
                    "This file system does not support O_DIRECT",
                    where=uri,
                    fix="Use file:// instead of direct://, or a folder on a local disk.",
                ) from error
            raise (
                map_name_clash(error, uri) if flags & os.O_CREAT else map_os_error(error, "Opening", uri)
            ) from error

    def _open_descriptor(self, path: str, flags: int) -> int:
        try:
            return self._calls.open(path, flags, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        return self._calls.open(self._folders.resolve(path), flags, 0o666)

    def _stat_entry(self, entry: os.DirEntry[str]) -> os.stat_result | None:
        """Return the status of an object, or None if it no longer exists.

        Raises `AccessRefused` for a link that leads out.
        """
        try:
            if entry.is_symlink():
                facts = self._calls.lstat(self._folders.resolve(entry.path))
                return facts if stat.S_ISREG(facts.st_mode) else None
            if entry.is_file(follow_symlinks=False) and not is_unfinished(entry.name):
                return entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return None
        return None

    def _sync_tree(self, top: str) -> None:
        with translate_os_errors("Syncing", self._folders.uri_of(top)):
            for entry in self._folders.walk(top):
                with suppress(ObjectNotFound):
                    if entry.is_dir(follow_symlinks=False):
                        self._folders.sync_folder(entry.path)
                    elif entry.is_file(follow_symlinks=False) and not is_unfinished(entry.name):
                        self._folders.sync_file(entry.path)
        self._folders.sync_folder(top)


def _describe(key: str, facts: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=facts.st_size, modified_s=facts.st_mtime)


def _require_regular(facts: os.stat_result, uri: str) -> None:
    if not stat.S_ISREG(facts.st_mode):
        kind = "a folder" if stat.S_ISDIR(facts.st_mode) else "a device, a pipe or a socket"
        raise ObjectNotFound(
            f"This is {kind}, not an object", uri=uri, fix="Give the key of a file; list() shows them."
        )


STALE_S: Final = 600.0
"""An unfinished object that was not written to for this long belongs to a dead writer."""


def reclaim_unfinished(storage: Storage, *, older_than_s: float = STALE_S) -> int:
    """Remove unfinished objects not written to for `older_than_s` seconds; return how many there were.

    Object storage keeps unfinished uploads invisible; a lifecycle rule of the bucket removes them.
    """
    now_s = time.time()
    old = [name for name, entry in unfinished_objects(storage) if now_s - entry.modified_s >= older_than_s]
    tree = capabilities.find_folder_tree(storage)
    for name in old:
        assert tree is not None, "what has unfinished objects has folders"
        tree.remove(name)
    return len(old)


def unfinished_objects(storage: Storage) -> Iterator[tuple[str, FolderEntry]]:
    """Yield the name and entry of each unfinished object, of live and of dead writers."""
    tree = capabilities.find_folder_tree(storage)
    pending = [""] if tree is not None else []
    while tree is not None and pending:
        folder = pending.pop()
        for entry in tree.entries(folder):
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_folder:
                pending.append(name)
            elif is_unfinished(entry.name):
                yield name, entry
