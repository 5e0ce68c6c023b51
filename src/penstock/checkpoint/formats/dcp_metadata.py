"""The `.metadata` file of a torch distributed checkpoint (DCP), read into columns. Needs no torch.

Invariant: what is returned has been checked: every region has one place and is inside its tensor, and no file
name leaves the checkpoint's folder.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
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
    pad_rows,
)
from penstock.errors import AccessRefused, DataDamaged, UsageError
from penstock.storage.protocol import check_key

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


def read_pickle(content: bytes | bytearray | memoryview, where: str) -> DcpMetadata:
    """Parse a `.metadata` that torch 2.x or we wrote, record by record; `where` names it in errors."""
    with paused_garbage_collection():
        return _read_pickle(content, where)


def _read_pickle(content: bytes | bytearray | memoryview, where: str) -> DcpMetadata:
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
        indices = map(attrgetter("fqn", "offset"), root.storage_data)
        self._places = dict(zip(indices, root.storage_data.values(), strict=True))

    def result(self) -> DcpMetadata:
        chunks, count, places = self._walk()
        regions = self._boxes(chunks, np.repeat(np.arange(len(count)), count))
        row_transform = np.zeros(len(places), dtype=np.int64)
        for row, through in enumerate(_all(places, "transform_descriptors")):
            if through:
                row_transform[row] = self._transforms.setdefault(tuple(through), len(self._transforms))
        stored = StoredRegions(
            regions,
            file=self._file_numbers(places),
            item_offset=_column(_all(places, "offset")),
            item_bytes=_column(_all(places, "length")),
            payload_offset=np.full(len(places), UNKNOWN, dtype=np.int64),
            packed=row_transform > 0,
        )
        check_items(self._tensors, stored, self._where)
        check_file_names(self._files, self._where)
        meta = getattr(self._root, "storage_meta", None)
        return DcpMetadata(
            index=CheckpointIndex(tuple(self._tensors), stored, tuple(self._objects), tuple(self._files)),
            paths=_paths(getattr(self._root, "planner_data", None)),
            transforms=tuple(self._transforms),
            row_transform=row_transform if len(self._transforms) > 1 else None,
            object_transforms=self._object_transforms,
            save_id=getattr(meta, "save_id", None),
            checkpoint_id=getattr(meta, "checkpoint_id", None),
            version=getattr(self._root, "version", None),
        )

    def _walk(self) -> tuple[list[Any], list[int], list[Any]]:
        """The chunks of all tensors, how many each tensor has, and the place of each chunk."""
        chunks: list[Any] = []
        places: list[Any] = []
        count, find = [], self._places.get
        for name, about in self._root.state_dict_metadata.items():
            if about.kind == "BytesStorageMetadata":
                self._add_object(name)
                continue
            if about.properties.state[0] in QUANTIZED:
                self._add_quantized(name, about)
                continue
            self._tensors.append(self._facts(name, about))
            offsets = _all(about.chunks, "offsets")
            found = [find((name, each)) for each in offsets]
            if None in found:
                found = [self._place(name, each) for each in offsets]
            chunks += about.chunks
            count.append(len(found))
            places += found
        return chunks, count, places

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
        number = int(self._file_numbers([place])[0])
        self._objects.append(StoredObject(str(name), number, offset, size_bytes, bool(descriptors)))

    def _file_numbers(self, places: Sequence[Any]) -> Ints:
        names = _all(places, "relative_path")
        for name in dict.fromkeys(names):
            self._files.setdefault(name, len(self._files))
        return _column(map(self._files.__getitem__, names))

    def _boxes(self, chunks: Sequence[Any], tensor: Ints) -> Regions:
        dims = np.array([len(facts.shape) for facts in self._tensors], dtype=np.int64)
        width = int(dims.max(initial=0))
        offsets = np.zeros((len(chunks), width), dtype=np.int64)
        sizes = np.ones((len(chunks), width), dtype=np.int64)
        for num_dims in range(1, width + 1):
            rows = np.flatnonzero(dims[tensor] == num_dims)
            chosen = chunks if len(rows) == len(chunks) else [chunks[row] for row in rows.tolist()]
            offsets[rows, :num_dims] = _rows(_all(chosen, "offsets"), num_dims)
            sizes[rows, :num_dims] = _rows(_all(chosen, "sizes"), num_dims)
        regions = Regions(tensor, offsets, sizes)
        check_regions(self._tensors, regions, self._where)
        return regions


def _all(records: Iterable[Any], name: str) -> list[Any]:
    """An attribute of all records."""
    return list(map(attrgetter(name), records))


def check_file_names(names: Iterable[str], where: str) -> None:
    """Raise `DataDamaged` for a file that is not in the checkpoint's folder."""
    for name in names:
        try:
            check_key(name, where)
        except AccessRefused as error:
            raise DataDamaged(
                f"It names the file {name!r}, which is not in its folder", where=where
            ) from error


def check_regions(tensors: Sequence[TensorFacts], regions: Regions, where: str) -> None:
    """Raise `DataDamaged` for a region that is not inside its tensor."""
    shapes = pad_rows([facts.shape for facts in tensors], 1, least_width=regions.num_dims)
    shapes = shapes[:, : regions.num_dims]
    ends = regions.offsets + regions.sizes
    wrong = ((regions.offsets < 0) | (regions.sizes < 0) | (ends > shapes[regions.tensor])).any(axis=1)
    for row in np.flatnonzero(wrong)[:1].tolist():
        facts = tensors[int(regions.tensor[row])]
        offsets, sizes = regions.region(row, len(facts.shape))
        _refuse(
            f"A region of {facts.name} at {list(offsets)} of {list(sizes)} is outside its shape"
            f" {list(facts.shape)}",
            where,
        )


def check_items(tensors: Sequence[TensorFacts], stored: StoredRegions, where: str) -> None:
    """Raise `DataDamaged` for an item at a place that no file has."""
    wrong = (stored.item_offset < 0) | (stored.item_bytes < 0)
    for row in np.flatnonzero(wrong)[:1].tolist():
        name = tensors[int(stored.regions.tensor[row])].name
        _refuse(f"{name} has {stored.item_bytes[row]} bytes at offset {stored.item_offset[row]}", where)


def _column(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, dtype=np.int64)


def _rows(rows: Sequence[tuple[int, ...]], width: int) -> Ints:
    if set(map(len, rows)) - {width}:
        raise ValueError("a chunk has not as many dimensions as its tensor")
    return _column(chain.from_iterable(rows)).reshape(len(rows), width)


def _descriptors(place: Any) -> Descriptors:
    return tuple(place.transform_descriptors or ())


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
