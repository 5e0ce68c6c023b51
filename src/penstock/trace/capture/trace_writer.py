"""Writes the trace of one process: recorded events as lines of JSON, in gzip segments, and an event count.

The lines are in the third generation of DFTracer's format: files and hosts are named once per process, in
separate lines, and afterwards by hash. A segment is either a complete gzip member or absent: a failed write
is undone. The event count is a memory-mapped file next to the trace, so the kernel keeps it however the
process ends. It is removed when the trace is closed properly. Invariants: whatever a path contains, each line
is one line of valid JSON; trace and count together show how many events are missing.
"""

import json
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

import xxhash
from isal import igzip

from penstock.errors import OutOfSpace, PenstockError, StorageError
from penstock.storage.files.system_calls import map_name_clash
from penstock.trace.reading.trace_files import COUNT_SUFFIX

COMPLETE: Final = 1
METADATA: Final = 4


class Layer(IntEnum):
    """The part of a process to which an event belongs, as the format numbers it."""

    TRACER = 1
    LIBC_IO = 3
    PYTHON = 6


@dataclass(frozen=True, slots=True, eq=False)
class EventKind:
    """The facts that all events of a kind share. Kinds are compared by identity, so a lookup is cheap."""

    name: str
    cat: str
    layer: Layer


@cache
def span_kind(name: str, cat: str) -> EventKind:
    """Return the kind of a span of the program itself. Equal arguments return the same object."""
    return EventKind(name, cat, Layer.PYTHON)


RecordedEvent = tuple[
    EventKind, int, int, str | None, int | None, int | None, int | None, Mapping[str, Any] | None
]
"""One recorded event: kind, start and end (nanoseconds of the monotonic clock), path, offset, count, return
value, other arguments. A plain tuple, because one is created for every event."""


@dataclass(slots=True)
class LineFormatter:
    """Formats the lines of one process. `epoch_ns` added to the monotonic clock gives the time since 1970."""

    host: str
    pid: int
    epoch_ns: int
    num_events: int = 0
    _files: dict[str, str] = field(default_factory=dict)
    _heads: dict[EventKind, str] = field(default_factory=dict)

    def opening(self, *, rank: int | None) -> bytes:
        """Return the first lines, which name this process: its host, its unit of time, its rank."""
        host = self._hash_of_host()
        lines = [
            self._metadata("HH", {"name": self.host, "value": host}),
            self._metadata("CM", {"name": "time_metric", "value": "US"}),
        ]
        if rank is not None:
            lines.append(self._metadata("PR", {"name": "rank", "value": rank}))
            lines.append(self._metadata("process_name", {"name": "process_name", "value": f"Rank {rank}"}))
        return b"".join(lines)

    def events(self, thread: int, recorded: Iterable[RecordedEvent]) -> bytes:
        """Return the lines of the events that one thread recorded."""
        lines: list[str] = []
        files, heads, epoch_ns = self._files, self._heads, self.epoch_ns
        number, tail = self.num_events, f'"ph":{COMPLETE},"args":{{"hhash":"{self._hash_of_host()}"'
        for kind, began_ns, ended_ns, path, offset, count, ret, others in recorded:
            args = "" if path is None else files.get(path) or self._name_file(path, lines)
            if ret is not None:
                args += f',"ret":{ret}'
            if offset is not None:
                args += f',"offset":{offset}'
            if count is not None:
                args += f',"count":{count}'
            if others:
                args += "," + json.dumps(others, default=str)[1:-1]
            began_us = (began_ns + epoch_ns) // 1000
            number += 1
            lines.append(
                f'{{"id":{number},{heads.get(kind) or self._head(kind)},"tid":{thread},"ts":{began_us},'
                f'"dur":{(ended_ns + epoch_ns) // 1000 - began_us},{tail}{args}}}}}\n'
            )
        self.num_events = number
        return "".join(lines).encode()

    def ending(self, at_ns: int) -> bytes:
        """Return the last line: the number of events before it, which shows readers if some are missing."""
        at_us = (at_ns + self.epoch_ns) // 1000
        return (
            f'{{"id":{self.num_events + 1},"name":"end","cat":"dftracer","type":{Layer.TRACER:d},'
            f'"pid":{self.pid},"tid":{self.pid},"ts":{at_us},"dur":0,"ph":{COMPLETE},'
            f'"args":{{"hhash":"{self._hash_of_host()}","num_events":{self.num_events}}}}}\n'
        ).encode()

    def _hash_of_host(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.host.encode())

    def _head(self, kind: EventKind) -> str:
        """Return the beginning of all lines of a kind. Formatted only once."""
        name, cat = json.dumps(kind.name), json.dumps(kind.cat)
        head = f'"name":{name},"cat":{cat},"type":{kind.layer:d},"pid":{self.pid}'
        self._heads[kind] = head
        return head

    def _name_file(self, path: str, lines: list[str]) -> str:
        """Return the argument that names a file by its hash.

        On first use, a line that explains the hash is added to `lines`.
        """
        value = xxhash.xxh3_64_hexdigest(path.encode(errors="surrogateescape"))
        lines.append(self._metadata("FH", {"name": path, "value": value}).decode())
        self._files[path] = f',"fhash":"{value}"'
        return self._files[path]

    def _metadata(self, name: str, args: Mapping[str, Any]) -> bytes:
        line = {
            "name": name,
            "cat": "dftracer",
            "type": int(Layer.TRACER),
            "pid": self.pid,
            "tid": self.pid,
            "ph": METADATA,
            "args": {"hhash": self._hash_of_host(), **args},
        }
        return (json.dumps(line, separators=(",", ":")) + "\n").encode()


COUNTED_THREADS: Final = 4096
"""The number of threads of one process that have their own counts; further threads share the last count."""

_FAST = 1


class TraceFileWriter:
    """The trace file of one process, open for appending; `counts` holds the number of events per thread."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.path, self._descriptor = _create(folder, stem)
        self._count_path = self.path.with_name(self.path.name + COUNT_SUFFIX)
        self._size_bytes = 0
        try:
            self.counts = _map_counts(self._count_path)
        except OSError as error:
            os.close(self._descriptor)
            self.path.unlink()
            raise _explain_failure(error, self.path) from error

    def append(self, lines: bytes) -> None:
        """Append one segment.

        If the segment cannot be written completely, nothing of it remains, and `StorageError` is raised.
        """
        segment = memoryview(igzip.compress(lines, _FAST))
        written = 0
        try:
            while written < len(segment):
                written += os.write(self._descriptor, segment[written:])
        except OSError as error:
            # A torn gzip member in the middle of the file would damage what follows it.
            os.ftruncate(self._descriptor, self._size_bytes)
            raise _explain_failure(error, self.path) from error
        self._size_bytes += written

    def close(self, *, complete: bool) -> None:
        """Close the file, and remove the count if everything it counts is in the trace."""
        os.close(self._descriptor)
        if complete:
            self._count_path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Close a parent's file in a forked child."""
        os.close(self._descriptor)


def _map_counts(path: Path) -> memoryview:
    """Map a new file for the number of events that each thread has recorded."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        # On a full disk, writing to a page without a block would end the process with SIGBUS.
        os.posix_fallocate(descriptor, 0, COUNTED_THREADS * 8)
        # Never closed, because a thread may record until the process ends.
        return memoryview(mmap.mmap(descriptor, COUNTED_THREADS * 8)).cast("q")
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def _create(folder: Path, stem: str) -> tuple[Path, int]:
    """Create a new file. The trace of an earlier process with the same pid is left unchanged."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for attempt in range(1000):
            path = folder / f"{stem}{f'-{attempt}' if attempt else ''}.pfw.gz"
            try:
                return path, os.open(path, flags, 0o644)
            except FileExistsError:
                continue
    except OSError as error:
        raise map_name_clash(error, str(folder)) from error
    raise StorageError(f"There are 1000 traces of {stem} already", uri=str(folder), fix="Use another folder.")


def _explain_failure(error: OSError, path: Path) -> PenstockError:
    if error.errno in (28, 122):
        return OutOfSpace(
            f"No space for a trace: {error.strerror}", uri=str(path), fix="Trace to another disk."
        )
    return StorageError(
        f"A trace could not be written: {error.strerror}",
        uri=str(path),
        fix="Trace to a folder in which files can be created.",
    )
