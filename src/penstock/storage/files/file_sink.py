"""One file being written, from its hidden beginning to its durable name: the commit protocol of file storage.

finish: write out, compare sizes, cut padding, fsync the file, close, rename, fsync the folder. Invariant:
the final name appears in one step, after all bytes are safe; a crash before leaves a file never listed.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.errors import ShortTransfer, StorageError
from penstock.storage.files.system_calls import map_name_clash, translate_os_errors
from penstock.storage.protocol import ObjectInfo, Release

if TYPE_CHECKING:
    from penstock.storage.files.file_io import OpenFile
    from penstock.storage.files.folders import VerifiedFolders

logger = logging.getLogger(__name__)

_UNFINISHED = re.compile(r"\.penstock-[0-9a-f]{16}\.unfinished")


def unfinished_name() -> str:
    """A fresh name for an object that nobody may see yet."""
    return f".penstock-{secrets.token_hex(8)}.unfinished"


def is_unfinished(name: str) -> bool:
    """Whether `name` is one that only an unfinished object has."""
    return _UNFINISHED.fullmatch(name) is not None


class FileWriter(Protocol):
    """What a kind of access does to append to a file; used by one thread."""

    size_bytes: int
    padding_bytes: int

    def append(self, buffer: memoryview, release: Release | None) -> None:
        """Write `buffer` at the end; `release` is called once, even if this raises."""

    def complete(self) -> None:
        """Wait for everything; afterwards the file ends with `padding_bytes` to cut off."""

    def give_up(self) -> None:
        """Wait until no buffer is in use. Safe twice, raises nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A file that is being written at `written_path`, to become the object `key` at `final_path`."""

    key: str
    file: OpenFile
    written_path: str
    final_path: str
    declared_bytes: int | None
    fsync: bool


class FileSink:
    """A `Sink` into a file. `finish` failing in the folder's fsync alone leaves the whole object visible."""

    def __init__(self, new: NewFile, writer: FileWriter, folders: VerifiedFolders) -> None:
        self._new = new
        self._file = new.file
        self._writer = writer
        self._folders = folders
        self._is_ended = False
        self._is_open = True
        self._is_leftover = True

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        """Append `buffer`; `release` is called exactly once, also where this raises."""
        if self._is_ended:
            if release is not None:
                release()
            raise self._ended()
        self._writer.append(buffer, release)

    def finish(self) -> ObjectInfo:
        """Complete, check, make durable and publish; see the module for the order."""
        if self._is_ended:
            raise self._ended()
        self._is_ended = True
        self._writer.complete()
        self._check_size("declared", self._new.declared_bytes)
        with translate_os_errors("Finishing", self._file.uri):
            facts = self._settle()
        self._publish()
        return ObjectInfo(key=self._new.key, size_bytes=facts.st_size, modified_s=facts.st_mtime)

    def abort(self) -> None:
        """Remove what was written. What cannot be removed stays hidden, and the log names it."""
        self._is_ended = True
        self._writer.give_up()
        with self._logged_failures("close"):
            self._close()
        if self._is_leftover:
            self._is_leftover = False
            with self._logged_failures("remove"):
                self._file.calls.unlink(self._new.written_path)

    def _settle(self) -> os.stat_result:
        """Everything that must be true of the file before it gets its name."""
        calls, descriptor = self._file.calls, self._file.descriptor
        if self._writer.padding_bytes:
            calls.ftruncate(descriptor, self._writer.size_bytes)
        facts = calls.fstat(descriptor)
        self._check_size("stored", facts.st_size)
        if self._new.fsync:
            calls.fsync(descriptor)
        # Network file systems report late write errors here.
        self._close()
        return facts

    def _publish(self) -> None:
        if self._new.written_path != self._new.final_path:
            try:
                self._file.calls.rename(self._new.written_path, self._new.final_path)
            except OSError as error:
                raise map_name_clash(error, self._file.uri) from error
        self._is_leftover = False
        if self._new.fsync:
            self._folders.sync_folder(os.path.dirname(self._new.final_path))

    @contextmanager
    def _logged_failures(self, doing: str) -> Iterator[None]:
        """What fails while giving up is named in the log: raised, it would hide why we gave up."""
        try:
            yield
        except FileNotFoundError:
            logger.debug("%s was already gone", self._new.written_path)
        except OSError as error:
            logger.warning("Could not %s an unfinished object: %s (%s)", doing, self._new.written_path, error)

    def _ended(self) -> StorageError:
        return StorageError(
            "The object was finished or aborted before", uri=self._file.uri, fix="Create it anew."
        )

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._file.calls.close(self._file.descriptor)

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
            fix="Submit exactly what create() was told, and let nobody else write this file.",
        )
