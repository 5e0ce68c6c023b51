"""Files whose bytes are in memory when they are wanted: mapped from the page cache, or read ahead past it.

Copying out of a mapping takes about half of what read(2) does. Invariant: bytes that cannot be mapped or read
ahead, because the file was cut or the device failed, are read by read(2), which says why. Only a file that is
cut while it is being copied ends the process (SIGBUS).
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.storage.aligned import PAGE_BYTES, copy_bytes, flat, round_up
from penstock.storage.capabilities import find_local_paths, prefer_direct_access, uses_page_cache
from penstock.storage.files.file_io import FileSource
from penstock.storage.files.system_calls import translate_os_errors
from penstock.storage.protocol import Counters, Source, Storage, WrappedSource, WrappedStorage
from penstock.storage.residency import are_resident, count_by_cachestat

logger = logging.getLogger(__name__)

POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14, which fails where touching the pages would end the process."""


class MappedStorage(WrappedStorage):
    """A storage whose files are read out of mappings; what wrappers inside watch or slow is left to them."""

    def open(self, key: str) -> Source:
        """Open and map a file; an empty one has nothing to map, and some file systems map none."""
        source = self.inside.open(key)
        if isinstance(source, FileSource) and source.size_bytes:
            # A file that was cut since it was opened is a ValueError.
            with suppress(OSError, ValueError):
                return MappedSource(source, self.counters)
        return source


class MappedSource(WrappedSource):
    """An open file, mapped until it is closed."""

    def __init__(self, inside: FileSource, counters: Counters) -> None:
        super().__init__(inside)
        self._counters = counters
        self._descriptor = inside.descriptor
        self._pages = mmap.mmap(
            inside.descriptor, inside.size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ
        )
        self._view = memoryview(self._pages)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Copy from the mapping."""
        wanted = flat(buffer)
        found = self.view(offset, len(wanted))
        if found is None:
            self.inside.read_into(offset, buffer)
        else:
            copy_bytes(wanted, found)

    def view(self, offset: int, size_bytes: int) -> memoryview | None:
        """A part of the mapping, of pages that are in memory now. It stays mapped as long as it is used."""
        end, begin = offset + size_bytes, offset - offset % PAGE_BYTES
        if end > self.size_bytes or not size_bytes:
            return None
        try:
            # Behind a file's end, its last page has zeros.
            if os.fstat(self._descriptor).st_size < end:
                return None
            # To map all of it by madvise takes longer than page faults, which map several pages at a time.
            if not self._is_resident(begin, end):
                self._pages.madvise(POPULATE_READ, begin, end - begin)
        except OSError:
            return None
        self._counters.add(requests=1, read_bytes=size_bytes)
        return self._view[offset:end]

    def _is_resident(self, begin: int, end: int) -> bool:
        try:
            found = count_by_cachestat(self._descriptor, end - begin, begin).resident
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                raise
            return False
        return found * PAGE_BYTES >= end - begin

    def close(self) -> None:
        """Close the file and unmap it, or leave the latter to the last view; no thread may be reading."""
        self._view.release()
        with suppress(BufferError):
            self._pages.close()
        self.inside.close()


LEAST_STEP_BYTES = 1 << 20


@dataclass(slots=True)
class _AheadFile:
    """A file of which something is read ahead: what is to be read, and how much of that has been."""

    source: Source
    path: str
    identity: tuple[int, int]
    content: memoryview
    num_read: int = 0


class ReadAhead:
    """Reads the first bytes of files that a rank most likely wants, in a thread, while the load is planned.

    Only local files past the page cache, if `is_likely` says that it is worth it. What nobody wants is
    forgotten, and what cannot be read is left to the load, which says why.
    """

    def __init__(
        self,
        storage: Storage,
        keys: Sequence[str],
        memory: Callable[[], memoryview],
        is_likely: Callable[[], bool],
    ) -> None:
        self._storage = storage
        self._keys = keys
        self._memory = memory
        self._is_likely = is_likely
        self._files: dict[str, _AheadFile] = {}
        self._is_stopped = False
        self._is_over = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="penstock-read-ahead")

    def begin(self) -> None:
        """Open the files, and begin to read them.

        Small reads that others wait for come before this, or the device makes them wait for all of it. Files
        are opened here because the interpreter is busy with the plan: the thread would get it much later.
        """
        try:
            self._open_files()
            self._is_over = not self._files
            if self._files:
                self._thread.start()
        except (PenstockError, RuntimeError) as error:
            self._is_over = True
            logger.info("Nothing is read ahead: %s", error)

    def stop(self) -> None:
        """Begin no further request. A load reads the rest itself: one thread beside its own would be last."""
        with self._changed:
            self._is_stopped = True

    def open(self, key: str) -> Source | None:
        """A file of which some is read ahead; None for others, and for one that is no longer of this name."""
        file = self._files.get(key)
        return None if file is None or _identify(file.path) != file.identity else _AheadSource(self, file)

    def wait_for(self, file: _AheadFile, end: int) -> memoryview:
        """The first bytes of a file, up to `end`, once they are there; fewer if no more are read ahead."""
        end = min(end, len(file.content))
        with self._changed:
            self._changed.wait_for(lambda: file.num_read >= end or self._is_over)
        return file.content[: min(file.num_read, end)]

    def close(self) -> None:
        """End the thread and close the files; what was read is not used any more."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()
        for file in self._files.values():
            file.source.close()

    def _open_files(self) -> None:
        paths = find_local_paths(self._storage)
        if paths is None or not self._is_likely() or are_resident(self._storage, self._keys[:1]):
            return
        direct = prefer_direct_access(self._storage, reads=self._keys[0])
        if uses_page_cache(direct):
            return
        room = self._memory()
        for key in self._keys:
            if not room:
                return
            path = paths.local_path(key)
            identity, source = _identify(path), direct.open(key)
            file = self._files[key] = _AheadFile(source, path, identity, room[: source.size_bytes])
            room = room[round_up(len(file.content), PAGE_BYTES) :]

    def _work(self) -> None:
        with ExitStack() as always:
            always.callback(self._end)
            try:
                self._read()
            except PenstockError as error:
                logger.info("Nothing more is read ahead: %s", error)

    def _end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _read(self) -> None:
        """Read in few and large steps, as each waits for the interpreter; the last ones are soon there."""
        left_bytes = sum(len(file.content) for file in self._files.values())
        for file in self._files.values():
            while file.num_read < len(file.content) and not self._is_stopped:
                step_bytes = max(round_up(left_bytes // 2, PAGE_BYTES), LEAST_STEP_BYTES)
                step = file.content[file.num_read :][:step_bytes]
                file.source.read_into(file.num_read, step)
                left_bytes -= len(step)
                with self._changed:
                    file.num_read += len(step)
                    self._changed.notify_all()


def _identify(path: str) -> tuple[int, int]:
    """Of the file that has this name now."""
    with translate_os_errors("Looking at a file", f"file://{path}"):
        found = os.stat(path)
    return found.st_dev, found.st_ino


class _AheadSource(WrappedSource):
    """A file whose first bytes are read ahead."""

    def __init__(self, ahead: ReadAhead, file: _AheadFile) -> None:
        super().__init__(file.source)
        self._ahead = ahead
        self._file = file

    def view(self, offset: int, size_bytes: int) -> memoryview | None:
        """A part of what is read ahead."""
        content = self._ahead.wait_for(self._file, offset + size_bytes)[offset:]
        return content.toreadonly() if len(content) == size_bytes else None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Read what is not read ahead."""
        rest = flat(buffer)
        known = self._ahead.wait_for(self._file, offset + len(rest))[offset:]
        copy_bytes(rest[: len(known)], known)
        if len(known) < len(rest):
            self.inside.read_into(offset + len(known), rest[len(known) :])

    def close(self) -> None:
        """Leave the file open: whoever reads ahead closes it."""
