"""What this rank wants of a checkpoint: regions of tensors and whole items, in the checkpoint's numbering.

Objects, and items that can only be read whole, are requested as one-dimensional tensors of bytes, so one plan
serves all. Invariant: what passes here exists in the checkpoint to the last element, with the shape and dtype
of the state, and every leaf is either selected or listed as left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.formats.dcp_item import HEAD_BYTES
from penstock.checkpoint.plan.load_plan import missing_elements
from penstock.checkpoint.plan.region_arithmetic import find_overlaps
from penstock.checkpoint.plan.save_plan import RANK_MARK, find_stored_name
from penstock.checkpoint.state.leaves import matches_pattern
from penstock.checkpoint.state.regions import (
    UNKNOWN,
    CheckpointIndex,
    Ints,
    Regions,
    StoredRegions,
    TensorFacts,
)
from penstock.cluster.comm import run_on_all_ranks
from penstock.errors import DataDamaged, UsageError
from penstock.suggest import nearest

if TYPE_CHECKING:
    from penstock.checkpoint.engine import LoadChoice
    from penstock.checkpoint.formats.checkpoint_source import CheckpointSource
    from penstock.checkpoint.state.tensors import LocalState
    from penstock.cluster.comm import Comm
    from penstock.storage.protocol import Source


@dataclass(frozen=True, slots=True, eq=False)
class ByteItemIndex:
    """A checkpoint's contents with its whole items as tensors of bytes behind its own tensors.

    Rows of `stored` are those of the contents that are no whole items, then one for each packed row, then one
    for each object; `source_row` tells the row of the contents, or -1 - k for the k-th object.
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
    """A part of a wanted box that is cut out of a packed item once that has come."""

    row: int
    want: int
    regions: Regions
    part: int


@dataclass(frozen=True, slots=True, eq=False)
class LoadRequests:
    """`regions` are wanted in the numbers of `ByteItemIndex`: first the pieces of tensors, then whole items.

    `names` says of each piece which leaf it is of, and the how manieth of its pieces.
    """

    regions: Regions
    names: tuple[tuple[str, int], ...]
    items: tuple[int, ...]
    """Tensor numbers of the whole items, in the order of their rows behind the pieces."""
    unpacking: tuple[Unpacking, ...]
    objects: Mapping[str, int]
    """Leaf name to the object's number in the contents."""


def index_byte_items(index: CheckpointIndex) -> ByteItemIndex:
    """Lay whole items out as tensors of bytes."""
    stored = index.stored
    packed_rows = np.flatnonzero(stored.packed)
    plain_rows = np.flatnonzero(~stored.packed)
    objects = index.objects
    first_packed = len(index.tensors)
    packed = stored.take(packed_rows)
    sizes = np.concatenate(
        [packed.item_bytes, np.array([each.size_bytes for each in objects], dtype=np.int64)]
    )
    offsets = np.concatenate(
        [packed.item_offset, np.array([each.offset for each in objects], dtype=np.int64)]
    )
    file = np.concatenate([packed.file, np.array([each.file for each in objects], dtype=np.int64)])
    names = [index.tensors[number].name for number in packed.regions.tensor.tolist()]
    names += [each.name for each in objects]
    item_index = tuple(
        TensorFacts(name, "uint8", (size,), 1) for name, size in zip(names, sizes.tolist(), strict=True)
    )
    whole = _byte_regions(np.arange(len(item_index)) + first_packed, sizes)
    plain = stored.take(plain_rows)
    return ByteItemIndex(
        tensors=(*index.tensors, *item_index),
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
    """What this rank wants. Raises `UsageError` where state and checkpoint do not fit together.

    `DataDamaged` where the checkpoint lacks a part of what it says it holds. `converts` allows other dtypes.
    """
    numbers = {facts.name: number for number, facts in enumerate(index.tensors)}
    objects = {each.name: number for number, each in enumerate(index.objects)}
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
    """The same for boxes and objects that were matched and checked already."""
    unpacking = _unpackings(index, item_index, regions)
    items = dict.fromkeys(item_index.first_packed + each.row for each in unpacking)
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
            fix="Build the state with the configuration it was saved with, or leave this part out: exclude=.",
        )
    if own.dtype != stored.dtype and not converts:
        raise UsageError(
            f"{own.name!r} is {own.dtype} in the state and {stored.dtype} in the checkpoint",
            fix="Give the state the checkpoint's dtype, or ask for the conversion: convert_dtypes=True.",
        )


def _kinds_differ(name: str, stored_name: str, *, is_tensor: bool) -> UsageError:
    holdings, stored = ("a tensor", "an object") if is_tensor else ("no tensor", "a tensor")
    return UsageError(
        f"{name!r} is {holdings} in the state, but {stored_name!r} is {stored} in the checkpoint",
        fix="Give the state the same kind of value there, or leave this part out with exclude=.",
    )


def check_covered(index: CheckpointIndex, regions: Regions, where: str) -> None:
    """Raise `DataDamaged` for the first wanted box that stored ones do not make up, each element once."""
    missing = missing_elements(index.stored.regions, regions)
    rows = np.flatnonzero(missing)
    if len(rows):
        facts = index.tensors[int(regions.tensor[rows[0]])]
        offsets, sizes = regions.region(int(rows[0]), len(facts.shape))
        raise DataDamaged(
            f"{int(abs(missing[rows[0]]))} elements of {facts.name!r} at {list(offsets)} of {list(sizes)} are"
            f" {'in no piece' if missing[rows[0]] > 0 else 'in several pieces'} of the checkpoint",
            where=where,
            fix="Load an older checkpoint; this one was saved incompletely.",
        )


def _unpackings(index: CheckpointIndex, item_index: ByteItemIndex, regions: Regions) -> tuple[Unpacking, ...]:
    if not len(item_index.packed_rows):
        return ()
    met = find_overlaps(regions, index.stored.regions.take(item_index.packed_rows))
    return tuple(
        Unpacking(row=int(met.right[part]), want=int(met.left[part]), regions=met.regions, part=part)
        for part in range(len(met.left))
    )


def with_payloads(index: CheckpointIndex, positions: Ints, rows: Ints) -> CheckpointIndex:
    """`index` with payload positions in the file for `rows`; -1 means that an item is only read whole."""
    payload, packed = index.stored.payload_offset.copy(), index.stored.packed.copy()
    payload[rows] = positions
    packed[rows] |= positions < 0
    return replace(index, stored=replace(index.stored, payload_offset=payload, packed=packed))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSelection:
    """`stored_names` by leaf name; `left` leaves stay as they are, `unused` names nobody asked for."""

    stored_names: Mapping[str, str]
    left: tuple[str, ...]
    unused: tuple[str, ...]


def select_leaves(
    names: Iterable[str], stored: Collection[str], choice: LoadChoice, *, rank: int
) -> LeafSelection:
    """Match the leaves of a state with what a checkpoint holds.

    `UsageError` for a leaf that it does not hold, unless the choice is not strict.
    """
    found: dict[str, str] = {}
    left = []
    missing = []
    for name in names:
        if not _is_chosen(name, choice):
            left.append(name)
            continue
        stored_name = find_stored_name(apply_rename(name, choice.rename or {}), rank, stored)
        if stored_name is not None:
            found[name] = stored_name
        else:
            missing.append(name)
    if missing and choice.strict:
        raise _missing(missing, stored, choice)
    used = set(found.values())
    unused = (name for name in stored if name not in used and name.partition(RANK_MARK)[0] not in used)
    return LeafSelection(stored_names=found, left=(*left, *missing), unused=tuple(unused))


def apply_rename(name: str, rename: Mapping[str, str]) -> str:
    """What the checkpoint calls the leaf `name`: `{"model.*": "module.*"}` gives it another beginning."""
    if name in rename:
        return rename[name]
    for pattern, target in rename.items():
        if pattern.endswith("*") and name.startswith(pattern[:-1]):
            return target.removesuffix("*") + name[len(pattern) - 1 :]
    return name


def _is_chosen(name: str, choice: LoadChoice) -> bool:
    if choice.only is not None and not matches_pattern(name, choice.only):
        return False
    return choice.exclude is None or not matches_pattern(name, choice.exclude)


def _missing(missing: list[str], stored: Collection[str], choice: LoadChoice) -> UsageError:
    looked_for = apply_rename(missing[0], choice.rename or {})
    near = nearest(looked_for, list(stored)[:10_000])
    hint = f"The nearest name there is {near!r}. " if near else ""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return UsageError(
        f"The checkpoint does not hold {looked_for!r}{more}",
        fix=f"{hint}Map names with rename=, leave parts out with exclude=, or keep what is missing as it is"
        " with strict=False.",
    )


NUM_HEAD_READERS = 16
"""Heads are small, so it is latency that counts."""


def locate_payloads(checkpoint: CheckpointSource, comm: Comm) -> CheckpointIndex:
    """The contents with all payloads' positions; collective. Costs nothing where a manifest tells them.

    Heads are read as the checkpoint was opened: past the page cache a page here and there takes four times as
    long, and there are as many as tensors.
    """
    index = checkpoint.index
    rows = unlocated_rows(index)
    if not len(rows):
        return index
    mine = rows[comm.rank :: comm.size]
    found = run_on_all_ranks(
        comm, lambda: _positions(checkpoint, mine), awaiting="all ranks to look into foreign items"
    )
    everybodys = comm.gather(found, awaiting="where all payloads begin")
    positions = np.empty(len(rows), dtype=np.int64)
    for rank, each in enumerate(everybodys):
        positions[rank :: comm.size] = each
    return with_payloads(index, positions, rows)


def unlocated_rows(index: CheckpointIndex) -> Ints:
    """Rows of plain items whose payload only their own heads can tell."""
    stored = index.stored
    return np.flatnonzero((stored.payload_offset == UNKNOWN) & ~stored.packed)


def _positions(checkpoint: CheckpointSource, rows: Ints) -> Ints:
    """Positions in the file, -1 where only the whole item tells."""
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
    found = checkpoint.payload_in(row, head)
    return UNKNOWN if found is None else begin + found
