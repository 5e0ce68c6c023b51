"""Transfer bytes between files and buffers; write new files under a hidden name, sync, then name them.

From the bottom up: `move_whole` continues short transfers and returns only when every byte is transferred; a
`WriteQueue` keeps several writes of one file in flight; `FileAccess` passes every buffer to the kernel
unchanged or, for direct I/O (O_DIRECT), only whole aligned blocks of it. The rest of the buffer is copied
through an aligned bounce buffer, counted as "direct-unaligned", so that address, offset and length of every
call are aligned; a file's last block is padded, then the file is truncated. Invariant of `FileSink` and
`write_together`: a name appears atomically, after all bytes of its file are durable, so a crash leaves only
complete files and hidden ones.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

from penstock.errors import ShortTransfer, StorageError
from penstock.storage.aligned import BufferPool, address_of, copy_bytes, flat, round_up
from penstock.storage.files.folders import VerifiedFolders
from penstock.storage.files.system_calls import (
    FileCalls,
    close_after_reading,
    map_name_clash,
    map_os_error,
    translate_os_errors,
)
from penstock.storage.protocol import Counters, ObjectInfo, Release

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenFile:
    """An open descriptor with the calls to use, the counters to update, and the URI for errors."""

    descriptor: int
    uri: str
    calls: FileCalls
    counters: Counters


def move_whole(
    doing: Literal["Writing", "Reading"],
    file: OpenFile,
    buffer: memoryview,
    offset: int,
    *,
    needed_bytes: int,
    step_bytes: int,
) -> None:
    """Transfer at least `needed_bytes` between `buffer` and the file from `offset` onward.

    A short transfer is continued at a multiple of `step_bytes`; a read may extend beyond the end of the file.
    """
    move = file.calls.pwrite if doing == "Writing" else file.calls.pread_into
    done = 0
    while done < needed_bytes:
        try:
            moved = move(file.descriptor, buffer[done:], offset + done)
        except OSError as error:
            file.counters.add(errors=1)
            raise map_os_error(error, doing, file.uri) from error
        file.counters.add(requests=1)
        reached = done + moved
        # Direct I/O must continue at an aligned offset: the rest of the last step is transferred again.
        done = reached if reached >= needed_bytes else reached - moved % step_bytes
        if moved < step_bytes and done < needed_bytes:
            file.counters.add(errors=1)
            raise ShortTransfer(
                f"Only {reached} of {needed_bytes} bytes were transferred",
                uri=file.uri,
                expected_bytes=needed_bytes,
                actual_bytes=reached,
                fix="Check that nothing truncates the file meanwhile, and look at the kernel log (dmesg).",
            )


class WriteQueue:
    """Writes up to `num_in_flight` pieces at a time in threads; if that is 1, in the caller's thread.

    Each piece is released exactly once, written or not, and never while the kernel may still read its buffer.
    That is why no wait has a time limit: giving up on a stuck write would return a buffer that is still being
    read.
    """

    def __init__(self, file: OpenFile, num_in_flight: int, step_bytes: int) -> None:
        self._file = file
        self._step_bytes = step_bytes
        self._threads = (
            ThreadPoolExecutor(num_in_flight, thread_name_prefix="penstock-write")
            if num_in_flight > 1
            else None
        )
        self._free_slots = threading.Semaphore(num_in_flight)
        self._pending: deque[Future[None]] = deque()
        self._failure: StorageError | None = None

    def put(self, offset: int, piece: memoryview, payload_bytes: int, release: Release | None) -> None:
        """Wait for a free slot, then write `piece`.

        Its first `payload_bytes` are the caller's; the rest is padding. Raises an error if this
        piece or an earlier one failed.
        """
        self._free_slots.acquire()
        if self._threads is None or self._failure is not None:
            self._write(offset, piece, payload_bytes, release)
        else:
            self._pending.append(self._threads.submit(self._write, offset, piece, payload_bytes, release))
            while self._pending and self._pending[0].done():
                self._pending.popleft().result()

    def _write(self, offset: int, piece: memoryview, payload_bytes: int, release: Release | None) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            size_bytes, step_bytes = len(piece), self._step_bytes
            move_whole("Writing", self._file, piece, offset, needed_bytes=size_bytes, step_bytes=step_bytes)
            self._file.counters.add(written_bytes=payload_bytes)
        except StorageError as error:
            self._failure = error
            raise
        finally:
            self._free_slots.release()
            if release is not None:
                release()

    def drain(self) -> None:
        """Return when everything is written; raise the first failure."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        if self._failure is not None:
            raise self._failure
        for write in self._pending:
            write.result()

    def give_up(self) -> None:
        """Skip queued pieces and wait for those being written. May be called twice; raises nothing."""
        self._failure = self._failure or StorageError("The write was aborted", uri=self._file.uri)
        if self._threads is not None:
            self._threads.shutdown(wait=True)


COPY_REASON = "direct-unaligned"
NUM_IDLE_BOUNCES = 16


class FileAccess:
    """Access through the page cache, or past it in blocks of `alignment_bytes` (O_DIRECT).

    All files of one `FileStorage` share its bounce buffers.
    """

    def __init__(self, alignment_bytes: int = 1, bounce_bytes: int = 1) -> None:
        self.alignment_bytes = alignment_bytes
        self.bounces = BufferPool(bounce_bytes, NUM_IDLE_BOUNCES)
        self.is_direct = alignment_bytes > 1

    def read_into(self, file: OpenFile, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of the file; the caller has checked that the file is long enough."""
        aligned = aligned_range(buffer, offset, self.alignment_bytes)
        self._read_bounced(file, offset, buffer[: aligned.start])
        if aligned:
            move_whole(
                "Reading",
                file,
                buffer[aligned.start : aligned.stop],
                offset + aligned.start,
                needed_bytes=len(aligned),
                step_bytes=self.alignment_bytes,
            )
        self._read_bounced(file, offset + aligned.stop, buffer[aligned.stop :])

    def _read_bounced(self, file: OpenFile, offset: int, target: memoryview) -> None:
        """Read aligned windows around `target` into a bounce buffer, and copy from it."""
        if not target:
            return
        step_bytes, bounce = self.alignment_bytes, self.bounces.take()
        try:
            while target:
                lead = offset % step_bytes
                window = bounce[: round_up(lead + len(target), step_bytes)]
                moved = min(len(target), len(window) - lead)
                needed = lead + moved
                move_whole("Reading", file, window, offset - lead, needed_bytes=needed, step_bytes=step_bytes)
                copy_bytes(target[:moved], window[lead : lead + moved])
                file.counters.add_copy(COPY_REASON, moved)
                offset, target = offset + moved, target[moved:]
        finally:
            self.bounces.give_back(bounce)


def aligned_range(buffer: memoryview, offset: int, alignment_bytes: int) -> range:
    """Return the part of `buffer`, at `offset` of the file, that needs no bounce buffer: aligned blocks.

    If there are no such blocks, the range is empty and at the buffer's end.
    """
    if alignment_bytes == 1:
        return range(len(buffer))
    lead = -offset % alignment_bytes
    num_blocks = (len(buffer) - lead) // alignment_bytes
    if num_blocks < 1 or (address_of(buffer) + lead) % alignment_bytes:
        return range(len(buffer), len(buffer))
    return range(lead, lead + num_blocks * alignment_bytes)


class FileWriter:
    """Appends buffers to an empty file in aligned pieces. For use by one thread."""

    def __init__(self, file: OpenFile, access: FileAccess, num_in_flight: int = 1) -> None:
        self._writes = WriteQueue(file, num_in_flight, access.alignment_bytes)
        self._bounces = access.bounces
        self._alignment_bytes = access.alignment_bytes
        self._counters = file.counters
        self._bounce: memoryview | None = None
        self._held_bytes = 0
        self.size_bytes = 0
        self.padding_bytes = 0

    def append(self, buffer: memoryview, release: Release | None) -> None:
        """Write the aligned part of `buffer`; the rest is copied, and waits until its block is full.

        `release` is called once, even if this raises.
        """
        buffer = flat(buffer)
        aligned = aligned_range(buffer, self.size_bytes, self._alignment_bytes)
        offset, is_kept = self.size_bytes + aligned.start, False
        try:
            self._append_copied(buffer[: aligned.start])
            if aligned:
                self._put_bounce()
                is_kept = True
        finally:
            if release is not None and not is_kept:
                release()
        if aligned:
            self.size_bytes += len(aligned)
            # The tail is copied before the middle is queued: from then on, the owner may refill the buffer.
            self._hold(buffer[aligned.stop :])
            self._writes.put(offset, buffer[aligned.start : aligned.stop], len(aligned), release)

    def complete(self) -> None:
        """Write the padded last block and wait; the file then ends with `padding_bytes` to be cut off."""
        self._put_bounce()
        self._writes.drain()

    def give_up(self) -> None:
        """Skip what is queued and wait for what is being written. May be called twice."""
        self._writes.give_up()
        if self._bounce is not None:
            self._bounces.give_back(self._bounce)
            self._bounce = None

    def _append_copied(self, buffer: memoryview) -> None:
        while buffer:
            room = self._bounces.size_bytes - self._held_bytes
            self._hold(buffer[:room])
            buffer = buffer[room:]
            if self._held_bytes == self._bounces.size_bytes:
                self._put_bounce()

    def _hold(self, part: memoryview) -> None:
        if not part:
            return
        if self._bounce is None:
            self._bounce = self._bounces.take()
        end = self._held_bytes + len(part)
        copy_bytes(self._bounce[self._held_bytes : end], part)
        self._counters.add_copy(COPY_REASON, len(part))
        self._held_bytes = end
        self.size_bytes += len(part)

    def _put_bounce(self) -> None:
        # A queued bounce buffer is full, except for the last one of a file: no other piece is ever padded.
        if self._bounce is None:
            return
        bounce, held = self._bounce, self._held_bytes
        padded = round_up(held, self._alignment_bytes)
        bounce[held:padded] = bytes(padded - held)
        self._bounce, self._held_bytes, self.padding_bytes = None, 0, padded - held
        give_back = partial(self._bounces.give_back, bounce)
        self._writes.put(self.size_bytes - held, bounce[:padded], held, give_back)


class FileSource:
    """A file opened for reading. Any thread may read; each read has its own offset."""

    def __init__(self, file: OpenFile, access: FileAccess, size_bytes: int) -> None:
        self._file = file
        self._access = access
        self.descriptor = file.descriptor
        self.size_bytes = size_bytes
        self._is_open = True

    def read_into(self, offset: int, buffer: memoryview) -> None:
        wanted = flat(buffer)
        if offset + len(wanted) > self.size_bytes:
            raise ShortTransfer(
                f"{len(wanted)} bytes at offset {offset} reach past the end at {self.size_bytes}",
                uri=self._file.uri,
                expected_bytes=len(wanted),
                actual_bytes=max(0, self.size_bytes - offset),
                fix="Request ranges inside size_bytes.",
            )
        self._access.read_into(self._file, offset, wanted)
        self._file.counters.add(read_bytes=len(wanted))

    def close(self) -> None:
        """Close the file; no thread may be reading."""
        if self._is_open:
            self._is_open = False
            close_after_reading(self._file.calls, self.descriptor)


@dataclass(slots=True, kw_only=True)
class NewFile:
    """A file that is written at `written_path` and will become the object `key` at `final_path`."""

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
        """Close the file. May be called twice. Network file systems report late write errors here."""
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
        """Close the file, and remove it unless it is published. If it cannot be removed, that is logged."""
        acts: list[tuple[str, Callable[[], None]]] = [("close", self.close)]
        if not self.is_published:
            self.is_published = True
            acts.append(("remove", partial(self.file.calls.unlink, self.written_path)))
        for doing, act in acts:
            # A failure to clean up must not hide why the object was aborted, so it is not raised.
            try:
                act()
            except FileNotFoundError:
                logger.debug("%s was already gone", self.written_path)
            except OSError as error:
                logger.warning("Could not %s an unfinished object: %s (%s)", doing, self.written_path, error)


class FileSink:
    """A `Sink` that writes a file.

    `finish` writes out, compares sizes, cuts padding, fsyncs the file, closes, renames, and fsyncs the
    folder: the final name appears atomically, after all bytes are durable, and a crash before that leaves a
    file that is never listed. If only the folder's fsync fails, the complete object stays visible.
    """

    def __init__(self, new: NewFile, writer: FileWriter, folders: VerifiedFolders) -> None:
        self._new = new
        self._file = new.file
        self._writer = writer
        self._folders = folders
        self._is_ended = False

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        """Append `buffer`. `release` is called exactly once, even if this raises."""
        if self._is_ended:
            if release is not None:
                release()
            raise self._ended()
        self._writer.append(buffer, release)

    def finish(self) -> ObjectInfo:
        if self._is_ended:
            raise self._ended()
        # Set first: after a failure below, only `abort` is allowed.
        self._is_ended = True
        self._writer.complete()
        self._check_size("declared", self._new.declared_bytes)
        calls, descriptor = self._file.calls, self._file.descriptor
        with translate_os_errors("Finishing", self._file.uri):
            if self._writer.padding_bytes:
                calls.ftruncate(descriptor, self._writer.size_bytes)
            facts = calls.fstat(descriptor)
            self._check_size("stored", facts.st_size)
            if self._new.fsync:
                calls.fsync(descriptor)
            self._new.close()
        self._new.publish()
        if self._new.keep_name:
            self._folders.sync_folder(os.path.dirname(self._new.final_path))
        return ObjectInfo(key=self._new.key, size_bytes=facts.st_size, modified_s=facts.st_mtime)

    def abort(self) -> None:
        """Remove what was written. What cannot be removed stays hidden, and is logged."""
        self._is_ended = True
        self._writer.give_up()
        self._new.discard()

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


def write_together(
    contents: Iterable[tuple[NewFile, memoryview]], access: FileAccess, folders: VerifiedFolders
) -> None:
    """Write small files one by one and make them durable together, for a fraction of the cost.

    An fsync commits whatever is new in the file system's journal. All bytes, and the changes that they cause
    in the journal, are on their way to the disk before the first fsync, so its commit serves the other files
    as well. Each file gets its name after its own fsync. A buffer may be reused once the next file is
    requested.
    """
    files: list[NewFile] = []
    try:
        for new, content in contents:
            files.append(new)
            with translate_os_errors("Writing", new.file.uri):
                writer = FileWriter(new.file, access)
                try:
                    writer.append(content, None)
                    writer.complete()
                finally:
                    writer.give_up()
                if writer.padding_bytes:
                    new.file.calls.ftruncate(new.file.descriptor, len(content))
                if new.fsync:
                    new.file.calls.start_writeback(new.file.descriptor)
        for new in files:
            if new.fsync:
                with translate_os_errors("Finishing", new.file.uri):
                    new.file.calls.await_writeback(new.file.descriptor)
        for new in files:
            with translate_os_errors("Finishing", new.file.uri):
                if new.fsync:
                    new.file.calls.fsync(new.file.descriptor)
                new.close()
        for new in files:
            new.publish()
    finally:
        for new in files:
            if new.is_open or not new.is_published:
                new.discard()
    for folder in {os.path.dirname(new.final_path) for new in files if new.keep_name}:
        folders.sync_folder(folder)
