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
from penstock.errors import ShortTransfer, StorageError
from penstock.storage import ObjectInfo, Source, Storage
from penstock.storage.aligned import BufferPool
from penstock.storage.in_memory import MemoryStorage
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
            what = "the index is wrong" if part else _describe(kind, plan, storage, content)
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


def _describe(kind: fp.FileFormat, plan: fp.FilePlan, storage: Storage, content: Content) -> str:
    """Say which sample a file's wrong bytes belong to."""
    find = _first_wrong_block if kind.is_taken_apart_by_library else _first_wrong_sample
    try:
        wrong = find(kind, plan, storage, content)
    except StorageError as error:
        return error.what
    if wrong is None:
        return (
            "all samples are right, but bytes of the format around them differ: damage, or a file that "
            "another version of its encoder wrote"
        )
    return f"sample {wrong} differs"


def _first_wrong_sample(
    kind: fp.FileFormat, plan: fp.FilePlan, storage: Storage, content: Content
) -> int | None:
    """Return the first sample that decodes to something other than expected, or None."""
    with closing(storage.open(plan.name)) as source:
        survey = kind.survey(plan, source)
        for start in range(0, plan.num_samples, plan.block_samples):
            block = range(start, min(start + plan.block_samples, plan.num_samples))
            decoded = read_samples(kind, plan, survey, source, block)
            expected = kind.expected(plan, content, block)
            for sample, stored, right in zip(block, decoded, expected, strict=True):
                if stored.tobytes() != right.tobytes():
                    return sample
    return None


def _first_wrong_block(
    kind: fp.FileFormat, plan: fp.FilePlan, storage: Storage, content: Content
) -> int | None:
    """Return the first sample of the first block that differs from a file generated in memory, or None."""
    whole = kind.with_all_columns()
    plan = whole.plan(plan.index, plan.name)
    right = MemoryStorage()
    write_file(whole, plan, right, content, buffer_pool())
    with closing(storage.open(plan.name)) as stored, closing(right.open(plan.name)) as made:
        survey = whole.survey(plan, made)
        for start in range(0, plan.num_samples, plan.block_samples):
            for read in whole.reads(plan, survey, range(start, start + 1)):
                if read.offset + read.size_bytes > stored.size_bytes:
                    return start
                if _read(stored, read) != _read(made, read):
                    return start
    return None


def read_samples(
    kind: fp.FileFormat, plan: fp.FilePlan, survey: fp.FileSurvey, source: Source, samples: range
) -> fp.Sample:
    """Read and decode `samples` of an open file, one range after the other. For verification and tests."""
    pieces = [_read(source, read) for read in kind.reads(plan, survey, samples) if read.part == 0]
    return kind.decode(plan, survey, pieces, samples)


def _read(source: Source, read: fp.RangeRead) -> fp.Extent:
    buffer = memoryview(bytearray(read.size_bytes))
    source.read_into(read.offset, buffer)
    return fp.Extent(read.offset, buffer)
