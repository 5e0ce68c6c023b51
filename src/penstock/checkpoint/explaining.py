"""What a save and a load of a state would do, rank by rank, without doing it.

The planners' own answer: `explain` plans exactly as `save` and `load` do. Invariant: no tensor is moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.checkpoint.members import meeting
from penstock.checkpoint.pieces import StoredBoxes, item_bytes_of
from penstock.checkpoint.plan.agreement import Planner
from penstock.checkpoint.plan.loading import rank_load_plan, share_loading
from penstock.checkpoint.plan.records import LoadOptions, SaveOptions
from penstock.checkpoint.plan.saving import merge_held
from penstock.checkpoint.stateful import opened
from penstock.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.checkpoint.pieces import Boxes, Ints
    from penstock.checkpoint.plan.records import Held, SharedSavePlan
    from penstock.checkpoint.plan.saving import Merged

NUM_TENSORS_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """Bytes of tensors on one rank. What it holds and does not read when loading, others send it."""

    rank: int
    holds_bytes: int
    writes_bytes: int
    reads_bytes: int
    receives_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One piece that a rank writes: `offsets` and `sizes` are in the whole tensor."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Who writes and who reads what. `print` it, or look at its parts."""

    unique_bytes: int
    """Of all tensors, each element counted once: so much is written, and so much is read by all together."""
    ranks: tuple[RankPart, ...]
    pieces: tuple[Written, ...]
    """What is written, tensor by tensor."""
    objects: tuple[tuple[str, ...], ...]
    """Names of what is no tensor, by the rank that writes it; `rng@rank3` is rank 3's own."""

    def __str__(self) -> str:
        return "\n".join([*self._about_ranks(), "", *self._about_tensors()])

    def _about_ranks(self) -> list[str]:
        lines = [
            f"{format_bytes(self.unique_bytes)} in tensors, on {len(self.ranks)} rank(s)",
            "",
            f"{'rank':>4}  {'holds':>10}  {'writes':>10}  {'reads':>10}  {'receives':>10}  objects",
        ]
        for part, objects in zip(self.ranks, self.objects, strict=True):
            counted = (part.holds_bytes, part.writes_bytes, part.reads_bytes, part.receives_bytes)
            figures = "  ".join(f"{format_bytes(each):>10}" for each in counted)
            lines.append(f"{part.rank:>4}  {figures}  {len(objects)}")
        return lines

    def _about_tensors(self) -> list[str]:
        by_name: dict[str, list[Written]] = {}
        for piece in self.pieces:
            by_name.setdefault(piece.tensor, []).append(piece)
        largest = sorted(by_name, key=lambda name: -sum(piece.size_bytes for piece in by_name[name]))
        lines = []
        for name in largest[:NUM_TENSORS_SHOWN]:
            first = by_name[name][0]
            lines.append(f"{name}  {first.dtype} {list(first.shape)}")
            lines += [f"    rank {piece.rank} writes {_ranges(piece)}" for piece in by_name[name]]
        if len(largest) > NUM_TENSORS_SHOWN:
            lines.append(f"and {len(largest) - NUM_TENSORS_SHOWN} smaller tensors")
        return lines


def explain(state: Mapping[str, Any], *, process_group: Any = None) -> Explanation:
    """What `save` and `load` of `state` would do on these ranks. Collective; moves no tensor.

    >>> print(pc.explain({"model": model.state_dict()}))

    Loading is told for the same ranks and placements as saving.
    """
    from penstock.checkpoint.tensors import hold  # noqa: PLC0415 - loads torch

    with meeting(process_group) as members:
        held = hold(opened(state)).held
        agreed = Planner(members.comm).agree(held, SaveOptions())
        everybodys: list[Held] = members.comm.gather(held, awaiting="what all ranks hold")
    merged = merge_held(everybodys)
    item_bytes = item_bytes_of(merged.tensors)
    objects = tuple(tuple(each.stored_name for each in rank) for rank in agreed.objects)
    return Explanation(
        unique_bytes=int(agreed.shared.boxes.num_bytes(item_bytes).sum()),
        ranks=tuple(_parts(agreed.shared, merged, item_bytes)),
        pieces=tuple(_written(agreed.shared, item_bytes)),
        objects=objects,
    )


def _parts(shared: SharedSavePlan, merged: Merged, item_bytes: Ints) -> list[RankPart]:
    options = LoadOptions()
    wanted = [merged.boxes.take(merged.rank == rank) for rank in range(shared.num_ranks)]
    plan = share_loading(_as_stored(shared, item_bytes), item_bytes, wanted, options)
    parts = []
    for rank, boxes in enumerate(wanted):
        own = rank_load_plan(plan, item_bytes, rank, options)
        parts.append(
            RankPart(
                rank=rank,
                holds_bytes=_sum(boxes, item_bytes),
                writes_bytes=_sum(shared.boxes.take(shared.rank == rank), item_bytes),
                reads_bytes=_sum(own.boxes, item_bytes),
                receives_bytes=_sum(own.receives.boxes, item_bytes),
            )
        )
    return parts


def _as_stored(shared: SharedSavePlan, item_bytes: Ints) -> StoredBoxes:
    """The checkpoint that this plan would make, with one file a rank and no envelopes."""
    size = shared.boxes.num_bytes(item_bytes)
    end = np.cumsum(size)
    packed = np.zeros(len(size), dtype=np.bool_)
    return StoredBoxes(shared.boxes, shared.rank, end - size, size, end - size, packed)


def _sum(boxes: Boxes, item_bytes: Ints) -> int:
    return int(boxes.num_bytes(item_bytes).sum())


def _written(shared: SharedSavePlan, item_bytes: Ints) -> list[Written]:
    size = shared.boxes.num_bytes(item_bytes)
    found = []
    for row in np.argsort(shared.boxes.tensor, kind="stable").tolist():
        facts = shared.tensors[int(shared.boxes.tensor[row])]
        offsets, sizes = shared.boxes.box(row, len(facts.shape))
        found.append(
            Written(
                tensor=facts.name,
                dtype=facts.dtype,
                shape=facts.shape,
                rank=int(shared.rank[row]),
                offsets=offsets,
                sizes=sizes,
                size_bytes=int(size[row]),
            )
        )
    return found


def _ranges(piece: Written) -> str:
    """As numpy would slice it: `[0:512, :]`."""
    if not piece.shape:
        return "its one element"
    slices: Sequence[str] = [
        ":" if (begin, extent) == (0, whole) else f"{begin}:{begin + extent}"
        for begin, extent, whole in zip(piece.offsets, piece.sizes, piece.shape, strict=True)
    ]
    return f"[{', '.join(slices)}], {format_bytes(piece.size_bytes)}"
