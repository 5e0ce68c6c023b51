"""A load from an opened checkpoint into the tensors of a state, all ranks together.

The way of a load, in order:

1. `formats.checkpoint_source` opens the checkpoint once for all ranks; `requests.locate_payloads` finds the
   payloads of items that other programs wrote.
2. `requests.build_requests` matches the state's leaves with the checkpoint's names.
3. `plan.load_plan` decides which rank reads what and sends it to whom.
4. `execute.execute_plan` reads (`reader`), exchanges (`transport`) and places (`placement`) the bytes, while
   `heartbeat` ends the work on all ranks when one fails.
5. Compressed items and objects are unpacked, and objects are put into the state last.

Invariant: it returns on all ranks with everything loaded and verified, or raises on all of them. After an
error the values of tensors are undefined, and no object of the state has been replaced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.checkpoint.formats.checkpoint_source import open_together
from penstock.checkpoint.formats.objects import load_object
from penstock.checkpoint.loading.execute import Means, Moved, move, recheck
from penstock.checkpoint.loading.heartbeat import side_by_side
from penstock.checkpoint.loading.placement import Target, wait_for_devices
from penstock.checkpoint.loading.reader import ReadBuffers, ReadSettings
from penstock.checkpoint.loading.requests import Selection, as_lines, located, select, wishes_of
from penstock.checkpoint.loading.transport import GlooLines
from penstock.checkpoint.plan.load_plan import LoadOptions, NobodyCanRead, rank_load_plan, share_loading
from penstock.checkpoint.state.leaves import loading_into
from penstock.checkpoint.state.regions import item_bytes_of
from penstock.checkpoint.state.tensors import destinations
from penstock.cluster.comm import run_on_all_ranks
from penstock.errors import ObjectNotFound
from penstock.progress import Silent
from penstock.storage.capabilities import prefer_direct_access

if TYPE_CHECKING:
    from penstock.checkpoint.commit.catalog import CheckpointRef
    from penstock.checkpoint.engine import LoadChoice, State
    from penstock.checkpoint.formats.checkpoint_source import Opened
    from penstock.checkpoint.loading.heartbeat import Stopping
    from penstock.checkpoint.loading.requests import ByteItemIndex, Unpacking, Wishes
    from penstock.checkpoint.plan.load_plan import LoadPlan
    from penstock.checkpoint.state.process_group import Members
    from penstock.checkpoint.state.regions import Bools, Boxes, Contents
    from penstock.checkpoint.state.tensors import Holding
    from penstock.progress import Progress
    from penstock.storage import Storage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What came of a load on this rank."""

    loaded: tuple[str, ...]
    left: tuple[str, ...]
    """Parts of the state that stayed as they were: not chosen, or missing where that was allowed."""
    unused: tuple[str, ...]
    """What the checkpoint holds and this rank did not ask for."""
    read_bytes: int
    """From storage, on this rank."""
    received_bytes: int
    """From other ranks."""
    num_summed: int
    """Items whose checksum this rank has verified."""
    plan_s: float
    move_s: float


class Loader:
    """Loads states; its warm buffers last from load to load. One load at a time."""

    def __init__(self, settings: ReadSettings | None = None, options: LoadOptions | None = None) -> None:
        self._buffers = ReadBuffers(settings or ReadSettings())
        self._options = options or LoadOptions()

    def load(
        self,
        state: State,
        stored: CheckpointRef,
        members: Members,
        choice: LoadChoice,
        progress: Progress | None = None,
    ) -> LoadReport:
        """Fill `state` from a committed checkpoint. Collective."""
        opened = open_together(stored.storage, stored.committed.folder, stored.uri, members.comm)
        return self.load_opened(state, opened, members, choice, progress, readable=stored.readable)

    def load_opened(
        self,
        state: State,
        opened: Opened,
        members: Members,
        choice: LoadChoice,
        progress: Progress | None = None,
        *,
        readable: Sequence[str] | None = None,
    ) -> LoadReport:
        """Fill `state` from a checkpoint that all ranks have opened. Collective.

        `readable` names the files that this rank can open, where not every rank can open all; on all ranks or
        on none.
        """
        load = _Load(opened, members, choice, self._buffers, self._options)
        with loading_into(state) as inner:
            return load.run(inner, progress or Silent(), readable)

    def close(self) -> None:
        """Let go of the buffers. Safe twice."""
        self._buffers = ReadBuffers(self._buffers.settings)


class _Load:
    """One load on one rank."""

    def __init__(
        self, opened: Opened, members: Members, choice: LoadChoice, buffers: ReadBuffers, options: LoadOptions
    ) -> None:
        self._opened = opened
        self._members = members
        self._comm = members.comm
        self._choice = choice
        self._buffers = buffers
        self._options = options
        self._storage: Storage = prefer_direct_access(opened.storage)

    def run(self, state: State, progress: Progress, readable: Sequence[str] | None) -> LoadReport:
        began_s = time.perf_counter()
        contents = located(self._opened, self._comm)
        self._opened = replace(self._opened, contents=contents)
        lines = as_lines(contents)
        holding, selection, wishes = run_on_all_ranks(
            self._comm,
            lambda: self._wish(state, contents, lines),
            awaiting="all ranks to match their state with the checkpoint",
        )
        plan = self._plan(contents, lines, wishes, readable)
        planned_s = time.perf_counter()
        targets = [_target(holding, wishes, lines, row) for row in range(len(wishes.names))]
        targets += item_targets(wishes, lines)
        wait_for_devices(targets)
        moved = side_by_side(
            self._comm,
            lambda stopping: self._move(plan, lines, (wishes.boxes, targets), progress, stopping),
            awaiting="all ranks to load their parts",
        )
        values = run_on_all_ranks(
            self._comm,
            lambda: unpack(self._opened, lines, wishes, targets, trust=self._choice.trust),
            awaiting="all ranks to unpack what they have loaded",
        )
        for leaf in holding.leaves:
            if leaf.name in values:
                leaf.put(values[leaf.name])
        return _report(selection, moved, planned_s - began_s, time.perf_counter() - planned_s)

    def _wish(
        self, state: State, contents: Contents, lines: ByteItemIndex
    ) -> tuple[Holding, Selection, Wishes]:
        holding = destinations(state)
        names = [leaf.name for leaf in holding.leaves]
        stored = [facts.name for facts in contents.tensors] + [each.name for each in contents.objects]
        selection = select(names, dict.fromkeys(stored), self._choice, rank=self._comm.rank)
        wishes = wishes_of(
            holding,
            selection,
            contents,
            lines,
            converts=self._choice.convert_dtypes,
            where=self._opened.uri,
        )
        return holding, selection, wishes

    def _plan(
        self, contents: Contents, lines: ByteItemIndex, wishes: Wishes, readable: Sequence[str] | None
    ) -> LoadPlan:
        wanted = self._comm.gather(wishes.boxes, awaiting="what all ranks want of the checkpoint")
        item_bytes = item_bytes_of(lines.tensors)
        able = None if readable is None else self._gather_readable(contents, readable)
        try:
            shared = share_loading(lines.stored, item_bytes, wanted, self._options, readable=able)
        except NobodyCanRead as error:
            raise ObjectNotFound(
                f"None of the {self._comm.size} ranks can open {contents.files[error.file]}",
                uri=self._opened.uri,
                fix="Bring the file back to one of their nodes, or load another step.",
            ) from error
        return rank_load_plan(shared, item_bytes, self._comm.rank, self._options)

    def _gather_readable(self, contents: Contents, readable: Sequence[str]) -> Bools:
        own = set(readable)
        mine = np.array([name in own for name in contents.files], dtype=np.bool_)
        return np.stack(self._comm.gather(mine, awaiting="which files each rank can open"))

    def _move(
        self,
        plan: LoadPlan,
        lines: ByteItemIndex,
        into: tuple[Boxes, Sequence[Target]],
        progress: Progress,
        stopping: Stopping,
    ) -> Moved:
        (wanted, targets), means = into, self._means(progress)
        moved = move(plan, lines, targets, means, stopping)
        num_rechecked = recheck(plan, lines, wanted, targets, means)
        return replace(moved, num_summed=moved.num_summed + num_rechecked)

    def _means(self, progress: Progress) -> Means:
        return Means(
            opened=self._opened,
            storage=self._storage,
            carrier=None if self._members.group is None else GlooLines(self._members.group),
            buffers=self._buffers,
            progress=progress,
            timeout_s=self._comm.timeout_s,
        )


def _target(holding: Holding, wishes: Wishes, lines: ByteItemIndex, row: int) -> Target:
    name, place = wishes.names[row]
    piece = holding.pieces[name][place]
    return Target(piece.offsets, piece.memory, lines.tensors[int(wishes.boxes.tensor[row])])


def item_targets(wishes: Wishes, lines: ByteItemIndex) -> list[Target]:
    """Fresh memory for the whole items that are wanted, behind the targets of the pieces."""
    facts = [lines.tensors[number] for number in wishes.items]
    return [Target((0,), torch.empty(each.shape, dtype=torch.uint8), each) for each in facts]


def unpack(
    opened: Opened, lines: ByteItemIndex, wishes: Wishes, targets: Sequence[Target], *, trust: bool
) -> dict[str, Any]:
    """Put parts of packed items into their tensors; the objects, by leaf name, for whoever sets them."""
    content = item_contents(wishes, targets)
    for each in wishes.unpacking:
        row = int(lines.packed_rows[each.row])
        elements = opened.tensor_bytes(row, content[lines.first_packed + each.row])
        _put_part(each, elements, opened.contents, row, targets[each.want])
    values = {}
    for name, number in wishes.objects.items():
        stored = opened.contents.objects[number]
        if opened.archive is not None:
            values[name] = opened.value(stored, trust=trust)
            continue
        values[name] = load_object(
            content[lines.first_object + number],
            stored.name,
            descriptors=opened.descriptors(stored),
            trust=trust,
            where=f"{opened.uri}, {stored.name}",
        )
    return values


def item_contents(wishes: Wishes, targets: Sequence[Target]) -> dict[int, memoryview]:
    """The whole items that have come, by their tensor numbers in `ByteItemIndex`."""
    return {
        number: memoryview(targets[len(wishes.names) + place].memory.numpy().data)
        for place, number in enumerate(wishes.items)
    }


def _put_part(
    unpacking: Unpacking, elements: memoryview, contents: Contents, row: int, target: Target
) -> None:
    """Cut one box out of the elements of a stored one."""
    facts = target.facts
    offsets, sizes = unpacking.boxes.box(unpacking.part, len(facts.shape))
    corner, extents = contents.stored.boxes.box(row, len(facts.shape))
    words = np.dtype("c16") if facts.item_bytes == 16 else np.dtype(f"u{facts.item_bytes}")
    whole = np.frombuffer(bytes(elements), dtype=words).reshape(extents)
    inside = tuple(
        slice(begin - own, begin - own + extent)
        for begin, own, extent in zip(offsets, corner, sizes, strict=True)
    )
    target.fill(offsets, sizes, whole[inside])


def _report(selection: Selection, moved: Moved, plan_s: float, move_s: float) -> LoadReport:
    report = LoadReport(
        loaded=tuple(selection.stored_names),
        left=selection.left,
        unused=selection.unused,
        read_bytes=moved.read_bytes,
        received_bytes=moved.received_bytes,
        num_summed=moved.num_summed,
        plan_s=plan_s,
        move_s=move_s,
    )
    logger.info("Loaded %d leaves: %s", len(report.loaded), report)
    return report
