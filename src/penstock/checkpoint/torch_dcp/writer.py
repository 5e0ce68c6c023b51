"""Storage writer for torch's `dcp.save`: direct I/O, checksums, and one commit at the end.

Invariant: every item of torch's plan is in one file and gets one result, and nothing is visible at the path
before `finish`, which the coordinator calls when all ranks have written.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from penstock.checkpoint.commit.catalog import AnyPath, can_be_named, open_catalog, open_parent
from penstock.checkpoint.commit.protocol import Draft, Seal
from penstock.checkpoint.commit.transaction import SaveTransaction, begin_save
from penstock.checkpoint.engine import WrittenShare
from penstock.checkpoint.file_layout import (
    FileLayout,
    lay_out_file,
    payload_of_bytes,
    payload_of_tensor,
)
from penstock.checkpoint.formats.dcp_item import require_known_transforms
from penstock.checkpoint.formats.dcp_metadata import VERSION, read_metadata
from penstock.checkpoint.formats.manifest import build_manifest, manifest_bytes
from penstock.checkpoint.plan.save_plan import PlacedObject, SaveOptions, plan_files
from penstock.checkpoint.saver import WAITING_BUFFER_BYTES, SaveShare, StagedFiles, choose_pipeline_settings
from penstock.checkpoint.state.regions import Regions, TensorFacts
from penstock.checkpoint.state.walk import require_text
from penstock.cluster.comm import SoloComm
from penstock.errors import AlreadyThere, UsageError
from penstock.storage.capabilities import prefer_direct_access, sync_names
from penstock.storage.uri import has_option, parse_uri
from penstock.transfer.buffers import StagingMemory

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan


SHARE_NAME = "penstock.share"
"""The name of one result of each rank that describes its files; torch passes results on to `finish`."""


class RankItems:
    """The items of one rank, divided among its files."""

    def __init__(
        self, items: Sequence[WriteItem], planner: SavePlanner, rank: int, options: SaveOptions
    ) -> None:
        self.rank = rank
        self._objects: dict[str, bytes] = {}
        self._items: dict[tuple[str, tuple[int, ...]], WriteItem] = {}
        facts: dict[str, TensorFacts] = {}
        boxes = []
        for item in items:
            name, data = item.index.fqn, item.tensor_data
            if item.type is WriteItemType.BYTE_IO:
                packed: Any = planner.resolve_data(item)
                self._objects[name] = bytes(packed.getbuffer())
            elif data is not None and (data.chunk.sizes.numel() or not data.size.numel()):
                # Empty shards of tensors that have elements are left out: others may begin at the same place.
                offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
                dtype = data.properties.dtype
                kind = str(dtype).removeprefix("torch.")
                facts.setdefault(name, TensorFacts(name, kind, tuple(data.size), dtype.itemsize))
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

    @property
    def payload_bytes(self) -> int:
        """The payload bytes of all tensors."""
        return self._plan.num_bytes

    def layouts(self) -> tuple[FileLayout, ...]:
        """The layouts of the files; none if there is nothing to write."""
        return tuple(lay_out_file(bucket, self._plan.tensors) for bucket in self._plan.buckets)

    def contents(
        self,
        of_object: Callable[[bytes], Any],
        of_tensor: Callable[[torch.Tensor, torch.dtype], Any],
    ) -> dict[str, list[Any]]:
        """By file, what `of_object` and `of_tensor` make of its items, in order, with the plan's dtypes."""
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
        """One result for each item, and one with the share itself."""
        results: list[WriteResult] = []
        for bucket, file in zip(self._plan.buckets, share.files, strict=True):
            indices = [MetadataIndex(placed.name) for placed in bucket.objects]
            indices += [item.index for item in self._boxes_of(bucket.regions)]
            for row, index in enumerate(indices):
                place = file.name, int(file.item_offset[row]), int(file.item_bytes[row])
                # Older versions of torch lack the field of transforms, and read what is not transformed.
                further: dict[str, Any] = {"transform_descriptors": list(transforms)} if transforms else {}
                results.append(WriteResult(index, place[2], _StorageInfo(*place, **further)))
        return [*results, WriteResult(MetadataIndex(SHARE_NAME), share.stats.file_bytes, share)]

    def _boxes_of(self, regions: Regions) -> list[WriteItem]:
        names = [self._plan.tensors[number] for number in regions.tensor.tolist()]
        return [
            self._items[facts.name, regions.region(row, len(facts.shape))[0]]
            for row, facts in enumerate(names)
        ]


def build_seal(metadata: Metadata, results: Sequence[Sequence[WriteResult]], meta: StorageMeta) -> Seal:
    """The planner's metadata as torch pickles it, and our manifest, from what all ranks report."""
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
    # This pickle is only written, never loaded: torch's readers expect this form.
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


MEMORY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class _WriteAssignment:
    """The coordinator's message to each rank with its plan: where to write, and as which rank."""

    uri: str
    draft: Draft
    rank: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.uri, self.draft, self.rank)


_ARRIVED: dict[str, _WriteAssignment] = {}
"""By path, what arrived last and was not used yet. Planners that cache plans give the writer one of an older
save, and drop the one that came with the plan of this save."""


def _arrived(uri: str, draft: Draft, rank: int) -> _WriteAssignment:
    assigned = _ARRIVED[uri] = _WriteAssignment(uri, draft, rank)
    return assigned


class Writer(BlockingAsyncStager, StorageWriter):
    """A drop-in for torch's `FileSystemWriter`: `dcp.save(state, storage_writer=pc.Writer("/pfs/step-1"))`.

    `writers` files of each rank are written in parallel, through at most `staging_bytes` of buffers; items
    whose names begin with `separation_hint` go to separate files. With fsync=False, a power cut may destroy
    the checkpoint. `transforms` are those of `save`. With overwrite=False, it is an error if the path has a
    checkpoint already. One writer can make any number of them, with `dcp.save(..., checkpoint_id=path)`.
    `dcp.async_save` copies the state with it as with torch's, to pinned memory that is kept for the next save
    if `cache_staged_state_dict` is set.
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
        """For the process of `dcp.async_save`: everything but memory and a save that has begun here."""
        return {
            **self.__dict__,
            "_memory": self._memory.budget_bytes,
            "_transaction": None,
            "state_dict_cache": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _memory=StagingMemory(state["_memory"]))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, perhaps at another path, and remove what an earlier one left unfinished."""
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
        """All ranks, first: refuse saves without collectives, unless there is nobody to communicate with."""
        has_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if has_others and kwargs.get("use_collectives", True) is False:
            raise UsageError(
                "Ranks that do not communicate cannot commit one checkpoint together",
                fix="Keep use_collectives=True.",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """All ranks: refuse names that no file can hold, before anything is written."""
        for item in plan.items:
            require_text(item.index.fqn)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: begin the save, and send each rank its draft."""
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

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """All ranks: write this rank's items durably."""
        done: Future[list[WriteResult]] = Future()
        with ExitStack() as undo:
            undo.callback(self._abandon)
            done.set_result(self._write(plan, planner))
            undo.pop_all()
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: describe what all ranks have written, and commit it."""
        assert self._transaction is not None, "torch calls prepare_global_plan first"
        meta = self.storage_meta()
        transaction, self._transaction = self._transaction, None
        transaction.commit(lambda: build_seal(metadata, results, meta))

    def storage_meta(self) -> StorageMeta:
        """The storage metadata for torch's planners and `.metadata`."""
        return StorageMeta(checkpoint_id=os.fspath(self.checkpoint_id), save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any path, and URIs of known storages."""
        return can_be_named(checkpoint_id)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        assigned: _WriteAssignment = _ARRIVED.pop(self._uri(), plan.storage_data)
        if self._transaction is not None:
            assigned = replace(assigned, draft=self._transaction.draft)
        storage, _ = open_parent(self._uri(), rank=assigned.rank)
        items = RankItems(plan.items, planner, assigned.rank, self._options)
        share = SaveShare(
            rank=items.rank,
            layouts=items.layouts(),
            payloads=items.contents(payload_of_bytes, payload_of_tensor),
            payload_bytes=items.payload_bytes,
        ).transformed(self._transforms)
        settings = choose_pipeline_settings(share.layouts, self._options.writers, self._memory.budget_bytes)
        # The memory is this writer's own, and its earlier saves have returned it.
        staged = StagedFiles(
            share, self._memory, settings, copies="with the writes", timeout_s=MEMORY_TIMEOUT_S
        )
        written = staged.write_to(prefer_direct_access(storage), assigned.draft.key)
        if self._transaction is None:
            sync_names(storage, assigned.draft.folder)
        return items.results(written, self._transforms)

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
