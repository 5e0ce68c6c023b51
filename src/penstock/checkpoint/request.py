"""What this rank wants of a checkpoint: regions of tensors and whole items, in the checkpoint's numbering.

Objects, and items that can only be read whole, are requested as one-dimensional tensors of bytes, so one plan
serves all. Invariant: what passes here exists in the checkpoint to the last element, with the shape and dtype
of the state, and every leaf is either selected or listed as left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.formats.dcp_item import HEAD_BYTES
from penstock.checkpoint.plan.load_plan import missing_elements, uncovered
from penstock.checkpoint.plan.region_arithmetic import find_overlaps
from penstock.checkpoint.state.regions import (
    UNKNOWN,
    CheckpointIndex,
    Ints,
    Regions,
    StoredRegions,
    TensorFacts,
)
from penstock.cluster.comm import Comm, run_on_all_ranks
from penstock.errors import DataDamaged, ObjectNotFound, UsageError

if TYPE_CHECKING:
    from penstock.checkpoint.formats.checkpoint_source import CheckpointSource
    from penstock.checkpoint.match import LeafSelection
    from penstock.checkpoint.state.tensors import LocalState
    from penstock.storage.protocol import Source


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ByteItemIndex:
    """A checkpoint's index in which items that are read whole are tensors of bytes, after its own tensors.

    The rows of `stored` are first those that can be read in part, then one for each packed row, then one for
    each object; `source_row` has the row in the checkpoint's index, or -1 - k for the k-th object.
    """

    tensors: tuple[TensorFacts, ...]
    stored: StoredRegions
    source_row: Ints
    packed_rows: Ints
    first_packed: int
    """Tensor number of the first packed row; those of objects follow."""

    @property
    def first_object(self) -> int:
        """Tensor number of the first object."""
        return self.first_packed + len(self.packed_rows)


@dataclass(frozen=True, slots=True, eq=False)
class Unpacking:
    """A part of a wanted region that is cut out of a packed item once that is loaded."""

    row: int
    want: int
    regions: Regions
    part: int


@dataclass(frozen=True, slots=True, eq=False)
class LoadRequests:
    """What a rank wants: `regions` in the tensor numbers of `ByteItemIndex`, shards first, then whole items.

    `names` has for each shard its leaf's name, and its number among the leaf's shards.
    """

    regions: Regions
    names: tuple[tuple[str, int], ...]
    items: tuple[int, ...]
    """Tensor numbers of the whole items, in the order of their rows after the shards."""
    unpacking: tuple[Unpacking, ...]
    objects: Mapping[str, int]
    """Leaf name -> the object's number in the checkpoint's index."""


def index_byte_items(index: CheckpointIndex) -> ByteItemIndex:
    """Index packed regions and objects as tensors of bytes, so that one plan serves all of them."""
    stored = index.stored
    packed_rows = np.flatnonzero(stored.packed)
    plain_rows = np.flatnonzero(~stored.packed)
    objects = index.objects
    first_packed = len(index.tensors)
    packed = stored.take(packed_rows)
    columns = [(stored.size_bytes, stored.offset, stored.file) for stored in objects]
    object_sizes, object_offsets, object_files = np.array(columns, dtype=np.int64).reshape(-1, 3).T
    sizes = np.concatenate([packed.item_bytes, object_sizes])
    offsets = np.concatenate([packed.item_offset, object_offsets])
    file = np.concatenate([packed.file, object_files])
    names = [index.tensors[number].name for number in packed.regions.tensor.tolist()]
    names += [stored.name for stored in objects]
    byte_tensors = tuple(
        TensorFacts(name, "uint8", (size,), 1) for name, size in zip(names, sizes.tolist(), strict=True)
    )
    whole = _byte_regions(np.arange(len(byte_tensors)) + first_packed, sizes)
    plain = stored.take(plain_rows)
    return ByteItemIndex(
        tensors=(*index.tensors, *byte_tensors),
        stored=StoredRegions(
            Regions.concatenated([plain.regions, whole]),
            np.concatenate([plain.file, file]),
            np.concatenate([plain.item_offset, offsets]),
            np.concatenate([plain.item_bytes, sizes]),
            np.concatenate([plain.payload_offset, offsets]),
            np.zeros(len(plain) + len(whole), dtype=np.bool_),
        ),
        source_row=np.concatenate([plain_rows, packed_rows, -1 - np.arange(len(objects))]),
        packed_rows=packed_rows,
        first_packed=first_packed,
    )


def _byte_regions(tensor: Ints, sizes: Ints) -> Regions:
    return Regions(tensor, np.zeros((len(tensor), 1), dtype=np.int64), sizes[:, None])


def build_requests(
    local_state: LocalState,
    selection: LeafSelection,
    index: CheckpointIndex,
    item_index: ByteItemIndex,
    *,
    converts: bool,
    where: str,
) -> LoadRequests:
    """What this rank wants. Raises `UsageError` where state and checkpoint do not match.

    Raises `DataDamaged` where the checkpoint, called `where`, lacks a part of what it lists; `converts`
    allows other dtypes.
    """
    numbers = {facts.name: number for number, facts in enumerate(index.tensors)}
    objects = {stored.name: number for number, stored in enumerate(index.objects)}
    wanted_objects: dict[str, int] = {}
    rows: list[tuple[int, Sequence[int], Sequence[int]]] = []
    names: list[tuple[str, int]] = []
    own = {facts.name: facts for facts in local_state.holdings.tensors}
    for name, stored_name in selection.stored_names.items():
        if name in own and stored_name in numbers:
            number = numbers[stored_name]
            _check_fit(own[name], index.tensors[number], converts=converts)
            for place, piece in enumerate(local_state.shards[name]):
                rows.append((number, piece.offsets, piece.sizes))
                names.append((name, place))
        elif name not in own and stored_name in objects:
            wanted_objects[name] = objects[stored_name]
        else:
            raise _kinds_differ(name, stored_name, is_tensor=name in own)
    regions = Regions.from_rows(rows)
    check_covered(index, regions, where)
    return build_matched_requests(regions, tuple(names), wanted_objects, index, item_index)


def build_matched_requests(
    regions: Regions,
    names: tuple[tuple[str, int], ...],
    wanted_objects: Mapping[str, int],
    index: CheckpointIndex,
    item_index: ByteItemIndex,
) -> LoadRequests:
    """The requests for regions and objects that are already matched and checked."""
    unpacking = _unpackings(index, item_index, regions)
    items = dict.fromkeys(item_index.first_packed + part.row for part in unpacking)
    items.update(dict.fromkeys(item_index.first_object + number for number in wanted_objects.values()))
    sizes = np.array([item_index.tensors[number].shape[0] for number in items], dtype=np.int64)
    whole = _byte_regions(np.array(list(items), dtype=np.int64), sizes)
    return LoadRequests(
        regions=Regions.concatenated([regions, whole]),
        names=names,
        items=tuple(items),
        unpacking=unpacking,
        objects=wanted_objects,
    )


def _check_fit(own: TensorFacts, stored: TensorFacts, *, converts: bool) -> None:
    if own.shape != stored.shape:
        raise UsageError(
            f"{own.name!r} is {list(own.shape)} in the state and {list(stored.shape)} in the checkpoint",
            fix="Build the state with the configuration it was saved with, or skip this part with exclude=.",
        )
    if own.dtype != stored.dtype and not converts:
        raise UsageError(
            f"{own.name!r} is {own.dtype} in the state and {stored.dtype} in the checkpoint",
            fix="Give the state the checkpoint's dtype, or convert it with convert_dtypes=True.",
        )


def _kinds_differ(name: str, stored_name: str, *, is_tensor: bool) -> UsageError:
    own, stored = ("a tensor", "an object") if is_tensor else ("an object", "a tensor")
    return UsageError(
        f"{name!r} is {own} in the state, but {stored_name!r} is {stored} in the checkpoint",
        fix="Give the state the same kind of value, or skip this part with exclude=.",
    )


def check_covered(index: CheckpointIndex, regions: Regions, where: str) -> None:
    """Raise `DataDamaged` for the first wanted region whose elements are not all stored exactly once."""
    missing = missing_elements(index.stored.regions, regions)
    rows = np.flatnonzero(missing)
    if len(rows):
        row = int(rows[0])
        raise uncovered(index.tensors[int(regions.tensor[row])], regions, row, int(missing[row]), where)


def _unpackings(index: CheckpointIndex, item_index: ByteItemIndex, regions: Regions) -> tuple[Unpacking, ...]:
    if not len(item_index.packed_rows):
        return ()
    met = find_overlaps(regions, index.stored.regions.take(item_index.packed_rows))
    return tuple(
        Unpacking(row=int(met.right[part]), want=int(met.left[part]), regions=met.regions, part=part)
        for part in range(len(met.left))
    )


def with_payloads(index: CheckpointIndex, positions: Ints, rows: Ints) -> CheckpointIndex:
    """`index` with payload positions in the file for `rows`; -1 means that an item must be read whole."""
    payload, packed = index.stored.payload_offset.copy(), index.stored.packed.copy()
    payload[rows] = positions
    packed[rows] |= positions < 0
    return replace(index, stored=replace(index.stored, payload_offset=payload, packed=packed))


LARGE_BYTES = 256 << 20


def require_lengths(checkpoint: CheckpointSource, item_index: ByteItemIndex, items: Iterable[int]) -> None:
    """Raise `DataDamaged` for a large item that goes beyond its file, before memory is taken for it."""
    for number in items:
        facts = item_index.tensors[number]
        if facts.shape[0] < LARGE_BYTES:
            continue
        row = len(item_index.stored) - len(item_index.tensors) + number
        key = checkpoint.key(checkpoint.index.files[int(item_index.stored.file[row])])
        # A file that is only on another rank's node is read there, and its length is looked at there.
        with suppress(ObjectNotFound):
            size_bytes = checkpoint.storage.stat(key).size_bytes
            end = int(item_index.stored.item_offset[row]) + facts.shape[0]
            if end > size_bytes:
                raise DataDamaged(
                    f"{facts.name!r} should end at byte {end} of a file that has {size_bytes}",
                    where=f"{checkpoint.uri}, {key}",
                    fix="Load an older checkpoint.",
                )


NUM_HEAD_READERS = 16
"""Heads are small, so reading them is bound by latency."""


def locate_payloads(checkpoint: CheckpointSource, comm: Comm) -> CheckpointIndex:
    """The index with the positions of all payloads, read from items that no manifest describes. Collective.

    Heads of items are read through the page cache: with direct I/O, scattered pages take four times as long.
    """
    index = checkpoint.index
    rows = unlocated_rows(index)
    if not len(rows):
        return index
    own_rows = rows[comm.rank :: comm.size]
    own_positions = run_on_all_ranks(
        comm, lambda: _positions(checkpoint, own_rows), awaiting="all ranks to locate payloads"
    )
    positions = np.empty(len(rows), dtype=np.int64)
    for rank, part in enumerate(comm.gather(own_positions, awaiting="where all payloads begin")):
        positions[rank :: comm.size] = part
    return with_payloads(index, positions, rows)


def unlocated_rows(index: CheckpointIndex) -> Ints:
    """Rows of plain items whose payload can only be located from their own heads."""
    stored = index.stored
    return np.flatnonzero((stored.payload_offset == UNKNOWN) & ~stored.packed)


def _positions(checkpoint: CheckpointSource, rows: Ints) -> Ints:
    """Positions in the file, -1 where only the whole item has the payload."""
    stored = checkpoint.index.stored
    positions = np.full(len(rows), UNKNOWN, dtype=np.int64)
    with ThreadPoolExecutor(NUM_HEAD_READERS) as threads:
        for file in np.unique(stored.file[rows]).tolist():
            places = np.flatnonzero(stored.file[rows] == file)
            with ExitStack() as opening:
                source = checkpoint.storage.open(checkpoint.key(checkpoint.index.files[file]))
                opening.callback(source.close)
                look = partial(_position, checkpoint, source)
                positions[places] = list(threads.map(look, rows[places].tolist()))
    return positions


def _position(checkpoint: CheckpointSource, source: Source, row: int) -> int:
    stored = checkpoint.index.stored
    begin, size = int(stored.item_offset[row]), int(stored.item_bytes[row])
    head = bytearray(min(HEAD_BYTES, size))
    source.read_into(begin, memoryview(head))
    offset = checkpoint.payload_in(row, head)
    return UNKNOWN if offset is None else begin + offset
