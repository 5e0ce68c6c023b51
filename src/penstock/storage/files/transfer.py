"""Bytes between one open file and buffers, whole or not at all: short reads and writes are completed here.

Sinks and sources of both kinds of access stand on it. Invariant: it returns only when every byte has moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ShortTransfer
from penstock.storage.files.calls import FileCalls, storage_failure

if TYPE_CHECKING:
    from penstock.storage.counters import Counters


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open descriptor, and what is needed to use it and to speak of it."""

    descriptor: int
    uri: str
    calls: FileCalls
    counters: Counters


def write_whole(file: OpenFile, buffer: memoryview, offset: int, *, step_bytes: int = 1) -> None:
    """Write all of `buffer` at `offset`; a short write is continued at a multiple of `step_bytes`."""
    done = 0
    while done < len(buffer):
        try:
            moved = file.calls.pwrite(file.descriptor, buffer[done:], offset + done)
        except OSError as error:
            file.counters.add(errors=1)
            raise storage_failure(error, "Writing", file.uri) from error
        file.counters.add(requests=1)
        done += _progress(moved, step_bytes, done, len(buffer), file)


def read_whole(
    file: OpenFile, buffer: memoryview, offset: int, *, needed_bytes: int, step_bytes: int = 1
) -> None:
    """Read at least `needed_bytes` at `offset` into `buffer`, which may reach past the end of the file."""
    done = 0
    while done < needed_bytes:
        try:
            moved = file.calls.pread_into(file.descriptor, buffer[done:], offset + done)
        except OSError as error:
            file.counters.add(errors=1)
            raise storage_failure(error, "Reading", file.uri) from error
        file.counters.add(requests=1)
        done += _progress(moved, step_bytes, done, needed_bytes, file)


def _progress(moved: int, step_bytes: int, done: int, needed: int, file: OpenFile) -> int:
    """Bytes to move on by: all, if that is enough, else whole steps, so that direct I/O stays aligned."""
    if done + moved >= needed:
        return moved
    whole_steps = moved - moved % step_bytes
    if whole_steps == 0:
        file.counters.add(errors=1)
        raise ShortTransfer(
            f"Only {done + moved} of {needed} bytes moved",
            uri=file.uri,
            expected_bytes=needed,
            actual_bytes=done + moved,
            fix="Check that nothing truncates the file meanwhile, and look at the kernel log (dmesg).",
        )
    return whole_steps
