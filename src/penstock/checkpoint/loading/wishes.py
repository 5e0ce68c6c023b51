"""What this rank wants of a checkpoint, in the checkpoint's own numbers: boxes of tensors, and whole items.

Objects and items that can only be read whole are wanted as lines of bytes, so one plan serves all. Invariant:
what passes here exists in the checkpoint to the last element, with the shape and dtype of the state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.pieces import Boxes, Contents, Ints, StoredBoxes, TensorFacts
from penstock.checkpoint.plan.loading import missing_elements
from penstock.checkpoint.plan.overlaps import overlaps
from penstock.errors import DataDamaged, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.checkpoint.loading.selecting import Selection
    from penstock.checkpoint.tensors import Holding


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """A checkpoint's contents with its whole items as tensors of bytes behind its own tensors.

    Rows of `stored` are those of the contents that are no whole items, then one for each packed row, then one
    for each object; `source_row` tells the row of the contents, or -1 - k for the k-th object.
    """

    tensors: tuple[TensorFacts, ...]
    stored: StoredBoxes
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
    boxes: Boxes
    part: int


@dataclass(frozen=True, slots=True, eq=False)
class Wishes:
    """`boxes` are wanted in the numbers of `Lines`: first the pieces of tensors, then whole items.

    `names` says of each piece which leaf it is of, and the how manieth of its pieces.
    """

    boxes: Boxes
    names: tuple[tuple[str, int], ...]
    items: tuple[int, ...]
    """Tensor numbers of the whole items, in the order of their rows behind the pieces."""
    unpacking: tuple[Unpacking, ...]
    objects: Mapping[str, int]
    """Leaf name to the object's number in the contents."""


def as_lines(contents: Contents) -> Lines:
    """Lay whole items out as tensors of bytes."""
    stored = contents.stored
    packed_rows = np.flatnonzero(stored.packed)
    plain_rows = np.flatnonzero(~stored.packed)
    objects = contents.objects
    first_packed = len(contents.tensors)
    packed = stored.take(packed_rows)
    sizes = np.concatenate(
        [packed.item_bytes, np.array([each.size_bytes for each in objects], dtype=np.int64)]
    )
    offsets = np.concatenate(
        [packed.item_offset, np.array([each.offset for each in objects], dtype=np.int64)]
    )
    file = np.concatenate([packed.file, np.array([each.file for each in objects], dtype=np.int64)])
    names = [contents.tensors[number].name for number in packed.boxes.tensor.tolist()]
    names += [each.name for each in objects]
    lines = tuple(
        TensorFacts(name, "uint8", (size,), 1) for name, size in zip(names, sizes.tolist(), strict=True)
    )
    whole = _lines(np.arange(len(lines)) + first_packed, sizes)
    plain = stored.take(plain_rows)
    return Lines(
        tensors=(*contents.tensors, *lines),
        stored=StoredBoxes(
            Boxes.concatenated([plain.boxes, whole]),
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


def _lines(tensor: Ints, sizes: Ints) -> Boxes:
    return Boxes(tensor, np.zeros((len(tensor), 1), dtype=np.int64), sizes[:, None])


def wishes_of(
    holding: Holding, selection: Selection, contents: Contents, lines: Lines, *, converts: bool, where: str
) -> Wishes:
    """What this rank wants. Raises `UsageError` where state and checkpoint do not fit together.

    `DataDamaged` where the checkpoint lacks a part of what it says it holds. `converts` allows other dtypes.
    """
    numbers = {facts.name: number for number, facts in enumerate(contents.tensors)}
    objects = {each.name: number for number, each in enumerate(contents.objects)}
    wanted_objects: dict[str, int] = {}
    rows: list[tuple[int, Sequence[int], Sequence[int]]] = []
    names: list[tuple[str, int]] = []
    own = {facts.name: facts for facts in holding.held.tensors}
    for name, stored_name in selection.stored_names.items():
        if name in own and stored_name in numbers:
            number = numbers[stored_name]
            _check_fit(own[name], contents.tensors[number], converts=converts)
            for place, piece in enumerate(holding.pieces[name]):
                rows.append((number, piece.offsets, piece.sizes))
                names.append((name, place))
        elif name not in own and stored_name in objects:
            wanted_objects[name] = objects[stored_name]
        else:
            raise _kinds_differ(name, stored_name, is_tensor=name in own)
    boxes = Boxes.from_rows(rows)
    check_whole(contents, boxes, where)
    return wishes_for(boxes, tuple(names), wanted_objects, contents, lines)


def wishes_for(
    boxes: Boxes,
    names: tuple[tuple[str, int], ...],
    wanted_objects: Mapping[str, int],
    contents: Contents,
    lines: Lines,
) -> Wishes:
    """The same for boxes and objects that were matched and checked already."""
    unpacking = _unpackings(contents, lines, boxes)
    items = dict.fromkeys(lines.first_packed + each.row for each in unpacking)
    items.update(dict.fromkeys(lines.first_object + number for number in wanted_objects.values()))
    sizes = np.array([lines.tensors[number].shape[0] for number in items], dtype=np.int64)
    whole = _lines(np.array(list(items), dtype=np.int64), sizes)
    return Wishes(
        boxes=Boxes.concatenated([boxes, whole]),
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
    held, stored = ("a tensor", "an object") if is_tensor else ("no tensor", "a tensor")
    return UsageError(
        f"{name!r} is {held} in the state, but {stored_name!r} is {stored} in the checkpoint",
        fix="Give the state the same kind of value there, or leave this part out with exclude=.",
    )


def check_whole(contents: Contents, boxes: Boxes, where: str) -> None:
    """Raise `DataDamaged` for the first wanted box that stored ones do not make up, each element once."""
    missing = missing_elements(contents.stored.boxes, boxes)
    rows = np.flatnonzero(missing)
    if len(rows):
        facts = contents.tensors[int(boxes.tensor[rows[0]])]
        offsets, sizes = boxes.box(int(rows[0]), len(facts.shape))
        raise DataDamaged(
            f"{int(abs(missing[rows[0]]))} elements of {facts.name!r} at {list(offsets)} of {list(sizes)} are"
            f" {'in no piece' if missing[rows[0]] > 0 else 'in several pieces'} of the checkpoint",
            where=where,
            fix="Load an older checkpoint; this one was saved incompletely.",
        )


def _unpackings(contents: Contents, lines: Lines, boxes: Boxes) -> tuple[Unpacking, ...]:
    if not len(lines.packed_rows):
        return ()
    met = overlaps(boxes, contents.stored.boxes.take(lines.packed_rows))
    return tuple(
        Unpacking(row=int(met.right[part]), want=int(met.left[part]), boxes=met.boxes, part=part)
        for part in range(len(met.left))
    )


def with_payloads(contents: Contents, positions: Ints, rows: Ints) -> Contents:
    """`contents` with payload positions in the file for `rows`; -1 means that an item is only read whole."""
    payload, packed = contents.stored.payload_offset.copy(), contents.stored.packed.copy()
    payload[rows] = positions
    packed[rows] |= positions < 0
    return replace(contents, stored=replace(contents.stored, payload_offset=payload, packed=packed))
