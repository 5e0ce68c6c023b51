"""Storage reader for torch's `dcp.load`: the engine's plan, threads and exchange behind torch's interface.

`Reader` works with any planner. Invariant: no code of a checkpoint runs without `trust`, and bytes that
several ranks want are read from storage by one of them.
"""

from __future__ import annotations

import io
import os
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from penstock.checkpoint.api import DEFAULT_TIMEOUT_S
from penstock.checkpoint.commit.catalog import AnyPath, can_be_named
from penstock.checkpoint.engine import make_group_of
from penstock.checkpoint.formats.checkpoint_source import CheckpointSource, open_checkpoint
from penstock.checkpoint.formats.dcp_item import object_bytes
from penstock.checkpoint.formats.dcp_metadata import torch_metadata
from penstock.checkpoint.loader import LoadContext, execute_plan
from penstock.checkpoint.match import (
    ByteItemIndex,
    LoadRequests,
    build_matched_requests,
    check_covered,
    index_byte_items,
    locate_payloads,
    require_lengths,
    unlocated_rows,
    with_payloads,
)
from penstock.checkpoint.place import Target, item_contents, item_targets, unpack
from penstock.checkpoint.plan.load_plan import LoadOptions, plan_load, plan_rank_load
from penstock.checkpoint.plan.load_plan import LoadPlan as SharedPlan
from penstock.checkpoint.state.regions import CheckpointIndex, Ints, Regions, element_sizes
from penstock.cluster.comm import SoloComm
from penstock.errors import UsageError
from penstock.progress import Progress
from penstock.transfer.reader import ReadBuffers, ReadSettings

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


@dataclass(frozen=True, slots=True, eq=False)
class _RankRequest:
    """A rank's message to the coordinator with torch's plan: its number, and the regions it wants."""

    rank: int
    regions: Regions
    objects: dict[str, int]

    def build(self, index: CheckpointIndex, item_index: ByteItemIndex) -> LoadRequests:
        """The requests; names only number the regions, as torch's planner knows where they go."""
        names = tuple(("", row) for row in range(len(self.regions)))
        return build_matched_requests(self.regions, names, self.objects, index, item_index)


@dataclass(frozen=True, slots=True, eq=False)
class _RankAssignment:
    """The coordinator's message to each rank: its plan, the ranks that take part, and payload positions."""

    plan: SharedPlan
    ranks: list[int]
    positions: Ints


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Reader(StorageReader):
    """A drop-in for torch's `FileSystemReader`: `dcp.load(state, storage_reader=pc.Reader("/pfs/step-1"))`.

    At `path`, it reads torch's distributed checkpoints, archives of torch.save and safetensors. Checksums are
    verified if the checkpoint has any. `trust` allows objects whose unpickling may run code; `convert_dtypes`
    allows tensors of another dtype than the checkpoint's.
    """

    def __init__(self, path: AnyPath, *, trust: bool = False, convert_dtypes: bool = False) -> None:
        self.checkpoint_id: AnyPath = path
        self.load_id = str(uuid4())
        self._trust = trust
        self._converts = convert_dtypes
        self._buffers = ReadBuffers(ReadSettings())
        self._options = LoadOptions()
        self._opened: CheckpointSource | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For other processes: everything but memory, and a checkpoint that this process has opened."""
        return {**self.__dict__, "_buffers": self._buffers.settings, "_opened": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _buffers=ReadBuffers(state["_buffers"]))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, perhaps of another checkpoint."""
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self.load_id = str(uuid4())
        self._opened = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - torch's signature
        """All ranks, first: describe the checkpoint, whatever its format."""
        checkpoint = self._opened = open_checkpoint(self.checkpoint_id)
        if _own_rank() == 0:
            checkpoint.tell_if_unchecked()
        # torch's records are made of columns that were checked: no pickle of the checkpoint is loaded.
        metadata = torch_metadata(checkpoint.index)
        save_id = checkpoint.manifest.save_id if checkpoint.manifest else None
        metadata.storage_meta = StorageMeta(save_id=save_id, load_id=self.load_id)
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001 - torch's signature
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """All ranks: nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """All ranks: describe what this rank wants as columns."""
        return replace(plan, storage_data=self._request(plan, _own_rank()))

    def _request(self, plan: LoadPlan, rank: int) -> _RankRequest:
        index = self._checkpoint.index
        numbers = {facts.name: number for number, facts in enumerate(index.tensors)}
        objects = {stored.name: number for number, stored in enumerate(index.objects)}
        rows, wanted = [], {}
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                wanted[name] = objects[name]
                continue
            corner = item.storage_index.offset or (0,) * len(item.lengths)
            begin = tuple(at + inside for at, inside in zip(corner, item.storage_offsets, strict=True))
            rows.append((numbers[name], begin, tuple(item.lengths)))
        regions = Regions.from_rows(rows)
        check_covered(index, regions, self._checkpoint.uri)
        return _RankRequest(rank, regions, wanted)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Coordinator: decide which rank reads what.

        A planner may have put data of its own in the place of this reader's. It finds that when it finishes
        its plan, and each rank reads alone all that it wants, as with torch's readers.
        """
        if not all(isinstance(plan.storage_data, _RankRequest) for plan in plans):
            return plans
        index = locate_payloads(self._checkpoint, SoloComm())
        item_index = index_byte_items(index)
        requests: list[_RankRequest] = [plan.storage_data for plan in plans]
        built = [request.build(index, item_index) for request in requests]
        for request in built:
            require_lengths(self._checkpoint, item_index, request.items)
        wanted = [request.regions for request in built]
        element_bytes = element_sizes(item_index.tensors)
        shared = plan_load(item_index.stored, element_bytes, wanted, self._options)
        positions = index.stored.payload_offset[unlocated_rows(self._checkpoint.index)]
        ranks = [request.rank for request in requests]
        return [
            replace(
                plan,
                storage_data=_RankAssignment(
                    plan_rank_load(shared, element_bytes, rank, self._options), ranks, positions
                ),
            )
            for rank, plan in enumerate(plans)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """All ranks: read, exchange, and fill what the planner resolves."""
        assigned = plan.storage_data
        if not isinstance(assigned, _RankAssignment):
            # Replaced by the planner, when all plans were made or when this one was finished.
            assigned = self.prepare_global_plan([self.prepare_local_plan(plan)])[0].storage_data
        checkpoint = self._checkpoint
        rows = unlocated_rows(checkpoint.index)
        if len(rows):
            checkpoint = replace(checkpoint, index=with_payloads(checkpoint.index, assigned.positions, rows))
        item_index = index_byte_items(checkpoint.index)
        tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        request = self._request(plan, _own_rank())
        requests = request.build(checkpoint.index, item_index)
        resolved = [planner.resolve_tensor(item) for item in tensors]
        targets = [
            self._target(memory, requests.regions, row, item_index) for row, memory in enumerate(resolved)
        ] + item_targets(requests, item_index)
        with closing(make_group_of(assigned.ranks)) as group:
            group.comm.timeout_s = DEFAULT_TIMEOUT_S
            context = LoadContext(
                checkpoint=checkpoint,
                items=item_index,
                group=group,
                buffers=self._buffers,
                progress=Progress(),
                storage=checkpoint.storage_of_files(),
            )
            execute_plan(assigned.plan, requests.regions, targets, context)
        # Objects are read here as well, so that one that would run code is refused before the planner does.
        values = unpack(checkpoint, item_index, requests, targets, trust=self._trust)
        contents = item_contents(requests, targets)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                name = item.storage_index.fqn
                number = requests.objects[name]
                if checkpoint.archive is None and not checkpoint.index.objects[number].transforms:
                    packed = io.BytesIO(contents[item_index.first_object + number])
                else:
                    packed = io.BytesIO(object_bytes(values[name]))
                planner.load_bytes(item, packed)
        for item, memory in zip(tensors, resolved, strict=True):
            planner.commit_tensor(item, memory)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether torch may choose this reader for a path; it only asks its own readers."""
        return can_be_named(checkpoint_id)

    @property
    def _checkpoint(self) -> CheckpointSource:
        assert self._opened is not None, "torch calls read_metadata first"
        return self._opened

    def _target(self, memory: torch.Tensor, regions: Regions, row: int, item_index: ByteItemIndex) -> Target:
        facts = item_index.tensors[int(regions.tensor[row])]
        if str(memory.dtype) != f"torch.{facts.dtype}" and not self._converts:
            raise UsageError(
                f"{facts.name!r} is {memory.dtype} in the state and torch.{facts.dtype} in the checkpoint",
                fix="Give the state the checkpoint's dtype, or convert it: Reader(..., convert_dtypes=True).",
            )
        return Target(regions.region(row, len(facts.shape))[0], memory.detach(), facts)
