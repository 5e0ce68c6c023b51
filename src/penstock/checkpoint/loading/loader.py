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

from penstock.checkpoint.commit.catalog import CheckpointRef
from penstock.checkpoint.formats.checkpoint_source import CheckpointSource, open_together
from penstock.checkpoint.formats.dcp_item import load_object
from penstock.checkpoint.loading.execute import (
    CancelToken,
    LoadContext,
    LoadTotals,
    execute_plan,
    run_with_heartbeat,
    verify_cut_items,
)
from penstock.checkpoint.loading.placement import Target, wait_for_devices
from penstock.checkpoint.loading.reader import ReadBuffers, ReadSettings
from penstock.checkpoint.loading.requests import (
    ByteItemIndex,
    LeafSelection,
    LoadRequests,
    Unpacking,
    build_requests,
    index_byte_items,
    locate_payloads,
    select_leaves,
)
from penstock.checkpoint.loading.transport import GlooTransport
from penstock.checkpoint.plan.load_plan import (
    LoadOptions,
    LoadPlan,
    UnreadableFile,
    plan_load,
    plan_rank_load,
)
from penstock.checkpoint.state.leaves import loading_into
from penstock.checkpoint.state.regions import Bools, CheckpointIndex, Regions, element_sizes
from penstock.checkpoint.state.tensors import LocalState, collect_for_load
from penstock.cluster.comm import run_on_all_ranks
from penstock.errors import ObjectNotFound
from penstock.progress import Progress, Silent
from penstock.storage import Storage
from penstock.storage.capabilities import prefer_direct_access

if TYPE_CHECKING:
    from penstock.checkpoint.engine import LoadChoice, State
    from penstock.checkpoint.state.process_group import RankGroup

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


class CheckpointLoader:
    """Loads states; its warm buffers last from load to load. One load at a time."""

    def __init__(self, settings: ReadSettings | None = None, options: LoadOptions | None = None) -> None:
        self._buffers = ReadBuffers(settings or ReadSettings())
        self._options = options or LoadOptions()

    def load(
        self,
        state: State,
        stored: CheckpointRef,
        group: RankGroup,
        choice: LoadChoice,
        progress: Progress | None = None,
    ) -> LoadReport:
        """Fill `state` from a committed checkpoint. Collective."""
        checkpoint = open_together(stored.storage, stored.committed.folder, stored.uri, group.comm)
        return self.load_from(state, checkpoint, group, choice, progress, readable=stored.readable)

    def load_from(
        self,
        state: State,
        checkpoint: CheckpointSource,
        group: RankGroup,
        choice: LoadChoice,
        progress: Progress | None = None,
        *,
        readable: Sequence[str] | None = None,
    ) -> LoadReport:
        """Fill `state` from a checkpoint that all ranks have opened. Collective.

        `readable` names the files that this rank can open, where not every rank can open all; on all ranks or
        on none.
        """
        load = _Load(checkpoint, group, choice, self._buffers, self._options)
        with loading_into(state) as inner:
            return load.run(inner, progress or Silent(), readable)

    def close(self) -> None:
        """Let go of the buffers. Safe twice."""
        self._buffers = ReadBuffers(self._buffers.settings)


class _Load:
    """One load on one rank."""

    def __init__(
        self,
        checkpoint: CheckpointSource,
        group: RankGroup,
        choice: LoadChoice,
        buffers: ReadBuffers,
        options: LoadOptions,
    ) -> None:
        self._checkpoint = checkpoint
        self._members = group
        self._comm = group.comm
        self._choice = choice
        self._buffers = buffers
        self._options = options
        self._storage: Storage = prefer_direct_access(checkpoint.storage)

    def run(self, state: State, progress: Progress, readable: Sequence[str] | None) -> LoadReport:
        began_s = time.perf_counter()
        index = locate_payloads(self._checkpoint, self._comm)
        self._checkpoint = replace(self._checkpoint, index=index)
        item_index = index_byte_items(index)
        local_state, selection, requests = run_on_all_ranks(
            self._comm,
            lambda: self._match_state(state, index, item_index),
            awaiting="all ranks to match their state with the checkpoint",
        )
        plan = self._plan(index, item_index, requests, readable)
        planned_s = time.perf_counter()
        targets = [_target(local_state, requests, item_index, row) for row in range(len(requests.names))]
        targets += item_targets(requests, item_index)
        wait_for_devices(targets)
        totals = run_with_heartbeat(
            self._comm,
            lambda cancel_token: self._move(
                plan, item_index, (requests.regions, targets), progress, cancel_token
            ),
            awaiting="all ranks to load their parts",
        )
        values = run_on_all_ranks(
            self._comm,
            lambda: unpack(self._checkpoint, item_index, requests, targets, trust=self._choice.trust),
            awaiting="all ranks to unpack what they have loaded",
        )
        for leaf in local_state.leaves:
            if leaf.name in values:
                leaf.put(values[leaf.name])
        return _report(selection, totals, planned_s - began_s, time.perf_counter() - planned_s)

    def _match_state(
        self, state: State, index: CheckpointIndex, item_index: ByteItemIndex
    ) -> tuple[LocalState, LeafSelection, LoadRequests]:
        local_state = collect_for_load(state)
        names = [leaf.name for leaf in local_state.leaves]
        stored = [facts.name for facts in index.tensors] + [each.name for each in index.objects]
        selection = select_leaves(names, dict.fromkeys(stored), self._choice, rank=self._comm.rank)
        requests = build_requests(
            local_state,
            selection,
            index,
            item_index,
            converts=self._choice.convert_dtypes,
            where=self._checkpoint.uri,
        )
        return local_state, selection, requests

    def _plan(
        self,
        index: CheckpointIndex,
        item_index: ByteItemIndex,
        requests: LoadRequests,
        readable: Sequence[str] | None,
    ) -> LoadPlan:
        wanted = self._comm.gather(requests.regions, awaiting="what all ranks want of the checkpoint")
        item_bytes = element_sizes(item_index.tensors)
        able = None if readable is None else self._gather_readable(index, readable)
        try:
            shared = plan_load(item_index.stored, item_bytes, wanted, self._options, readable=able)
        except UnreadableFile as error:
            raise ObjectNotFound(
                f"None of the {self._comm.size} ranks can open {index.files[error.file]}",
                uri=self._checkpoint.uri,
                fix="Bring the file back to one of their nodes, or load another step.",
            ) from error
        return plan_rank_load(shared, item_bytes, self._comm.rank, self._options)

    def _gather_readable(self, index: CheckpointIndex, readable: Sequence[str]) -> Bools:
        own = set(readable)
        mine = np.array([name in own for name in index.files], dtype=np.bool_)
        return np.stack(self._comm.gather(mine, awaiting="which files each rank can open"))

    def _move(
        self,
        plan: LoadPlan,
        item_index: ByteItemIndex,
        into: tuple[Regions, Sequence[Target]],
        progress: Progress,
        cancel_token: CancelToken,
    ) -> LoadTotals:
        (wanted, targets), context = into, self._make_context(progress)
        totals = execute_plan(plan, item_index, targets, context, cancel_token)
        num_rechecked = verify_cut_items(plan, item_index, wanted, targets, context)
        return replace(totals, num_summed=totals.num_summed + num_rechecked)

    def _make_context(self, progress: Progress) -> LoadContext:
        return LoadContext(
            checkpoint=self._checkpoint,
            storage=self._storage,
            transport=None if self._members.group is None else GlooTransport(self._members.group),
            buffers=self._buffers,
            progress=progress,
            timeout_s=self._comm.timeout_s,
        )


def _target(local_state: LocalState, requests: LoadRequests, item_index: ByteItemIndex, row: int) -> Target:
    name, place = requests.names[row]
    piece = local_state.shards[name][place]
    return Target(piece.offsets, piece.memory, item_index.tensors[int(requests.regions.tensor[row])])


def item_targets(requests: LoadRequests, item_index: ByteItemIndex) -> list[Target]:
    """Fresh memory for the whole items that are wanted, behind the targets of the pieces."""
    facts = [item_index.tensors[number] for number in requests.items]
    return [Target((0,), torch.empty(each.shape, dtype=torch.uint8), each) for each in facts]


def unpack(
    checkpoint: CheckpointSource,
    item_index: ByteItemIndex,
    requests: LoadRequests,
    targets: Sequence[Target],
    *,
    trust: bool,
) -> dict[str, Any]:
    """Put parts of packed items into their tensors; the objects, by leaf name, for whoever sets them."""
    content = item_contents(requests, targets)
    for each in requests.unpacking:
        row = int(item_index.packed_rows[each.row])
        elements = checkpoint.tensor_bytes(row, content[item_index.first_packed + each.row])
        _put_part(each, elements, checkpoint.index, row, targets[each.want])
    values = {}
    for name, number in requests.objects.items():
        stored = checkpoint.index.objects[number]
        if checkpoint.archive is not None:
            values[name] = checkpoint.value(stored, trust=trust)
            continue
        values[name] = load_object(
            content[item_index.first_object + number],
            stored.name,
            descriptors=checkpoint.descriptors(stored),
            trust=trust,
            where=f"{checkpoint.uri}, {stored.name}",
        )
    return values


def item_contents(requests: LoadRequests, targets: Sequence[Target]) -> dict[int, memoryview]:
    """The whole items that have come, by their tensor numbers in `ByteItemIndex`."""
    return {
        number: memoryview(targets[len(requests.names) + place].memory.numpy().data)
        for place, number in enumerate(requests.items)
    }


def _put_part(
    unpacking: Unpacking, elements: memoryview, index: CheckpointIndex, row: int, target: Target
) -> None:
    """Cut one box out of the elements of a stored one."""
    facts = target.facts
    offsets, sizes = unpacking.regions.region(unpacking.part, len(facts.shape))
    corner, extents = index.stored.regions.region(row, len(facts.shape))
    words = np.dtype("c16") if facts.item_bytes == 16 else np.dtype(f"u{facts.item_bytes}")
    whole = np.frombuffer(bytes(elements), dtype=words).reshape(extents)
    inside = tuple(
        slice(begin - own, begin - own + extent)
        for begin, own, extent in zip(offsets, corner, sizes, strict=True)
    )
    target.fill(offsets, sizes, whole[inside])


def _report(selection: LeafSelection, totals: LoadTotals, plan_s: float, move_s: float) -> LoadReport:
    report = LoadReport(
        loaded=tuple(selection.stored_names),
        left=selection.left,
        unused=selection.unused,
        read_bytes=totals.read_bytes,
        received_bytes=totals.received_bytes,
        num_summed=totals.num_summed,
        plan_s=plan_s,
        move_s=move_s,
    )
    logger.info("Loaded %d leaves: %s", len(report.loaded), report)
    return report
