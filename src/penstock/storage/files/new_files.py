"""Files that do not exist yet: written under a hidden name, made durable, and then given their own.

One by one (`FileSink`), or many small ones together (`NewFileGroup`). Invariant: a name appears in one step,
and after all bytes of its file are durable, so that a crash leaves whole files and hidden ones.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.errors import ShortTransfer, StorageError
from penstock.storage.files.file_io import FileAccess, FileWriter, OpenFile
from penstock.storage.files.folders import VerifiedFolders
from penstock.storage.files.system_calls import map_name_clash, map_os_error, translate_os_errors
from penstock.storage.protocol import ObjectInfo, Release

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class NewFile:
    """A file that is being written at `written_path`, to become the object `key` at `final_path`."""

    key: str
    file: OpenFile
    written_path: str
    final_path: str
    declared_bytes: int | None
    fsync: bool
    keep_name: bool
    is_open: bool = True
    is_published: bool = False

    def close(self) -> None:
        """Close the file. Safe twice. Network file systems report late write errors here."""
        if self.is_open:
            self.is_open = False
            self.file.calls.close(self.file.descriptor)

    def publish(self) -> None:
        """Give the file its final name; the folder is not synced."""
        if self.written_path != self.final_path:
            try:
                self.file.calls.rename(self.written_path, self.final_path)
            except OSError as error:
                raise map_name_clash(error, self.file.uri) from error
        self.is_published = True

    def discard(self) -> None:
        """Close the file, and remove it unless it is published. What cannot be removed, the log names."""
        with self._logged_failures("close"):
            self.close()
        if not self.is_published:
            self.is_published = True
            with self._logged_failures("remove"):
                self.file.calls.unlink(self.written_path)

    @contextmanager
    def _logged_failures(self, doing: str) -> Iterator[None]:
        # Raised, a failure to clean up would hide why the object was given up.
        try:
            yield
        except FileNotFoundError:
            logger.debug("%s was already gone", self.written_path)
        except OSError as error:
            logger.warning("Could not %s an unfinished object: %s (%s)", doing, self.written_path, error)


class FileSink:
    """A `Sink` into a file.

    `finish` writes out, compares sizes, cuts padding, fsyncs the file, closes, renames, fsyncs the folder:
    the final name appears in one step, after all bytes are safe, and a crash before it leaves a file that is
    never listed. If only the folder's fsync fails, the whole object stays visible. `sync` does what comes
    before the rename, and leaves the rest to `finish`.
    """

    def __init__(self, new: NewFile, writer: FileWriter, folders: VerifiedFolders) -> None:
        self._new = new
        self._file = new.file
        self._writer = writer
        self._folders = folders
        self._synced: os.stat_result | None = None
        self._is_ended = False

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        """Append `buffer`; `release` is called exactly once, also where this raises."""
        if self._is_ended or self._synced is not None:
            if release is not None:
                release()
            raise self._ended()
        self._writer.append(buffer, release)

    def sync(self) -> None:
        """Complete, check and make durable, but do not publish yet."""
        if self._is_ended:
            raise self._ended()
        # Set first: after a failure below only `abort` is left.
        self._is_ended = True
        self._synced = self._complete()
        self._is_ended = False

    def finish(self) -> ObjectInfo:
        if self._is_ended:
            raise self._ended()
        # As in `sync`.
        self._is_ended = True
        facts = self._synced or self._complete()
        self._new.publish()
        if self._new.keep_name:
            self._folders.sync_folder(os.path.dirname(self._new.final_path))
        return ObjectInfo(key=self._new.key, size_bytes=facts.st_size, modified_s=facts.st_mtime)

    def abort(self) -> None:
        """Remove what was written. What cannot be removed stays hidden, and the log names it."""
        self._is_ended = True
        self._writer.give_up()
        self._new.discard()

    def _complete(self) -> os.stat_result:
        self._writer.complete()
        self._check_size("declared", self._new.declared_bytes)
        with translate_os_errors("Finishing", self._file.uri):
            return self._finish_content()

    def _finish_content(self) -> os.stat_result:
        calls, descriptor = self._file.calls, self._file.descriptor
        if self._writer.padding_bytes:
            calls.ftruncate(descriptor, self._writer.size_bytes)
        facts = calls.fstat(descriptor)
        self._check_size("stored", facts.st_size)
        if self._new.fsync:
            calls.fsync(descriptor)
        self._new.close()
        return facts

    def _ended(self) -> StorageError:
        return StorageError(
            "The object is already finished or aborted", uri=self._file.uri, fix="Create it again."
        )

    def _check_size(self, which: str, size_bytes: int | None) -> None:
        submitted_bytes = self._writer.size_bytes
        if size_bytes is None or size_bytes == submitted_bytes:
            return
        expected, actual = (
            (size_bytes, submitted_bytes) if which == "declared" else (submitted_bytes, size_bytes)
        )
        raise ShortTransfer(
            f"{submitted_bytes} bytes were submitted, but {size_bytes} {which}",
            uri=self._file.uri,
            expected_bytes=expected,
            actual_bytes=actual,
            fix="Submit exactly the size given to create(), and let no other process write this file.",
        )


class NewFileGroup:
    """Small files that are written in turn and then made durable together, for a fraction of the cost.

    An fsync commits the journal for what is new in it. All bytes of a group, and what they change in the
    journal, are on their way to the disk before the first fsync, so that its commit serves the others.
    Each file gets its name after its own fsync, as a `FileSink` gives it.
    """

    def __init__(self, folders: VerifiedFolders) -> None:
        self._folders = folders
        self._files: list[NewFile] = []

    def add(self, new: NewFile, access: FileAccess, content: memoryview) -> None:
        """Write the content of a file; its buffer may then be reused."""
        self._files.append(new)
        file = new.file
        try:
            if access.write(file, content):
                file.calls.ftruncate(file.descriptor, len(content))
            if new.fsync:
                file.calls.start_writeback(file.descriptor)
        except StorageError:
            raise
        except OSError as error:
            raise map_os_error(error, "Writing", file.uri) from error

    def finish(self) -> None:
        unsynced = [new for new in self._files if new.fsync]
        try:
            for new in unsynced:
                new.file.calls.await_writeback(new.file.descriptor)
            for new in self._files:
                if new.fsync:
                    new.file.calls.fsync(new.file.descriptor)
                new.close()
            for new in self._files:
                new.publish()
        except StorageError:
            raise
        except OSError as error:
            raise map_os_error(error, "Finishing", new.file.uri) from error
        for folder in {os.path.dirname(new.final_path) for new in self._files if new.keep_name}:
            self._folders.sync_folder(folder)

    def discard(self) -> None:
        """Remove what is not published; after `finish`, nothing."""
        for new in self._files:
            if new.is_open or not new.is_published:
                new.discard()
