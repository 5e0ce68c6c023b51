"""Writes, verifies and reads one data file of any format, on any storage.

A part that fails halfway is aborted, and an index is stored before the file that needs it.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from penstock.dataset.content import Content
from penstock.dataset.formats import format_protocol as fp
from penstock.dataset.formats.file_writer import (
    BUFFER_BYTES,
    DataFileChecker,
    DataFileWriter,
    FirstDifference,
)
from penstock.errors import ShortTransfer
from penstock.storage import ObjectInfo, Source, Storage
from penstock.storage.aligned import BufferPool
from penstock.storage.protocol import Release, SupportsWritesAtOnce

KEPT_BUFFERS = 8


def buffer_pool() -> BufferPool:
    """Return a pool of buffers for `write_file`; one pool serves any number of files and threads."""
    return BufferPool(BUFFER_BYTES, KEPT_BUFFERS)


def write_file(
    kind: fp.FileFormat, plan: fp.FilePlan, storage: Storage, content: Content, pool: BufferPool
) -> tuple[ObjectInfo, ...]:
    """Write all parts of one file, the file itself last; return the stored parts in the order of the plan."""
    stored: list[ObjectInfo] = []
    # A reader that finds the file also finds its indexes, whenever this is interrupted.
    for part in reversed(range(len(plan.parts))):
        size_bytes = plan.parts[part].size_bytes
        with ExitStack() as undo:
            sink = storage.create(plan.parts[part].key(plan.name), size_bytes)
            undo.callback(sink.abort)
            out = DataFileWriter(content, sink.submit, pool)
            kind.emit(plan, part, out)
            out.flush()
            stored.append(sink.finish())
            undo.pop_all()
    return tuple(reversed(stored))


def write_together(
    kind: fp.FileFormat,
    files: Iterable[tuple[fp.FilePlan, Content]],
    storage: SupportsWritesAtOnce,
    pool: BufferPool,
) -> list[tuple[fp.FilePlan, int]]:
    """Write small files, which become durable together; return the plan and the size of each.

    Memory holds one file at a time.
    """
    written: list[tuple[fp.FilePlan, int]] = []

    def made() -> Iterator[tuple[str, memoryview]]:
        for plan, content in files:
            size_bytes = 0
            for part in reversed(range(len(plan.parts))):
                kept: list[tuple[memoryview, Release]] = []
                out = DataFileWriter(content, lambda *filled, kept=kept: kept.append(filled), pool)
                kind.emit(plan, part, out)
                out.flush()
                # Copied only if the file takes more than one buffer.
                text = kept[0][0] if len(kept) == 1 else memoryview(b"".join(buffer for buffer, _ in kept))
                yield plan.parts[part].key(plan.name), text
                for _, release in kept:
                    release()
                size_bytes += len(text)
            written.append((plan, size_bytes))

    storage.write_at_once(made())
    return written


@dataclass(frozen=True, slots=True)
class WrongFile:
    """A stored part that differs from its recipe, and how it differs."""

    name: str
    what: str


def verify_file(
    kind: fp.FileFormat, plan: fp.FilePlan, storage: Storage, content: Content
) -> WrongFile | None:
    """Compare every byte of every part with the generator; return None if the file is as it was written.

    Raises `ShortTransfer` for a part that is truncated or too long, `ObjectNotFound` for one that is missing.
    """
    for part in range(len(plan.parts)):
        name = plan.parts[part].key(plan.name)
        with closing(storage.open(name)) as source:
            offset = _first_wrong_byte(kind, plan, part, source, content)
        if offset is not None:
            what = "it differs from what is generated"
            if plan.parts[part].size_bytes is None:
                what += ": damage, or a file that another version of its encoder wrote"
            return WrongFile(name, f"byte {offset}: {what}")
    return None


def _first_wrong_byte(
    kind: fp.FileFormat, plan: fp.FilePlan, part: int, source: Source, content: Content
) -> int | None:
    planned, actual = plan.parts[part].size_bytes, source.size_bytes
    if planned is not None and actual < planned:
        raise _truncated(plan, part, actual, planned)
    if planned is not None and actual > planned:
        name = plan.parts[part].key(plan.name)
        raise ShortTransfer(
            f"{name} has {actual} bytes instead of {planned}",
            uri=name,
            expected_bytes=planned,
            actual_bytes=actual,
            fix="It belongs to a data set with a different size or seed: generate into an empty folder.",
        )
    out = DataFileChecker(content, source, partial(_truncated, plan, part, source.size_bytes))
    try:
        kind.emit(plan, part, out)
        out.finish()
    except FirstDifference as difference:
        return difference.offset
    return None


def _truncated(plan: fp.FilePlan, part: int, actual_bytes: int, needed_bytes: int) -> ShortTransfer:
    """Return the error for a stored part that ends before the bytes that it must have."""
    name = plan.parts[part].key(plan.name)
    return ShortTransfer(
        f"{name} is truncated: it has {actual_bytes} bytes of at least {needed_bytes}",
        uri=name,
        expected_bytes=needed_bytes,
        actual_bytes=actual_bytes,
        fix="Generate the data set again: files that are whole are kept.",
    )
