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
from penstock.checkpoint.commit.catalog import AnyPath
from penstock.checkpoint.formats.checkpoint_source import CheckpointSource, open_checkpoint
from penstock.checkpoint.formats.dcp_metadata import DcpMetadata, metadata_bytes
from penstock.checkpoint.loading.execute import (
    CancelToken,
    LoadContext,
    execute_plan,
    run_with_heartbeat,
    verify_cut_items,
)
from penstock.checkpoint.loading.loader import item_contents, item_targets, unpack
from penstock.checkpoint.loading.placement import Target, wait_for_devices
from penstock.checkpoint.loading.reader import ReadBuffers, ReadSettings
from penstock.checkpoint.loading.requests import (
    ByteItemIndex,
    LoadRequests,
    build_matched_requests,
    check_covered,
    index_byte_items,
    locate_payloads,
    unlocated_rows,
    with_payloads,
)
from penstock.checkpoint.loading.transport import GlooTransport
from penstock.checkpoint.plan.load_plan import LoadOptions, plan_load, plan_rank_load
from penstock.checkpoint.plan.load_plan import LoadPlan as SharedPlan
from penstock.checkpoint.state.process_group import make_group_of
from penstock.checkpoint.state.regions import CheckpointIndex, Ints, Regions, element_sizes
from penstock.cluster.comm import SoloComm
from penstock.errors import UsageError
from penstock.progress import Silent
from penstock.storage.capabilities import prefer_direct_access

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


@dataclass(frozen=True, slots=True, eq=False)
class _RankRequest:
    """What a rank tells the coordinator beside torch's plan: who it is and what it wants, in our columns."""

    rank: int
    regions: Regions
    objects: dict[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class _RankAssignment:
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
        self._checkpoint: CheckpointSource | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, perhaps of another checkpoint."""
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self._checkpoint = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - torch's signature
        """All ranks, first: what the checkpoint holds, whatever format it has."""
        checkpoint = self._checkpoint = open_checkpoint(self.checkpoint_id)
        told = checkpoint.metadata or DcpMetadata(index=checkpoint.index, paths=checkpoint.paths)
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
        contents = self._found().index
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
        regions = Regions.from_rows(rows)
        check_covered(contents, regions, self._found().uri)
        rank = dist.get_rank() if dist.is_initialized() else 0
        return replace(plan, storage_data=_RankRequest(rank, regions, wanted))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Coordinator: decide who reads what."""
        checkpoint = self._found()
        contents = locate_payloads(checkpoint, SoloComm())
        item_index = index_byte_items(contents)
        asked: list[_RankRequest] = [plan.storage_data for plan in plans]
        wanted = [
            build_matched_requests(each.regions, (), each.objects, contents, item_index).regions
            for each in asked
        ]
        item_bytes = element_sizes(item_index.tensors)
        shared = plan_load(item_index.stored, item_bytes, wanted, self._options)
        rows = unlocated_rows(checkpoint.index)
        positions = contents.stored.payload_offset[rows]
        ranks = [each.rank for each in asked]
        return [
            replace(
                plan,
                storage_data=_RankAssignment(
                    plan_rank_load(shared, item_bytes, rank, self._options), ranks, positions
                ),
            )
            for rank, plan in enumerate(plans)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """All ranks: read, exchange, and fill what the planner resolves."""
        assigned: _RankAssignment = plan.storage_data
        checkpoint = self._found()
        rows = unlocated_rows(checkpoint.index)
        if len(rows):
            checkpoint = replace(checkpoint, index=with_payloads(checkpoint.index, assigned.positions, rows))
        item_index = index_byte_items(checkpoint.index)
        tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        objects = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        requests = _wishes_again(self.prepare_local_plan(plan).storage_data, checkpoint.index, item_index)
        resolved = [planner.resolve_tensor(item) for item in tensors]
        targets = [
            self._target(memory, requests.regions, row, item_index) for row, memory in enumerate(resolved)
        ] + item_targets(requests, item_index)
        wait_for_devices(targets)
        with ExitStack() as meeting:
            members = make_group_of(assigned.ranks)
            meeting.callback(members.close)
            context = LoadContext(
                checkpoint=checkpoint,
                storage=prefer_direct_access(checkpoint.storage),
                transport=None if members.group is None else GlooTransport(members.group),
                buffers=self._buffers,
                progress=Silent(),
                timeout_s=DEFAULT_TIMEOUT_S,
            )
            run_with_heartbeat(
                members.comm,
                lambda cancel_token: _moved(
                    assigned.plan, item_index, (requests.regions, targets), context, cancel_token
                ),
                awaiting="all ranks to load their parts",
            )
        # Objects are read here as well, so that one that would run code is refused before the planner does.
        values = unpack(checkpoint, item_index, requests, targets, trust=self._trust)
        self._hand_objects(checkpoint, planner, objects, (item_index, requests, targets), values)
        for item, memory in zip(tensors, resolved, strict=True):
            planner.commit_tensor(item, memory)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether torch may choose this reader for a path; it asks none but its own."""
        return bool(os.fspath(checkpoint_id))

    def _found(self) -> CheckpointSource:
        assert self._checkpoint is not None, "torch calls read_metadata first"
        return self._checkpoint

    def _target(self, memory: torch.Tensor, regions: Regions, row: int, item_index: ByteItemIndex) -> Target:
        facts = item_index.tensors[int(regions.tensor[row])]
        if str(memory.dtype) != f"torch.{facts.dtype}" and not self._converts:
            raise UsageError(
                f"{facts.name!r} is {memory.dtype} in the state and torch.{facts.dtype} in the checkpoint",
                fix="Give the state the checkpoint's dtype, or ask for it: Reader(..., convert_dtypes=True).",
            )
        return Target(regions.region(row, len(facts.shape))[0], memory.detach(), facts)

    def _hand_objects(
        self,
        checkpoint: CheckpointSource,
        planner: LoadPlanner,
        items: list[ReadItem],
        come: tuple[ByteItemIndex, LoadRequests, list[Target]],
        values: dict[str, Any],
    ) -> None:
        item_index, requests, targets = come
        contents = item_contents(requests, targets)
        for item in items:
            name = item.storage_index.fqn
            number = requests.objects[name]
            is_plain_item = checkpoint.archive is None and not checkpoint.descriptors(
                checkpoint.index.objects[number]
            )
            if is_plain_item:
                planner.load_bytes(item, io.BytesIO(contents[item_index.first_object + number]))
                continue
            packed = io.BytesIO()
            torch.save(values[name], packed)
            packed.seek(0)
            planner.load_bytes(item, packed)


def _moved(
    plan: SharedPlan,
    item_index: ByteItemIndex,
    into: tuple[Regions, list[Target]],
    context: LoadContext,
    cancel_token: CancelToken,
) -> None:
    wanted, targets = into
    execute_plan(plan, item_index, targets, context, cancel_token)
    verify_cut_items(plan, item_index, wanted, targets, context)


def _wishes_again(asked: _RankRequest, contents: CheckpointIndex, item_index: ByteItemIndex) -> LoadRequests:
    """The wishes of a rank as the coordinator saw them; the names only count the pieces."""
    names = tuple(("", row) for row in range(len(asked.regions)))
    return build_matched_requests(asked.regions, names, asked.objects, contents, item_index)
