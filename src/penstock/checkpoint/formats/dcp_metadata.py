"""The `.metadata` file of a torch distributed checkpoint (DCP), read into columns. Needs no torch.

Invariant: what is returned has been checked: every region has one place and is inside its tensor, and no file
name leaves the checkpoint's folder.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from penstock.checkpoint.formats.restricted_pickle import read_metadata_pickle
from penstock.checkpoint.state.regions import (
    QUANTIZED,
    UNKNOWN,
    CheckpointIndex,
    Ints,
    Regions,
    StoredObject,
    StoredRegions,
    TensorFacts,
    element_type,
)
from penstock.errors import AccessRefused, DataDamaged, UsageError
from penstock.storage.uri import check_key

Path = tuple[str | int, ...]
"""The place of a leaf in the nested state dict, from which its name was made."""
Descriptors = tuple[str, ...]
"""The stream transforms of an item, outermost last: `("stream.zstd/1",)`; () for none."""

VERSION = "1.0.0"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DcpMetadata:
    """The content of a `.metadata` file."""

    index: CheckpointIndex
    paths: Mapping[str, Path] = field(default_factory=dict)
    transforms: tuple[Descriptors, ...] = ((),)
    row_transform: Ints | None = None
    """By row of `contents.stored`, which of `transforms` it went through; None: none did."""
    object_transforms: Mapping[str, Descriptors] = field(default_factory=dict)
    save_id: str | None = None
    checkpoint_id: str | None = None
    version: str | None = VERSION

    def descriptors(self, row: int) -> Descriptors:
        """The stream transforms of one stored region."""
        return () if self.row_transform is None else self.transforms[int(self.row_transform[row])]


def read_metadata(content: bytes | bytearray | memoryview, where: str) -> DcpMetadata:
    """Parse a `.metadata` that torch 2.x or we wrote; `where` names it in errors."""
    with paused_garbage_collection():
        return _read(content, where)


def _read(content: bytes | bytearray | memoryview, where: str) -> DcpMetadata:
    root = read_metadata_pickle(content, where)
    if getattr(root, "kind", None) != "Metadata":
        _refuse("It is not the metadata of a checkpoint", where)
    try:
        return _Parsing(root, where).result()
    except UsageError:
        raise
    except (AttributeError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise DataDamaged(
            f"Its records are not those of a checkpoint: {type(error).__name__}: {error}", where=where
        ) from error


def _refuse(what: str, where: str) -> NoReturn:
    raise DataDamaged(what, where=where, fix="Load an older checkpoint, or save this one again.")


class _Parsing:
    """Parses one file: torch's records in, columns out."""

    def __init__(self, root: Any, where: str) -> None:
        self._root = root
        self._where = where
        self._files: dict[str, int] = {}
        self._transforms: dict[Descriptors, int] = {(): 0}
        self._tensors: list[TensorFacts] = []
        self._objects: list[StoredObject] = []
        self._object_transforms: dict[str, Descriptors] = {}
        self._places = {
            (key.fqn, getattr(key, "offset", None)): place for key, place in root.storage_data.items()
        }

    def result(self) -> DcpMetadata:
        parts, places = self._walk()
        regions = self._boxes(parts)
        stored = StoredRegions(
            regions,
            file=_column(self._file_number(place) for place in places),
            item_offset=_column(place.offset for place in places),
            item_bytes=_column(place.length for place in places),
            payload_offset=np.full(len(places), UNKNOWN, dtype=np.int64),
            packed=np.zeros(len(places), dtype=np.bool_),
        )
        self._check_items(stored)
        row_transform = _column(self._transform_number(place) for place in places)
        if len(self._transforms) > 1:
            stored.packed[:] = row_transform > 0
        meta = getattr(self._root, "storage_meta", None)
        return DcpMetadata(
            index=CheckpointIndex(tuple(self._tensors), stored, tuple(self._objects), self._file_names()),
            paths=_paths(getattr(self._root, "planner_data", None)),
            transforms=tuple(self._transforms),
            row_transform=row_transform if len(self._transforms) > 1 else None,
            object_transforms=self._object_transforms,
            save_id=getattr(meta, "save_id", None),
            checkpoint_id=getattr(meta, "checkpoint_id", None),
            version=getattr(self._root, "version", None),
        )

    def _walk(self) -> tuple[list[tuple[int, Any]], list[Any]]:
        """The chunks of all tensors, each with its tensor's number, and the place of each."""
        parts, places = [], []
        for name, about in self._root.state_dict_metadata.items():
            if about.kind == "BytesStorageMetadata":
                self._add_object(name)
                continue
            if about.properties.state[0] in QUANTIZED:
                self._add_quantized(name, about)
                continue
            number = len(self._tensors)
            self._tensors.append(self._facts(name, about))
            for chunk in about.chunks:
                parts.append((number, chunk))
                places.append(self._place(name, chunk.offsets))
        return parts, places

    def _facts(self, name: str, about: Any) -> TensorFacts:
        dtype, layout, *_ = about.properties.state
        if layout != "torch.strided":
            raise UsageError(f"The tensor {name} is stored as {layout}, not densely", where=self._where)
        kind = element_type(dtype)
        shape = tuple(int(extent) for extent in about.size)
        return TensorFacts(str(name), kind.name, shape, kind.size_bytes)

    def _place(self, name: str, offsets: tuple[int, ...] | None) -> Any:
        place = self._places.get((name, offsets))
        # torch before 2.1 gave unsharded tensors no offsets.
        if place is None:
            place = self._places.get((name, None)) if not any(offsets or ()) else None
        if place is None:
            at = f" at {list(offsets)}" if offsets is not None else ""
            _refuse(f"{name}{at} was not written: no file holds it", self._where)
        return place

    def _add_quantized(self, name: str, about: Any) -> None:
        if len(about.chunks) != 1 or tuple(about.chunks[0].sizes) != tuple(about.size):
            raise UsageError(
                f"The quantized tensor {name} is stored in parts",
                where=self._where,
                fix="Load it with torch.",
            )
        self._add_object(name, about.chunks[0].offsets)

    def _add_object(self, name: str, offsets: tuple[int, ...] | None = None) -> None:
        place = self._place(name, offsets)
        descriptors = _descriptors(place)
        if descriptors:
            self._object_transforms[name] = descriptors
        size_bytes, offset = int(place.length), int(place.offset)
        if size_bytes < 0 or offset < 0:
            _refuse(f"The object {name} has {size_bytes} bytes at offset {offset}", self._where)
        number = self._file_number(place)
        self._objects.append(StoredObject(str(name), number, offset, size_bytes, bool(descriptors)))

    def _file_number(self, place: Any) -> int:
        name = place.relative_path
        number = self._files.get(name)
        return self._files.setdefault(name, len(self._files)) if number is None else number

    def _transform_number(self, place: Any) -> int:
        descriptors = _descriptors(place)
        return self._transforms.setdefault(descriptors, len(self._transforms)) if descriptors else 0

    def _file_names(self) -> tuple[str, ...]:
        for name in self._files:
            try:
                check_key(name, self._where)
            except AccessRefused as error:
                raise DataDamaged(
                    f"It names the file {name!r}, which is not in its folder", where=self._where
                ) from error
        return tuple(self._files)

    def _boxes(self, parts: list[tuple[int, Any]]) -> Regions:
        width = max((len(facts.shape) for facts in self._tensors), default=0)
        offsets = np.zeros((len(parts), width), dtype=np.int64)
        sizes = np.ones((len(parts), width), dtype=np.int64)
        tensor = _column(number for number, _ in parts)
        dims = np.array([len(facts.shape) for facts in self._tensors], dtype=np.int64)
        for num_dims in range(1, width + 1):
            rows = np.flatnonzero(dims[tensor] == num_dims) if len(parts) else tensor
            chosen = [parts[row][1] for row in rows.tolist()]
            offsets[rows, :num_dims] = _rows((chunk.offsets for chunk in chosen), len(chosen), num_dims)
            sizes[rows, :num_dims] = _rows((chunk.sizes for chunk in chosen), len(chosen), num_dims)
        self._check_boxes(Regions(tensor, offsets, sizes))
        return Regions(tensor, offsets, sizes)

    def _check_boxes(self, regions: Regions) -> None:
        shapes = np.ones((len(self._tensors), regions.num_dims), dtype=np.int64)
        for number, facts in enumerate(self._tensors):
            shapes[number, : len(facts.shape)] = facts.shape
        ends = regions.offsets + regions.sizes
        wrong = ((regions.offsets < 0) | (regions.sizes < 0) | (ends > shapes[regions.tensor])).any(axis=1)
        for row in np.flatnonzero(wrong)[:1].tolist():
            facts = self._tensors[int(regions.tensor[row])]
            offsets, sizes = regions.region(row, len(facts.shape))
            _refuse(
                f"A region of {facts.name} at {list(offsets)} of {list(sizes)} is outside its shape"
                f" {list(facts.shape)}",
                self._where,
            )

    def _check_items(self, stored: StoredRegions) -> None:
        wrong = (stored.item_offset < 0) | (stored.item_bytes < 0)
        for row in np.flatnonzero(wrong)[:1].tolist():
            name = self._tensors[int(stored.regions.tensor[row])].name
            _refuse(
                f"{name} has {stored.item_bytes[row]} bytes at offset {stored.item_offset[row]}", self._where
            )


def _column(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, dtype=np.int64)


def _rows(rows: Iterable[tuple[int, ...]], num_rows: int, width: int) -> Ints:
    flat = [number for row in rows for number in row]
    return np.array(flat, dtype=np.int64).reshape(num_rows, width)


def _descriptors(place: Any) -> Descriptors:
    return tuple(getattr(place, "transform_descriptors", None) or ())


def _paths(planner_data: object) -> dict[str, Path]:
    """The names' places as the default planner records them; data of other planners is ignored."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        name: path
        for name, path in planner_data.items()
        if isinstance(name, str)
        and isinstance(path, tuple)
        and all(isinstance(key, str | int) for key in path)
    }


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector, which takes as long as the reading itself for a million records."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
