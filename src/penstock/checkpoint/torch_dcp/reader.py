"""Storage reader for torch's `dcp.load`: the engine's plan, threads and exchange behind torch's interface.

`Reader` works with any planner. Invariant: no code of a checkpoint runs without `trust`, and bytes that
several ranks want are read from storage by one of them.
"""

from __future__ import annotations

import io
import os
import pickle
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from penstock.checkpoint.api import DEFAULT_TIMEOUT_S
from penstock.checkpoint.formats.checkpoint_source import Opened, open_checkpoint
from penstock.checkpoint.formats.dcp_metadata import DcpMetadata, metadata_bytes
from penstock.checkpoint.loading.execute import Means, move, recheck
from penstock.checkpoint.loading.heartbeat import side_by_side
from penstock.checkpoint.loading.loader import item_contents, item_targets, unpack
from penstock.checkpoint.loading.placement import Target, wait_for_devices
from penstock.checkpoint.loading.reader import ReadBuffers, ReadSettings
from penstock.checkpoint.loading.requests import (
    as_lines,
    check_whole,
    located,
    unlocated_rows,
    wishes_for,
    with_payloads,
)
from penstock.checkpoint.loading.transport import GlooLines
from penstock.checkpoint.plan.load_plan import LoadOptions, rank_load_plan, share_loading
from penstock.checkpoint.plan.load_plan import LoadPlan as SharedPlan
from penstock.checkpoint.state.process_group import members_of_ranks
from penstock.checkpoint.state.regions import Boxes, Ints, item_bytes_of
from penstock.cluster.comm import SoloComm
from penstock.errors import UsageError
from penstock.progress import Silent
from penstock.storage.capabilities import prefer_direct_access

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from penstock.checkpoint.commit.catalog import AnyPath
    from penstock.checkpoint.loading.heartbeat import Stopping
    from penstock.checkpoint.loading.requests import ByteItemIndex, Wishes
    from penstock.checkpoint.state.regions import Contents


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """What a rank tells the coordinator beside torch's plan: who it is and what it wants, in our columns."""

    rank: int
    boxes: Boxes
    objects: dict[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class _Assigned:
    """What the coordinator tells each rank: its part, who else takes part, and where payloads begin."""

    plan: SharedPlan
    ranks: list[int]
    positions: Ints


class Reader(StorageReader):
    """A drop-in for torch's `FileSystemReader`: `dcp.load(state, storage_reader=pc.Reader("/pfs/step-1"))`.

    Reads torch's distributed checkpoints, archives of torch.save and safetensors. Checksums are verified
    where there are any. `trust` allows objects whose unpickling may run code; `convert_dtypes` allows tensors
    of another dtype than the checkpoint's.
    """

    def __init__(self, path: AnyPath, *, trust: bool = False, convert_dtypes: bool = False) -> None:
        self.checkpoint_id: AnyPath = path
        self._trust = trust
        self._converts = convert_dtypes
        self._buffers = ReadBuffers(ReadSettings())
        self._options = LoadOptions()
        self._opened: Opened | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, perhaps of another checkpoint."""
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self._opened = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - torch's signature
        """All ranks, first: what the checkpoint holds, whatever format it has."""
        opened = self._opened = open_checkpoint(self.checkpoint_id)
        told = opened.metadata or DcpMetadata(contents=opened.contents, paths=opened.paths)
        # These are our own bytes, made of columns that were checked: no pickle of the checkpoint is loaded.
        metadata: Metadata = pickle.loads(metadata_bytes(told))  # noqa: S301
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001 - torch's signature
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """All ranks: nothing to add."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """All ranks: say what this one wants in columns."""
        contents = self._found().contents
        numbers = {facts.name: number for number, facts in enumerate(contents.tensors)}
        objects = {each.name: number for number, each in enumerate(contents.objects)}
        rows, wanted = [], {}
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                wanted[item.storage_index.fqn] = objects[item.storage_index.fqn]
                continue
            corner = item.storage_index.offset or (0,) * len(item.lengths)
            begin = tuple(at + inside for at, inside in zip(corner, item.storage_offsets, strict=True))
            rows.append((numbers[item.storage_index.fqn], begin, tuple(item.lengths)))
        boxes = Boxes.from_rows(rows)
        check_whole(contents, boxes, self._found().uri)
        rank = dist.get_rank() if dist.is_initialized() else 0
        return replace(plan, storage_data=_Asked(rank, boxes, wanted))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Coordinator: decide who reads what."""
        opened = self._found()
        contents = located(opened, SoloComm())
        lines = as_lines(contents)
        asked: list[_Asked] = [plan.storage_data for plan in plans]
        wanted = [wishes_for(each.boxes, (), each.objects, contents, lines).boxes for each in asked]
        item_bytes = item_bytes_of(lines.tensors)
        shared = share_loading(lines.stored, item_bytes, wanted, self._options)
        rows = unlocated_rows(opened.contents)
        positions = contents.stored.payload_offset[rows]
        ranks = [each.rank for each in asked]
        return [
            replace(
                plan,
                storage_data=_Assigned(
                    rank_load_plan(shared, item_bytes, rank, self._options), ranks, positions
                ),
            )
            for rank, plan in enumerate(plans)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """All ranks: read, exchange, and fill what the planner resolves."""
        assigned: _Assigned = plan.storage_data
        opened = self._found()
        rows = unlocated_rows(opened.contents)
        if len(rows):
            opened = replace(opened, contents=with_payloads(opened.contents, assigned.positions, rows))
        lines = as_lines(opened.contents)
        tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        objects = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        wishes = _wishes_again(self.prepare_local_plan(plan).storage_data, opened.contents, lines)
        resolved = [planner.resolve_tensor(item) for item in tensors]
        targets = [
            self._target(memory, wishes.boxes, row, lines) for row, memory in enumerate(resolved)
        ] + item_targets(wishes, lines)
        wait_for_devices(targets)
        with ExitStack() as meeting:
            members = members_of_ranks(assigned.ranks)
            meeting.callback(members.close)
            means = Means(
                opened=opened,
                storage=prefer_direct_access(opened.storage),
                carrier=None if members.group is None else GlooLines(members.group),
                buffers=self._buffers,
                progress=Silent(),
                timeout_s=DEFAULT_TIMEOUT_S,
            )
            side_by_side(
                members.comm,
                lambda stopping: _moved(assigned.plan, lines, (wishes.boxes, targets), means, stopping),
                awaiting="all ranks to load their parts",
            )
        # Objects are read here as well, so that one that would run code is refused before the planner does.
        values = unpack(opened, lines, wishes, targets, trust=self._trust)
        self._hand_objects(opened, planner, objects, (lines, wishes, targets), values)
        for item, memory in zip(tensors, resolved, strict=True):
            planner.commit_tensor(item, memory)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether torch may choose this reader for a path; it asks none but its own."""
        return bool(os.fspath(checkpoint_id))

    def _found(self) -> Opened:
        assert self._opened is not None, "torch calls read_metadata first"
        return self._opened

    def _target(self, memory: torch.Tensor, boxes: Boxes, row: int, lines: ByteItemIndex) -> Target:
        facts = lines.tensors[int(boxes.tensor[row])]
        if str(memory.dtype) != f"torch.{facts.dtype}" and not self._converts:
            raise UsageError(
                f"{facts.name!r} is {memory.dtype} in the state and torch.{facts.dtype} in the checkpoint",
                fix="Give the state the checkpoint's dtype, or ask for it: Reader(..., convert_dtypes=True).",
            )
        return Target(boxes.box(row, len(facts.shape))[0], memory.detach(), facts)

    def _hand_objects(
        self,
        opened: Opened,
        planner: LoadPlanner,
        items: list[ReadItem],
        come: tuple[ByteItemIndex, Wishes, list[Target]],
        values: dict[str, Any],
    ) -> None:
        lines, wishes, targets = come
        contents = item_contents(wishes, targets)
        for item in items:
            name = item.storage_index.fqn
            number = wishes.objects[name]
            is_plain_item = opened.archive is None and not opened.descriptors(opened.contents.objects[number])
            if is_plain_item:
                planner.load_bytes(item, io.BytesIO(contents[lines.first_object + number]))
                continue
            packed = io.BytesIO()
            torch.save(values[name], packed)
            packed.seek(0)
            planner.load_bytes(item, packed)


def _moved(
    plan: SharedPlan, lines: ByteItemIndex, into: tuple[Boxes, list[Target]], means: Means, stopping: Stopping
) -> None:
    wanted, targets = into
    move(plan, lines, targets, means, stopping)
    recheck(plan, lines, wanted, targets, means)


def _wishes_again(asked: _Asked, contents: Contents, lines: ByteItemIndex) -> Wishes:
    """The wishes of a rank as the coordinator saw them; the names only count the pieces."""
    names = tuple(("", row) for row in range(len(asked.boxes)))
    return wishes_for(asked.boxes, names, asked.objects, contents, lines)
