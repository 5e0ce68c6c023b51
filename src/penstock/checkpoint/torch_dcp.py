"""The engine behind torch's own `dcp.save` and `dcp.load`: planners, a storage reader, a storage writer.

`SavePlanner` lets replicas share the work and keeps each rank's own objects; `LoadPlanner` selects and
renames. `Writer` and `Reader` bring direct I/O, checksums, one commit at the end, and reads that ranks share.
Each also works with torch's own counterparts. Invariants: each byte is written once, and bytes that several
ranks need are read by one of them; nothing is visible at the path before `finish`, which the coordinator
calls when all ranks have written; no code from a checkpoint runs unless `trust` is set.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import ChainMap
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from penstock.checkpoint.commit.checkpoints import (
    AnyPath,
    SaveTransaction,
    begin_save,
    can_be_named,
    open_catalog,
    open_parent,
)
from penstock.checkpoint.commit.protocol import Draft, Seal
from penstock.checkpoint.engine import LoadChoice, RankSaveStats, WrittenShare, make_comm
from penstock.checkpoint.file_layout import (
    lay_out_file,
    payload_of_bytes,
    payload_of_tensor,
)
from penstock.checkpoint.formats.checkpoint_source import CheckpointSource, locate_payloads, open_checkpoint
from penstock.checkpoint.formats.dcp_item import load_object, object_bytes, require_known_transforms
from penstock.checkpoint.formats.description import (
    VERSION,
    build_manifest,
    manifest_bytes,
    read_metadata,
    torch_metadata,
)
from penstock.checkpoint.loader import CheckpointLoader, request_stored
from penstock.checkpoint.match import (
    LeafSelection,
    find_idle,
    find_wanted,
    require_matches,
    select_leaves,
)
from penstock.checkpoint.place import Target, item_targets, unpack
from penstock.checkpoint.plan.load_plan import LoadRequests, index_byte_items
from penstock.checkpoint.plan.save_plan import (
    Holdings,
    PlacedObject,
    RankRegions,
    SaveOptions,
    plan_files,
    plan_job,
)
from penstock.checkpoint.replica_comparison import add_digests, warn_of_own_values
from penstock.checkpoint.saver import WAITING_BUFFER_BYTES, SaveShare, write_share
from penstock.checkpoint.state.regions import Region, Regions, TensorFacts
from penstock.checkpoint.state.tensors import LocalState, collect_for_load, collect_for_save, warn_of_losses
from penstock.checkpoint.state.walk import NamePatterns, Owner, find_leaf_name, require_text
from penstock.cluster.comm import SoloComm, run_on_all_ranks
from penstock.errors import AlreadyThere, UsageError
from penstock.storage.capabilities import sync_names
from penstock.storage.uri import has_option, parse_uri
from penstock.transfer.buffers import StagingMemory

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


def own_rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


class LoadPlanner(DefaultLoadPlanner):
    """A drop-in for torch's `DefaultLoadPlanner`: `dcp.load(state, planner=pc.LoadPlanner(), ...)`.

    `only`, `exclude`, `rename`, `strict` and `trust` are as in `pc.load`. After the load, `selection` tells
    what was not loaded. Works with torch's storage readers as well as with `pc.Reader`.
    """

    def __init__(
        self,
        *,
        only: NamePatterns | None = None,
        exclude: NamePatterns | None = None,
        rename: dict[str, str] | None = None,
        strict: bool = True,
        trust: bool = False,
    ) -> None:
        super().__init__(allow_partial_load=not strict)
        self._choice = LoadChoice(only=only, exclude=exclude, rename=rename, strict=strict, trust=trust)
        self.selection: LeafSelection | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - as torch has it
    ) -> None:
        """Find the memory to load into. Called on all ranks."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._local_state = collect_for_load(state_dict)
        self._leaves = {leaf.name: leaf for leaf in self._local_state.leaves}

    def create_local_plan(self) -> planning.LoadPlan:
        """Plan which stored chunks go into which of this rank's shards. Called on all ranks."""
        assert self.metadata is not None, "torch calls set_up_planner with it"
        stored = self.metadata.state_dict_metadata
        names, paths = list(self._leaves), self.metadata.planner_data or {}
        self.selection = select_leaves(names, stored, self._choice, rank=own_rank(), paths=paths)
        chunked = {name: about for name, about in stored.items() if isinstance(about, TensorStorageMetadata)}
        tensors = [_facts_of(name, about.properties.dtype, about.size) for name, about in chunked.items()]
        others = [name for name, about in stored.items() if isinstance(about, BytesStorageMetadata)]
        # torch's planners convert dtypes without being asked.
        _, shards, objects = find_wanted(self._local_state, self.selection, tensors, others, converts=True)
        nothing = torch.Size((0,))
        items = [
            planning.ReadItem(
                type=planning.LoadItemType.BYTE_IO,
                dest_index=MetadataIndex(name),
                dest_offsets=nothing,
                storage_index=MetadataIndex(others[number]),
                storage_offsets=nothing,
                lengths=nothing,
            )
            for name, number in objects.items()
        ]
        for name, shard in shards:
            stored_name = self.selection.stored_names[name]
            chunk = ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))
            items += [
                replace(item, dest_index=MetadataIndex(name, item.dest_index.offset))
                for item in create_read_items_for_chunk_list(stored_name, chunked[stored_name], [chunk])
            ]
        return planning.LoadPlan(items, planner_data=find_idle(self._choice, names, stored))

    def create_global_plan(self, global_plan: list[planning.LoadPlan]) -> list[planning.LoadPlan]:
        """Refuse the load if its selection matches nothing on any rank. Called on the coordinator."""
        stored = list(self.metadata.state_dict_metadata) if self.metadata is not None else []
        require_matches(self._choice, [plan.planner_data for plan in global_plan], stored, 0)
        return super().create_global_plan(global_plan)

    def load_bytes(self, read_item: planning.ReadItem, value: io.BytesIO) -> None:
        """Unpickle an object, only as harmless data unless `trust` is set, and put it into the state."""
        name = read_item.dest_index.fqn
        loaded = load_object(value.getvalue(), name, trust=self._choice.trust, where="this checkpoint")
        self._leaves[name].put(loaded)

    def resolve_tensor(self, read_item: planning.ReadItem) -> torch.Tensor:
        """Return the memory of the state into which an item is read."""
        index = read_item.dest_index
        begin = _offsets_of(index, read_item.dest_offsets)
        return self._local_state.view(index.fqn, begin, tuple(read_item.lengths))


def _offsets_of(index: MetadataIndex, inside: Sequence[int]) -> tuple[int, ...]:
    """Return an element's offsets in its tensor, given those in a part of the tensor."""
    corner = index.offset or (0,) * len(inside)
    return tuple(at + offset for at, offset in zip(corner, inside, strict=True))


def _facts_of(name: str, dtype: torch.dtype, size: torch.Size) -> TensorFacts:
    return TensorFacts(name, str(dtype).removeprefix("torch."), tuple(size), dtype.itemsize)


class SavePlanner(DefaultSavePlanner):
    """A drop-in for torch's `DefaultSavePlanner`: `dcp.save(state, planner=pc.SavePlanner(), ...)`.

    A replicated tensor smaller than twice `min_cut_bytes` is written by one rank as a whole.
    """

    _local_state: LocalState
    """Set by `set_up_planner`, which torch calls first."""

    def __init__(self, *, min_cut_bytes: int = 64 * 1024) -> None:
        super().__init__()
        self._options = SaveOptions(min_cut_bytes=min_cut_bytes)
        self._plain_names: dict[str, str] = {}
        self._told: set[str] = set()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - as torch has it
    ) -> None:
        """List what this rank holds. Called on all ranks."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        # torch has replaced parts by their states, and has no names for empty dicts.
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._local_state = collect_for_save(
            state_dict, owner_of=lambda _: Owner.FIXED, is_alone=num_ranks == 1
        )
        if num_ranks > 1:
            self._local_state = add_digests(self._local_state, state_dict, range(num_ranks))
        warn_of_losses(self._local_state, own_rank(), self._told, set())

    def create_local_plan(self) -> planning.SavePlan:
        """Return what this rank holds, for the coordinator. Called on all ranks."""
        self.plan = planning.SavePlan([], planner_data=self._local_state.holdings)
        return self.plan

    def create_global_plan(
        self, all_plans: list[planning.SavePlan]
    ) -> tuple[list[planning.SavePlan], Metadata]:
        """Decide which rank writes what. Called on the coordinator."""
        facts: list[Holdings] = [plan.planner_data for plan in all_plans]
        shared, objects = plan_job(facts, self._options)
        plans = [
            replace(
                plan,
                items=_write_items(shared, objects[rank].placed, rank),
                # For each object that is stored under another name, the leaf's name.
                planner_data={
                    placed.stored_name: placed.name
                    for placed in objects[rank].placed
                    if placed.stored_name != placed.name
                },
            )
            for rank, plan in enumerate(all_plans)
        ]
        plans, metadata = create_default_global_save_plan(plans)
        metadata.planner_data = dict(ChainMap(*(holdings.paths for holdings in facts)))
        for name in metadata.state_dict_metadata:
            metadata.planner_data.setdefault(name, (name,))
        warn_of_own_values(shared.tensors, metadata.planner_data, len(facts), self._local_state, self._told)
        self.global_plan, self.metadata = plans, metadata
        return plans, metadata

    def finish_plan(self, new_plan: planning.SavePlan) -> planning.SavePlan:
        """Adopt what the coordinator decided. Called on all ranks."""
        self._plain_names = new_plan.planner_data
        self.plan = new_plan
        return new_plan

    def resolve_data(self, write_item: planning.WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the memory of a region, live and possibly strided, or a packed object."""
        name = write_item.index.fqn
        if write_item.type is planning.WriteItemType.BYTE_IO:
            return io.BytesIO(self._local_state.objects[self._plain_names.get(name, name)])
        assert write_item.tensor_data is not None, "every other item is a tensor's"
        chunk = write_item.tensor_data.chunk
        leaf = find_leaf_name(name, self._local_state.shards)
        memory = self._local_state.view(leaf, tuple(chunk.offsets), tuple(chunk.sizes))
        # Readers other than torch's own do not understand views that represent their conjugates.
        return memory.resolve_conj().resolve_neg()


def _write_items(shared: RankRegions, objects: Sequence[PlacedObject], rank: int) -> list[planning.WriteItem]:
    """Return one rank's part of the plan in the form of torch's write items."""
    items = [
        planning.WriteItem(MetadataIndex(placed.stored_name), planning.WriteItemType.BYTE_IO)
        for placed in objects
    ]
    regions = shared.regions.take(shared.rank == rank)
    for facts, (offsets, sizes) in regions.with_facts(shared.tensors):
        data = planning.TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            properties=TensorProperties(dtype=getattr(torch, facts.dtype)),
            size=torch.Size(facts.shape),
        )
        kind = planning.WriteItemType.TENSOR if sizes == facts.shape else planning.WriteItemType.SHARD
        items.append(planning.WriteItem(MetadataIndex(facts.name, offsets), kind, tensor_data=data))
    return items


@dataclass(frozen=True, slots=True)
class _Readers:
    """The ranks that load together, numbered as in the job.

    The plan that a rank makes has only its own number; those that the coordinator returns have all numbers.
    """

    ranks: tuple[int, ...]


class Reader(StorageReader):
    """A drop-in for torch's `FileSystemReader`: `dcp.load(state, storage_reader=pc.Reader("/pfs/step-1"))`.

    Reads torch distributed checkpoints, files of torch.save and safetensors at `path`. Checksums are verified
    if the checkpoint has any. `trust` allows objects whose unpickling may run code; `convert_dtypes` allows
    tensors whose dtype differs from the checkpoint's.
    """

    def __init__(self, path: AnyPath, *, trust: bool = False, convert_dtypes: bool = False) -> None:
        self.checkpoint_id: AnyPath = path
        self.load_id = str(uuid4())
        self._trust = trust
        self._converts = convert_dtypes
        self._loader = CheckpointLoader()
        self._opened: CheckpointSource | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Keep everything for another process, except memory and a checkpoint opened in this one."""
        return {**self.__dict__, "_loader": None, "_opened": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _loader=CheckpointLoader())

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, possibly from another checkpoint."""
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self.load_id = str(uuid4())
        self._opened = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - torch's signature
        """Describe the checkpoint, whatever its format. Called first, on all ranks."""
        checkpoint = self._opened = open_checkpoint(self.checkpoint_id)
        if own_rank() == 0:
            checkpoint.tell_if_unchecked()
        # torch's records are built from columns that were checked: no pickle from the checkpoint is loaded.
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
        """Do nothing. Called on all ranks."""

    def prepare_local_plan(self, plan: planning.LoadPlan) -> planning.LoadPlan:
        """Add this rank's number to the plan. Called on all ranks."""
        return replace(plan, storage_data=_Readers((own_rank(),)))

    def prepare_global_plan(self, plans: list[planning.LoadPlan]) -> list[planning.LoadPlan]:
        """Let all ranks load together. Called on the coordinator.

        A planner may have replaced this reader's data in the plan with its own. The planner then finds its
        data in the finished plan, and each rank itself reads everything it needs, as with torch's readers.
        """
        of_ranks = [plan.storage_data for plan in plans]
        if not all(isinstance(readers, _Readers) for readers in of_ranks):
            return plans
        together = _Readers(tuple(rank for readers in of_ranks for rank in readers.ranks))
        return [replace(plan, storage_data=together) for plan in plans]

    def read_data(self, plan: planning.LoadPlan, planner: planning.LoadPlanner) -> Future[None]:
        """Read, exchange, and fill what the planner resolves. Collective."""
        readers = plan.storage_data if isinstance(plan.storage_data, _Readers) else _Readers((own_rank(),))
        assert self._opened is not None, "torch calls read_metadata first"
        others = [item for item in plan.items if item.type is planning.LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type is not planning.LoadItemType.BYTE_IO]
        resolved: list[torch.Tensor] = []
        with closing(make_comm(readers.ranks)) as comm:
            checkpoint = locate_payloads(self._opened, comm)
            index = checkpoint.index
            items = index_byte_items(index)

            def request() -> tuple[LoadRequests, list[Target]]:
                objects = {stored.name: number for number, stored in enumerate(index.objects)}
                wanted = {item.storage_index.fqn: objects[item.storage_index.fqn] for item in others}
                regions = self._regions(tensors, index.tensors)
                requests = request_stored(checkpoint, items, regions, wanted)
                resolved.extend(planner.resolve_tensor(item) for item in tensors)
                rows = regions.with_facts(index.tensors)
                targets = [self._target(memory, *row) for memory, row in zip(resolved, rows, strict=True)]
                return requests, targets + item_targets(requests, items.tensors)

            requests, targets = run_on_all_ranks(comm, request, awaiting="all ranks to name what they load")
            self._loader.fetch(checkpoint, items, requests, targets, comm)
        # Objects are read here as well, so that one that would run code is refused before the planner loads
        # it.
        values = unpack(checkpoint, requests, targets, trust=self._trust)
        for item in others:
            planner.load_bytes(item, io.BytesIO(object_bytes(values[item.storage_index.fqn])))
        for item, memory in zip(tensors, resolved, strict=True):
            planner.commit_tensor(item, memory)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return can_be_named(checkpoint_id)

    def _regions(self, wanted: Sequence[planning.ReadItem], tensors: Sequence[TensorFacts]) -> Regions:
        """Return the regions that torch's plan needs, with the checkpoint's own tensor numbers."""
        numbers = {facts.name: number for number, facts in enumerate(tensors)}
        rows = [
            (
                numbers[each.storage_index.fqn],
                _offsets_of(each.storage_index, each.storage_offsets),
                each.lengths,
            )
            for each in wanted
        ]
        return Regions.from_rows(rows)

    def _target(self, memory: torch.Tensor, facts: TensorFacts, region: Region) -> Target:
        if str(memory.dtype) != f"torch.{facts.dtype}" and not self._converts:
            raise UsageError(
                f"{facts.name!r} is {memory.dtype} in the state and torch.{facts.dtype} in the checkpoint",
                fix="Give the state the checkpoint's dtype, or convert it: Reader(..., convert_dtypes=True).",
            )
        return Target(region[0], memory.detach(), facts)


SHARE_NAME = "penstock.share"
"""The name of one result of each rank that describes its files. torch passes results on to `finish`."""


class RankItems:
    """The items of one rank, divided among its files."""

    def __init__(
        self,
        items: Sequence[planning.WriteItem],
        planner: planning.SavePlanner,
        rank: int,
        options: SaveOptions,
    ) -> None:
        self.rank = rank
        self._objects: dict[str, bytes] = {}
        self._items: dict[tuple[str, tuple[int, ...]], planning.WriteItem] = {}
        facts: dict[str, TensorFacts] = {}
        boxes = []
        for item in items:
            name, data = item.index.fqn, item.tensor_data
            if item.type is planning.WriteItemType.BYTE_IO:
                packed: Any = planner.resolve_data(item)
                self._objects[name] = bytes(packed.getbuffer())
            elif data is not None and (data.chunk.sizes.numel() or not data.size.numel()):
                # Empty shards of tensors that have elements are omitted, because other shards may begin at
                # the same offset.
                offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
                facts.setdefault(name, _facts_of(name, data.properties.dtype, data.size))
                self._items[name, offsets] = item
                boxes.append((name, offsets, sizes))
        numbers = {name: number for number, name in enumerate(facts)}
        regions = Regions.from_rows([(numbers[name], offsets, sizes) for name, offsets, sizes in boxes])
        objects = [
            PlacedObject(name=name, stored_name=name, size_bytes=len(content))
            for name, content in self._objects.items()
        ]
        self._plan = plan_files(rank, tuple(facts.values()), regions, objects, options)
        self._planner = planner
        self.payload_bytes = self._plan.num_bytes
        self.layouts = tuple(lay_out_file(bucket, self._plan.tensors) for bucket in self._plan.buckets)
        """The layouts of the files; empty if there is nothing to write."""

    def contents(
        self,
        of_object: Callable[[bytes], Any],
        of_tensor: Callable[[torch.Tensor, torch.dtype], Any],
    ) -> dict[str, list[Any]]:
        """Return each file's items in order, converted by `of_object`, or by `of_tensor` with the dtype."""
        made: dict[str, list[Any]] = {}
        for bucket in self._plan.buckets:
            made[bucket.file] = [of_object(self._objects[placed.name]) for placed in bucket.objects]
            for item in self._boxes_of(bucket.regions):
                memory = self._planner.resolve_data(item)
                assert isinstance(memory, torch.Tensor), "torch's planners resolve tensors to tensors"
                assert item.tensor_data is not None, "it is a tensor's item"
                made[bucket.file].append(of_tensor(memory.detach(), item.tensor_data.properties.dtype))
        return made

    def results(self, share: WrittenShare, transforms: Sequence[str] = ()) -> list[WriteResult]:
        """Return one result for each item, and one with the share itself."""
        results: list[WriteResult] = []
        for bucket, file in zip(self._plan.buckets, share.files, strict=True):
            indices = [MetadataIndex(placed.name) for placed in bucket.objects]
            indices += [item.index for item in self._boxes_of(bucket.regions)]
            for row, index in enumerate(indices):
                place = file.name, int(file.item_offset[row]), int(file.item_bytes[row])
                # Older versions of torch lack the field for transforms, and read only what is not
                # transformed.
                further: dict[str, Any] = {"transform_descriptors": list(transforms)} if transforms else {}
                results.append(WriteResult(index, place[2], _StorageInfo(*place, **further)))
        return [*results, WriteResult(MetadataIndex(SHARE_NAME), share.stats.file_bytes, share)]

    def _boxes_of(self, regions: Regions) -> list[planning.WriteItem]:
        rows = regions.with_facts(self._plan.tensors)
        return [self._items[facts.name, offsets] for facts, (offsets, _) in rows]


def build_seal(metadata: Metadata, results: Sequence[Sequence[WriteResult]], meta: StorageMeta) -> Seal:
    """Return the planner's metadata as torch pickles it, and the manifest, from the reports of all ranks."""
    all_results = [result for rank_results in results for result in rank_results]
    shares = [result.storage_data for result in all_results if isinstance(result.storage_data, WrittenShare)]
    metadata.storage_data = {
        result.index: result.storage_data
        for result in all_results
        if not isinstance(result.storage_data, WrittenShare)
    }
    for name, facts in metadata.state_dict_metadata.items():
        if isinstance(facts, TensorStorageMetadata) and facts.size.numel():
            # Empty shards were not written.
            chunks = [chunk for chunk in facts.chunks if chunk.sizes.numel()]
            metadata.state_dict_metadata[name] = replace(facts, chunks=chunks)
    metadata.storage_meta = meta
    metadata.version = VERSION
    # This pickle is only written, never loaded; torch's readers expect this form.
    content = pickle.dumps(metadata)
    files = [file for share in shares for file in share.files]
    manifest = build_manifest(
        read_metadata(content, "this save's metadata"),
        files,
        content,
        save_id=meta.save_id or "",
        world_size=len(results),
    )
    sizes = {file.name: file.size_bytes for file in files}
    return Seal(manifest=manifest_bytes(manifest), metadata=content, sizes=sizes)


@dataclass(frozen=True, slots=True)
class _WriteAssignment:
    """The coordinator's message to each rank, sent with its plan: where to write, and as which rank."""

    uri: str
    draft: Draft
    rank: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.uri, self.draft, self.rank)


_ARRIVED: dict[str, _WriteAssignment] = {}
"""For each path, the assignment that arrived last, until it is used. Planners that cache plans pass the
writer an assignment of an earlier save, and drop the one that came with the current plan.
"""


def _arrived(uri: str, draft: Draft, rank: int) -> _WriteAssignment:
    assigned = _ARRIVED[uri] = _WriteAssignment(uri, draft, rank)
    return assigned


class Writer(BlockingAsyncStager, StorageWriter):
    """A drop-in for torch's `FileSystemWriter`: `dcp.save(state, storage_writer=pc.Writer("/pfs/step-1"))`.

    Each rank writes `writers` files in parallel, through at most `staging_bytes` of buffers; items whose
    names begin with `separation_hint` go to separate files. With fsync=False, a power failure may destroy the
    checkpoint. `transforms` are as in `pc.save`. With overwrite=False, a save is refused if a checkpoint
    exists at the path. One writer can save any number of checkpoints, with `dcp.save(...,
    checkpoint_id=path)`. As with torch's own writer, `dcp.async_save` copies the state to pinned memory,
    which is kept for the next save if `cache_staged_state_dict` is set.
    """

    def __init__(
        self,
        path: AnyPath,
        *,
        writers: int = 2,
        separation_hint: str | None = None,
        fsync: bool = True,
        staging_bytes: int = WAITING_BUFFER_BYTES,
        transforms: Sequence[str] = (),
        overwrite: bool = True,
        cache_staged_state_dict: bool = False,
    ) -> None:
        require_known_transforms(transforms)
        super().__init__(cache_staged_state_dict=cache_staged_state_dict)
        self.save_id = str(uuid4())
        self._overwrites = overwrite
        self._transforms = tuple(transforms)
        self.checkpoint_id: AnyPath = path
        self._fsync = fsync
        self._options = SaveOptions(writers=writers, separation_hint=separation_hint)
        self._memory = StagingMemory(staging_bytes)
        self._transaction: SaveTransaction | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Keep everything for the process of `dcp.async_save`, except memory and a save begun here."""
        return {
            **self.__dict__,
            "_memory": self._memory.budget_bytes,
            "_transaction": None,
            "state_dict_cache": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _memory=StagingMemory(state["_memory"]))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, possibly at another path, and remove what an earlier one left unfinished."""
        self.save_id = str(uuid4())
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self._abandon()

    def set_up_storage_writer(  # torch's signature
        self,
        is_coordinator: bool,  # noqa: ARG002, FBT001
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Refuse saves without collectives if there are other ranks. Called first, on all ranks."""
        has_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if has_others and kwargs.get("use_collectives", True) is False:
            raise UsageError(
                "Ranks that do not communicate cannot commit one checkpoint together",
                fix="Keep use_collectives=True.",
            )

    def prepare_local_plan(self, plan: planning.SavePlan) -> planning.SavePlan:
        """Refuse names that no file can have, before anything is written. Called on all ranks."""
        for item in plan.items:
            require_text(item.index.fqn)
        return plan

    def prepare_global_plan(self, plans: list[planning.SavePlan]) -> list[planning.SavePlan]:
        """Begin the save, and send each rank its draft. Called on the coordinator."""
        self._abandon()
        storage, name = open_parent(self._uri())
        if not self._overwrites and name in open_catalog(storage).names():
            raise AlreadyThere(
                "Checkpoint already exists, and overwrite=False",
                uri=os.fspath(self.checkpoint_id),
                fix="Save to a new name, or allow the writer to overwrite.",
            )
        self._transaction = begin_save(storage, name, SoloComm())
        return [
            replace(plan, storage_data=_WriteAssignment(self._uri(), self._transaction.draft, rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: planning.SavePlan, planner: planning.SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items durably. Called on all ranks."""
        done: Future[list[WriteResult]] = Future()
        with ExitStack() as undo:
            undo.callback(self._abandon)
            assigned: _WriteAssignment = _ARRIVED.pop(self._uri(), plan.storage_data)
            if self._transaction is not None:
                assigned = replace(assigned, draft=self._transaction.draft)
            storage, _ = open_parent(self._uri(), rank=assigned.rank)
            items = RankItems(plan.items, planner, assigned.rank, self._options)
            share = SaveShare(
                layouts=items.layouts,
                payloads=items.contents(payload_of_bytes, payload_of_tensor),
                stats=RankSaveStats(rank=items.rank, payload_bytes=items.payload_bytes),
            )
            # The memory belongs to this writer alone, and its earlier saves have given it back.
            written = write_share(
                share,
                storage,
                assigned.draft.key,
                self._memory,
                writers=self._options.writers,
                transforms=self._transforms,
            )
            if self._transaction is None:
                sync_names(storage, assigned.draft.folder)
            done.set_result(items.results(written, self._transforms))
            undo.pop_all()
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Describe what all ranks have written, and commit it. Called on the coordinator."""
        assert self._transaction is not None, "torch calls prepare_global_plan first"
        meta = self.storage_meta()
        transaction, self._transaction = self._transaction, None
        transaction.commit(lambda: build_seal(metadata, results, meta))

    def storage_meta(self) -> StorageMeta:
        """Return the storage metadata for torch's planners and `.metadata`."""
        return StorageMeta(checkpoint_id=os.fspath(self.checkpoint_id), save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return can_be_named(checkpoint_id)

    def _uri(self) -> str:
        text = os.fspath(self.checkpoint_id)
        if self._fsync:
            return text
        if not has_option(text, "fsync"):
            raise UsageError(f"fsync=False is for file systems, not for {text}", fix="Omit it.")
        return parse_uri(text).with_options(fsync="false").text

    def _abandon(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.abandon()
