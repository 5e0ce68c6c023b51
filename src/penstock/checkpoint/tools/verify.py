"""Verify a stored checkpoint against all checksums that it has.

Our checkpoints have checksums of all their bytes; stock archives have a CRC-32 for each record, which torch
never checks; safetensors have none. Invariant: bytes that were not checked are counted, and never reported as
undamaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from penstock.checkpoint.formats.torch_save import ReadRange, ZipRecord, data_offset, read_directory
from penstock.checkpoint.tools import file_scan
from penstock.checkpoint.tools.file_scan import Damage
from penstock.errors import DataDamaged, ObjectNotFound, StorageError, UsageError, name_some
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.capabilities import prefer_direct_access
from penstock.storage.protocol import Source, read_object
from penstock.units import format_bytes

_MOST_NAMES: Final = 5
"""How many of the items that cannot be checked are named."""

_END_BYTES: Final = 1 << 17
"""More than an archive's directory and the longest comment after it."""
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
    """The bytes that a checksum or the format itself determines."""
    damage: tuple[Damage, ...]
    notes: tuple[str, ...] = ()
    unchecked_bytes: int = 0
    """Bytes of contents that have no checksum, or one that cannot be computed here."""

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

    Damage is returned, not raised, even damage of the manifest or of `.metadata`.
    """
    progress = progress or Progress()
    storage, name = open_parent(path)
    uri, folder = checkpoint_uri(storage, name), find_folder(storage, name)
    try:
        content = read_object(storage, f"{folder}/{MANIFEST_NAME}")
    except StorageError:
        return _verify_foreign(path, uri, progress)
    try:
        manifest = read_manifest(content, uri)
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
    """The result if the file that describes the others is damaged: nothing else can be checked."""
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
    """The damage in `files`, all of a checkpoint's or the ones that this node has."""
    progress = progress or Progress()
    damage: list[Damage] = []
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

    `StorageError` names the first damage, or reports that there are no checksums.
    """
    storage, folder = checkpoint.storage, checkpoint.committed.folder
    try:
        content = read_object(storage, checkpoint.key(MANIFEST_NAME))
    except ObjectNotFound as error:
        raise StorageError(
            "It cannot be verified: it has no checksums",
            uri=checkpoint.uri,
            fix="Restore it without verify=True, and save it again.",
        ) from error
    manifest = read_manifest(content, checkpoint.uri)
    files = manifest.files[rank::num_ranks]
    damage: list[Damage] = []
    if checkpoint.readable is not None:
        files = tuple(file for file in manifest.files if file.name in checkpoint.readable)
    elif rank == 0:
        _, damage = _check_metadata(storage, folder, manifest)
    if damage := damage + find_damage(storage, folder, manifest, files):
        raise DataDamaged(f"{damage[0]}", where=checkpoint.uri)


def _check_metadata(storage: Storage, folder: str, manifest: Manifest) -> tuple[int, list[Damage]]:
    """The number of bytes that could be read, and what is wrong with them."""
    wrong = partial(Damage, file=METADATA_NAME, begin=0, end=manifest.metadata_bytes, item="")
    try:
        content = read_object(storage, f"{folder}/{METADATA_NAME}")
    except ObjectNotFound:
        return 0, [wrong(what="the file is missing")]
    except StorageError as error:
        return 0, [wrong(what=f"cannot be read: {error}")]
    is_whole = len(content) == manifest.metadata_bytes and checksum_of(content) == manifest.metadata_sum
    return len(content), [] if is_whole else [wrong(what="its checksum differs")]


def _check_size(storage: Storage, key: str, file: ManifestFile) -> list[Damage]:
    """A missing file is damaged from 0 on, one of the wrong size from where it ends, or should end."""
    wrong = partial(Damage, file=file.name, item="")
    try:
        size_bytes = storage.stat(key).size_bytes
    except ObjectNotFound:
        return [wrong(begin=0, end=file.size_bytes, what="the file is missing")]
    except StorageError as error:
        return [wrong(begin=0, end=file.size_bytes, what=f"cannot be read: {error}")]
    if size_bytes == file.size_bytes:
        return []
    begin, end = sorted((size_bytes, file.size_bytes))
    what = f"the file has {size_bytes} bytes, {file.size_bytes} were written"
    return [wrong(begin=begin, end=end, what=what)]


def _segments(file: ManifestFile, names: Sequence[str]) -> Iterator[file_scan.Segment]:
    """All bytes of a file in order: items, and the gaps between them."""
    at = 0
    columns = (file.item_offset.tolist(), file.item_bytes.tolist(), file.item_name.tolist())
    for row, (offset, size, name) in enumerate(zip(*columns, strict=True)):
        if offset > at:
            yield file_scan.Segment(at, offset, "", file_scan.check_zeros)
        at = offset + size
        check = partial(file_scan.check_sum, file.sum_at(row))
        yield file_scan.Segment(offset, at, names[name], check)
    if file.size_bytes > at:
        yield file_scan.Segment(at, file.size_bytes, "", file_scan.check_zeros)


@dataclass(frozen=True, slots=True, order=True)
class _Item:
    """One archive of `torch.save`, alone in its file or among others."""

    file: str
    begin: int
    size_bytes: int
    name: str
    transforms: tuple[str, ...] = ()


def _verify_foreign(path: AnyPath, uri: str, progress: Progress) -> Verification:
    """Verify what another program wrote, by the CRC-32 of the archives' records."""
    try:
        checkpoint = open_checkpoint(path)
    except DataDamaged as error:
        return _of_one_file(
            uri, "unknown", Damage(file=error.where, begin=0, end=0, item="", what=error.what)
        )
    items = sorted(_items(checkpoint))
    result = partial(
        Verification,
        uri=checkpoint.uri,
        format=checkpoint.format,
        num_files=len(checkpoint.index.files),
        num_items=len(items),
        size_bytes=sum(item.size_bytes for item in items),
    )
    if checkpoint.format is Format.SAFETENSORS:
        note = "The format has no checksums: only headers and sizes were checked."
        return result(checked_bytes=0, damage=(), notes=(note,))
    unknown = [item for item in items if not _can_unpack(item.transforms)]
    known = [item for item in items if _can_unpack(item.transforms)]
    bare: list[int] = []
    """The sizes of records without a checksum; the threads that read archives add to it."""
    work, at = [], 0
    while at < len(known):
        # A run of archives of one file, for one thread.
        end, size_bytes = at, 0
        while end < len(known) and known[end].file == known[at].file and size_bytes < file_scan.STRETCH_BYTES:
            size_bytes += known[end].size_bytes
            end += 1
        run, begin = known[at:end], known[at].begin
        find = partial(_records_of_run, run, bare)
        work.append(file_scan.Stretch(run[0].file, begin, run[-1].begin + run[-1].size_bytes - begin, find))
        at = end
    progress.begin("bytes", sum(stretch.size_bytes for stretch in work))
    counted = _Counted(progress)
    damage = file_scan.scan(checkpoint.storage_of_files(), checkpoint.key, work, counted)
    notes = ["Checked by the CRC-32 of the archives' records; the bytes around them have none."]
    if unknown:
        names = name_some([item.name for item in unknown], _MOST_NAMES)
        through = ", ".join(sorted({name for item in unknown for name in item.transforms}))
        notes.append(f"Not checked, because their transforms are unknown here ({through}): {names}.")
    if bare:
        notes.append(
            f"Not checked, because their archives have no CRC-32: {format_bytes(sum(bare))} of contents."
            f" A checkpoint of Penstock has their checksums in {MANIFEST_NAME}, which is missing."
        )
    return result(
        checked_bytes=sum(counted.amounts),
        damage=tuple(damage),
        notes=tuple(notes),
        unchecked_bytes=sum(bare) + sum(item.size_bytes for item in unknown),
    )


def _can_unpack(transforms: Sequence[str]) -> bool:
    try:
        require_known_transforms(transforms)
    except UsageError:
        return False
    return True


def _items(checkpoint: CheckpointSource) -> Iterator[_Item]:
    index, stored = checkpoint.index, checkpoint.index.stored
    if checkpoint.format is Format.TORCH_SAVE:
        (file,) = index.files
        yield _Item(file, 0, checkpoint.storage.stat(checkpoint.key(file)).size_bytes, "")
        return
    columns = (stored.file, stored.item_offset, stored.item_bytes, stored.regions.tensor)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for row, (number, begin, size, tensor) in enumerate(rows):
        name = index.tensors[tensor].name
        yield _Item(index.files[number], begin, size, name, index.transforms_of(row))
    for held in index.objects:
        yield _Item(index.files[held.file], held.offset, held.size_bytes, held.name, held.transforms)


def _records_of_run(run: Sequence[_Item], bare: list[int], source: Source) -> list[file_scan.Segment]:
    return [segment for item in run for segment in _records(item, bare, source)]


def _records(item: _Item, bare: list[int], source: Source) -> Iterator[file_scan.Segment]:
    """The records of one archive that have a checksum, in order; all of it if it cannot be parsed."""
    whole = partial(file_scan.Segment, item.begin, item.begin + item.size_bytes, item.name)
    if item.transforms:
        yield whole(partial(_check_packed, item, bare))
        return
    try:
        found = _directory(_reader(source, item), item.size_bytes, item.name)
    except DataDamaged as error:
        what = error.what
        yield whole(lambda _: what)
        return
    for begin, record in found:
        if record.crc32:
            at = item.begin + begin
            check = partial(file_scan.check_crc, record.crc32)
            yield file_scan.Segment(at, at + record.size_bytes, item.name or record.name, check)
        else:
            bare.append(record.size_bytes)


def _directory(read: ReadRange, size_bytes: int, where: str) -> list[tuple[int, ZipRecord]]:
    """The records of an archive in the order in which their bytes begin, with that offset."""
    records = read_directory(read, size_bytes, where).values()
    return sorted(
        ((data_offset(read, record, where), record) for record in records), key=lambda found: found[0]
    )


def _check_packed(item: _Item, bare: list[int], content: Iterator[memoryview]) -> str | None:
    """Check an item that was stored through transforms: its records are found by undoing them.

    Takes the memory of the item, packed and unpacked, as loading it does.
    """
    plain = memoryview(b"")

    def read(offset: int, size: int) -> bytes:
        if offset < 0 or offset + size > len(plain):
            raise DataDamaged("the archive ends before it", where=item.name)
        return bytes(plain[offset : offset + size])

    try:
        plain = memoryview(undo_transforms(b"".join(content), item.transforms, item.name))
        for begin, record in _directory(read, len(plain), item.name):
            if not record.crc32:
                bare.append(record.size_bytes)
            elif what := file_scan.check_crc(record.crc32, iter([plain[begin : begin + record.size_bytes]])):
                return what
    except DataDamaged as error:
        return error.what
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


class _Counted(Progress):
    """A progress that also lists what was checked."""

    def __init__(self, inside: Progress) -> None:
        self._inside = inside
        self.amounts: list[int] = []

    def begin(self, phase: str, total: float) -> None:
        self._inside.begin(phase, total)

    def advance(self, amount: float) -> None:
        # Threads may append to a list at the same time.
        self.amounts.append(int(amount))
        self._inside.advance(amount)
