"""Sums of items that several ranks read in shares: taken from where they landed, once everything has come.

Nobody reads such an item from end to end, but each replica ends up with all of it. The rank that read its
first share verifies it. Invariant: an item that lies whole and as stored in a tensor of its rank is verified.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.loading.reading import SummedItem, damaged
from penstock.checkpoint.pieces import item_bytes_of
from penstock.checkpoint.plan.loading import payload_starts
from penstock.checkpoint.plan.overlaps import overlaps
from penstock.checkpoint.sums import running_sum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.checkpoint.loading.landing import Target
    from penstock.checkpoint.loading.moving import Means
    from penstock.checkpoint.loading.wishes import Lines
    from penstock.checkpoint.pieces import Boxes, Ints
    from penstock.checkpoint.plan.records import LoadPlan

NUM_THREADS = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Landed:
    item: SummedItem
    file: int
    payload_offset: int
    payload: NDArray[np.uint8]


def recheck(plan: LoadPlan, lines: Lines, wanted: Boxes, targets: Sequence[Target], means: Means) -> int:
    """Verify what this rank answers for; how many items that were. `DataDamaged` names the first bad one.

    `wanted` is row by row what `targets` hold.
    """
    found = [
        landed
        for row in _opened_here(plan, lines).tolist()
        if (landed := _landed(row, lines, wanted, targets, means)) is not None
    ]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(lambda landed: _verify(landed, means), found))
    return len(found)


def _opened_here(plan: LoadPlan, lines: Lines) -> Ints:
    """Rows whose payload this rank began to read, and others went on with."""
    item_bytes = item_bytes_of(lines.tensors)
    outer = lines.stored.boxes.take(plan.row)
    starts = payload_starts(plan.boxes, outer) == 0
    own = np.zeros(len(lines.stored), dtype=np.int64)
    np.add.at(own, plan.row, plan.boxes.num_bytes(item_bytes))
    is_cut = own[plan.row] < outer.num_bytes(item_bytes)
    return np.unique(plan.row[starts & is_cut])


def _landed(row: int, lines: Lines, wanted: Boxes, targets: Sequence[Target], means: Means) -> _Landed | None:
    item = means.summed(lines, row)
    if item is None:
        return None
    box = lines.stored.boxes.take(np.array([row]))
    met = overlaps(box, wanted)
    whole = np.flatnonzero(met.boxes.num_elements == box.num_elements)
    for place in met.right[whole].tolist():
        facts = lines.tensors[int(box.tensor[0])]
        payload = targets[place].straight(*box.box(0, len(facts.shape)))
        if payload is not None:
            offset = int(lines.stored.payload_offset[row])
            return _Landed(item, int(lines.stored.file[row]), offset, payload)
    return None


def _verify(landed: _Landed, means: Means) -> None:
    item = landed.item
    prefix = bytearray(landed.payload_offset - item.begin)
    end = landed.payload_offset + landed.payload.nbytes
    suffix = bytearray(item.end - end)
    source = means.open_file(landed.file)
    try:
        source.read_into(item.begin, memoryview(prefix))
        source.read_into(end, memoryview(suffix))
    finally:
        source.close()
    total = running_sum()
    for part in (prefix, landed.payload.data, suffix):
        total.update(part)
    if total.digest() != item.expected:
        raise damaged(item)
