"""Verify a stored checkpoint against all checksums that it has.

Penstock's checkpoints have checksums of all their bytes; stock archives have a CRC-32 for each record, which
torch never checks; safetensors have none. Files are read front to back in several threads, each of which
reads a stretch (a run of segments) of one file. Invariant: bytes that were not checked are counted, and never
reported as undamaged; bytes that cannot be read are reported as damage and do not end the scan; memory use is
`STREAMS` blocks, however large the files are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from operator import attrgetter, itemgetter
from typing import Final, TypeVar

import numpy as np
from isal import isal_zlib

from penstock.checkpoint.commit.checkpoints import (
    AnyPath,
    CheckpointRef,
    follow_link,
    open_parent,
    parse_step,
    require_step,
)
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME
from penstock.checkpoint.formats.checkpoint_source import (
    CheckpointSource,
    Format,
    checkpoint_uri,
    find_folder,
    open_checkpoint,
)
from penstock.checkpoint.formats.dcp_item import most_unpacked, require_known_transforms, undo_transforms
from penstock.checkpoint.formats.description import (
    Manifest,
    ManifestFile,
    checksum_of,
    read_manifest,
    start_checksum,
)
from penstock.checkpoint.formats.torch_save import (
    ReadRange,
    ZipRecord,
    data_offset,
    in_pages,
    read_directory,
)
from penstock.errors import DataDamaged, ObjectNotFound, StorageError, UsageError, name_some, proves_damage
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.aligned import PAGE_BYTES, BufferPool, round_up
from penstock.storage.capabilities import prefer_direct_access
from penstock.storage.protocol import MOST_WHOLE, Source, read_object
from penstock.units import format_bytes

Check = Callable[[Iterator[memoryview]], str | None]
"""Takes all bytes of a segment in order; returns what is wrong with them, or None."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Damage:
    """Bytes `begin` to `end` of `file` are wrong. `item` is empty if they belong to no item."""

    file: str
    begin: int
    end: int
    item: str
    what: str
    is_unread: bool = False
    """True if storage failed, so that the bytes may be intact."""

    def __str__(self) -> str:
        item = f", {self.item}" if self.item else ""
        return f"{self.file}{item}, bytes {self.begin} to {self.end}: {self.what}"


logger = logging.getLogger(__name__)

STREAMS: Final = 4
BLOCK_BYTES: Final = 8 << 20
STRETCH_BYTES: Final = 64 << 20
_STEP_BYTES: Final = 1 << 20
"""Bytes are checked in steps that stay in the processor's cache."""


def check_sum(expected: bytes, content: Iterator[memoryview]) -> str | None:
    """Return what is wrong with bytes whose XXH3-128 is known, or None."""
    total = start_checksum()
    for part in content:
        total.update(part)
    return None if total.digest() == expected else "its checksum differs"


def check_crc(expected: int, content: Iterator[memoryview]) -> str | None:
    """Return what is wrong with bytes whose CRC-32 is known, or None. torch never checks this itself."""
    total = 0
    for part in content:
        total = isal_zlib.crc32(part, total)
    return None if total == expected else "its CRC-32 differs"


def check_zeros(content: Iterator[memoryview]) -> str | None:
    """Return what is wrong with bytes between items, which must be zeros, or None."""
    is_clean = True
    for part in content:
        is_clean &= not np.frombuffer(part, dtype=np.uint8).any()
    return None if is_clean else "something was written between items"


Segment = tuple[int, int, str, Check]
"""Start and end in a file, the item to which these bytes belong ("" for a gap), and their check."""

Given = TypeVar("Given")

Stretch = tuple[str, int, int, Callable[[Source], Iterable[Segment]]]
"""The bytes that one thread reads: file, start, size, and a function that finds their segments, in order."""


def cut_into_stretches(file: str, segments: Iterable[Segment]) -> Iterator[Stretch]:
    """Cut segments into runs of about `STRETCH_BYTES`, for several threads."""
    for run in _cut_into_runs(segments, itemgetter(0)):
        yield file, run[0][0], run[-1][1] - run[0][0], partial(_given, run)


def _cut_into_runs(parts: Iterable[Given], begin_of: Callable[[Given], int]) -> list[list[Given]]:
    """Cut parts of a file, in the order of their bytes, into runs of about `STRETCH_BYTES`."""
    runs: list[list[Given]] = []
    for part in parts:
        if not runs or begin_of(part) - begin_of(runs[-1][0]) >= STRETCH_BYTES:
            runs.append([])
        runs[-1].append(part)
    return runs


def _given(value: Given, _: object) -> Given:
    return value


def scan(
    storage: Storage,
    key_of: Callable[[str], str],
    work: Sequence[Stretch],
    progress: Progress,
    *,
    streams: int = STREAMS,
) -> list[Damage]:
    """Check all of `work`; return the damage in the order of files and ranges."""
    if not work:
        return []
    streams = min(streams, len(work))
    largest = max(size_bytes for _, _, size_bytes, _ in work)
    block_bytes = min(BLOCK_BYTES, round_up(largest, PAGE_BYTES) + PAGE_BYTES)
    buffers = BufferPool(block_bytes, streams)

    def check(stretch: Stretch) -> list[Damage]:
        file, begin, size_bytes, segments = stretch
        buffer = buffers.take()
        try:
            with closing(storage.open(key_of(file))) as source:
                return list(_check_segments(file, segments(source), source, buffer, progress))
        except StorageError as error:
            logger.info("%s: %s", key_of(file), error)
            what, is_unread = f"cannot be read: {error}", not proves_damage(error)
            end = begin + size_bytes
            return [Damage(file=file, begin=begin, end=end, item="", what=what, is_unread=is_unread)]
        finally:
            buffers.give_back(buffer)

    with ThreadPoolExecutor(streams, thread_name_prefix="penstock-scan") as threads:
        return sorted(damage for damages in threads.map(check, work) for damage in damages)


def _check_segments(
    file: str, segments: Iterable[Segment], source: Source, buffer: memoryview, progress: Progress
) -> Iterator[Damage]:
    block_begin = block_end = 0

    def content(at: int, end: int) -> Iterator[memoryview]:
        """Yield a segment's bytes. One aligned block stays in memory, so that each byte is read only once."""
        nonlocal block_begin, block_end
        while at < end:
            if not block_begin <= at < block_end:
                block_begin = at - at % PAGE_BYTES
                block_end = min(block_begin + len(buffer), source.size_bytes)
                source.read_into(block_begin, buffer[: block_end - block_begin])
            stop = min(at + _STEP_BYTES, end, block_end)
            yield buffer[at - block_begin : stop - block_begin]
            at = stop

    for begin, end, item, check in segments:
        is_unread = False
        try:
            what = check(content(begin, end)) if end <= source.size_bytes else "the file ends before it"
        except StorageError as error:
            block_begin = block_end = 0
            what, is_unread = f"cannot be read: {error}", not proves_damage(error)
        if what is not None:
            yield Damage(file=file, begin=begin, end=end, item=item, what=what, is_unread=is_unread)
        progress.advance(end - begin)


_MOST_NAMES: Final = 5
"""The number of items that are named among those that cannot be checked."""

_DESCRIPTION_IS_DAMAGED: Final = "The data files were not checked: the file that describes them is damaged."


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of verifying one checkpoint."""

    uri: str
    format: str
    num_files: int
    num_items: int
    size_bytes: int
    checked_bytes: int
    """The bytes that are determined by a checksum or by the format itself."""
    damage: tuple[Damage, ...]
    notes: tuple[str, ...] = ()
    unchecked_bytes: int = 0
    """The bytes of contents that have no checksum, or one that cannot be computed here."""

    @property
    def is_whole(self) -> bool:
        """True if no damage was found. Bytes without a checksum may be damaged anyway."""
        return not self.damage

    @property
    def is_checked(self) -> bool:
        """True if all contents have a checksum."""
        return not self.unchecked_bytes and (self.checked_bytes > 0 or self.size_bytes == 0)


def verify(path: AnyPath, progress: Progress | None = None) -> Verification:
    """Verify the checkpoint at a path or URI; raise `ObjectNotFound` if there is none.

    Damage is returned rather than raised, even damage to the manifest or to `.metadata`.
    """
    progress = progress or Progress()
    parent, own_name = open_parent(path)
    storage, name = follow_link(parent, own_name)
    uri, folder = checkpoint_uri(storage, name), find_folder(storage, name)
    try:
        content = read_object(storage, f"{folder}/{MANIFEST_NAME}", at_most=MOST_WHOLE)
    except StorageError:
        return _verify_foreign(path, uri, progress)
    try:
        manifest = read_manifest(content, uri)
        require_step(manifest, parse_step(own_name), uri)
    except DataDamaged as error:
        whole = Damage(file=MANIFEST_NAME, begin=0, end=len(content), item="", what=error.what)
        return _of_one_file(uri, Format.DCP, whole)
    metadata_bytes, damage = _check_metadata(storage, folder, manifest)
    counted = _Counted(progress)
    damage += find_damage(storage, folder, manifest, manifest.files, counted)
    return Verification(
        uri=uri,
        format="penstock",
        num_files=len(manifest.files) + 2,
        num_items=sum(map(len, manifest.files)),
        size_bytes=manifest.size_bytes + manifest.metadata_bytes,
        checked_bytes=metadata_bytes + sum(counted.amounts),
        damage=tuple(sorted(set(damage))),
    )


def _of_one_file(uri: str, format_: str, damage: Damage) -> Verification:
    """Return the result if the file that describes the others is damaged: nothing else can be checked."""
    return Verification(
        uri=uri,
        format=format_,
        num_files=1,
        num_items=0,
        size_bytes=damage.end,
        checked_bytes=damage.end,
        damage=(damage,),
        notes=(_DESCRIPTION_IS_DAMAGED,),
    )


def find_damage(
    storage: Storage,
    folder: str,
    manifest: Manifest,
    files: Sequence[ManifestFile],
    progress: Progress | None = None,
) -> list[Damage]:
    """Find the damage in `files`: all of a checkpoint's, or those that this node has."""
    progress = progress or Progress()
    damage: list[Damage] = []
    work: list[Stretch] = []
    for file in files:
        wrong = _check_size(storage, f"{folder}/{file.name}", file)
        damage += wrong
        if not wrong or wrong[0].begin > 0:
            work += cut_into_stretches(file.name, _segments(file, manifest.names))
    progress.begin("bytes", sum(size_bytes for _, _, size_bytes, _ in work))
    if work:
        storage = prefer_direct_access(storage, reads=f"{folder}/{work[0][0]}")
    return damage + scan(storage, lambda file: f"{folder}/{file}", work, progress)


def require_verified(checkpoint: CheckpointRef, rank: int, num_ranks: int) -> None:
    """Verify this rank's part of a step's files or, if not every rank can open all, those that it can open.

    Raises `StorageError` with the first damage, or if there are no checksums.
    """
    storage, folder = checkpoint.storage, checkpoint.committed.folder
    try:
        manifest = checkpoint.read_manifest()
    except ObjectNotFound as error:
        raise ObjectNotFound(
            "It cannot be verified: it has no checksums",
            uri=checkpoint.uri,
            fix="Restore it without verify=True, and save it again.",
        ) from error
    files = manifest.files[rank::num_ranks]
    damage: list[Damage] = []
    if checkpoint.readable is not None:
        files = tuple(file for file in manifest.files if file.name in checkpoint.readable)
    elif rank == 0:
        _, damage = _check_metadata(storage, folder, manifest)
    require_undamaged(damage + find_damage(storage, folder, manifest, files), checkpoint.uri)


def require_undamaged(damage: Sequence[Damage], uri: str) -> None:
    """Raise `DataDamaged` with the first damage, or `StorageError` if bytes merely cannot be read."""
    if not damage:
        return
    first = min(damage, key=attrgetter("is_unread"))
    raise (StorageError if first.is_unread else DataDamaged)(f"{first}", where=uri)


def _check_metadata(storage: Storage, folder: str, manifest: Manifest) -> tuple[int, list[Damage]]:
    """Return the number of bytes that could be read, and what is wrong with them."""
    wrong = partial(Damage, file=METADATA_NAME, begin=0, end=manifest.metadata_bytes, item="")
    try:
        content = read_object(storage, f"{folder}/{METADATA_NAME}", at_most=MOST_WHOLE)
    except ObjectNotFound:
        return 0, [wrong(what="the file is missing")]
    except StorageError as error:
        return 0, [wrong(what=f"cannot be read: {error}", is_unread=not proves_damage(error))]
    is_whole = len(content) == manifest.metadata_bytes and checksum_of(content) == manifest.metadata_sum
    return len(content), [] if is_whole else [wrong(what="its checksum differs")]


def _check_size(storage: Storage, key: str, file: ManifestFile) -> list[Damage]:
    """Return the damage that a file's size proves: all of a missing file, or the difference."""
    wrong = partial(Damage, file=file.name, item="")
    try:
        size_bytes = storage.stat(key).size_bytes
    except ObjectNotFound:
        return [wrong(begin=0, end=file.size_bytes, what="the file is missing")]
    except StorageError as error:
        what, is_unread = f"cannot be read: {error}", not proves_damage(error)
        return [wrong(begin=0, end=file.size_bytes, what=what, is_unread=is_unread)]
    if size_bytes == file.size_bytes:
        return []
    begin, end = sorted((size_bytes, file.size_bytes))
    what = f"the file has {size_bytes} bytes, but {file.size_bytes} were written"
    return [wrong(begin=begin, end=end, what=what)]


def _segments(file: ManifestFile, names: Sequence[str]) -> Iterator[Segment]:
    """Yield all bytes of a file in order: items, and the gaps between them."""
    at = 0
    columns = (file.item_offset.tolist(), file.item_bytes.tolist(), file.item_name.tolist())
    for row, (offset, size, name) in enumerate(zip(*columns, strict=True)):
        if offset > at:
            yield at, offset, "", check_zeros
        at = offset + size
        yield offset, at, names[name], partial(check_sum, file.sum_at(row))
    if file.size_bytes > at:
        yield at, file.size_bytes, "", check_zeros


_Item = tuple[str, int, int, str, int | None, tuple[str, ...]]
"""An archive of `torch.save`: its file, start and size there, its name ("" if the only one), the bytes of
its tensor, its transforms."""


def _verify_foreign(path: AnyPath, uri: str, progress: Progress) -> Verification:
    """Verify what another program wrote, by the CRC-32 of the archives' records."""
    try:
        checkpoint = open_checkpoint(path)
    except DataDamaged as error:
        damage = Damage(file=error.where, begin=0, end=0, item="", what=error.what)
        return _of_one_file(uri, "unknown", damage)
    items = sorted(_items(checkpoint))
    result = partial(
        Verification,
        uri=checkpoint.uri,
        format=checkpoint.format,
        num_files=len(checkpoint.index.files),
        num_items=len(items),
        size_bytes=sum(size_bytes for _, _, size_bytes, *_ in items),
    )
    if checkpoint.format is Format.SAFETENSORS:
        note = "The format has no checksums: only headers and sizes were checked."
        return result(checked_bytes=0, damage=(), notes=(note,))
    bare: list[int] = []
    """The sizes of records without a checksum, filled by the threads that read archives."""
    known: list[_Item] = []
    unknown: list[_Item] = []
    for item in items:
        try:
            require_known_transforms(item[-1])
            known.append(item)
        except UsageError:
            unknown.append(item)
    work: list[Stretch] = []
    for file, of_file in groupby(known, itemgetter(0)):
        for run in _cut_into_runs(of_file, itemgetter(1)):
            (_, begin, *_), (_, last_begin, last_bytes, *_) = run[0], run[-1]
            work.append((file, begin, last_begin + last_bytes - begin, partial(_records_of, run, bare)))
    progress.begin("bytes", sum(size_bytes for _, _, size_bytes, _ in work))
    counted = _Counted(progress)
    damages = scan(checkpoint.storage_of_files(), checkpoint.key, work, counted)
    notes = ["Checked by the CRC-32 of the archives' records; the bytes around them have none."]
    if unknown:
        names = name_some([name for *_, name, _, _ in unknown], _MOST_NAMES)
        through = ", ".join(sorted({each for *_, transforms in unknown for each in transforms}))
        notes.append(f"Not checked, because their transforms are unknown here ({through}): {names}.")
    if bare:
        notes.append(
            f"Not checked, because their archives have no CRC-32: {format_bytes(sum(bare))} of contents."
            f" A checkpoint of Penstock has their checksums in {MANIFEST_NAME}, which is missing."
        )
    return result(
        checked_bytes=sum(counted.amounts),
        damage=tuple(damages),
        notes=tuple(notes),
        unchecked_bytes=sum(bare) + sum(size_bytes for _, _, size_bytes, *_ in unknown),
    )


def _items(checkpoint: CheckpointSource) -> Iterator[_Item]:
    index, stored = checkpoint.index, checkpoint.index.stored
    if checkpoint.format is Format.TORCH_SAVE:
        (file,) = index.files
        yield file, 0, checkpoint.storage.stat(checkpoint.key(file)).size_bytes, "", None, ()
        return
    columns = (stored.file, stored.item_offset, stored.item_bytes, stored.regions.tensor)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for row, (number, begin, size, tensor) in enumerate(rows):
        name, width = index.tensors[tensor].name, index.tensors[tensor].element_bytes
        payload_bytes = math.prod(checkpoint.shape(row)) * width
        yield index.files[number], begin, size, name, payload_bytes, index.transforms_of(row)
    for held in index.objects:
        yield index.files[held.file], held.offset, held.size_bytes, held.name, None, held.transforms


def _records_of(run: Sequence[_Item], bare: list[int], source: Source) -> list[Segment]:
    """Return the records with a checksum in consecutive archives; a packed or invalid archive is one segment.

    The sizes of records without a checksum are added to `bare`.
    """
    segments: list[Segment] = []
    for item in run:
        _, begin, size_bytes, name, _, transforms = item
        end = begin + size_bytes
        if transforms:
            segments.append((begin, end, name, partial(_check_packed, item, bare)))
            continue
        try:
            found = _directory(_reader(source, item), size_bytes, name)
        except DataDamaged as error:
            segments.append((begin, end, name, partial(_given, error.what)))
            continue
        for offset, record in found:
            if record.crc32:
                at = begin + offset
                check = partial(check_crc, record.crc32)
                segments.append((at, at + record.size_bytes, name or record.name, check))
            else:
                bare.append(record.size_bytes)
    return segments


def _directory(read: ReadRange, size_bytes: int, where: str) -> list[tuple[int, ZipRecord]]:
    """Return an archive's records in the order of their bytes, each with the offset where these begin."""
    records = sorted(read_directory(read, size_bytes, where).values(), key=attrgetter("header_offset"))
    found = [(data_offset(read, record, where), record) for record in records]
    for (begin, record), (_, after) in pairwise(found):
        # Bytes that belong to a thousand records would be checked a thousand times.
        if begin + record.size_bytes > after.header_offset:
            raise DataDamaged(f"{record.name} overlaps {after.name}", where=where)
    return found


def _check_packed(item: _Item, bare: list[int], content: Iterator[memoryview]) -> str | None:
    """Check an item that was stored through transforms, which must be undone to find its records.

    The item is in memory both packed and unpacked, as when it is loaded.
    """
    *_, name, payload_bytes, transforms = item
    plain = memoryview(b"")

    def read(offset: int, size: int) -> bytes:
        if offset < 0 or offset + size > len(plain):
            raise DataDamaged("the archive ends before it", where=name)
        return bytes(plain[offset : offset + size])

    try:
        packed = b"".join(content)
        most = most_unpacked(packed, payload_bytes)
        plain = memoryview(undo_transforms(packed, transforms, name, at_most=most))
        for begin, record in _directory(read, len(plain), name):
            if not record.crc32:
                bare.append(record.size_bytes)
            elif what := check_crc(record.crc32, iter([plain[begin : begin + record.size_bytes]])):
                return what
    except DataDamaged as error:
        return error.what
    return None


def _reader(source: Source, item: _Item) -> ReadRange:
    """Return a reader of ranges of an item, which reads small ones by pages."""
    _, item_begin, item_bytes, name, *_ = item

    def fetch(offset: int, size: int) -> bytearray:
        if offset < 0 or item_begin + offset + size > source.size_bytes or offset + size > item_bytes:
            raise DataDamaged("the file ends before it", where=name)
        content = bytearray(size)
        source.read_into(item_begin + offset, memoryview(content))
        return content

    return in_pages(fetch, item_bytes)


class _Counted(Progress):
    """A `Progress` that also records the numbers of bytes that were checked."""

    def __init__(self, inside: Progress) -> None:
        self.amounts: list[int] = []
        self.begin = inside.begin  # type: ignore[method-assign]
        self._inside = inside

    def advance(self, amount: float) -> None:
        # Threads may append to a list at the same time.
        self.amounts.append(int(amount))
        self._inside.advance(amount)
