"""`.metadata` of a torch distributed checkpoint (DCP): written with torch's classes, read without torch.

Stock torch reads and writes the same file. Reading never runs code of the file: see `restricted_pickle`.
Invariant: an index that was read has been checked: every region has one place and is inside its tensor, and
no file name leaves the checkpoint's folder.
"""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

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
    Transforms,
    check_index,
    element_type,
    pad_rows,
    refuse_index,
)
from penstock.checkpoint.state.walk import Path
from penstock.errors import DataDamaged, UsageError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

VERSION: Final = "1.0.0"
_FORGET_EVERY: Final = 1000


def metadata_bytes(index: CheckpointIndex) -> bytes:
    """The file that describes `index` to torch."""
    content, num_items = io.BytesIO(), 0
    # Protocol 3 numbers what it remembers, so that numbers can be used again: see `_Streamed`.
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
            _describe(
                index,
                lambda items: _Streamed((list, (), None, forget(items), None)),
                lambda items: _Streamed((dict, (), None, None, forget(items))),
            )
        )
    return content.getvalue()


def torch_metadata(index: CheckpointIndex) -> Metadata:
    """The description of `index` for torch's planners."""
    return _describe(index, list, dict)


class _Streamed:
    """A list or dict whose items are made while they are pickled, and then forgotten.

    A million parts and the pickler's memory of them would take several gigabytes at once. The pickler forgets
    names, too, and writes them again after a while; nothing refers to a container that is being written.
    """

    def __init__(self, reduced: tuple[Any, ...]) -> None:
        self._reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def _describe(
    index: CheckpointIndex,
    make_list: Callable[[Iterable[Any]], Any],
    make_dict: Callable[[Iterable[tuple[Any, Any]]], Any],
) -> Metadata:
    import torch  # noqa: PLC0415 - only writers have it loaded
    from torch.distributed.checkpoint import metadata as records  # noqa: PLC0415 - takes half a second
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: PLC0415 - likewise

    stored = index.stored
    order = np.argsort(stored.regions.tensor, kind="stable")
    begins = np.searchsorted(stored.regions.tensor[order], np.arange(len(index.tensors) + 1)).tolist()
    size = torch.Size

    def parts(number: int) -> Iterator[tuple[Any, ...]]:
        """For each part of a tensor its row, offsets, sizes, file, and place in the file."""
        rows, dims = order[begins[number] : begins[number + 1]], len(index.tensors[number].shape)
        regions = stored.regions.offsets[rows, :dims], stored.regions.sizes[rows, :dims]
        places = stored.file[rows], stored.item_offset[rows], stored.item_bytes[rows]
        return zip(*(column.tolist() for column in (rows, *regions, *places)), strict=True)

    def chunks(number: int) -> Iterator[Any]:
        for _, offsets, sizes, *_ in parts(number):
            yield records.ChunkStorageMetadata(size(offsets), size(sizes))

    def state() -> Iterator[tuple[str, Any]]:
        for number, facts in enumerate(index.tensors):
            properties = records.TensorProperties(dtype=getattr(torch, facts.dtype))
            yield (
                facts.name,
                records.TensorStorageMetadata(properties, size(facts.shape), make_list(chunks(number))),
            )
        for held in index.objects:
            yield held.name, records.BytesStorageMetadata()

    def place(file: int, offset: int, num_bytes: int, transforms: Transforms) -> Any:
        if transforms:
            # Older versions of torch lack this field, and read what is not transformed.
            return _StorageInfo(index.files[file], offset, num_bytes, transform_descriptors=list(transforms))
        return _StorageInfo(index.files[file], offset, num_bytes)

    def storage() -> Iterator[tuple[Any, Any]]:
        for number, facts in enumerate(index.tensors):
            for row, offsets, _, file, begin, num_bytes in parts(number):
                transforms = index.transforms[row] if index.transforms else ()
                yield (
                    records.MetadataIndex(facts.name, size(offsets)),
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
    # A field of newer versions of torch; its readers ask for it by name.
    described.version = VERSION
    return described


class MetadataWriter:
    """Writes `.metadata`, and keeps the bytes as long as they describe the same.

    While a job's plan does not change, neither does the file: only the manifest tells checkpoints apart.
    """

    def __init__(self) -> None:
        self._index: CheckpointIndex | None = None
        self._content = b""

    def write(self, index: CheckpointIndex) -> bytes:
        """The file that describes `index`."""
        if self._index is None or not _are_same(self._index, index):
            self._index, self._content = index, metadata_bytes(index)
        return self._content


def _are_same(one: CheckpointIndex, other: CheckpointIndex) -> bool:
    """Whether `.metadata` of both is the same."""
    texts = attrgetter("tensors", "objects", "files", "paths", "transforms")
    columns = attrgetter(
        *("regions.tensor", "regions.offsets", "regions.sizes", "file", "item_offset", "item_bytes")
    )
    return texts(one) == texts(other) and all(map(np.array_equal, columns(one.stored), columns(other.stored)))


def read_metadata(content: bytes | bytearray | memoryview, where: str) -> CheckpointIndex:
    """Parse a `.metadata` that torch 2.x or we wrote; `where` names it in errors."""
    with paused_garbage_collection():
        root = read_metadata_pickle(content, where)
        if getattr(root, "kind", None) != "Metadata":
            refuse_index("It is not the metadata of a checkpoint", where)
        try:
            return _Parsing(root, where).result()
        except UsageError:
            raise
        except (AttributeError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise DataDamaged(
                f"Its records are not those of a checkpoint: {type(error).__name__}: {error}", where=where
            ) from error


class _Parsing:
    """Parses one file: torch's records in, columns out."""

    def __init__(self, root: Any, where: str) -> None:
        self._root = root
        self._where = where
        self._files: dict[str, int] = {}
        self._tensors: list[TensorFacts] = []
        self._objects: list[StoredObject] = []
        keys = map(attrgetter("fqn", "offset"), root.storage_data)
        self._places = dict(zip(keys, root.storage_data.values(), strict=True))

    def result(self) -> CheckpointIndex:
        chunks: list[Any] = []
        places: list[Any] = []
        count = []
        for name, about in self._root.state_dict_metadata.items():
            if about.kind == "BytesStorageMetadata":
                self._add_object(name, None)
            elif about.properties.state[0] in QUANTIZED:
                if len(about.chunks) != 1 or tuple(about.chunks[0].sizes) != tuple(about.size):
                    raise UsageError(
                        f"The quantized tensor {name} is stored in parts",
                        where=self._where,
                        fix="Load it with torch.",
                    )
                self._add_object(name, about.chunks[0].offsets)
            else:
                self._add_tensor(name, about)
                chunks += about.chunks
                count.append(len(about.chunks))
                places += [self._place(name, chunk.offsets) for chunk in about.chunks]
        transforms = [tuple(through or ()) for through in _all(places, "transform_descriptors")]
        stored = StoredRegions(
            self._regions(chunks, np.repeat(np.arange(len(count)), count)),
            file=_column(map(self._file, _all(places, "relative_path"))),
            item_offset=_column(_all(places, "offset")),
            item_bytes=_column(_all(places, "length")),
            payload_offset=np.full(len(places), UNKNOWN, dtype=np.int64),
            packed=np.array([bool(through) for through in transforms], dtype=np.bool_),
        )
        index = CheckpointIndex(
            tuple(self._tensors),
            stored,
            tuple(self._objects),
            tuple(self._files),
            paths=_paths(getattr(self._root, "planner_data", None)),
            transforms=transforms if any(transforms) else (),
        )
        check_index(index, self._where)
        return index

    def _add_tensor(self, name: str, about: Any) -> None:
        dtype, layout, *_ = about.properties.state
        if layout != "torch.strided":
            raise UsageError(f"The tensor {name} is stored as {layout}, not densely", where=self._where)
        kind = element_type(dtype)
        shape = tuple(int(extent) for extent in about.size)
        self._tensors.append(TensorFacts(str(name), kind.name, shape, kind.size_bytes))

    def _add_object(self, name: str, offsets: tuple[int, ...] | None) -> None:
        place = self._place(name, offsets)
        at = self._file(place.relative_path), int(place.offset), int(place.length)
        self._objects.append(StoredObject(str(name), *at, tuple(place.transform_descriptors or ())))

    def _place(self, name: str, offsets: tuple[int, ...] | None) -> Any:
        place = self._places.get((name, offsets))
        # torch before 2.1 gave unsharded tensors no offsets.
        if place is None and not any(offsets or ()):
            place = self._places.get((name, None))
        if place is None:
            at = f" at {list(offsets)}" if offsets is not None else ""
            refuse_index(f"{name}{at} was not written: no file holds it", self._where)
        return place

    def _file(self, name: str) -> int:
        return self._files.setdefault(name, len(self._files))

    def _regions(self, chunks: Sequence[Any], tensor: Ints) -> Regions:
        dims = np.array([len(facts.shape) for facts in self._tensors], dtype=np.int64)
        columns = []
        for name, padding in (("offsets", 0), ("sizes", 1)):
            rows = _all(chunks, name)
            if not np.array_equal(_column(map(len, rows)), dims[tensor]):
                raise ValueError("a chunk has not as many dimensions as its tensor")
            columns.append(pad_rows(rows, padding, least_width=int(dims.max(initial=0))))
        return Regions(tensor, *columns)


def _all(records: Iterable[Any], name: str) -> list[Any]:
    """An attribute of all records."""
    return list(map(attrgetter(name), records))


def _column(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, dtype=np.int64)


def _paths(planner_data: object) -> dict[str, Path]:
    """The names' places as the default planner records them; data of other planners is ignored."""
    if not isinstance(planner_data, Mapping):
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
