"""Measure how much of a file is in this node's page cache, read from the cache, and evict files from it.

Read benchmarks rely on this to start cold. Invariants: every figure is what the kernel reported
(cachestat, or mincore before Linux 6.5) after the attempt, even if pages cannot be dropped, as on tmpfs.
Bytes that cannot be mapped, because the file was truncated or the device failed, are read by read(2), which
raises the reason: only truncating a file while it is being copied ends the process (SIGBUS).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Final, Literal

import numpy as np

from penstock.errors import StorageError, Unavailable
from penstock.storage.aligned import PAGE_BYTES, copy_bytes, flat
from penstock.storage.capabilities import unwrap, uses_page_cache
from penstock.storage.files.file_io import FileSource
from penstock.storage.files.local_files import open_to_read
from penstock.storage.files.system_calls import libc, raise_on_failure, translate_os_errors
from penstock.storage.protocol import Counters, Source, Storage, WrappedSource, WrappedStorage

CACHESTAT = 451
"""The system call's number, which is the same on every architecture that Python supports except Alpha."""

Method = Literal["cachestat", "mincore"]

PageCounter = Callable[[int, int], tuple[int, int]]
"""Counts, given an open descriptor and its size in bytes, the resident pages and the unwritten ones among
them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """The part of some files that is in the page cache, in whole pages but never more than their size."""

    resident_bytes: int
    total_bytes: int
    method: Method

    @property
    def fraction(self) -> float:
        """Resident bytes divided by all bytes; 0 if there are none."""
        return self.resident_bytes / self.total_bytes if self.total_bytes else 0.0

    def __add__(self, other: Residency) -> Residency:
        return Residency(
            resident_bytes=self.resident_bytes + other.resident_bytes,
            total_bytes=self.total_bytes + other.total_bytes,
            method=other.method,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """The residency of files before and after an attempt to drop their pages."""

    before: Residency
    after: Residency

    def __add__(self, other: Eviction) -> Eviction:
        return Eviction(before=self.before + other.before, after=self.after + other.after)


class _CachestatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def count_by_cachestat(descriptor: int, size_bytes: int, offset: int = 0) -> tuple[int, int]:
    """Count pages by cachestat(2): one call for any size, without a mapping."""
    answer = _Cachestat()
    place = _CachestatRange(offset, size_bytes)
    raise_on_failure(libc().syscall(CACHESTAT, descriptor, ctypes.byref(place), ctypes.byref(answer), 0))
    return answer.cached, answer.dirty + answer.writeback


def count_by_mincore(descriptor: int, size_bytes: int) -> tuple[int, int]:
    """Count pages by mincore(2), which maps the file without reading it and returns a byte for each page.

    mincore does not report which pages are dirty, so all are assumed to be.
    """
    states = np.zeros(-(-size_bytes // mmap.PAGESIZE), dtype=np.uint8)
    with mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as mapping:
        start = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        result = libc().mincore(
            ctypes.c_void_p(start), ctypes.c_size_t(size_bytes), ctypes.c_void_p(states.ctypes.data)
        )
    raise_on_failure(result)
    resident = int(np.count_nonzero(states & 1))
    return resident, resident


COUNTERS: Mapping[Method, PageCounter] = MappingProxyType(
    {"cachestat": count_by_cachestat, "mincore": count_by_mincore}
)
"""Best first: if this kernel or file system does not support a method, the next one is used."""

_NOT_HERE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def measure_residency(file: FileSource, counters: Mapping[Method, PageCounter] = COUNTERS) -> Residency:
    """Measure how much of an open file is resident, by the first method that works here."""
    resident, _, method = _count_pages(file.descriptor, file.size_bytes, counters)
    return _residency(resident, file.size_bytes, method)


def _residency(num_pages: int, size_bytes: int, method: Method) -> Residency:
    """Return the residency of a file with `num_pages` resident pages."""
    resident_bytes = min(size_bytes, num_pages * mmap.PAGESIZE)
    return Residency(resident_bytes=resident_bytes, total_bytes=size_bytes, method=method)


def _count_pages(
    descriptor: int, size_bytes: int, counters: Mapping[Method, PageCounter]
) -> tuple[int, int, Method]:
    """Return the resident pages, those of them that may be unwritten, and the method that counted them."""
    if size_bytes == 0:
        return 0, 0, "cachestat"
    for method, count in counters.items():
        try:
            return *count(descriptor, size_bytes), method
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
    raise Unavailable(
        "This kernel does not report which pages are resident",
        where=", ".join(counters),
        fix="Use Linux 6.5 or later, or allow cachestat and mincore in the container's seccomp profile.",
    )


NUM_SAMPLED = 16
RESIDENT_SHARE = 0.99


def are_resident(storage: Storage, keys: Sequence[str]) -> bool:
    """Return True if these files can be read from this machine's page cache alone, judging by a few of them.

    False if that cannot be known, or if `storage` reads past the page cache.
    """
    if not uses_page_cache(storage) or not keys:
        return False
    try:
        for key in keys[:: -(-len(keys) // NUM_SAMPLED)]:
            with closing(unwrap(storage).open(key)) as file:
                found = measure_residency(file) if isinstance(file, FileSource) else None
            if found is None or found.resident_bytes < RESIDENT_SHARE * found.total_bytes:
                return False
    except (OSError, StorageError, Unavailable):
        return False
    return True


def evict_file(path: str) -> Eviction:
    """Write back and drop the pages of one file. Pages that another process maps or locks remain."""
    with translate_os_errors("Dropping pages", f"file://{path}"), open_to_read(path) as file:
        descriptor, left = file.fileno(), 0
        size_bytes = os.fstat(descriptor).st_size
        resident, unwritten, method = _count_pages(descriptor, size_bytes, COUNTERS)
        # The kernel drops only clean pages.
        if unwritten:
            os.fsync(descriptor)
        if resident:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            left, _, _ = _count_pages(descriptor, size_bytes, COUNTERS)
    return Eviction(
        before=_residency(resident, size_bytes, method), after=_residency(left, size_bytes, method)
    )


_CHUNK: Final = 256
_THREADS: Final = 16


def evict_files(paths: Iterable[str], advance: Callable[[int], None] = lambda _files: None) -> Eviction:
    """Drop the pages of these files; `advance` is called after every few hundred.

    Files without unwritten pages are not synced. Runs in several threads, because the calls may wait for a
    server or a device.
    """
    left = iter(paths)
    total = Eviction(before=_residency(0, 0, "cachestat"), after=_residency(0, 0, "cachestat"))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="penstock-evict") as threads:
        while chunk := tuple(islice(left, _CHUNK)):
            total = sum(threads.map(evict_file, chunk), total)
            advance(len(chunk))
    return total


POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14, which fails if touching the pages would end the process."""


class MappedStorage(WrappedStorage):
    """A `Storage` whose files are read from memory mappings.

    Wrappers inside it that observe or slow down reads remain in effect.
    """

    def open(self, key: str) -> Source:
        """Open and map a file. Empty files are not mapped, nor are files that the file system cannot map."""
        source = self.inside.open(key)
        if isinstance(source, FileSource) and source.size_bytes:
            # A file that was truncated since it was opened causes a ValueError.
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
        """Return a part of the mapping, or None if it is not in memory. It stays mapped while in use."""
        end, begin = offset + size_bytes, offset - offset % PAGE_BYTES
        if end > self.size_bytes or not size_bytes:
            return None
        try:
            # Beyond the end of a file, its last page contains zeros.
            if os.fstat(self._descriptor).st_size < end:
                return None
            # Mapping all of it by madvise takes longer than page faults, each of which maps several pages.
            if not self._is_resident(begin, end):
                self._pages.madvise(POPULATE_READ, begin, end - begin)
        except OSError:
            return None
        self._counters.add(requests=1, read_bytes=size_bytes)
        return self._view[offset:end]

    def _is_resident(self, begin: int, end: int) -> bool:
        try:
            found, _ = count_by_cachestat(self._descriptor, end - begin, begin)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            return False
        return found * PAGE_BYTES >= end - begin

    def close(self) -> None:
        """Close the file, which is unmapped now or with its last view. No thread may be reading."""
        self._view.release()
        with suppress(BufferError):
            self._pages.close()
        self.inside.close()
