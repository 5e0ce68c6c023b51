"""Verify a stored checkpoint against all checksums that it has.

Our checkpoints have checksums of all their bytes; stock archives have a CRC-32 for each record, which torch
never checks; safetensors have none. Invariant: bytes that were not checked are counted, and never reported as
undamaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Final

from penstock.checkpoint.commit.catalog import AnyPath, CheckpointRef, open_parent
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME
from penstock.checkpoint.formats.checkpoint_source import (
    CheckpointSource,
    Format,
    checkpoint_uri,
    find_folder,
    open_checkpoint,
)
from penstock.checkpoint.formats.dcp_item import require_known_transforms, undo_transforms
from penstock.checkpoint.formats.manifest import Manifest, ManifestFile, checksum_of, read_manifest
from penstock.checkpoint.formats.torch_save import ReadRange, data_offset, read_directory
from penstock.checkpoint.tools import file_scan
from penstock.errors import DataDamaged, ObjectNotFound, StorageError, UsageError, name_some
from penstock.progress import Progress, Silent
from penstock.storage import Storage
from penstock.storage.capabilities import prefer_direct_access
from penstock.storage.protocol import Source, read_object
from penstock.units import format_bytes

_MOST_NAMES: Final = 5
"""How many of the items that cannot be checked are named."""

_END_BYTES: Final = 1 << 17
"""More than an archive's directory and the longest comment after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of verifying one checkpoint."""

    uri: str
    format: str
    num_files: int
    num_items: int
    size_bytes: int
    checked_bytes: int
    """Those of all bytes that a checksum or the format itself determines."""
    damage: tuple[file_scan.Damage, ...]
    notes: tuple[str, ...] = ()
    unchecked_bytes: int = 0
    """Of contents that have no checksum, or one that cannot be computed; not those around contents."""

    @property
    def is_whole(self) -> bool:
        """Whether no damage was found. Bytes without a checksum may be damaged all the same."""
        return not self.damage

    @property
    def is_checked(self) -> bool:
        """Whether all contents have a checksum."""
        return not self.unchecked_bytes and (self.checked_bytes > 0 or self.size_bytes == 0)


def verify(path: AnyPath, progress: Progress | None = None) -> Verification:
    """Verify the checkpoint at a path or URI; `ObjectNotFound` if there is none.

    Damage is returned, not raised, even that of the manifest or of `.metadata`.
    """
    storage, name = open_parent(path)
    uri = checkpoint_uri(storage, name)
    folder = find_folder(storage, name)
    try:
        content = read_object(storage, f"{folder}/{MANIFEST_NAME}")
    except (ObjectNotFound, StorageError):
        return _verify_foreign(path, uri, progress or Silent())
    try:
        manifest = read_manifest(content, uri)
    except DataDamaged as error:
        damage = file_scan.Damage(file=MANIFEST_NAME, begin=0, end=len(content), item="", what=error.what)
        return _of_one_file(uri, Format.DCP, damage)
    return _verify_ours(storage, folder, uri, manifest, progress or Silent())


def _of_one_file(uri: str, format_: str, damage: file_scan.Damage) -> Verification:
    """The result if the file that describes the others is damaged: nothing else can be checked."""
    return Verification(
        uri=uri,
        format=format_,
        num_files=1,
        num_items=0,
        size_bytes=damage.end,
        checked_bytes=damage.end,
        damage=(damage,),
        notes=("The data files were not checked: the file that describes them is damaged.",),
    )


def _verify_ours(
    storage: Storage, folder: str, uri: str, manifest: Manifest, progress: Progress
) -> Verification:
    counted = _CountingProgress(progress)
    num_read, damage = _check_metadata(storage, folder, manifest)
    damage += find_damage(storage, folder, manifest, manifest.files, counted)
    return Verification(
        uri=uri,
        format="penstock",
        num_files=len(manifest.files) + 2,
        num_items=sum(map(len, manifest.files)),
        size_bytes=manifest.size_bytes + manifest.metadata_bytes,
        checked_bytes=num_read + counted.num_bytes,
        damage=tuple(sorted(set(damage))),
    )


def find_damage(
    storage: Storage,
    folder: str,
    manifest: Manifest,
    files: Sequence[ManifestFile],
    progress: Progress | None = None,
) -> list[file_scan.Damage]:
    """The damage in `files`, all of a checkpoint's or those that this node has."""
    progress = progress or Silent()
    damage: list[file_scan.Damage] = []
    work: list[file_scan.Stretch] = []
    for file in files:
        wrong = _check_size(storage, f"{folder}/{file.name}", file)
        damage += wrong
        if not wrong or wrong[0].begin > 0:
            work += file_scan.cut_into_stretches(file.name, _segments(file, manifest.names))
    progress.begin("bytes", sum(stretch.size_bytes for stretch in work))
    if work:
        storage = prefer_direct_access(storage, reads=f"{folder}/{work[0].file}")
    return damage + file_scan.scan(storage, lambda file: f"{folder}/{file}", work, progress)


def require_verified(checkpoint: CheckpointRef, rank: int, num_ranks: int) -> None:
    """Verify this rank's part of a step's files, or all that it can open where not every rank can open all.

    `StorageError` names the first damage, or says that there are no checksums.
    """
    storage, folder = checkpoint.storage, checkpoint.committed.folder
    try:
        content = read_object(storage, checkpoint.key(MANIFEST_NAME))
    except ObjectNotFound as error:
        raise StorageError(
            "It cannot be verified: it has no checksums",
            uri=checkpoint.uri,
            fix="Restore it without verify=True, and save it anew.",
        ) from error
    manifest = read_manifest(content, checkpoint.uri)
    files, readable = manifest.files[rank::num_ranks], checkpoint.readable
    damage: list[file_scan.Damage] = []
    if readable is not None:
        files = tuple(file for file in manifest.files if file.name in readable)
    elif rank == 0:
        _, damage = _check_metadata(storage, folder, manifest)
    damage += find_damage(storage, folder, manifest, files)
    if damage:
        raise DataDamaged(f"{damage[0]}", where=checkpoint.uri)


def _check_metadata(storage: Storage, folder: str, manifest: Manifest) -> tuple[int, list[file_scan.Damage]]:
    """The number of bytes that could be read, and what is wrong with them."""
    wrong = partial(file_scan.Damage, file=METADATA_NAME, begin=0, end=manifest.metadata_bytes, item="")
    try:
        content = read_object(storage, f"{folder}/{METADATA_NAME}")
    except ObjectNotFound:
        return 0, [wrong(what="the file is missing")]
    except StorageError as error:
        return 0, [wrong(what=f"cannot be read: {error}")]
    is_whole = len(content) == manifest.metadata_bytes and checksum_of(content) == manifest.metadata_sum
    return len(content), [] if is_whole else [wrong(what="its checksum differs")]


def _check_size(storage: Storage, key: str, file: ManifestFile) -> list[file_scan.Damage]:
    """A missing file is damaged from 0 on, one of the wrong size from where it ends, or should end."""
    wrong = partial(file_scan.Damage, file=file.name, item="")
    try:
        size_bytes = storage.stat(key).size_bytes
    except ObjectNotFound:
        return [wrong(begin=0, end=file.size_bytes, what="the file is missing")]
    except StorageError as error:
        return [wrong(begin=0, end=file.size_bytes, what=f"cannot be read: {error}")]
    if size_bytes == file.size_bytes:
        return []
    ends = sorted((size_bytes, file.size_bytes))
    what = f"the file has {size_bytes} bytes, {file.size_bytes} were written"
    return [wrong(begin=ends[0], end=ends[1], what=what)]


def _segments(file: ManifestFile, names: Sequence[str]) -> Iterator[file_scan.Segment]:
    """All bytes of a file in order: items, and the gaps between them."""
    at = 0
    columns = (file.item_offset.tolist(), file.item_bytes.tolist(), file.item_name.tolist())
    for row, (offset, size, name) in enumerate(zip(*columns, strict=True)):
        if offset > at:
            yield file_scan.Segment(at, offset, "", file_scan.ZeroCheck)
        at = offset + size
        yield file_scan.Segment(offset, at, names[name], partial(file_scan.SumCheck, file.sum_at(row)))
    if file.size_bytes > at:
        yield file_scan.Segment(at, file.size_bytes, "", file_scan.ZeroCheck)


def _verify_foreign(path: AnyPath, uri: str, progress: Progress) -> Verification:
    try:
        checkpoint = open_checkpoint(path)
    except DataDamaged as error:
        return _of_one_file(
            uri, "unknown", file_scan.Damage(file=error.where, begin=0, end=0, item="", what=error.what)
        )
    items = sorted(_items(checkpoint))
    unknown = [item for item in items if not _can_unpack(item.descriptors)]
    result = partial(
        Verification,
        uri=checkpoint.uri,
        format=checkpoint.format,
        num_files=len(checkpoint.index.files),
        num_items=len(items),
        size_bytes=sum(item.size_bytes for item in items),
    )
    if checkpoint.format is Format.SAFETENSORS:
        return result(
            checked_bytes=0,
            damage=(),
            notes=("The format has no checksums: only headers and sizes were checked.",),
        )
    bare: list[int] = []
    work = list(_archive_stretches([item for item in items if _can_unpack(item.descriptors)], bare))
    counted = _CountingProgress(progress)
    progress.begin("bytes", sum(stretch.size_bytes for stretch in work))
    damage = file_scan.scan(checkpoint.storage_of_files(), checkpoint.key, work, counted)
    return result(
        checked_bytes=counted.num_bytes,
        damage=tuple(damage),
        notes=(
            "Checked by the CRC-32 of the archives' records; the bytes around them have none.",
            *_notes_of_unknown(unknown),
            *_notes_of_bare(sum(bare)),
        ),
        unchecked_bytes=sum(bare) + sum(item.size_bytes for item in unknown),
    )


def _notes_of_unknown(items: Sequence[_Item]) -> Iterator[str]:
    """A note that names the items that could not be checked."""
    if items:
        names = name_some([item.name for item in items], _MOST_NAMES)
        through = ", ".join(sorted({name for item in items for name in item.descriptors}))
        yield f"Not checked, because their transforms are unknown here ({through}): {names}."


def _notes_of_bare(size_bytes: int) -> Iterator[str]:
    """A note if archives were written without checksums of their own, as Penstock's are."""
    if size_bytes:
        yield (
            f"Not checked, because their archives have no CRC-32: {format_bytes(size_bytes)} of contents."
            f" A checkpoint of Penstock has their checksums in {MANIFEST_NAME}, which is missing."
        )


def _can_unpack(descriptors: Sequence[str]) -> bool:
    try:
        require_known_transforms(descriptors)
    except UsageError:
        return False
    return True


@dataclass(frozen=True, slots=True, order=True)
class _Item:
    """One archive of `torch.save`, alone in its file or among others."""

    file: str
    begin: int
    size_bytes: int
    name: str
    descriptors: tuple[str, ...] = ()
    """The stream transforms that it was stored through."""


def _items(checkpoint: CheckpointSource) -> Iterator[_Item]:
    contents = checkpoint.index
    if checkpoint.format is Format.TORCH_SAVE:
        (file,) = contents.files
        yield _Item(file, 0, checkpoint.storage.stat(checkpoint.key(file)).size_bytes, "")
        return
    stored = contents.stored
    columns = (stored.file, stored.item_offset, stored.item_bytes, stored.regions.tensor)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for row, (file, begin, size, tensor) in enumerate(rows):
        through = checkpoint.metadata.descriptors(row) if checkpoint.metadata else ()
        yield _Item(contents.files[file], begin, size, contents.tensors[tensor].name, tuple(through))
    for stored_object in contents.objects:
        through = checkpoint.descriptors(stored_object)
        yield _Item(
            contents.files[stored_object.file],
            stored_object.offset,
            stored_object.size_bytes,
            stored_object.name,
            tuple(through),
        )


def _archive_stretches(items: Sequence[_Item], bare: list[int]) -> Iterator[file_scan.Stretch]:
    """Runs of archives of one file; the thread that reads them finds out where their records are.

    `bare` gets the sizes of records without a checksum.
    """
    run: list[_Item] = []
    for item in items:
        if run and (
            item.file != run[0].file or sum(archive.size_bytes for archive in run) >= file_scan.STRETCH_BYTES
        ):
            yield _archive_stretch(run, bare)
            run = []
        run.append(item)
    if run:
        yield _archive_stretch(run, bare)


def _archive_stretch(run: list[_Item], bare: list[int]) -> file_scan.Stretch:
    def segments(source: Source) -> list[file_scan.Segment]:
        return [segment for item in run for segment in _records(source, item, bare)]

    begin = run[0].begin
    return file_scan.Stretch(run[0].file, begin, run[-1].begin + run[-1].size_bytes - begin, segments)


def _records(source: Source, item: _Item, bare: list[int]) -> Iterator[file_scan.Segment]:
    """The records of one archive that have a checksum, in order; all of it if it cannot be parsed."""
    if item.descriptors:
        check = partial(_PackedCheck, item, bare)
        yield file_scan.Segment(item.begin, item.begin + item.size_bytes, item.name, check)
        return
    read = _reader(source, item)
    try:
        records = read_directory(read, item.size_bytes, item.name)
        begins = {name: item.begin + data_offset(read, record, "") for name, record in records.items()}
    except DataDamaged as error:
        yield file_scan.Segment(
            item.begin, item.begin + item.size_bytes, item.name, partial(file_scan.KnownDamage, error.what)
        )
        return
    for name, begin in sorted(begins.items(), key=lambda named: named[1]):
        record = records[name]
        if record.crc32:
            crc = partial(file_scan.CrcCheck, record.crc32)
            yield file_scan.Segment(begin, begin + record.size_bytes, item.name or name, crc)
        else:
            bare.append(record.size_bytes)


class _PackedCheck:
    """An item that was stored through stream transforms, whose records can only be found by undoing them.

    Takes the memory of the item, packed and unpacked, as loading it does.
    """

    def __init__(self, item: _Item, bare: list[int]) -> None:
        self._item = item
        self._bare = bare
        self._content = bytearray()

    def update(self, content: memoryview) -> None:
        """Keep the next bytes."""
        self._content += content

    def complaint(self) -> str | None:
        """Unpack it, and check each of its records."""
        try:
            plain = memoryview(undo_transforms(self._content, self._item.descriptors, self._item.name))
            return _complaint_of_archive(plain, self._item.name, self._bare)
        except DataDamaged as error:
            return error.what


def _complaint_of_archive(content: memoryview, name: str, bare: list[int]) -> str | None:
    def read(offset: int, size: int) -> bytes:
        if offset < 0 or offset + size > len(content):
            raise DataDamaged("the archive ends before it", where=name)
        return bytes(content[offset : offset + size])

    for record in read_directory(read, len(content), name).values():
        if not record.crc32:
            bare.append(record.size_bytes)
            continue
        begin = data_offset(read, record, name)
        check = file_scan.CrcCheck(record.crc32)
        check.update(content[begin : begin + record.size_bytes])
        if (what := check.complaint()) is not None:
            return what
    return None


def _reader(source: Source, item: _Item) -> ReadRange:
    """Reads ranges of an item, most of them from its first and last pages, which are read only once."""
    ends: dict[int, bytearray] = {}

    def fetch(offset: int, size: int) -> bytearray:
        if offset < 0 or item.begin + offset + size > source.size_bytes or offset + size > item.size_bytes:
            raise DataDamaged("the file ends before it", where=item.name)
        content = bytearray(size)
        source.read_into(item.begin + offset, memoryview(content))
        return content

    def read(offset: int, size: int) -> bytearray:
        for begin in (0, max(item.size_bytes - _END_BYTES, 0)):
            if begin <= offset and offset + size <= min(begin + _END_BYTES, item.size_bytes):
                if begin not in ends:
                    ends[begin] = fetch(begin, min(_END_BYTES, item.size_bytes - begin))
                return ends[begin][offset - begin : offset - begin + size]
        return fetch(offset, size)

    return read


class _CountingProgress(Progress):
    """Progress that remembers how much was checked."""

    def __init__(self, inside: Progress) -> None:
        self._inside = inside
        self._lock = Lock()
        self.num_bytes = 0

    def begin(self, phase: str, total: float) -> None:
        self._inside.begin(phase, total)

    def advance(self, amount: float) -> None:
        with self._lock:
            self.num_bytes += int(amount)
        self._inside.advance(amount)
