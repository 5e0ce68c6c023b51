"""One process's trace file: whole gzip members, appended one by one, beside a count that outlives a kill.

A segment is there whole or not at all, as far as the process decides: a write that fails is taken back. The
count lies in shared memory of the file beside the trace, so the kernel keeps it whatever becomes of the
process; it is removed when the trace ends in good order. Invariant: trace and count together tell how many
events are missing.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final

from isal import igzip

from penstock.errors import OutOfSpace, PenstockError, StorageError

COUNT_SUFFIX: Final = ".count"
LANES: Final = 4096
"""Threads of one process that are counted by themselves; further ones share the last place."""

_FAST = 1


class Tally:
    """How many events each thread recorded, in a file that is mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            # Without its blocks, a full disk would end the process at the first count.
            os.posix_fallocate(descriptor, 0, LANES * 8)
            shared = mmap.mmap(descriptor, LANES * 8)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        # Never let go of: a thread may record until the process ends.
        self.counts = memoryview(shared).cast("q")


def read_tally(trace: Path) -> int | None:
    """How many events the process of an unfinished trace recorded; None for a finished one."""
    try:
        content = trace.with_name(trace.name + COUNT_SUFFIX).read_bytes()
    except FileNotFoundError:
        return None
    return sum(memoryview(content[: len(content) // 8 * 8]).cast("q"))


class Segments:
    """The trace file being written."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.path, self._descriptor = _create(folder, stem)
        self._size_bytes = 0
        try:
            self.tally = Tally(self.path.with_name(self.path.name + COUNT_SUFFIX))
        except OSError as error:
            os.close(self._descriptor)
            self.path.unlink()
            raise _refused(error, self.path) from error

    def append(self, lines: bytes) -> None:
        """Add one segment; `StorageError` if it could not be written whole, and then nothing of it stays."""
        segment = memoryview(igzip.compress(lines, _FAST))
        written = 0
        try:
            while written < len(segment):
                written += os.write(self._descriptor, segment[written:])
        except OSError as error:
            os.ftruncate(self._descriptor, self._size_bytes)
            raise _refused(error, self.path) from error
        self._size_bytes += written

    def close(self, *, complete: bool) -> None:
        """End the file; the count goes where all that it counts is in the trace."""
        os.close(self._descriptor)
        if complete:
            self.tally.path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Let go of a parent's file in a forked child."""
        os.close(self._descriptor)


def _create(folder: Path, stem: str) -> tuple[Path, int]:
    """A new file: a process that got the number of an earlier one does not write into its trace."""
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
        raise _refused(error, folder) from error
    raise StorageError(f"1000 traces of {stem} lie here already", uri=str(folder), fix="Use another folder.")


def _refused(error: OSError, path: Path) -> PenstockError:
    if error.errno in (28, 122):
        return OutOfSpace(
            f"No space for a trace: {error.strerror}", uri=str(path), fix="Trace to another disk."
        )
    return StorageError(
        f"A trace could not be written: {error.strerror}",
        uri=str(path),
        fix="Trace to a folder that takes files.",
    )
