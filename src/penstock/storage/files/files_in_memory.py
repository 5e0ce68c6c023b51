"""Files in the page cache, read out of a mapping, which takes about half of the time of read(2).

Invariant: bytes that cannot be mapped, because the file was cut or the device failed, are read by read(2),
which raises the reason. Only a file that is cut while it is being copied ends the process (SIGBUS).
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from contextlib import suppress

from penstock.storage.aligned import PAGE_BYTES, copy_bytes, flat
from penstock.storage.files.file_io import FileSource
from penstock.storage.protocol import Counters, Source, WrappedSource, WrappedStorage
from penstock.storage.residency import count_by_cachestat

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
