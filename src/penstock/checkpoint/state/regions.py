"""Element types, parts of tensors and the index of a checkpoint, as numpy columns. Needs no torch.

Planners, the readers and writers of every format, and loads exchange these records. Invariant: a region is in
the global coordinates of its tensor, and all columns of a record have the same length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import NoReturn, Self

import numpy as np
import numpy.ma  # which np.unique would otherwise import in the middle of a first load
from numpy.typing import NDArray

from penstock.checkpoint.state.walk import Path
from penstock.did_you_mean import did_you_mean
from penstock.errors import AccessRefused, DataDamaged, UsageError
from penstock.storage.protocol import check_key

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
ByteArray = NDArray[np.uint8]
Bytes = bytes | bytearray | memoryview
Region = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets and sizes of a part of a tensor."""

MOST_DIMENSIONS = 64
"""The most dimensions that numpy allows. Columns are as wide as the tensor with the most dimensions."""
UNKNOWN = -1
"""The offset of a payload that must be read from its item's own header."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The properties of a tensor that are equal on all ranks. `dtype` has no `torch.` prefix: `bfloat16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    element_bytes: int
    """The size of one element."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.element_bytes

    def __reduce__(self) -> tuple[type[TensorFacts], tuple[object, ...]]:
        # The default of dataclasses takes ten times as long, and ranks exchange thousands of these.
        return TensorFacts, (self.name, self.dtype, self.shape, self.element_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Rectangular parts of tensors, one per row.

    `tensor` (n) has indices into a tuple of `TensorFacts` that is kept separately; `offsets` and `sizes` are
    (n, width), where width is the largest number of dimensions. Rows of tensors with fewer dimensions are
    padded with offset 0 and size 1, so that 0-d tensors need no special case and whole rows can be compared.
    """

    tensor: Ints
    offsets: Ints
    sizes: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def num_dims(self) -> int:
        """The width of `offsets` and `sizes`."""
        return int(self.offsets.shape[1])

    @property
    def num_elements(self) -> Ints:
        """The number of elements of each region; 0 for an empty one."""
        return np.asarray(np.prod(self.sizes, axis=1, dtype=np.int64))

    def num_bytes(self, element_bytes: Ints) -> Ints:
        """Return the size of each region in bytes; `element_bytes` is by tensor, see `element_sizes`."""
        return self.num_elements * element_bytes[self.tensor]

    def take(self, rows: Ints | Bools | slice) -> Regions:
        """Return some of the regions, in the order of `rows`; this object itself for all rows in order."""
        # The check costs far less than copying a million regions.
        if (
            isinstance(rows, np.ndarray)
            and len(rows) == len(self)
            and (rows if rows.dtype == np.bool_ else rows == np.arange(len(rows))).all()
        ):
            return self
        return Regions(self.tensor[rows], self.offsets[rows], self.sizes[rows])

    def widened(self, num_dims: int) -> Regions:
        """Return the same regions with columns for `num_dims` dimensions, which must not be fewer."""
        known = self.num_dims
        if num_dims == known:
            return self
        offsets, sizes = np.zeros((len(self), num_dims), np.int64), np.ones((len(self), num_dims), np.int64)
        offsets[:, :known], sizes[:, :known] = self.offsets, self.sizes
        return Regions(self.tensor, offsets, sizes)

    def region(self, row: int, num_dims: int) -> Region:
        """Return the offsets and sizes of one region, of a tensor with `num_dims` dimensions."""
        return (
            tuple(self.offsets[row, :num_dims].tolist()),
            tuple(self.sizes[row, :num_dims].tolist()),
        )

    def with_facts(self, tensors: Sequence[TensorFacts]) -> Iterator[tuple[TensorFacts, Region]]:
        """Yield, row by row, the tensor of each region, and the region without padding."""
        columns = (self.tensor.tolist(), self.offsets.tolist(), self.sizes.tolist())
        for number, offsets, sizes in zip(*columns, strict=True):
            num_dims = len(tensors[number].shape)
            yield tensors[number], (tuple(offsets[:num_dims]), tuple(sizes[:num_dims]))

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> Self:
        """Create regions from their (tensor number, offsets, sizes)."""
        tensor = np.array([tensor for tensor, _, _ in rows], dtype=np.int64)
        offsets, sizes = [begin for _, begin, _ in rows], [extent for _, _, extent in rows]
        return cls(tensor, pad_rows(offsets, 0), pad_rows(sizes, 1))

    @classmethod
    def concatenated(cls, parts: Sequence[Regions]) -> Self:
        """Return all regions of `parts` in order; their tensor numbers must refer to the same tensors."""
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
    """Return a table of `rows`, with `padding` to the right of shorter ones."""
    length = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    width = max(int(length.max(initial=0)), least_width)
    table = np.full((len(rows), width), padding, dtype=np.int64)
    table[np.arange(width) < length[:, None]] = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
    return table


def element_sizes(tensors: Sequence[TensorFacts]) -> Ints:
    """Return the size of one element, by tensor number."""
    return np.array([tensor.element_bytes for tensor in tensors], dtype=np.int64)


def whole_regions(tensors: Sequence[TensorFacts]) -> Regions:
    """Return one region for each tensor, which covers it completely."""
    return Regions.from_rows(
        [(number, (0,) * len(facts.shape), facts.shape) for number, facts in enumerate(tensors)]
    )


@dataclass(frozen=True, slots=True, eq=False)
class StoredRegions:
    """The positions of a checkpoint's regions in its files, row by row.

    An item is what a file holds for one region: an envelope and the payload, which is the region's elements
    in row-major order. `payload_offset` is the offset in the file, or `UNKNOWN`. A `packed` item (behind a
    stream transform, or in an order other than row-major) must be read whole.
    """

    regions: Regions
    file: Ints
    """Indices into a tuple of file names that is kept separately."""
    item_offset: Ints
    item_bytes: Ints
    payload_offset: Ints
    packed: Bools

    def __len__(self) -> int:
        return len(self.regions)

    def take(self, rows: Ints | Bools | slice) -> StoredRegions:
        return StoredRegions(
            self.regions.take(rows),
            self.file[rows],
            self.item_offset[rows],
            self.item_bytes[rows],
            self.payload_offset[rows],
            self.packed[rows],
        )


Transforms = tuple[str, ...]
"""The stream transforms of an item, outermost last: `("stream.zstd/1",)`; () if it has none."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An item that is not a tensor: its name in the checkpoint, and its position."""

    name: str
    file: int
    offset: int
    size_bytes: int
    transforms: Transforms = ()
    sum: bytes = b""
    """The XXH3-128 of the item as stored in the file; empty if no manifest has it."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointIndex:
    """Everything that a checkpoint of any format holds, and where."""

    tensors: tuple[TensorFacts, ...]
    stored: StoredRegions
    objects: tuple[StoredObject, ...]
    files: tuple[str, ...]
    """Keys relative to the checkpoint's folder."""
    paths: Mapping[str, Path] = field(default_factory=dict)
    """The place of each name in the nested state; names that are not listed are at the top level."""
    transforms: Sequence[Transforms] = ()
    """The transforms of each row of `stored`; empty if no row has any."""
    sums: NDArray[np.uint8] | None = None
    """(rows of `stored`, 16): the XXH3-128 of each item as stored in the file; None without a manifest."""

    def transforms_of(self, row: int) -> Transforms:
        return self.transforms[row] if self.transforms else ()


def check_index(index: CheckpointIndex, where: str) -> None:
    """Raise `DataDamaged` for a file outside the folder, or an item or region that cannot be valid."""
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
    is_invalid = (stored.item_offset < 0) | (stored.item_bytes < 0)
    for row in np.flatnonzero(is_invalid)[:1].tolist():
        name = tensors[int(regions.tensor[row])].name
        refuse_index(f"{name} has {stored.item_bytes[row]} bytes at offset {stored.item_offset[row]}", where)
    for row in rows_outside(tensors, regions)[:1].tolist():
        facts = tensors[int(regions.tensor[row])]
        offsets, sizes = regions.region(row, len(facts.shape))
        refuse_index(
            f"A region of {facts.name} at {list(offsets)} of {list(sizes)} is outside its shape"
            f" {list(facts.shape)}",
            where,
        )


def rows_outside(tensors: Sequence[TensorFacts], regions: Regions) -> Ints:
    """Return the rows of regions that are not within their tensor."""
    shapes = pad_rows([facts.shape for facts in tensors], 1, least_width=regions.num_dims)
    regions = regions.widened(shapes.shape[1])
    is_outside = regions.offsets + regions.sizes > shapes[regions.tensor]
    return np.flatnonzero((is_outside | (regions.offsets < 0) | (regions.sizes < 0)).any(axis=1))


def refuse_index(what: str, where: str) -> NoReturn:
    """Raise `DataDamaged` for an index that cannot be valid."""
    raise DataDamaged(what, where=where, fix="Load an older checkpoint, or save this one again.")


def require(is_right: object, what: str) -> None:
    """Raise `ValueError` unless `is_right`, as it is in any undamaged file. The caller names the file."""
    if not is_right:
        raise ValueError(what)


def require_few_values(document: bytes | bytearray, most: int) -> None:
    """Raise `ValueError` if JSON may have more than `most` values, whose objects take up to 70 bytes each."""
    num_values = 1 + sum(map(document.count, (b",", b"[", b"{")))
    if num_values > most:
        raise ValueError(f"it has more than {most:,} values")


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type. A name is None if the format lacks the type."""

    name: str
    size_bytes: int
    typed_storage: str | None
    """The class in `torch` that archives name as its storage; None if it is archived as plain bytes."""
    safetensors: str | None


ELEMENT_TYPES: Mapping[str, ElementType] = MappingProxyType(
    {
        row[0]: ElementType(*row)
        for row in (
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
    }
)
"""The element types by name. Those that torch itself cannot save (sub-byte and bare quantized ones) are left
out.
"""

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

The integer type is None if a byte holds several elements.
"""

BY_STORAGE: Mapping[str, ElementType] = MappingProxyType(
    {kind.typed_storage: kind for kind in ELEMENT_TYPES.values() if kind.typed_storage}
)
BY_SAFETENSORS: Mapping[str, ElementType] = MappingProxyType(
    {kind.safetensors: kind for kind in ELEMENT_TYPES.values() if kind.safetensors}
)


def element_type(name: str) -> ElementType:
    """Return the element type of this name, with or without `torch.`; raise `UsageError` if there is none."""
    bare = name.removeprefix("torch.")
    kind = ELEMENT_TYPES.get(bare)
    if kind is None:
        hint = did_you_mean(bare, ELEMENT_TYPES).strip() or f"Known: {', '.join(ELEMENT_TYPES)}."
        raise UsageError(f"{name!r} is not an element type of tensors", fix=hint)
    return kind


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor; computed as torch does if a dimension is 0."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def region_table(regions: Regions) -> Ints:
    """Return the regions as rows of one table."""
    return np.concatenate([regions.tensor[:, None], regions.offsets, regions.sizes], axis=1)


def group_equal_rows(table: Ints) -> tuple[Ints, Ints]:
    """Group equal rows of `table`: return the first row of each group, and the group of each row.

    Groups are numbered in the order of their first rows: rows a, b, a, c give [0, 1, 3] and [0, 1, 0, 2].
    """
    # Each column costs a sort of all rows, and most are constant: shards are usually cut along one dimension.
    table = table[:, (table != table[:1]).any(axis=0)]
    order = np.lexsort(table.T[::-1]) if table.shape[1] else np.arange(len(table))
    is_new = np.ones(len(table), dtype=np.bool_)
    is_new[1:] = (table[order[1:]] != table[order[:-1]]).any(axis=1)
    is_first = np.zeros(len(table), dtype=np.bool_)
    is_first[order[is_new]] = True
    number = np.empty(len(table), dtype=np.int64)
    number[order] = (np.cumsum(is_first) - 1)[order[is_new]][np.cumsum(is_new) - 1]
    return np.flatnonzero(is_first), number


def distinct(values: Ints) -> Ints:
    """Return the distinct numbers, in ascending order.

    `np.unique` hashes them, which takes ten times as long for millions.
    """
    values = np.sort(values)
    is_new = np.ones(len(values), dtype=np.bool_)
    is_new[1:] = values[1:] != values[:-1]
    return values[is_new]


def expand_ranges(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Return all integers of the ranges, in order: for each, its range's number, and the integer itself."""
    owner = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    return owner, starts[owner] + within


def find_ranges(column: Ints, values: Ints) -> tuple[Ints, Ints]:
    """Find where each value begins in an ascending column, and how often it occurs."""
    begin = np.searchsorted(column, values)
    return begin, np.searchsorted(column, values, side="right") - begin


@dataclass(frozen=True, slots=True, eq=False)
class RankSets:
    """The set of ranks of each group.

    `of_group` has the numbers of the sets; the members of each set are listed once. The members of set k are
    `members[start[k] : start[k] + size[k]]`, ascending.
    """

    of_group: Ints
    start: Ints
    size: Ints
    members: Ints

    def __len__(self) -> int:
        return len(self.size)


def find_rank_sets(group: Ints, rank: Ints, num_groups: int) -> RankSets:
    """Return the set of ranks of each group, from (group, rank) pairs in any order; repeats are allowed.

    Every group must have a pair. Sets are numbered in the order of the first groups that have them.
    """
    span = int(rank.max(initial=0)) + 1
    pairs = distinct(group * span + rank)
    group, rank = pairs // span, pairs % span
    size = np.bincount(group, minlength=num_groups)
    start = np.cumsum(size) - size
    first_group = np.empty(num_groups, dtype=np.int64)
    for each in distinct(size).tolist():
        alike = np.flatnonzero(size == each)
        first, number = group_equal_rows(rank[start[alike][:, None] + np.arange(each)])
        first_group[alike] = alike[first][number]
    chosen, of_group = np.unique(first_group, return_inverse=True)
    members = rank[expand_ranges(start[chosen], size[chosen])[1]]
    return RankSets(of_group, np.cumsum(size[chosen]) - size[chosen], size[chosen], members)


def are_disjoint(regions: Regions) -> bool:
    """Return True if it is certain that no two regions overlap.

    If False, `find_overlaps` must compare them.
    """
    regions = regions.take(np.flatnonzero((regions.sizes > 0).all(axis=1)))
    begin, end = _on_one_axis(regions, 0)
    order = np.argsort(begin, kind="stable")
    # If no adjacent regions overlap, their ends are in order, so no later region overlaps either.
    return bool((end[order][:-1] <= begin[order][1:]).all())


def find_overlaps(left: Regions, right: Regions) -> tuple[Ints, Ints, Regions]:
    """Return all intersections: the rows of `left`, the rows of `right`, and the common regions.

    Both have regions of the same tensors. Searches along one dimension of each tensor, the one with the most
    distinct offsets in `right`: there, a binary search leaves few candidates, at most the regions of one
    slice.
    """
    both = Regions.concatenated([left, right])
    left, right = left.widened(both.num_dims), right.widened(both.num_dims)
    begin, end = _on_one_axis(both, len(left))
    begin, begin_right = np.split(begin, [len(left)])
    end, end_right = np.split(end, [len(left)])
    order = np.argsort(begin_right, kind="stable")
    # Regions may be nested in this dimension, so their ends need not be sorted, but the largest end so far
    # is.
    reach = np.maximum.accumulate(end_right[order])
    # In order of position: millions of searches at random positions would each miss the processor's caches.
    in_order = np.argsort(begin, kind="stable")
    first, last = np.empty_like(in_order), np.empty_like(in_order)
    first[in_order] = np.searchsorted(reach, begin[in_order], side="right")
    last[in_order] = np.searchsorted(begin_right[order], end[in_order], side="left")
    rows_left, places = expand_ranges(first, np.maximum(last - first, 0))
    rows_right = order[places]
    offsets = np.maximum(left.offsets[rows_left], right.offsets[rows_right])
    ends_left, ends_right = left.offsets + left.sizes, right.offsets + right.sizes
    sizes = np.minimum(ends_left[rows_left], ends_right[rows_right]) - offsets
    real = np.flatnonzero((sizes > 0).all(axis=1))
    real = real[np.lexsort((rows_right[real], rows_left[real]))]
    common = Regions(left.tensor[rows_left[real]], offsets[real], sizes[real])
    return rows_left[real], rows_right[real], common


def _on_one_axis(regions: Regions, first: int) -> tuple[Ints, Ints]:
    """Return the start and end of each region on one axis, on which tensors are laid end to end.

    For each tensor, the axis takes the dimension with the most distinct offsets among the rows from `first`
    on.
    """
    if not regions.num_dims:
        regions = regions.widened(1)
    # Small numbers for tensors, so that positions on the axis fit into 64 bits.
    is_used = np.bincount(regions.tensor) > 0
    number = (np.cumsum(is_used) - 1)[regions.tensor]
    num_offsets = []
    for column in regions.offsets.T:
        span = int(column.max(initial=0)) + 1
        places = distinct(number[first:] * span + column[first:])
        num_offsets.append(np.bincount(places // span, minlength=int(is_used.sum())))
    dim = np.argmax(num_offsets, axis=0)[number][:, None]
    begin = np.take_along_axis(regions.offsets, dim, axis=1)[:, 0]
    end = begin + np.take_along_axis(regions.sizes, dim, axis=1)[:, 0]
    place = number * (int(end.max(initial=0)) + 1)
    return begin + place, end + place


def find_rows(regions: Regions, element_bytes: Ints) -> tuple[Ints, Ints, Ints]:
    """Return how regions can be cut into rows along their first dimension that is longer than 1.

    Returns, for each region, this dimension, the number of rows and the size of a row in bytes; a region of
    one element is one row.
    """
    if not regions.num_dims:
        regions = regions.widened(1)
    dim = np.argmax(regions.sizes != 1, axis=1).astype(np.int64)
    count = np.take_along_axis(regions.sizes, dim[:, None], axis=1)[:, 0]
    return dim, count, regions.num_bytes(element_bytes) // np.maximum(count, 1)


def slice_rows(regions: Regions, dim: Ints, begin: Ints, end: Ints) -> Regions:
    """Return rows `begin` to `end` of each region, counted along its dimension `dim` from its own offset."""
    if not regions.num_dims:
        return regions
    offsets, sizes = regions.offsets.copy(), regions.sizes.copy()
    at = np.arange(len(regions))
    offsets[at, dim] += begin
    sizes[at, dim] = end - begin
    return Regions(regions.tensor, offsets, sizes)


def split_large(regions: Regions, element_bytes: Ints, limit_bytes: int) -> tuple[Ints, Regions]:
    """Cut regions into contiguous parts of at most `limit_bytes`.

    Returns the row of the region from which each part was cut, and the parts. These are in the order of the
    regions, and within each region in the order of memory.
    """
    source = np.arange(len(regions))
    for _ in range(regions.num_dims):
        dim, count, row_bytes = find_rows(regions, element_bytes)
        step = np.maximum(limit_bytes // np.maximum(row_bytes, 1), 1)
        num_parts = np.maximum(-(-count // step), 1)
        if (num_parts == 1).all():
            break
        owner, number = expand_ranges(np.zeros_like(num_parts), num_parts)
        begin = number * step[owner]
        end = np.minimum(begin + step[owner], count[owner])
        source, regions = source[owner], slice_rows(regions.take(owner), dim[owner], begin, end)
    return source, regions


def divide_among_ranks(
    regions: Regions, element_bytes: Ints, sets: RankSets, num_ranks: int, *, min_cut_bytes: int
) -> tuple[Ints, Regions, Ints]:
    """Divide each region among the ranks of its set so that the loads of all ranks are as equal as possible.

    `sets.of_group` has the set of each region. A region smaller than twice `min_cut_bytes` is not divided.
    Returns for each part, in the order of the regions: the region from which it was cut, the part, and its
    rank.

    The regions of each set are laid end to end on one axis of bytes, which is cut where the share of one
    member ends and that of the next begins:

        set {0, 1}: aaaaaabb | bbcccccc    set {2}: dddd
    """
    order = np.argsort(sets.of_group, kind="stable")
    regions, set_of_region = regions.take(order), sets.of_group[order]
    dim, num_rows, row_bytes = find_rows(regions, element_bytes)
    num_bytes = num_rows * row_bytes
    end = np.cumsum(num_bytes)
    begin = end - num_bytes
    total = np.bincount(set_of_region, weights=num_bytes, minlength=len(sets)).astype(np.int64)
    is_cut = np.ones(len(sets.members), dtype=np.bool_)
    is_cut[sets.start + sets.size - 1] = False
    wanted = np.cumsum(level_sets(sets, total, num_ranks))[is_cut]

    # Cut at the nearest row. A part that would be too small for a separate item stays with the adjacent one.
    region = np.minimum(np.searchsorted(end, wanted, side="right"), len(end) - 1)
    within, width, size = wanted - begin[region], np.maximum(row_bytes[region], 1), num_bytes[region]
    row = (within + width // 2) // width
    is_small = np.minimum(row * width, size - row * width) < min_cut_bytes
    row[is_small] = np.where(within * 2 < size, 0, num_rows[region])[is_small]
    cut = begin[region] + row * row_bytes[region]
    is_inside = (row > 0) & (row < num_rows[region])
    cut_region, cut_row = np.unique(np.stack([region[is_inside], row[is_inside]]), axis=1)

    num_parts = 1 + np.bincount(cut_region, minlength=len(regions))
    source, part = expand_ranges(np.zeros_like(num_parts), num_parts)
    first_row, last_row = np.zeros_like(source), num_rows[source]
    first_row[part > 0] = cut_row
    last_row[:-1][part[1:] > 0] = cut_row
    # The owner is the member whose index is the number of its set's cuts at or before the part.
    set_of_part = set_of_region[source]
    cuts_of_sets_before = (sets.start - np.arange(len(sets)))[set_of_part]
    member = np.searchsorted(cut, begin[source] + first_row * row_bytes[source], side="right")
    member = np.clip(member - cuts_of_sets_before, 0, sets.size[set_of_part] - 1)
    owner = sets.members[sets.start[set_of_part] + member]

    parts = slice_rows(regions.take(source), dim[source], first_row, last_row)
    back = np.argsort(order[source], kind="stable")
    return order[source][back], parts.take(back), owner[back]


def level_sets(sets: RankSets, total: Ints, num_ranks: int) -> Ints:
    """Divide the `total` of each set among its members; return the share of each of `sets.members`.

    Small sets come first: work that only few ranks can do determines how much other work they get.
    """
    load = np.zeros(num_ranks, dtype=np.int64)
    shares = np.zeros(len(sets.members), dtype=np.int64)
    for number in np.argsort(sets.size, kind="stable").tolist():
        own = slice(sets.start[number], sets.start[number] + sets.size[number])
        ranks = sets.members[own]
        shares[own] = level_loads(load[ranks], int(total[number]))
        load[ranks] += shares[own]
    return shares


def level_loads(load: Ints, amount: int) -> Ints:
    """Divide `amount` into additions to `load`, so that the highest total is as low as possible."""
    order = np.argsort(load, kind="stable")
    sorted_load = load[order]
    count = np.arange(1, len(load) + 1)
    # `cost` is the amount that raises the k lowest loads to the k-th. The largest k that `amount` covers is
    # raised.
    cost = sorted_load * count - np.cumsum(sorted_load)
    k = int(np.searchsorted(cost, amount, side="right"))
    surface, rest = divmod(amount + int(sorted_load[:k].sum()), k)
    share = np.zeros(len(load), dtype=np.int64)
    share[order[:k]] = surface - sorted_load[:k]
    share[order[:rest]] += 1
    return share
