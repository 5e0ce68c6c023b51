"""Which part of a file is in the page cache of this node, and how to evict it, with proof.

The "cold" of a read benchmark relies on this. Invariant: a figure is what the kernel reported (cachestat, or
mincore before Linux 6.5) after the attempt, also where pages cannot be dropped, as on tmpfs.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import numpy as np

from penstock.errors import StorageError, Unavailable
from penstock.storage.capabilities import find_local_paths
from penstock.storage.files.system_calls import libc, map_os_error, raise_on_failure, translate_os_errors
from penstock.storage.protocol import Storage

CACHESTAT = 451
"""The system call's number: the same on every architecture that Python runs on, save Alpha."""

Method = Literal["cachestat", "mincore"]


class PageCounts(NamedTuple):
    """Pages of a file in the cache, and those of them that may not be written back yet."""

    resident: int
    unwritten: int


PageCounter = Callable[[int, int], PageCounts]
"""Counts the pages of an open descriptor, given its size in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """How much of some files is in the page cache, in whole pages but never more than their size."""

    resident_bytes: int
    total_bytes: int
    method: Method

    @property
    def fraction(self) -> float:
        """Resident part of all bytes; 0 for no bytes."""
        return self.resident_bytes / self.total_bytes if self.total_bytes else 0.0

    def __add__(self, other: Residency) -> Residency:
        return Residency(
            resident_bytes=self.resident_bytes + other.resident_bytes,
            total_bytes=self.total_bytes + other.total_bytes,
            method=other.method,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """What an attempt to drop pages achieved."""

    before: Residency
    after: Residency


class _CachestatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


class _Cachestats:
    """Calls cachestat(2) again and again with the same memory, for the same part of a file; for one thread.

    A size of 0 means up to the end.
    """

    def __init__(self, offset: int = 0, size_bytes: int = 0) -> None:
        self._answer = _Cachestat()
        self._places = ctypes.byref(_CachestatRange(offset, size_bytes)), ctypes.byref(self._answer)
        self._call = libc().syscall

    def count(self, descriptor: int) -> tuple[int, int]:
        """Resident pages, and unwritten ones of them."""
        answer = self._answer
        if result := self._call(CACHESTAT, descriptor, *self._places, 0):
            raise_on_failure(result)
        return answer.cached, answer.dirty + answer.writeback


def count_by_cachestat(descriptor: int, size_bytes: int, offset: int = 0) -> PageCounts:
    """Pages by cachestat(2): one call whatever the size, no mapping."""
    return PageCounts(*_Cachestats(offset, size_bytes).count(descriptor))


def count_by_mincore(descriptor: int, size_bytes: int) -> PageCounts:
    """Pages by mincore(2): maps the file without reading it, and gets a byte for each page.

    It does not say which pages are written back, so none of them may be.
    """
    states = np.zeros(-(-size_bytes // mmap.PAGESIZE), dtype=np.uint8)
    with mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as mapping:
        start = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        result = libc().mincore(
            ctypes.c_void_p(start), ctypes.c_size_t(size_bytes), ctypes.c_void_p(states.ctypes.data)
        )
    raise_on_failure(result)
    resident = int(np.count_nonzero(states & 1))
    return PageCounts(resident, resident)


COUNTERS: Mapping[Method, PageCounter] = MappingProxyType(
    {"cachestat": count_by_cachestat, "mincore": count_by_mincore}
)
"""Best first: where this kernel or file system lacks a method, the next one is used."""

_NOT_HERE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def measure_file_residency(path: str, counters: Mapping[Method, PageCounter] = COUNTERS) -> Residency:
    """How much of one file is resident, by the first method that works here."""
    with translate_os_errors("Asking for resident pages", f"file://{path}"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return _measure(descriptor, counters)
        finally:
            os.close(descriptor)


NUM_SAMPLED = 16
"""Files, and pieces of each: the kernel looks at every page that it is asked for."""
PIECE_PAGES = 1024
RESIDENT_SHARE = 0.99


def are_resident(storage: Storage, keys: Sequence[str]) -> bool:
    """Whether these files can be read from this machine's page cache alone, judged by pieces of a few.

    False where that cannot be known, and for storages that read past the page cache.
    """
    paths = find_local_paths(storage)
    if paths is None or not paths.uses_page_cache or not keys:
        return False
    try:
        for key in keys[:: -(-len(keys) // NUM_SAMPLED)]:
            found = measure_file_residency(paths.local_path(key), _SAMPLERS)
            if found.resident_bytes < RESIDENT_SHARE * found.total_bytes:
                return False
    except (StorageError, Unavailable):
        return False
    return True


def _count_by_pieces(descriptor: int, size_bytes: int) -> PageCounts:
    """Pages by cachestat(2) if all of the file is as some pieces of it, the first and the last among them."""
    num_pages = -(-size_bytes // mmap.PAGESIZE)
    if num_pages <= NUM_SAMPLED * PIECE_PAGES:
        return count_by_cachestat(descriptor, size_bytes)
    piece_bytes = PIECE_PAGES * mmap.PAGESIZE
    begins = np.linspace(0, num_pages - PIECE_PAGES, NUM_SAMPLED, dtype=np.int64) * mmap.PAGESIZE
    found = sum(count_by_cachestat(descriptor, piece_bytes, begin).resident for begin in begins.tolist())
    return PageCounts(found * num_pages // (NUM_SAMPLED * PIECE_PAGES), 0)


_SAMPLERS: Mapping[Method, PageCounter] = MappingProxyType({**COUNTERS, "cachestat": _count_by_pieces})


def evict_file(path: str) -> Eviction:
    """Write back and drop the pages of one file. Pages that another process maps or locks stay."""
    return _evict_in_turn((path,)).eviction()


def evict_files(paths: Iterable[str], advance: Callable[[int], None] = lambda _files: None) -> Eviction:
    """Drop the pages of these files; `advance` hears of every few hundred that are done.

    Files without unwritten pages are not synced. Threads are used once the calls turn out to wait, for a
    server or a device: those that only compute would wait for each other instead.
    """
    left, total = iter(paths), _Sums()
    while chunk := tuple(islice(left, _CHUNK)):
        began_s, began = time.monotonic(), resource.getrusage(resource.RUSAGE_THREAD)
        total.add(_evict_in_turn(chunk))
        advance(len(chunk))
        elapsed_s, ended = time.monotonic() - began_s, resource.getrusage(resource.RUSAGE_THREAD)
        cpu_s = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
        # On a busy machine calls take long that wait for nothing but a processor.
        has_waited = ended.ru_nvcsw - began.ru_nvcsw > _WAITING_FILES * len(chunk)
        if has_waited and elapsed_s > _WAITING_SHARE * cpu_s:
            _evict_on_threads(left, total, advance)
    return total.eviction()


def evict_objects(storage: Storage, prefix: str = "") -> Eviction:
    """Drop the pages of all files below `prefix`. `Unavailable` for a storage without local files."""
    return evict_files(_paths(storage, prefix))


_CHUNK: Final = 256
"""Files that one thread drops in turn."""
_THREADS: Final = 16
_WAITING_SHARE: Final = 3.0
"""Calls that take so many times their CPU time wait for something else."""
_WAITING_FILES: Final = 0.5
"""So many times a file does the thread give up its processor then."""


@dataclass(slots=True)
class _Sums:
    """Bytes of some files, in plain numbers: there may be millions."""

    before: int = 0
    after: int = 0
    total: int = 0
    method: Method = "cachestat"

    def add(self, other: _Sums) -> None:
        self.before += other.before
        self.after += other.after
        self.total += other.total
        self.method = other.method

    def eviction(self) -> Eviction:
        before, after = (
            Residency(resident_bytes=part, total_bytes=self.total, method=self.method)
            for part in (self.before, self.after)
        )
        return Eviction(before=before, after=after)


def _evict_on_threads(paths: Iterable[str], total: _Sums, advance: Callable[[int], None]) -> None:
    waiting: deque[tuple[int, Future[_Sums]]] = deque()
    left = iter(paths)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="penstock-evict") as pool:
        try:
            while True:
                chunk = tuple(islice(left, _CHUNK // _THREADS))
                if chunk:
                    waiting.append((len(chunk), pool.submit(_evict_in_turn, chunk)))
                elif not waiting:
                    return
                if not chunk or len(waiting) > 2 * _THREADS:
                    num_files, sums = waiting.popleft()
                    total.add(sums.result())
                    advance(num_files)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _evict_in_turn(paths: Iterable[str]) -> _Sums:
    sums, cachestats = _Sums(), _Cachestats()
    for path in paths:
        try:
            _evict_into(sums, path, cachestats)
        except StorageError:
            raise
        except OSError as error:
            raise map_os_error(error, "Dropping pages", f"file://{path}") from error
    return sums


def _evict_into(sums: _Sums, path: str, cachestats: _Cachestats) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Cheaper than fstat: this is what dropping many small files consists of.
        size_bytes = os.lseek(descriptor, 0, os.SEEK_END)
        if size_bytes == 0:
            return
        resident, unwritten = _count_quickly(sums, cachestats, descriptor, size_bytes)
        sums.total += size_bytes
        if resident:
            # The kernel drops clean pages only.
            if unwritten:
                os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            left, _ = _count_quickly(sums, cachestats, descriptor, size_bytes)
            sums.before += min(size_bytes, resident * mmap.PAGESIZE)
            if left:
                sums.after += min(size_bytes, left * mmap.PAGESIZE)
    finally:
        os.close(descriptor)


def _count_quickly(sums: _Sums, cachestats: _Cachestats, descriptor: int, size_bytes: int) -> tuple[int, int]:
    if sums.method == "cachestat":
        try:
            return cachestats.count(descriptor)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
    pages, sums.method = _count_pages(descriptor, size_bytes, COUNTERS)
    return pages


def drop_page_cache(control: Path = Path("/proc/sys/vm/drop_caches")) -> None:
    """Drop the whole page cache of this node: for root only, and it slows all users of the node."""
    os.sync()
    try:
        control.write_text("3\n")
    except OSError as error:
        raise Unavailable(
            f"The whole page cache cannot be dropped: {error.strerror}",
            where=str(control),
            fix="Run as root on the host itself, or drop file by file, which needs read permission only.",
        ) from error


def _measure(descriptor: int, counters: Mapping[Method, PageCounter]) -> Residency:
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes == 0:
        return _nothing()
    pages, method = _count_pages(descriptor, size_bytes, counters)
    return Residency(
        resident_bytes=min(size_bytes, pages.resident * mmap.PAGESIZE), total_bytes=size_bytes, method=method
    )


def _count_pages(
    descriptor: int, size_bytes: int, counters: Mapping[Method, PageCounter]
) -> tuple[PageCounts, Method]:
    for method, count in counters.items():
        try:
            return count(descriptor, size_bytes), method
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
    raise Unavailable(
        "This kernel does not report which pages are resident",
        where=", ".join(counters),
        fix="Use Linux 6.5 or later, or allow cachestat and mincore in the container's seccomp profile.",
    )


def _paths(storage: Storage, prefix: str) -> Iterable[str]:
    paths = find_local_paths(storage)
    if paths is None:
        raise Unavailable(
            "The page cache of this node holds only local files",
            where=storage.uri,
            fix="Evict files only; the caches of an object service cannot be dropped from here.",
        )
    return (paths.local_path(info.key) for info in storage.list(prefix))


def _nothing() -> Residency:
    return Residency(resident_bytes=0, total_bytes=0, method="cachestat")
