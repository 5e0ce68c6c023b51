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


_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIXERS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Groups of equal rows, numbered in the order of their first rows."""

    first: Ints
    """The first row of each group."""
    number: Ints
    """The group of each row."""

    def __len__(self) -> int:
        return len(self.first)


def region_table(regions: Regions) -> Ints:
    """Regions as the rows of one table."""
    return np.concatenate([regions.tensor[:, None], regions.offsets, regions.sizes], axis=1)


def group_equal_rows(table: Ints) -> Groups:
    """Group the rows of `table` that equal each other.

    Sorts one column of hashes instead of all columns. If all hashes differ, all rows do; if two different
    rows share a hash, all columns are compared, which is slow.
    """
    keys = _mixed(table)
    in_order = np.sort(keys)
    if (in_order[1:] != in_order[:-1]).all():
        rows = np.arange(len(table))
        return Groups(rows, rows)
    _, first, number = np.unique(keys, return_index=True, return_inverse=True)
    if (table[first][number] != table).any():
        _, first, number = np.unique(table, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    renumbered = np.empty(len(first), dtype=np.int64)
    renumbered[order] = np.arange(len(first))
    return Groups(first[order], renumbered[number.reshape(-1)])


def _mixed(table: Ints) -> NDArray[np.uint64]:
    keys = np.zeros(len(table), dtype=np.uint64)
    for column in table.T:
        keys = scramble(keys + column.astype(np.uint64))
    return keys


def scramble(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Map each number to a random-looking one, one to one (the finaliser of splitmix64)."""
    keys = keys + _ODD
    for shift, factor in _MIXERS:
        keys = (keys ^ (keys >> shift)) * factor
    return keys ^ (keys >> np.uint64(31))


def distinct(values: Ints) -> Ints:
    """The distinct numbers, or rows of a table, ascending.

    As np.unique, whose first call imports numpy.ma: that takes a process longer than a small load.
    """
    if values.ndim == 1:
        values = np.sort(values)
        differs = values[1:] != values[:-1]
    else:
        values = values[np.lexsort(values.T[::-1])]
        differs = (values[1:] != values[:-1]).any(axis=1)
    return np.concatenate([values[:1], values[1:][differs]])


def expand_ranges(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """All integers of the ranges, one range after another: the range of each, and the integer."""
    owner = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    return owner, starts[owner] + within


@dataclass(frozen=True, slots=True, eq=False)
class RankSets:
    """The set of ranks of each group: `of_group` has the numbers of sets, whose members are listed once."""

    of_group: Ints
    start: Ints
    size: Ints
    members: Ints

    def __len__(self) -> int:
        return len(self.size)

    def ranks(self, number: int) -> Ints:
        """The members of one set, ascending."""
        begin = self.start[number]
        return self.members[begin : begin + self.size[number]]

    def of_rows(self, group: Ints) -> RankSets:
        """The same sets for rows of these groups."""
        return RankSets(self.of_group[group], self.start, self.size, self.members)

    def sums(self) -> Ints:
        """Four numbers for each set, which no two sets share."""
        sums = np.zeros((len(self), 2), dtype=np.uint64)
        if len(self):
            once = scramble(self.members.astype(np.uint64))
            for column, values in enumerate((once, scramble(once))):
                sums[:, column] = np.add.reduceat(values, self.start)
        return sums.view(np.int32).reshape(len(self), 4).astype(np.int64)


def find_rank_sets(group: Ints, rank: Ints, num_groups: int) -> RankSets:
    """The set of ranks of each group, from (group, rank) pairs in any order, repeats allowed.

    Every group has a pair. Sets are compared by a 128-bit sum over their members: two different ones of a
    million sets would share it with a probability of 10^-27.
    """
    span = int(rank.max(initial=0)) + 1
    pairs = np.sort(group * span + rank)
    pairs = pairs[np.append(pairs[1:] != pairs[:-1], True)[: len(pairs)]]
    group, rank = pairs // span, pairs % span
    size = np.bincount(group, minlength=num_groups)
    sums = np.empty((num_groups, 3), dtype=np.int64)
    starts = np.cumsum(size) - size
    once = scramble(rank.astype(np.uint64))
    for column, values in enumerate((once, scramble(once))):
        totals = np.add.reduceat(values, starts) if num_groups else values
        sums[:, column] = totals.view(np.int64)
    sums[:, 2] = size
    sets = group_equal_rows(sums)
    set_size = size[sets.first]
    _, rows = expand_ranges(starts[sets.first], set_size)
    return RankSets(sets.number, np.cumsum(set_size) - set_size, set_size, rank[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Overlaps:
    """`regions` are the intersections of row `left` of one list with row `right` of the other."""

    left: Ints
    right: Ints
    regions: Regions


def are_disjoint(regions: Regions) -> bool:
    """Return True if surely no two regions overlap. If False, `find_overlaps` has to compare them."""
    regions = regions.take(np.flatnonzero((regions.sizes > 0).all(axis=1)))
    if not len(regions):
        return True
    begin, end, _, _ = _along_best_dimension(regions, regions)
    position = _dense_tensors(regions)[regions.tensor] * (int(end.max()) + 1)
    order = np.argsort(position + begin, kind="stable")
    begins, ends = (position + begin)[order], (position + end)[order]
    # If neighbours do not overlap, their ends are in order, so no later region overlaps either.
    return bool((ends[:-1] <= begins[1:]).all())


def find_overlaps(left: Regions, right: Regions) -> Overlaps:
    """All intersections, ordered by `left`, then `right`; both are regions of the same tensors.

    Searches along one dimension of each tensor, the one with most different offsets in `right`: there a
    binary search leaves few candidates, at most the regions of one slice.
    """
    width = max(left.num_dims, right.num_dims)
    left, right = left.widened(width), right.widened(width)
    if not len(left) or not len(right):
        none = np.zeros(0, dtype=np.int64)
        return Overlaps(none, none, left.take(none))
    first, last, order = _candidates(left, right)
    rows_left, rows_there = expand_ranges(first, np.maximum(last - first, 0))
    rows_right = order[rows_there]
    begin = np.maximum(left.offsets[rows_left], right.offsets[rows_right])
    end = np.minimum(
        left.offsets[rows_left] + left.sizes[rows_left], right.offsets[rows_right] + right.sizes[rows_right]
    )
    real = (end > begin).all(axis=1)
    rows_left, rows_right = rows_left[real], rows_right[real]
    common = Regions(left.tensor[rows_left], begin[real], (end - begin)[real])
    in_order = np.lexsort((rows_right, rows_left))
    return Overlaps(rows_left[in_order], rows_right[in_order], common.take(in_order))


def _candidates(wanted: Regions, there: Regions) -> tuple[Ints, Ints, Ints]:
    """For each wanted region the range of places in `order` (rows of `there`) that it may overlap."""
    begin, end, begin_wanted, end_wanted = _along_best_dimension(wanted, there)
    # Tensors are laid end to end on one axis, so that one sorted column serves all of them.
    span = max(int(end.max(initial=0)), int(end_wanted.max(initial=0))) + 1
    number = _dense_tensors(wanted, there)
    base, base_wanted = number[there.tensor] * span, number[wanted.tensor] * span
    order = np.argsort(base + begin, kind="stable")
    starts = (base + begin)[order]
    # Regions may be nested in this dimension: their ends need not be sorted, but the largest end so far is.
    reach = np.maximum.accumulate((base + end)[order])
    first = np.searchsorted(reach, base_wanted + begin_wanted, side="right")
    last = np.searchsorted(starts, base_wanted + end_wanted, side="left")
    return first, last, order


def _dense_tensors(*parts: Regions) -> Ints:
    """A small number for each tensor that occurs, so that axis positions stay within 64 bits."""
    num_tensors = 1 + max(int(part.tensor.max()) for part in parts)
    occurs = sum(np.bincount(part.tensor, minlength=num_tensors) for part in parts) > 0
    return np.cumsum(occurs) - 1


def _along_best_dimension(wanted: Regions, there: Regions) -> tuple[Ints, Ints, Ints, Ints]:
    if there.num_dims == 0:
        zeros, ones = np.zeros(len(there), dtype=np.int64), np.ones(len(there), dtype=np.int64)
        zeros_wanted = np.zeros(len(wanted), dtype=np.int64)
        return zeros, ones, zeros_wanted, zeros_wanted + 1
    num_tensors = int(max(wanted.tensor.max(), there.tensor.max())) + 1
    best = np.argmax(
        [_num_beginnings(there.tensor, column, num_tensors) for column in there.offsets.T], axis=0
    )
    columns = []
    for regions in (there, wanted):
        dim = best[regions.tensor][:, None]
        begin = np.take_along_axis(regions.offsets, dim, axis=1)[:, 0]
        columns += [begin, begin + np.take_along_axis(regions.sizes, dim, axis=1)[:, 0]]
    begin, end, begin_wanted, end_wanted = columns
    return begin, end, begin_wanted, end_wanted


def _num_beginnings(tensor: Ints, offset: Ints, num_tensors: int) -> Ints:
    """The number of different offsets of each tensor."""
    if not offset.any():
        return np.minimum(np.bincount(tensor, minlength=num_tensors), 1)
    order = np.lexsort((offset, tensor))
    tensor, offset = tensor[order], offset[order]
    is_new = np.ones(len(tensor), dtype=np.bool_)
    is_new[1:] = (tensor[1:] != tensor[:-1]) | (offset[1:] != offset[:-1])
    return np.bincount(tensor[is_new], minlength=num_tensors)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows by which regions can be cut into parts: along the first dimension that is longer than 1."""

    dim: Ints
    count: Ints
    num_bytes: Ints
    """Bytes of one row."""


@dataclass(frozen=True, slots=True, eq=False)
class RegionShares:
    """Parts of regions and the rank that each is assigned to, in the order of the regions."""

    source: Ints
    """The region that a part was cut from."""
    regions: Regions
    rank: Ints


def find_rows(regions: Regions, element_bytes: Ints) -> Rows:
    """The rows of each region; regions of one element are one row."""
    if regions.num_dims == 0:
        ones = np.ones(len(regions), dtype=np.int64)
        return Rows(np.zeros_like(ones), ones, element_bytes[regions.tensor])
    dim = np.argmax(regions.sizes != 1, axis=1).astype(np.int64)
    count = np.take_along_axis(regions.sizes, dim[:, None], axis=1)[:, 0]
    num_bytes = regions.num_bytes(element_bytes) // np.maximum(count, 1)
    return Rows(dim, count, num_bytes)


def divide_among_ranks(
    regions: Regions, element_bytes: Ints, sets: RankSets, num_ranks: int, *, min_cut_bytes: int
) -> RegionShares:
    """Divide each region among the ranks of its set, so that the loads of all ranks are as equal as possible.

    `sets.of_group` has the set of each region. A region below twice `min_cut_bytes` stays whole.
    """
    order = np.argsort(sets.of_group, kind="stable")
    regions = regions.take(order)
    set_of_box = sets.of_group[order]
    rows = find_rows(regions, element_bytes)
    num_bytes = rows.count * rows.num_bytes
    ends = np.cumsum(num_bytes)
    axis = _Axis(set_of_box, ends - num_bytes, ends, rows, min_cut_bytes)
    cut_set, position = _fair_cuts(set_of_box, num_bytes, sets, num_ranks)
    source, begin, end, owner = _cut(axis, cut_set, position, sets)
    shares = RegionShares(
        order[source], slice_rows(regions.take(source), rows.dim[source], begin, end), owner
    )
    back = np.argsort(shares.source, kind="stable")
    return RegionShares(shares.source[back], shares.regions.take(back), shares.rank[back])


def slice_rows(regions: Regions, dim: Ints, begin: Ints, end: Ints) -> Regions:
    """Rows `begin` to `end` of each region, counted along its dimension `dim` from its own offset."""
    if regions.num_dims == 0:
        return regions
    offsets, sizes = regions.offsets.copy(), regions.sizes.copy()
    at = np.arange(len(regions))
    offsets[at, dim] += begin
    sizes[at, dim] = end - begin
    return Regions(regions.tensor, offsets, sizes)


def split_large(regions: Regions, element_bytes: Ints, limit_bytes: int) -> tuple[Ints, Regions]:
    """Cut regions into contiguous parts of at most `limit_bytes`; returns the region of each part, and parts.

    Parts are in the order of the regions, and of memory within each.
    """
    source = np.arange(len(regions))
    for _ in range(regions.num_dims):
        rows = find_rows(regions, element_bytes)
        step = np.maximum(limit_bytes // np.maximum(rows.num_bytes, 1), 1)
        count = -(-rows.count // step)
        if (count <= 1).all():
            break
        owner, number = expand_ranges(np.zeros(len(count), dtype=np.int64), np.maximum(count, 1))
        begin = number * step[owner]
        end = np.minimum(begin + step[owner], rows.count[owner])
        source, regions = source[owner], slice_rows(regions.take(owner), rows.dim[owner], begin, end)
    return source, regions


@dataclass(frozen=True, slots=True, eq=False)
class _Axis:
    """Regions laid end to end on one axis of bytes, grouped by set."""

    set_of_box: Ints
    start: Ints
    end: Ints
    rows: Rows
    min_cut_bytes: int


def _fair_cuts(set_of_box: Ints, num_bytes: Ints, sets: RankSets, num_ranks: int) -> tuple[Ints, Ints]:
    """Choose where to cut the axis: for each set, one position fewer than it has members.

    Small sets come first: what only few ranks can take decides how much they take of the rest.
    """
    total = np.bincount(set_of_box, weights=num_bytes, minlength=len(sets)).astype(np.int64)
    set_start = np.cumsum(total) - total
    load = np.zeros(num_ranks, dtype=np.int64)
    alone = sets.size == 1
    np.add.at(load, sets.members[sets.start[alone]], total[alone])
    shared = np.flatnonzero(~alone)
    if not len(shared):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    begin, _ = level_sets(sets, total, load)
    is_cut = np.ones(len(begin), dtype=np.bool_)
    is_cut[sets.start] = False
    cut_set = np.repeat(np.arange(len(sets)), sets.size - 1)
    return cut_set, set_start[cut_set] + begin[is_cut]


def level_sets(sets: RankSets, total: Ints, load: Ints) -> tuple[Ints, Ints]:
    """Divide the `total` of each set among its members: by member, the begin and end of its share.

    `load` is what each rank has already; it grows by what is shared here.
    """
    end = total[np.repeat(np.arange(len(sets)), sets.size)]
    begin = np.zeros_like(end)
    shared = np.flatnonzero(sets.size > 1)
    for number in shared[np.lexsort((shared, sets.size[shared]))].tolist():
        first, stop = sets.start[number], sets.start[number] + sets.size[number]
        ranks = sets.members[first:stop]
        share = level_loads(load[ranks], int(total[number]))
        load[ranks] += share
        end[first:stop] = np.cumsum(share)
        begin[first:stop] = end[first:stop] - share
    return begin, end


def level_loads(load: Ints, amount: int) -> Ints:
    """Divide `amount` so that, added to `load`, the highest total is as low as possible."""
    order = np.argsort(load, kind="stable")
    sorted_load = load[order]
    count = np.arange(1, len(load) + 1)
    # `cost` is what raises the k lowest loads to the k-th. The largest k that `amount` covers is raised.
    cost = sorted_load * count - np.cumsum(sorted_load)
    k = int(np.searchsorted(cost, amount, side="right"))
    surface, rest = divmod(amount + int(sorted_load[:k].sum()), k)
    share = np.zeros(len(load), dtype=np.int64)
    share[order[:k]] = surface - sorted_load[:k]
    share[order[:rest]] += 1
    return share


def _cut(axis: _Axis, cut_set: Ints, position: Ints, sets: RankSets) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut at the row nearest to each position: region, first and end row, and owner of each part."""
    rows = axis.rows
    region, row = _nearest_rows(axis, position)
    position = axis.start[region] + row * rows.num_bytes[region]
    inside = (row > 0) & (row < rows.count[region])
    unique = distinct(np.stack([region[inside], row[inside]], axis=1))
    num_parts = 1 + np.bincount(unique[:, 0], minlength=len(axis.start))
    source, part = expand_ranges(np.zeros(len(num_parts), dtype=np.int64), num_parts)
    begin = np.zeros(len(source), dtype=np.int64)
    begin[part > 0] = unique[:, 1]
    end = rows.count[source]
    end[:-1][part[1:] > 0] = begin[1:][part[1:] > 0]

    # The owner is the set's member whose number is the count of the set's cuts at or before the part.
    cuts_before_set = np.searchsorted(cut_set, np.arange(len(sets)))
    set_of_part = axis.set_of_box[source]
    share = np.searchsorted(position, axis.start[source] + begin * rows.num_bytes[source], side="right")
    share = np.clip(share - cuts_before_set[set_of_part], 0, sets.size[set_of_part] - 1)
    return source, begin, end, sets.members[sets.start[set_of_part] + share]


def _nearest_rows(axis: _Axis, position: Ints) -> tuple[Ints, Ints]:
    region = np.searchsorted(axis.end, position, side="right")
    region = np.minimum(region, len(axis.end) - 1)
    size, row_bytes = axis.end[region] - axis.start[region], np.maximum(axis.rows.num_bytes[region], 1)
    within = position - axis.start[region]
    row = (within + row_bytes // 2) // row_bytes
    # A part that would be too small for a separate item stays with its neighbour.
    small = np.minimum(row * row_bytes, size - row * row_bytes) < axis.min_cut_bytes
    row[small] = np.where(within * 2 < size, 0, axis.rows.count[region])[small]
    return region, row
