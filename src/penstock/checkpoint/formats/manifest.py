"""`penstock.json`, the manifest: every byte of a checkpoint, with an XXH3-128 checksum for each item.

Rank 0 writes it when all files are durable, and before `.metadata`. A checksum is 16 bytes, in the order that
`xxhsum -H2` prints them; it detects damage, not forgery. Invariant: each byte of a checkpoint is covered
once: by an item's checksum, a gap between items (zeros), the checksum of `.metadata` or the manifest's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol

import numpy as np
import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from penstock import __version__
from penstock.checkpoint.state.regions import UNKNOWN, CheckpointIndex, Ints
from penstock.errors import AccessRefused, DataDamaged, ShortTransfer, StorageError, Unavailable, name_some
from penstock.storage import Storage
from penstock.storage.aligned import aligned_buffer
from penstock.storage.protocol import check_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.checkpoint.engine import WrittenFile


SUM_BYTES = 16
BLOCK_BYTES = 16 << 20

Bytes = bytes | bytearray | memoryview


class RunningChecksum(Protocol):
    """A checksum that is computed piece by piece, in order."""

    def update(self, data: Bytes, /) -> None:
        """Add the next bytes."""

    def digest(self) -> bytes:
        """The checksum of all bytes so far."""


def start_checksum() -> RunningChecksum:
    """The checksum of no bytes yet."""
    return xxhash.xxh3_128()


def checksum_of(*buffers: Bytes) -> bytes:
    """The checksum of `buffers`, one after another."""
    total = start_checksum()
    for buffer in buffers:
        total.update(buffer)
    return total.digest()


def checksum_object(storage: Storage, key: str, progress: Callable[[int], None] | None = None) -> bytes:
    """The sum of one object, read block by block; `progress` is called with the bytes of each."""
    total = start_checksum()
    with closing(storage.open(key)) as source:
        block = aligned_buffer(max(1, min(BLOCK_BYTES, source.size_bytes)))
        for start in range(0, source.size_bytes, BLOCK_BYTES):
            part = block[: min(BLOCK_BYTES, source.size_bytes - start)]
            source.read_into(start, part)
            total.update(part)
            if progress is not None:
                progress(part.nbytes)
    return total.digest()


Fact = str | int | float | bool | None

MANIFEST_VERSION: Final = 1
OPENING: Final = b'{"format":"penstock.checkpoint","xxh3_128":"'
"""Every manifest begins with this; the hexadecimal checksum of all other bytes follows."""
_HEX: Final = 2 * SUM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ManifestFile:
    """One data file: columns of its items in the order of their offsets. Bytes between items are zeros."""

    name: str
    size_bytes: int
    item_name: Ints
    """Numbers of the manifest's `names`."""
    item_offset: Ints
    item_bytes: Ints
    payload_offset: Ints
    sums: bytes
    """The XXH3-128 of each item as stored in the file, 16 bytes each."""

    def __len__(self) -> int:
        return len(self.item_offset)

    def sum_at(self, row: int) -> bytes:
        """One item's checksum."""
        return self.sums[row * SUM_BYTES : (row + 1) * SUM_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """All of a checkpoint's files, and what wrote them."""

    step: int | None = None
    save_id: str = ""
    written_by: str = ""
    """The program and its version."""
    world_size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Size of each named dimension of the device mesh, outermost first; empty without one."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """Further facts that the program that saved wants to record."""
    metadata_bytes: int
    metadata_sum: bytes
    names: tuple[str, ...]
    """Of tensors and objects; an item of each may lie in several files."""
    files: tuple[ManifestFile, ...]

    @property
    def size_bytes(self) -> int:
        """Of all data files."""
        return sum(file.size_bytes for file in self.files)


def manifest_bytes(manifest: Manifest) -> bytes:
    """The content of the file, with its own checksum."""
    _, between, ending = manifest_frames(manifest, b"")
    names, files = names_text(manifest.names), b",".join(map(file_text, manifest.files))
    rest = manifest_head(manifest) + names + between + files + ending
    return OPENING + checksum_of(OPENING, rest).hex().encode() + rest


def manifest_head(manifest: Manifest) -> bytes:
    """What stands between the file's own checksum and the names."""
    document = {
        "version": MANIFEST_VERSION,
        "step": manifest.step,
        "save_id": manifest.save_id,
        "written_by": manifest.written_by,
        "world_size": manifest.world_size,
        "mesh": dict(manifest.mesh),
        "facts": dict(manifest.facts),
        "metadata": {"size_bytes": manifest.metadata_bytes, "xxh3_128": manifest.metadata_sum.hex()},
    }
    return b'",' + _as_json(document)[1:-1] + b',"names":['


def manifest_frames(manifest: Manifest, own_sum: bytes) -> tuple[bytes, bytes, bytes]:
    """What stands before, between and after names and files; `own_sum` is hexadecimal, of all other bytes."""
    return OPENING + own_sum + manifest_head(manifest), b'],"files":[', b"]}\n"


def names_text(names: Sequence[str]) -> bytes:
    """Names with commas between them."""
    return _as_json(names)[1:-1]


def file_text(file: ManifestFile) -> bytes:
    """One of the files."""
    return _as_json(
        {
            "name": file.name,
            "size_bytes": file.size_bytes,
            "items": {
                "name": file.item_name.tolist(),
                "offset": file.item_offset.tolist(),
                "size_bytes": file.item_bytes.tolist(),
                "payload_offset": file.payload_offset.tolist(),
                "xxh3_128": file.sums.hex(),
            },
        }
    )


def _as_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, check_circular=False).encode()


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


_Size = Annotated[int, Field(ge=0, lt=1 << 62)]
_Sum = Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]


def _as_column(numbers: list[int]) -> Ints:
    try:
        return np.array(numbers, dtype=np.int64)
    except OverflowError as error:
        raise ValueError(str(error)) from error


_Column = Annotated[list[int], AfterValidator(_as_column)]
"""An array from when it is read: lists of all files' numbers take five times as much memory."""


class _Items(_Strict):
    name: _Column
    offset: _Column
    size_bytes: _Column
    payload_offset: _Column
    xxh3_128: str


class _File(_Strict):
    name: str
    size_bytes: _Size
    items: _Items


class _MetadataFile(_Strict):
    size_bytes: _Size
    xxh3_128: _Sum


class _Document(_Strict):
    format: Literal["penstock.checkpoint"]
    xxh3_128: _Sum
    version: Literal[1]
    step: int | None
    save_id: str
    written_by: str
    world_size: Annotated[int, Field(ge=1)]
    mesh: dict[str, int]
    facts: dict[str, Fact]
    metadata: _MetadataFile
    names: list[str]
    files: list[_File]


def read_manifest(content: bytes | bytearray | memoryview, where: str) -> Manifest:
    """Check a manifest's own checksum, then its content; `DataDamaged` names the first error."""
    content = bytes(content)
    _check_own_sum(content, where)
    try:
        document = _Document.model_validate_json(content)
    except ValidationError as error:
        raise _unreadable(content, error, where) from error
    files = tuple(_file(file, len(document.names), where) for file in document.files)
    return Manifest(
        step=document.step,
        save_id=document.save_id,
        written_by=document.written_by,
        world_size=document.world_size,
        mesh=document.mesh,
        facts=document.facts,
        metadata_bytes=document.metadata.size_bytes,
        metadata_sum=bytes.fromhex(document.metadata.xxh3_128),
        names=tuple(document.names),
        files=files,
    )


def _check_own_sum(content: bytes, where: str) -> None:
    end = len(OPENING) + _HEX
    stated = content[len(OPENING) : end]
    if not content.startswith(OPENING) or stated != checksum_of(OPENING, content[end:]).hex().encode():
        raise DataDamaged(
            "The manifest is not as it was written: its own checksum differs",
            where=where,
            fix="Load an older checkpoint; stock torch may still load this one, unverified.",
        )


def _unreadable(content: bytes, error: ValidationError, where: str) -> DataDamaged | Unavailable:
    """The error for content that is as it was written: another version is not damage."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if place == "version":
        version: Any = json.loads(content).get("version")
        return Unavailable(
            f"The manifest has version {version}, this Penstock reads {MANIFEST_VERSION}",
            where=where,
            fix="Use the version of Penstock that wrote it, or a newer one.",
        )
    return DataDamaged(f"The manifest's {place}: {first['msg']}", where=where)


def _file(file: _File, num_names: int, where: str) -> ManifestFile:
    """Check a file's columns: items are in order, do not overlap, and are inside the file."""
    try:
        check_key(file.name, where)
        columns = [np.asarray(column) for column in _columns(file.items)]
        sums = bytes.fromhex(file.items.xxh3_128)
    except (AccessRefused, ValueError) as error:
        raise DataDamaged(f"The manifest's file {file.name!r}: {error}", where=where) from error
    name, offset, size, payload = columns
    if len({len(column) for column in columns}) > 1 or len(sums) != SUM_BYTES * len(name):
        raise DataDamaged(f"The manifest's columns of {file.name} are not equally long", where=where)
    ends = offset + size
    edges = np.concatenate([[0], np.stack([offset, ends], axis=1).ravel(), [file.size_bytes]])
    inside = (payload >= offset) & (payload <= ends) & (name >= 0) & (name < num_names)
    if (np.diff(edges) < 0).any() or not inside.all():
        raise DataDamaged(f"The manifest's items of {file.name} overlap or leave the file", where=where)
    return ManifestFile(
        name=file.name,
        size_bytes=file.size_bytes,
        item_name=name,
        item_offset=offset,
        item_bytes=size,
        payload_offset=payload,
        sums=sums,
    )


def _columns(items: _Items) -> Iterable[list[int]]:
    return items.name, items.offset, items.size_bytes, items.payload_offset


def build_manifest(
    index: CheckpointIndex,
    files: Sequence[WrittenFile],
    metadata: bytes,
    *,
    step: int | None = None,
    save_id: str = "",
    world_size: int = 1,
    mesh: Mapping[str, int] | None = None,
    facts: Mapping[str, Fact] | None = None,
) -> Manifest:
    """The manifest of what was written: `index` as in `metadata`, `files` as ranks report them.

    Also checks that both agree: an item that is in `index` and in no file, or the other way round, is a
    `DataDamaged` that names it.
    """
    names = (*(facts.name for facts in index.tensors), *(stored.name for stored in index.objects))
    by_name = {file.name: file for file in files if len(file.item_offset)}
    missing = set(index.files) ^ set(by_name)
    if missing:
        raise DataDamaged(f"Planned and written files differ: {name_some(sorted(missing), 5)}")
    items = _ItemTable(index)
    entries = []
    for number, name in enumerate(index.files):
        file = by_name[name]
        rows = items.match(number, name, file.item_offset, file.item_bytes)
        entries.append(
            ManifestFile(
                name=name,
                size_bytes=file.size_bytes,
                item_name=items.name[rows],
                item_offset=file.item_offset,
                item_bytes=file.item_bytes,
                payload_offset=file.payload_offset,
                sums=file.sums,
            )
        )
    return Manifest(
        step=step,
        save_id=save_id,
        written_by=f"penstock {__version__}",
        world_size=world_size,
        mesh=mesh or {},
        facts=facts or {},
        metadata_bytes=len(metadata),
        metadata_sum=checksum_of(metadata),
        names=names,
        files=tuple(entries),
    )


@dataclass(frozen=True, slots=True, eq=False)
class ChecksummedIndex:
    """A checkpoint's index with what its manifest adds: payload positions and each item's checksum."""

    index: CheckpointIndex
    sums: NDArray[np.uint8]
    """(rows of `stored`, 16): of each item as stored in the file, with its envelope."""
    object_sums: tuple[bytes, ...]


def join_manifest(index: CheckpointIndex, manifest: Manifest, where: str) -> ChecksummedIndex:
    """Join `.metadata` and manifest of one checkpoint; raises `DataDamaged` where they disagree."""
    items = _ItemTable(index)
    by_name = {file.name: file for file in manifest.files}
    num_rows = len(index.stored)
    payload = np.full(len(items.name), UNKNOWN, dtype=np.int64)
    sums = np.zeros((len(items.name), SUM_BYTES), dtype=np.uint8)
    for number, name in enumerate(index.files):
        file = by_name.get(name)
        if file is None:
            raise DataDamaged(f"The manifest does not know the file {name}", where=where)
        rows = items.match(number, name, file.item_offset, file.item_bytes)
        payload[rows] = file.payload_offset
        sums[rows] = np.frombuffer(file.sums, dtype=np.uint8).reshape(-1, SUM_BYTES)
    # A packed item has no payload of its own, wherever the manifest says that it begins.
    known = np.where(index.stored.packed, UNKNOWN, payload[:num_rows])
    stored = replace(index.stored, payload_offset=known)
    return ChecksummedIndex(
        replace(index, stored=stored),
        sums[:num_rows],
        tuple(sums[num_rows + number].tobytes() for number in range(len(index.objects))),
    )


class _ItemTable:
    """All items of an index, regions first, then objects, to be found by file and offset."""

    def __init__(self, index: CheckpointIndex) -> None:
        objects, stored = index.objects, index.stored
        numbers = np.arange(len(objects), dtype=np.int64) + len(index.tensors)
        self.name = np.concatenate([stored.regions.tensor, numbers])
        self._file = np.concatenate([stored.file, _ints(one.file for one in objects)])
        self._offset = np.concatenate([stored.item_offset, _ints(one.offset for one in objects)])
        self._bytes = np.concatenate([stored.item_bytes, _ints(one.size_bytes for one in objects)])
        self._order = np.lexsort((self._bytes, self._offset, self._file))
        self._begins = np.searchsorted(self._file[self._order], np.arange(len(index.files) + 1))

    def match(self, file: int, file_name: str, offsets: Ints, sizes: Ints) -> Ints:
        """The rows of a file's items in order; their offsets and sizes must match."""
        rows = self._order[self._begins[file] : self._begins[file + 1]]
        if not (np.array_equal(self._offset[rows], offsets) and np.array_equal(self._bytes[rows], sizes)):
            raise DataDamaged(f"The items of {file_name} are not those in the metadata", where=file_name)
        return np.asarray(rows)


def _ints(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, dtype=np.int64)


def require_complete(sizes: Mapping[str, int], expected: Mapping[str, int], uri: str) -> None:
    """Raise unless the files of a draft, `sizes` by name, are exactly those `expected`."""
    missing = sorted(expected.keys() - sizes.keys())
    if missing:
        raise StorageError(
            f"{len(missing)} of {len(expected)} files of this checkpoint are missing, as rank 0 sees it: "
            f"{name_some(missing)}",
            uri=uri,
            fix="All ranks must write to the same storage: give a path on a shared file system, where nothing"
            " else removes files.",
        )
    for name, size_bytes in sorted(expected.items()):
        if sizes[name] != size_bytes:
            raise ShortTransfer(
                f"{name} has {sizes[name]} bytes, but {size_bytes} were written",
                uri=f"{uri}/{name}",
                expected_bytes=size_bytes,
                actual_bytes=sizes[name],
                fix="Another program changed this file, or the storage lost data: save again.",
            )
    strangers = sorted(sizes.keys() - expected.keys())
    if strangers:
        raise StorageError(
            f"This checkpoint contains {len(strangers)} files that no rank wrote: {name_some(strangers)}",
            uri=uri,
            fix="Find out which other program writes there, then save again.",
        )
