"""Element types, parts of tensors and the index of a checkpoint, as numpy columns. Needs no torch.

Planners, the readers and writers of every format, and loading exchange these records. Invariant: a region is
in the global coordinates of its tensor, and all columns of a record have the same length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.state.walk import Path
from penstock.did_you_mean import did_you_mean
from penstock.errors import AccessRefused, DataDamaged, UsageError
from penstock.storage.protocol import check_key

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
ByteArray = NDArray[np.uint8]
Bytes = bytes | bytearray | memoryview

UNKNOWN = -1
"""The position of a payload that has to be read from its item's own header."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The properties of a tensor that are equal on all ranks. `dtype` has no `torch.` prefix: `bfloat16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    element_bytes: int
    """The bytes of one element."""

    @property
    def size_bytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape) * self.element_bytes

    def __reduce__(self) -> tuple[type[TensorFacts], tuple[object, ...]]:
        # What dataclasses do by default takes ten times as long, and ranks exchange these by the thousand.
        return TensorFacts, (self.name, self.dtype, self.shape, self.element_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Rectangular parts of tensors, one per row.

    `tensor` (n) has numbers of a tuple of `TensorFacts` that is kept separately; `offsets` and `sizes` are
    (n, width), where width is the largest number of dimensions. For tensors of fewer dimensions they are
    padded with offset 0 and size 1, so that 0-d tensors need no special case and whole rows can be compared.
    """

    tensor: Ints
    offsets: Ints
    sizes: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def num_dims(self) -> int:
        """Width of `offsets` and `sizes`."""
        return int(self.offsets.shape[1])

    @property
    def num_elements(self) -> Ints:
        """The number of elements of each region; 0 for an empty one."""
        return np.asarray(np.prod(self.sizes, axis=1, dtype=np.int64))

    def num_bytes(self, element_bytes: Ints) -> Ints:
        """The bytes of each region; `element_bytes` is by tensor number, see `element_sizes`."""
        return self.num_elements * element_bytes[self.tensor]

    def take(self, rows: Ints | Bools | slice) -> Regions:
        """Some of the regions, in the order of `rows`; this object itself if those are all rows in order."""
        if isinstance(rows, np.ndarray) and len(rows) == len(self) and _is_all(rows):
            return self
        return Regions(self.tensor[rows], self.offsets[rows], self.sizes[rows])

    def widened(self, num_dims: int) -> Regions:
        """The same regions with columns for `num_dims` dimensions, not fewer than now."""
        known = self.num_dims
        if num_dims == known:
            return self
        offsets, sizes = np.zeros((len(self), num_dims), np.int64), np.ones((len(self), num_dims), np.int64)
        offsets[:, :known], sizes[:, :known] = self.offsets, self.sizes
        return Regions(self.tensor, offsets, sizes)

    def region(self, row: int, num_dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of one region of a tensor of `num_dims` dimensions."""
        return (
            tuple(self.offsets[row, :num_dims].tolist()),
            tuple(self.sizes[row, :num_dims].tolist()),
        )

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> Self:
        """From (tensor number, offsets, sizes) of each region."""
        tensor = np.array([tensor for tensor, _, _ in rows], dtype=np.int64)
        offsets, sizes = [begin for _, begin, _ in rows], [extent for _, _, extent in rows]
        return cls(tensor, pad_rows(offsets, 0), pad_rows(sizes, 1))

    @classmethod
    def concatenated(cls, parts: Sequence[Regions]) -> Self:
        """All regions of `parts`, one after another; their tensor numbers mean the same tensors."""
        width = max((part.num_dims for part in parts), default=0)
        wide = [part.widened(width) for part in parts]
        if not wide:
            return cls.from_rows(())
        return cls(
            np.concatenate([part.tensor for part in wide]),
            np.concatenate([part.offsets for part in wide]),
            np.concatenate([part.sizes for part in wide]),
        )


def pad_rows(rows: Sequence[Sequence[int]], padding: int, *, least_width: int = 0) -> Ints:
    """A table with each of `rows`, and `padding` to the right of shorter ones."""
    length = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    width = max(int(length.max(initial=0)), least_width)
    table = np.full((len(rows), width), padding, dtype=np.int64)
    table[np.arange(width) < length[:, None]] = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
    return table


def _is_all(rows: Ints | Bools) -> bool:
    """Whether these are all rows in order. Checking costs far less than copying a million regions."""
    return bool(rows.all() if rows.dtype == np.bool_ else (rows == np.arange(len(rows))).all())


def element_sizes(tensors: Sequence[TensorFacts]) -> Ints:
    """Bytes of one element, by tensor number."""
    return np.array([tensor.element_bytes for tensor in tensors], dtype=np.int64)


def whole_regions(tensors: Sequence[TensorFacts]) -> Regions:
    """One region for each tensor, all of it."""
    return Regions.from_rows(
        [(number, (0,) * len(facts.shape), facts.shape) for number, facts in enumerate(tensors)]
    )


@dataclass(frozen=True, slots=True, eq=False)
class StoredRegions:
    """The positions of a checkpoint's regions in its files, row by row.

    An item is what a file holds for one region: an envelope and the payload, which is the region's elements
    in row-major order. `payload_offset` is in the file, or `UNKNOWN`. A `packed` item (behind a stream
    transform, or in another order) has to be read whole.
    """

    regions: Regions
    file: Ints
    """Numbers of a tuple of file names that is kept separately."""
    item_offset: Ints
    item_bytes: Ints
    payload_offset: Ints
    packed: Bools

    def __len__(self) -> int:
        return len(self.regions)

    def take(self, rows: Ints | Bools | slice) -> StoredRegions:
        """Some of the rows, in the order of `rows`."""
        return StoredRegions(
            self.regions.take(rows),
            self.file[rows],
            self.item_offset[rows],
            self.item_bytes[rows],
            self.payload_offset[rows],
            self.packed[rows],
        )


Transforms = tuple[str, ...]
"""The stream transforms of an item, outermost last: `("stream.zstd/1",)`; () for none."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An item that is not a tensor: its name in the checkpoint and its position."""

    name: str
    file: int
    offset: int
    size_bytes: int
    transforms: Transforms = ()
    sum: bytes = b""
    """The XXH3-128 of the item as stored in the file; empty if no manifest has it."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointIndex:
    """Everything that a checkpoint holds and where, in any format."""

    tensors: tuple[TensorFacts, ...]
    stored: StoredRegions
    objects: tuple[StoredObject, ...]
    files: tuple[str, ...]
    """Keys relative to the checkpoint's folder."""
    paths: Mapping[str, Path] = field(default_factory=dict)
    """The place of each name in the nested state; names without one are at the top level."""
    transforms: Sequence[Transforms] = ()
    """By row of `stored`; empty if no row has any."""
    sums: NDArray[np.uint8] | None = None
    """(rows of `stored`, 16): the XXH3-128 of each item as stored in the file; None without a manifest."""

    def transforms_of(self, row: int) -> Transforms:
        """The stream transforms of one stored region."""
        return self.transforms[row] if self.transforms else ()


def check_index(index: CheckpointIndex, where: str) -> None:
    """Raise `DataDamaged` for a file outside the folder, or an item or region that cannot be."""
    for name in index.files:
        try:
            check_key(name, where)
        except AccessRefused as error:
            raise DataDamaged(
                f"It names the file {name!r}, which is not in its folder", where=where
            ) from error
    tensors, stored, regions = index.tensors, index.stored, index.stored.regions
    for held in index.objects:
        if held.size_bytes < 0 or held.offset < 0:
            refuse_index(f"The object {held.name} has {held.size_bytes} bytes at offset {held.offset}", where)
    nowhere = (stored.item_offset < 0) | (stored.item_bytes < 0)
    for row in np.flatnonzero(nowhere)[:1].tolist():
        name = tensors[int(regions.tensor[row])].name
        refuse_index(f"{name} has {stored.item_bytes[row]} bytes at offset {stored.item_offset[row]}", where)
    shapes = pad_rows([facts.shape for facts in tensors], 1, least_width=regions.num_dims)
    ends = regions.offsets + regions.sizes
    outside = (
        (regions.offsets < 0) | (regions.sizes < 0) | (ends > shapes[regions.tensor, : regions.num_dims])
    )
    for row in np.flatnonzero(outside.any(axis=1))[:1].tolist():
        facts = tensors[int(regions.tensor[row])]
        offsets, sizes = regions.region(row, len(facts.shape))
        refuse_index(
            f"A region of {facts.name} at {list(offsets)} of {list(sizes)} is outside its shape"
            f" {list(facts.shape)}",
            where,
        )


def refuse_index(what: str, where: str) -> NoReturn:
    """Raise `DataDamaged` for an index that cannot be right."""
    raise DataDamaged(what, where=where, fix="Load an older checkpoint, or save this one again.")


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type. The names are None in formats that lack the type."""

    name: str
    size_bytes: int
    typed_storage: str | None
    """The class in `torch` that archives name for its storage; None: torch archives it as plain bytes."""
    safetensors: str | None


def _table(*rows: tuple[str, int, str | None, str | None]) -> Mapping[str, ElementType]:
    return MappingProxyType({row[0]: ElementType(*row) for row in rows})


ELEMENT_TYPES: Mapping[str, ElementType] = _table(
    ("float32", 4, "FloatStorage", "F32"),
    ("float64", 8, "DoubleStorage", "F64"),
    ("float16", 2, "HalfStorage", "F16"),
    ("bfloat16", 2, "BFloat16Storage", "BF16"),
    ("int8", 1, "CharStorage", "I8"),
    ("int16", 2, "ShortStorage", "I16"),
    ("int32", 4, "IntStorage", "I32"),
    ("int64", 8, "LongStorage", "I64"),
    ("uint8", 1, "ByteStorage", "U8"),
    ("bool", 1, "BoolStorage", "BOOL"),
    ("complex64", 8, "ComplexFloatStorage", "C64"),
    ("complex128", 16, "ComplexDoubleStorage", None),
    ("complex32", 4, None, None),
    ("uint16", 2, None, "U16"),
    ("uint32", 4, None, "U32"),
    ("uint64", 8, None, "U64"),
    ("float8_e4m3fn", 1, None, "F8_E4M3"),
    ("float8_e5m2", 1, None, "F8_E5M2"),
    ("float8_e4m3fnuz", 1, None, "F8_E4M3FNUZ"),
    ("float8_e5m2fnuz", 1, None, "F8_E5M2FNUZ"),
    ("float8_e8m0fnu", 1, None, "F8_E8M0"),
    ("float4_e2m1fn_x2", 1, None, None),
    ("bits8", 1, None, None),
    ("bits16", 2, None, None),
    ("bits1x8", 1, None, None),
    ("bits2x4", 1, None, None),
    ("bits4x2", 1, None, None),
)
"""By name. Types that torch itself cannot save (sub-byte and bare quantized ones) are left out."""

QUANTIZED: Mapping[str, tuple[str, str | None]] = MappingProxyType(
    {
        "qint8": ("QInt8Storage", "int8"),
        "quint8": ("QUInt8Storage", "uint8"),
        "qint32": ("QInt32Storage", "int32"),
        "quint4x2": ("QUInt4x2Storage", None),
        "quint2x4": ("QUInt2x4Storage", None),
    }
)
"""Types of tensors with a scale, which are objects here: their storage, and the type of their integers.

None where a byte has several.
"""

BY_STORAGE: Mapping[str, ElementType] = MappingProxyType(
    {kind.typed_storage: kind for kind in ELEMENT_TYPES.values() if kind.typed_storage}
)
BY_SAFETENSORS: Mapping[str, ElementType] = MappingProxyType(
    {kind.safetensors: kind for kind in ELEMENT_TYPES.values() if kind.safetensors}
)


def element_type(name: str) -> ElementType:
    """The type of this name, with or without the `torch.` prefix; `UsageError` suggests a similar one."""
    bare = name.removeprefix("torch.")
    kind = ELEMENT_TYPES.get(bare)
    if kind is None:
        hint = did_you_mean(bare, ELEMENT_TYPES).strip() or f"Known: {', '.join(ELEMENT_TYPES)}."
        raise UsageError(f"{name!r} is not an element type of tensors", fix=hint)
    return kind


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a row-major tensor; as torch computes them if a dimension is 0."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
