"""The two files that describe a checkpoint: `penstock.json`, the manifest, and torch's `.metadata`.

Rank 0 writes both when all files are durable, `.metadata` last. The manifest has an XXH3-128 checksum for
each item, and the index in columns: a load needs `.metadata` only to verify its checksum. A checksum is 16
bytes, in the order in which `xxhsum -H2` prints them; it detects damage, not forgery. `.metadata` is written
with torch's classes, so that stock torch can read it. If there is no manifest, the index is read from it, but
without torch, so no code from the file runs (see `restricted_pickle`). Invariants: each byte of a checkpoint
is covered exactly once, by an item's checksum, as a gap between items (zeros), by the checksum of
`.metadata`, or by the manifest's own; an index that was read has been checked: every region has one position
and is within its tensor, and no file name leads out of the checkpoint's folder.
"""

from __future__ import annotations

import gc
import io
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from penstock import __version__
from penstock.checkpoint.formats.restricted_pickle import read_metadata_pickle
from penstock.checkpoint.state.regions import (
    MOST_DIMENSIONS,
    QUANTIZED,
    UNKNOWN,
    Bytes,
    CheckpointIndex,
    Ints,
    Regions,
    StoredObject,
    StoredRegions,
    TensorFacts,
    Transforms,
    check_index,
    element_type,
    pad_rows,
    refuse_index,
    require,
    require_few_values,
)
from penstock.errors import (
    AccessRefused,
    DataDamaged,
    ShortTransfer,
    StorageError,
    Unavailable,
    UsageError,
    name_some,
)
from penstock.storage import Storage
from penstock.storage.aligned import aligned_buffer
from penstock.storage.protocol import MOST_WHOLE, check_key

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


SUM_BYTES = 16
BLOCK_BYTES = 16 << 20
start_checksum = xxhash.xxh3_128
"""The checksum of no bytes, to be updated piece by piece."""


def checksum_of(*buffers: Bytes) -> bytes:
    """Return the checksum of `buffers`, one after another."""
    total = start_checksum()
    for buffer in buffers:
        total.update(buffer)
    return total.digest()


def checksum_object(storage: Storage, key: str, progress: Callable[[int], None] | None = None) -> bytes:
    """Return the checksum of one object, read block by block; `progress` receives the size of each block."""
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


class ItemChecksums:
    """Computes the checksums of a file's items from its bytes, given where the items begin and end."""

    def __init__(self, begins: Sequence[int], ends: Sequence[int]) -> None:
        self._begins, self._ends = begins, ends
        self._at = 0
        self._sum = start_checksum()
        self._done: list[bytes] = []

    def add(self, content: memoryview) -> None:
        """Add the next bytes of the file. Bytes in gaps belong to no item."""
        begin, self._at = self._at, self._at + len(content)
        while len(self._done) < len(self._ends) and self._begins[len(self._done)] < self._at:
            first, end = max(self._begins[len(self._done)], begin), self._ends[len(self._done)]
            self._sum.update(content[first - begin : end - begin])
            if self._at < end:
                return
            self._finish_item()

    def all(self) -> bytes:
        """Return all checksums, once the whole file has been added."""
        while len(self._done) < len(self._ends):
            # Empty items at the end of a file receive no bytes that would finish them.
            self._finish_item()
        return b"".join(self._done)

    def _finish_item(self) -> None:
        self._done.append(self._sum.digest())
        self._sum = start_checksum()


Fact = str | int | float | bool | None

MANIFEST_VERSION: Final = 2
"""The version that is written. Version 1 had no index."""
OPENING: Final = b'{"format":"penstock.checkpoint","xxh3_128":"'
"""The beginning of every manifest; the hexadecimal checksum of all other bytes follows."""
_HEX: Final = 2 * SUM_BYTES
_MOST_VALUES: Final = 1 << 24
"""The most values in a manifest, about ten for each of more than a million parts."""
_LARGEST_PICKLE: Final = 256 << 20
"""The largest `.metadata` that is parsed: of a million parts, it has up to 190 MB."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrittenFile:
    """One durable file of one rank: its items in order, objects first. Bytes between items are zeros."""

    name: str
    size_bytes: int
    item_offset: Ints
    item_bytes: Ints
    payload_offset: Ints
    sums: bytes
    """The XXH3-128 of each item as stored in the file, 16 bytes each."""

    def __len__(self) -> int:
        return len(self.item_offset)

    def sum_at(self, row: int) -> bytes:
        return self.sums[row * SUM_BYTES : (row + 1) * SUM_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ManifestFile(WrittenFile):
    """One data file, with a description of each of its items."""

    item_name: Ints
    """For each item, an index into the manifest's `names`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """All of a checkpoint's files, and what wrote them."""

    step: int | None = None
    save_id: str = ""
    written_by: str = ""
    """The program and its version."""
    world_size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    """The size of each named dimension of the device mesh, outermost first; empty without a mesh."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """Further facts that the saving program wants to record."""
    metadata_bytes: int
    metadata_sum: bytes
    names: tuple[str, ...]
    """The names of tensors, then of objects; several files may have items of the same name."""
    files: tuple[ManifestFile, ...]
    index: CheckpointIndex | None = None
    """The index, with regions in the order of `files` and their items; None if only `.metadata` has it."""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the content of the manifest file, including its own checksum."""
    index = manifest.index
    document: dict[str, Any] = {
        "version": MANIFEST_VERSION,
        "step": manifest.step,
        "save_id": manifest.save_id,
        "written_by": manifest.written_by,
        "world_size": manifest.world_size,
        "mesh": dict(manifest.mesh),
        "facts": dict(manifest.facts),
        "metadata": {"size_bytes": manifest.metadata_bytes, "xxh3_128": manifest.metadata_sum.hex()},
        "names": manifest.names,
    }
    if index is not None:
        numbers = {name: number for number, name in enumerate(manifest.names)}
        document["index"] = {
            "dtype": [facts.dtype for facts in index.tensors],
            "shape": [facts.shape for facts in index.tensors],
            "order": [numbers[name] for name in index.paths if name in numbers],
            "path": [path for name, path in index.paths.items() if name in numbers],
            "transforms": next(iter(_all_transforms(index)), ()),
        }
    begin = 0
    files = document["files"] = []
    for file in manifest.files:
        items = {
            "name": file.item_name.tolist(),
            "offset": file.item_offset.tolist(),
            "size_bytes": file.item_bytes.tolist(),
            "payload_offset": file.payload_offset.tolist(),
            "xxh3_128": file.sums.hex(),
        }
        if index is not None:
            end = begin + int((file.item_name < len(index.tensors)).sum())
            regions, begin = index.stored.regions.take(slice(begin, end)), end
            inside = _inside(regions.tensor, index.tensors, regions.num_dims)
            items |= {"begin": regions.offsets[inside].tolist(), "extent": regions.sizes[inside].tolist()}
        files.append({"name": file.name, "size_bytes": file.size_bytes, "items": items})
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True, check_circular=False)
    rest = b'",' + text[1:].encode() + b"\n"
    try:
        require(len(rest) <= MOST_WHOLE, f"it has {len(rest):,} bytes")
        require_few_values(rest, _MOST_VALUES)
    except ValueError as error:
        raise UsageError(
            f"The description of {sum(map(len, manifest.files)):,} parts is too large: {error}",
            fix="Save several checkpoints, or fewer and larger parts.",
        ) from error
    return OPENING + checksum_of(OPENING, rest).hex().encode() + rest


def _inside(tensor: Ints, tensors: Sequence[TensorFacts], width: int) -> NDArray[np.bool_]:
    """Return an array (rows, width): True for dimensions that a row's tensor has, False for padding."""
    dims = np.array([len(facts.shape) for facts in tensors], dtype=np.int64)
    return np.arange(width) < dims[tensor][:, None]


def _all_transforms(index: CheckpointIndex) -> set[Transforms]:
    """Return the distinct transforms of items: a single entry, unless other programs wrote the items."""
    of_rows = set(index.transforms) if index.transforms else {()} if len(index.stored) else set()
    return of_rows | {held.transforms for held in index.objects}


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
"""A list that becomes an array as soon as it is read: as lists, the numbers of all files take five times the
memory.
"""
_NO_NUMBERS: Final = np.zeros(0, dtype=np.int64)


class _Items(_Strict):
    name: _Column
    offset: _Column
    size_bytes: _Column
    payload_offset: _Column
    xxh3_128: str
    # For each dimension of each region, its offset in the tensor, and its size.
    begin: _Column = Field(default=[], validate_default=True)
    extent: _Column = Field(default=[], validate_default=True)


class _File(_Strict):
    name: str
    size_bytes: _Size
    items: _Items


class _MetadataFile(_Strict):
    size_bytes: _Size
    xxh3_128: _Sum


class _Index(_Strict):
    dtype: list[str]
    shape: list[list[_Size]]
    order: list[_Size]
    """Indices of names, in the order of the state."""
    path: list[list[str | int]]
    """The path of each name, in the same order."""
    transforms: list[str]


class _Document(_Strict):
    format: Literal["penstock.checkpoint"]
    xxh3_128: _Sum
    version: Literal[1, 2]
    step: int | None
    save_id: str
    written_by: str
    world_size: Annotated[int, Field(ge=1)]
    mesh: dict[str, int]
    facts: dict[str, Fact]
    metadata: _MetadataFile
    names: list[str]
    index: _Index | None = None
    files: list[_File]


def read_manifest(content: bytes | bytearray, where: str) -> Manifest:
    """Check a manifest's own checksum, then its content; raise `DataDamaged` for the first error."""
    end = len(OPENING) + _HEX
    stated = content[len(OPENING) : end]
    if not content.startswith(OPENING) or stated != checksum_of(OPENING, content[end:]).hex().encode():
        raise DataDamaged(
            "The manifest is not as it was written: its own checksum differs",
            where=where,
            fix="Load an older checkpoint; stock torch may still load this one, unverified.",
        )
    try:
        require_few_values(content, _MOST_VALUES)
    except ValueError as error:
        raise DataDamaged(f"The manifest cannot be read: {error}", where=where) from error
    try:
        document = _Document.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        if place != "version":
            raise DataDamaged(f"The manifest's {place}: {first['msg']}", where=where) from error
        # A different version is not damage.
        version: Any = json.loads(content).get("version")
        raise Unavailable(
            f"The manifest has version {version}; this Penstock reads versions up to {MANIFEST_VERSION}",
            where=where,
            fix="Use the version of Penstock that wrote it, or a newer one.",
        ) from error
    names = tuple(document.names)
    files = tuple(_file(file, len(names), where) for file in document.files)
    return Manifest(
        step=document.step,
        save_id=document.save_id,
        written_by=document.written_by,
        world_size=document.world_size,
        mesh=document.mesh,
        facts=document.facts,
        metadata_bytes=document.metadata.size_bytes,
        metadata_sum=bytes.fromhex(document.metadata.xxh3_128),
        names=names,
        files=files,
        index=None if document.index is None else _read_index(document, document.index, files, where),
    )


def _file(file: _File, num_names: int, where: str) -> ManifestFile:
    """Return a data file's description after checking it: items are in order, apart, and within the file."""
    try:
        check_key(file.name, where)
        items = file.items
        columns = list(map(np.asarray, (items.name, items.offset, items.size_bytes, items.payload_offset)))
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
        raise DataDamaged(
            f"The manifest's items of {file.name} overlap or reach outside the file", where=where
        )
    return ManifestFile(
        name=file.name,
        size_bytes=file.size_bytes,
        item_name=name,
        item_offset=offset,
        item_bytes=size,
        payload_offset=payload,
        sums=sums,
    )


def _read_index(
    document: _Document, about: _Index, files: Sequence[ManifestFile], where: str
) -> CheckpointIndex:
    names, num_tensors = document.names, len(about.dtype)
    try:
        tensors = tuple(
            TensorFacts(name, kind.name, tuple(shape), kind.size_bytes)
            for name, kind, shape in zip(names, map(element_type, about.dtype), about.shape, strict=False)
        )
        name = _column_of(files, "item_name")
        is_tensor = name < num_tensors
        tensor, transforms = name[is_tensor], tuple(about.transforms)
        width = max((len(facts.shape) for facts in tensors), default=0)
        require(width <= MOST_DIMENSIONS, "a tensor has too many dimensions")
        inside, shape = _inside(tensor, tensors, width), (len(tensor), width)
        regions = Regions(tensor, np.zeros(shape, np.int64), np.ones(shape, np.int64))
        begins = np.concatenate([_NO_NUMBERS, *(file.items.begin for file in document.files)])
        extents = np.concatenate([_NO_NUMBERS, *(file.items.extent for file in document.files)])
        are_whole = len(tensors) == num_tensors == len(about.shape) and len(set(names)) == len(names)
        require(are_whole and len(begins) == len(extents) == inside.sum(), "its columns differ in length")
        regions.offsets[inside], regions.sizes[inside] = begins, extents
        file = np.repeat(np.arange(len(files)), [len(each) for each in files])
        offset, size = _column_of(files, "item_offset"), _column_of(files, "item_bytes")
        payload = _column_of(files, "payload_offset")[is_tensor]
        sums = np.frombuffer(b"".join(each.sums for each in files), dtype=np.uint8).reshape(-1, SUM_BYTES)
        objects: dict[int, StoredObject] = {}
        for row in np.flatnonzero(~is_tensor).tolist():
            number, place = int(name[row]), (int(file[row]), int(offset[row]), int(size[row]))
            objects[number] = StoredObject(names[number], *place, transforms, sums[row].tobytes())
        of_objects = range(num_tensors, len(names))
        require(sorted(objects) == list(of_objects), "an object has no item")
        index = CheckpointIndex(
            tensors,
            StoredRegions(
                regions,
                file=file[is_tensor],
                item_offset=offset[is_tensor],
                item_bytes=size[is_tensor],
                # A packed item has no payload of its own.
                payload_offset=np.full(len(tensor), UNKNOWN) if transforms else payload,
                packed=np.full(len(tensor), bool(transforms)),
            ),
            tuple(objects[number] for number in of_objects),
            tuple(each.name for each in files),
            paths={names[number]: tuple(path) for number, path in zip(about.order, about.path, strict=True)},
            transforms=[transforms] * len(tensor) if transforms else (),
            sums=sums[is_tensor],
        )
    except (ValueError, LookupError, UsageError) as error:
        raise DataDamaged(f"The manifest's index: {error}", where=where) from error
    check_index(index, where)
    return index


def _column_of(files: Sequence[ManifestFile], name: str) -> Ints:
    return np.concatenate([_NO_NUMBERS, *(getattr(file, name) for file in files)])


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
    """Build the manifest of what was written: `index` as in `metadata`, `files` as reported by the ranks.

    Also checks that both agree: raises `DataDamaged` with the name of an item that is in `index` but in no
    file, or vice versa.
    """
    by_name = {file.name: file for file in files if len(file)}
    if missing := set(index.files) ^ set(by_name):
        raise DataDamaged(f"Planned and written files differ: {name_some(sorted(missing), 5)}")
    joined, item_names = _join(index, [by_name[name] for name in index.files])
    return Manifest(
        step=step,
        save_id=save_id,
        written_by=f"penstock {__version__}",
        world_size=world_size,
        mesh=mesh or {},
        facts=facts or {},
        metadata_bytes=len(metadata),
        metadata_sum=checksum_of(metadata),
        names=(*(facts.name for facts in index.tensors), *(stored.name for stored in index.objects)),
        files=tuple(
            ManifestFile(
                **{each.name: getattr(by_name[name], each.name) for each in fields(WrittenFile)},
                item_name=own,
            )
            for name, own in zip(index.files, item_names, strict=True)
        ),
        index=joined if len(_all_transforms(index)) < 2 else None,
    )


def join_manifest(index: CheckpointIndex, manifest: Manifest, where: str) -> CheckpointIndex:
    """Add to the `index` from `.metadata` what its manifest has: positions of payloads, checksums of items.

    The regions of the result are in the order of files and items. Raises `DataDamaged` if the two disagree.
    """
    by_name = {file.name: file for file in manifest.files}
    for name in index.files:
        if name not in by_name:
            raise DataDamaged(f"The manifest does not list the file {name}", where=where)
    return _join(index, [by_name[name] for name in index.files])[0]


def _join(index: CheckpointIndex, files: Sequence[WrittenFile]) -> tuple[CheckpointIndex, list[Ints]]:
    """Return the index in the order of the items of `files`, and the number of each item's name, by file."""
    stored, objects, num_rows = index.stored, list(index.objects), len(index.stored)
    # All items: first the regions, then the objects.
    numbers = np.arange(len(objects), dtype=np.int64) + len(index.tensors)
    name = np.concatenate([stored.regions.tensor, numbers])
    file_of = np.concatenate([stored.file, _ints(held.file for held in objects)])
    offset = np.concatenate([stored.item_offset, _ints(held.offset for held in objects)])
    size = np.concatenate([stored.item_bytes, _ints(held.size_bytes for held in objects)])
    order = np.lexsort((size, offset, file_of))
    begins = np.searchsorted(file_of[order], np.arange(len(files) + 1))
    item_names, payloads, sums = [], [_NO_NUMBERS], [np.zeros((0, SUM_BYTES), dtype=np.uint8)]
    for number, file in enumerate(files):
        rows = order[begins[number] : begins[number + 1]]
        if not (
            np.array_equal(offset[rows], file.item_offset) and np.array_equal(size[rows], file.item_bytes)
        ):
            raise DataDamaged(f"The items of {file.name} are not those in the metadata", where=file.name)
        item_names.append(name[rows])
        is_region = rows < num_rows
        of_items = np.frombuffer(file.sums, dtype=np.uint8).reshape(-1, SUM_BYTES)
        payloads.append(file.payload_offset[is_region])
        sums.append(of_items[is_region])
        for row in np.flatnonzero(~is_region).tolist():
            place = int(rows[row]) - num_rows
            objects[place] = replace(objects[place], sum=of_items[row].tobytes())
    regions = order[order < num_rows]
    ordered = stored.take(regions)
    # A packed item has no payload of its own, wherever the manifest says that it begins.
    payload = np.where(ordered.packed, UNKNOWN, np.concatenate(payloads))
    joined = replace(
        index,
        stored=replace(ordered, payload_offset=payload),
        objects=tuple(objects),
        transforms=[index.transforms[row] for row in regions.tolist()] if index.transforms else (),
        sums=np.concatenate(sums),
    )
    return joined, item_names


def _ints(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, dtype=np.int64)


def require_complete(sizes: Mapping[str, int], expected: Mapping[str, int], uri: str) -> None:
    """Raise unless the files of a draft, `sizes` by name, are exactly those in `expected`."""
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


VERSION: Final = "1.0.0"
_FORGET_EVERY: Final = 1000


def metadata_bytes(index: CheckpointIndex) -> bytes:
    """Return the content of the `.metadata` that describes `index` to torch."""
    content, num_items = io.BytesIO(), 0
    # Protocol 3 numbers what it memoizes, so that numbers can be reused: see `_Streamed`.
    pickler = pickle.Pickler(content, protocol=3)

    def forget(items: Iterable[Any]) -> Iterator[Any]:
        nonlocal num_items
        for item in items:
            num_items += 1
            if num_items % _FORGET_EVERY == 0:
                pickler.clear_memo()
            yield item

    with paused_garbage_collection():
        pickler.dump(
            torch_metadata(
                index,
                lambda items: _Streamed((list, (), None, forget(items), None)),
                lambda items: _Streamed((dict, (), None, None, forget(items))),
            )
        )
    return content.getvalue()


class _Streamed:
    """A list or dict whose items are created while they are pickled, and then forgotten.

    A million parts, together with the pickler's memo of them, would take several gigabytes. The memo is
    cleared regularly: names are then written again, and nothing refers to a container that is being written.
    """

    def __init__(self, reduced: tuple[Any, ...]) -> None:
        self._reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def torch_metadata(
    index: CheckpointIndex,
    make_list: Callable[[Iterable[Any]], Any] = list,
    make_dict: Callable[[Iterable[tuple[Any, Any]]], Any] = dict,
) -> Metadata:
    """Return the description of `index` in the form of torch's planners and `.metadata`."""
    import torch  # noqa: PLC0415 - only writers have it loaded
    from torch.distributed.checkpoint import metadata as records  # noqa: PLC0415 - takes half a second
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: PLC0415 - likewise

    stored, size = index.stored, torch.Size
    order, width = np.argsort(stored.regions.tensor, kind="stable"), stored.regions.num_dims
    begins = np.searchsorted(stored.regions.tensor[order], np.arange(len(index.tensors) + 1)).tolist()
    # One table, because a slice of each column for each of many small tensors takes most of the time.
    places = np.arange(len(order)), stored.file, stored.item_offset, stored.item_bytes
    table = np.column_stack([*places, stored.regions.offsets, stored.regions.sizes])[order]

    def parts(number: int) -> Iterator[tuple[Any, ...]]:
        """Return the offsets and sizes of each part of a tensor, its row, file, position and length."""
        dims = len(index.tensors[number].shape)
        for row, file, begin, num_bytes, *box in table[begins[number] : begins[number + 1]].tolist():
            yield size(box[:dims]), size(box[width : width + dims]), row, file, begin, num_bytes

    def state() -> Iterator[tuple[str, Any]]:
        for number, facts in enumerate(index.tensors):
            properties = records.TensorProperties(dtype=getattr(torch, facts.dtype))
            chunks = make_list(
                records.ChunkStorageMetadata(offsets, sizes) for offsets, sizes, *_ in parts(number)
            )
            yield facts.name, records.TensorStorageMetadata(properties, size(facts.shape), chunks)
        for held in index.objects:
            yield held.name, records.BytesStorageMetadata()

    def place(file: int, offset: int, num_bytes: int, transforms: Transforms) -> Any:
        if transforms:
            # Older versions of torch lack this field, and read only what is not transformed.
            return _StorageInfo(index.files[file], offset, num_bytes, transform_descriptors=list(transforms))
        return _StorageInfo(index.files[file], offset, num_bytes)

    def storage() -> Iterator[tuple[Any, Any]]:
        for number, facts in enumerate(index.tensors):
            for offsets, _, row, file, begin, num_bytes in parts(number):
                transforms = index.transforms[row] if index.transforms else ()
                yield (
                    records.MetadataIndex(facts.name, offsets),
                    place(file, begin, num_bytes, transforms),
                )
        for held in index.objects:
            at = held.file, held.offset, held.size_bytes
            yield records.MetadataIndex(held.name), place(*at, held.transforms)

    described = records.Metadata(
        state_dict_metadata=make_dict(state()),
        planner_data=dict(index.paths),
        storage_data=make_dict(storage()),
        storage_meta=records.StorageMeta(),
    )
    # A field that newer versions of torch have; their readers look it up by name.
    described.version = VERSION
    return described


class MetadataWriter:
    """Writes `.metadata`, and keeps the bytes as long as they describe the same state.

    As long as a job's plan does not change, neither does the file: only the manifest distinguishes
    checkpoints.
    """

    def __init__(self) -> None:
        self._index: CheckpointIndex | None = None
        self._content = b""

    def write(self, index: CheckpointIndex) -> bytes:
        if self._index is None or not _are_same(self._index, index):
            self._index, self._content = index, metadata_bytes(index)
        return self._content


def _are_same(one: CheckpointIndex, other: CheckpointIndex) -> bool:
    """Return whether both indexes give the same `.metadata`."""
    texts = attrgetter("tensors", "objects", "files", "paths", "transforms")
    columns = attrgetter(
        *("regions.tensor", "regions.offsets", "regions.sizes", "file", "item_offset", "item_bytes")
    )
    return texts(one) == texts(other) and all(map(np.array_equal, columns(one.stored), columns(other.stored)))


def read_metadata(content: bytes | bytearray | memoryview, where: str) -> CheckpointIndex:
    """Parse a `.metadata` that torch 2.x or Penstock wrote; `where` names it in errors."""
    if len(content) > _LARGEST_PICKLE:
        raise DataDamaged(
            f"It has {len(content):,} bytes, more than the {_LARGEST_PICKLE:,} that are parsed", where=where
        )
    with paused_garbage_collection():
        root = read_metadata_pickle(content, where)
        if getattr(root, "kind", None) != "Metadata":
            refuse_index("It is not the metadata of a checkpoint", where)
        try:
            return _parse(root, where)
        except UsageError:
            raise
        except (AttributeError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise DataDamaged(
                f"Its records do not describe a checkpoint: {type(error).__name__}: {error}", where=where
            ) from error


def _parse(root: Any, where: str) -> CheckpointIndex:
    """Convert the records of a `.metadata` to the columns of an index."""
    keys = map(attrgetter("fqn", "offset"), root.storage_data)
    places = dict(zip(keys, root.storage_data.values(), strict=True))
    files: dict[str, int] = {}
    tensors: list[TensorFacts] = []
    objects: list[StoredObject] = []
    chunks: list[Any] = []
    places_of_chunks: list[Any] = []
    counts = []

    def find(name: str, offsets: tuple[int, ...] | None) -> Any:
        place = places.get((name, offsets))
        # torch before 2.1 gave unsharded tensors no offsets.
        if place is None and not any(offsets or ()):
            place = places.get((name, None))
        if place is None:
            at = f" at {list(offsets)}" if offsets is not None else ""
            refuse_index(f"{name}{at} was not written: no file holds it", where)
        return place

    def add_object(name: str, offsets: tuple[int, ...] | None) -> None:
        place = find(name, offsets)
        file = files.setdefault(place.relative_path, len(files))
        transforms = tuple(place.transform_descriptors or ())
        objects.append(StoredObject(str(name), file, int(place.offset), int(place.length), transforms))

    for name, about in root.state_dict_metadata.items():
        if about.kind == "BytesStorageMetadata":
            add_object(name, None)
            continue
        dtype, layout, *_ = about.properties.state
        if dtype in QUANTIZED:
            if len(about.chunks) != 1 or tuple(about.chunks[0].sizes) != tuple(about.size):
                raise UsageError(
                    f"The quantized tensor {name} is stored in parts", where=where, fix="Load it with torch."
                )
            add_object(name, about.chunks[0].offsets)
            continue
        if layout != "torch.strided":
            raise UsageError(f"The tensor {name} is stored as {layout}, not densely", where=where)
        kind = element_type(dtype)
        shape = tuple(int(extent) for extent in about.size)
        tensors.append(TensorFacts(str(name), kind.name, shape, kind.size_bytes))
        chunks += about.chunks
        counts.append(len(about.chunks))
        places_of_chunks += [find(name, chunk.offsets) for chunk in about.chunks]
    tensor = np.repeat(np.arange(len(counts)), counts)
    dims = np.array([len(facts.shape) for facts in tensors], dtype=np.int64)
    require(dims.max(initial=0) <= MOST_DIMENSIONS, "a tensor has too many dimensions")
    boxes = []
    for field_name, padding in (("offsets", 0), ("sizes", 1)):
        rows = list(map(attrgetter(field_name), chunks))
        if not np.array_equal(_ints(map(len, rows)), dims[tensor]):
            raise ValueError("a chunk does not have as many dimensions as its tensor")
        boxes.append(pad_rows(rows, padding, least_width=int(dims.max(initial=0))))
    transforms = [tuple(place.transform_descriptors or ()) for place in places_of_chunks]
    stored = StoredRegions(
        Regions(tensor, *boxes),
        file=_ints(files.setdefault(place.relative_path, len(files)) for place in places_of_chunks),
        item_offset=_ints(place.offset for place in places_of_chunks),
        item_bytes=_ints(place.length for place in places_of_chunks),
        payload_offset=np.full(len(places_of_chunks), UNKNOWN, dtype=np.int64),
        packed=np.array([bool(through) for through in transforms], dtype=np.bool_),
    )
    # Data of planners other than torch's default one is ignored.
    planner_data = getattr(root, "planner_data", None)
    index = CheckpointIndex(
        tuple(tensors),
        stored,
        tuple(objects),
        tuple(files),
        paths={
            name: path
            for name, path in (planner_data.items() if isinstance(planner_data, Mapping) else ())
            if isinstance(name, str)
            and isinstance(path, tuple)
            and all(isinstance(key, str | int) for key in path)
        },
        transforms=transforms if any(transforms) else (),
    )
    check_index(index, where)
    return index


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Pause garbage collection, which would double the time that reading a million records takes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
