"""Writing for torch's own `dcp.save`: direct I/O, sums, and one commit at the end.

`Writer` fills torch's interface from the engine's parts. Invariant: nothing is visible at the path before
`finish`, which the coordinator calls when all ranks have written all they were told to.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from penstock.checkpoint.commit.base import Draft, Seal
from penstock.checkpoint.commit.place import Place, begin
from penstock.checkpoint.dcp.metadata import read_metadata
from penstock.checkpoint.dcp.transforms import require_known
from penstock.checkpoint.image import FileImage, lay_out
from penstock.checkpoint.manifest import manifest_bytes, manifest_of
from penstock.checkpoint.pieces import Boxes, TensorFacts
from penstock.checkpoint.plan.records import PlacedObject, SaveOptions, SharedSavePlan
from penstock.checkpoint.plan.saving import rank_plans
from penstock.checkpoint.saving import WAITING_BUFFER_BYTES
from penstock.checkpoint.staging.base import RankShare, WrittenFile
from penstock.checkpoint.staging.memory import StagingMemory
from penstock.checkpoint.staging.packing import pack_file
from penstock.checkpoint.staging.payloads import payload_of_bytes, payload_of_tensor
from penstock.checkpoint.staging.staged import Share, Staged, pipe_settings
from penstock.checkpoint.stored import open_around
from penstock.cluster.solo import SoloComm
from penstock.errors import UsageError
from penstock.storage.powers import for_large_files
from penstock.storage.uri import FILE_SCHEMES, parse_uri

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from penstock.checkpoint.staging.payloads import Payload
    from penstock.checkpoint.stored import AnyPath

MEMORY_TIMEOUT_S = 60.0
SHARE_NAME = "penstock.share"
"""One result of each rank has this name and says what its files are; torch passes it on to `finish`."""


@dataclass(frozen=True, slots=True)
class _Assigned:
    """What the coordinator tells each rank with its plan: where to write, and as which rank."""

    draft: Draft
    rank: int


class Writer(StorageWriter):
    """A drop-in for torch's `FileSystemWriter`: `dcp.save(state, storage_writer=pc.Writer("/pfs/step-1"))`.

    `writers` files of each rank are written side by side, through at most `staging_bytes` of buffers; names
    that begin with `separation_hint` go to files of their own. With fsync=False a power cut may take the
    checkpoint. `transforms` as for `save`. One writer may save again and again, with
    `dcp.save(..., checkpoint_id=path)`.
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
    ) -> None:
        require_known(transforms)
        self._transforms = tuple(transforms)
        self.checkpoint_id: AnyPath = path
        self._fsync = fsync
        self._options = SaveOptions(writers=writers, separation_hint=separation_hint)
        self._memory = StagingMemory(staging_bytes)
        self._place: Place | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, perhaps elsewhere. What an earlier one left unfinished is removed."""
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self._abandon()

    def set_up_storage_writer(  # torch's signature
        self,
        is_coordinator: bool,  # noqa: ARG002, FBT001
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """All ranks, first."""
        if kwargs.get("use_collectives", True) is False:
            raise UsageError(
                "A checkpoint of ranks that do not speak to each other cannot be committed as one",
                fix="Leave use_collectives=True.",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """All ranks: nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: make room, and tell each rank where."""
        self._abandon()
        storage, name = open_around(self._uri())
        self._place = begin(storage, name, SoloComm())
        return [
            replace(plan, storage_data=_Assigned(self._place.draft, rank)) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """All ranks: write this rank's items, each file durable."""
        done: Future[list[WriteResult]] = Future()
        with ExitStack() as undo:
            undo.callback(self._abandon)
            done.set_result(self._write(plan, planner))
            undo.pop_all()
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: seal what all ranks have written, and commit it."""
        assert self._place is not None, "torch calls prepare_global_plan first"
        shares: list[RankShare] = []
        metadata.storage_data = {}
        for result in (each for rank in results for each in rank):
            if isinstance(result.storage_data, RankShare):
                shares.append(result.storage_data)
            else:
                metadata.storage_data[result.index] = result.storage_data
        metadata.storage_meta = self.storage_meta()
        place, self._place = self._place, None
        place.commit(lambda: _seal(metadata, shares, place.draft.save_id, num_ranks=len(results)))

    def storage_meta(self) -> StorageMeta:
        """What torch's planners may look at, and `.metadata` keeps."""
        save_id = None if self._place is None else self._place.draft.save_id
        return StorageMeta(checkpoint_id=os.fspath(self.checkpoint_id), save_id=save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path or URI will do."""
        return bool(os.fspath(checkpoint_id))

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        assigned: _Assigned = plan.storage_data
        storage, _ = open_around(self._uri(), rank=assigned.rank)
        deal = _Deal(plan.items, planner, assigned.rank, self._options)
        share = deal.share(self._transforms)
        settings = pipe_settings(share.images, self._options.writers, self._memory.budget_bytes)
        # Memory is this writer's own, so an earlier save of its has long given it back.
        staged = Staged(share, self._memory, settings, copies_first=False, timeout_s=MEMORY_TIMEOUT_S)
        return deal.results(staged.write_to(for_large_files(storage), assigned.draft.key))

    def _uri(self) -> str:
        text = os.fspath(self.checkpoint_id)
        if self._fsync:
            return text
        location = parse_uri(text)
        if location.scheme not in FILE_SCHEMES:
            raise UsageError(
                f"fsync=False is for file systems, not for {location.scheme}://", fix="Leave it out."
            )
        options = {**location.options, "fsync": "false"}
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"{location.scheme}://{location.root}?{query}"

    def _abandon(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            place.abandon()


class _Deal:
    """One rank's items, dealt to its files: from torch's plan to images and payloads, and back to results."""

    def __init__(
        self, items: Sequence[WriteItem], planner: SavePlanner, rank: int, options: SaveOptions
    ) -> None:
        self._rank = rank
        self._contents = {
            item.index.fqn: _packed(planner.resolve_data(item))
            for item in items
            if item.type is WriteItemType.BYTE_IO
        }
        tensors = [item for item in items if item.type is not WriteItemType.BYTE_IO]
        self._items = {(item.index.fqn, _box_of(item)[0]): item for item in tensors}
        facts = {item.index.fqn: _facts_of(item) for item in tensors}
        numbers = {name: number for number, name in enumerate(facts)}
        boxes = Boxes.from_rows([(numbers[item.index.fqn], *_box_of(item)) for item in tensors])
        shared = SharedSavePlan(
            tensors=tuple(facts.values()),
            boxes=boxes,
            rank=torch.full((len(boxes),), rank, dtype=torch.int64).numpy(),
            num_ranks=rank + 1,
        )
        objects = [
            PlacedObject(name=name, stored_name=name, size_bytes=len(content))
            for name, content in self._contents.items()
        ]
        self._plan = rank_plans(shared, [*([()] * rank), objects], options, only=rank)[0]
        self._planner = planner
        self._transforms: tuple[str, ...] = ()

    def share(self, transforms: tuple[str, ...]) -> Share:
        """What the engine is to write."""
        self._transforms = transforms
        images: list[FileImage] = []
        payloads: dict[str, list[Payload]] = {}
        for bucket in self._plan.buckets:
            image = lay_out(bucket, self._plan.tensors)
            of_file = [payload_of_bytes(self._contents[each.name]) for each in bucket.objects]
            of_file += [self._payload(item) for item in self._boxes_of(bucket.boxes)]
            if transforms:
                image, of_file = pack_file(image, of_file, transforms)
            images.append(image)
            payloads[image.name] = of_file
        return Share(
            rank=self._rank,
            images=tuple(images),
            payloads=payloads,
            payload_bytes=self._plan.num_bytes,
            paths={},
        )

    def results(self, share: RankShare) -> list[WriteResult]:
        """One result for each item, and the share itself."""
        results: list[WriteResult] = []
        for bucket, file in zip(self._plan.buckets, share.files, strict=True):
            indices = [MetadataIndex(each.name) for each in bucket.objects]
            indices += [item.index for item in self._boxes_of(bucket.boxes)]
            results += [_result(index, file, row, self._transforms) for row, index in enumerate(indices)]
        return [*results, WriteResult(MetadataIndex(SHARE_NAME), share.stats.file_bytes, share)]

    def _boxes_of(self, boxes: Boxes) -> list[WriteItem]:
        names = [self._plan.tensors[number] for number in boxes.tensor.tolist()]
        return [
            self._items[facts.name, boxes.box(row, len(facts.shape))[0]] for row, facts in enumerate(names)
        ]

    def _payload(self, item: WriteItem) -> Payload:
        memory = self._planner.resolve_data(item)
        assert isinstance(memory, torch.Tensor), "torch's planners resolve tensors to tensors"
        assert item.tensor_data is not None, "it is a tensor's item"
        return payload_of_tensor(memory, item.tensor_data.properties.dtype)


def _box_of(item: WriteItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    assert item.tensor_data is not None, "it is a tensor's item"
    chunk = item.tensor_data.chunk
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _facts_of(item: WriteItem) -> TensorFacts:
    assert item.tensor_data is not None, "it is a tensor's item"
    dtype = item.tensor_data.properties.dtype
    name = str(dtype).removeprefix("torch.")
    return TensorFacts(item.index.fqn, name, tuple(item.tensor_data.size), dtype.itemsize)


def _packed(resolved: Any) -> bytes:
    return bytes(resolved.getbuffer())


def _result(index: MetadataIndex, file: WrittenFile, row: int, transforms: Sequence[str]) -> WriteResult:
    offset, size = int(file.item_offset[row]), int(file.item_bytes[row])
    info = _StorageInfo(file.name, offset, size)
    if transforms:
        # Versions of torch without this field read what is not transformed.
        info = _StorageInfo(file.name, offset, size, transform_descriptors=list(transforms))
    return WriteResult(index, size, info)


def _seal(metadata: Metadata, shares: Sequence[RankShare], save_id: str, *, num_ranks: int) -> Seal:
    """The planner's own metadata as torch packs it, and our manifest beside it."""
    import pickle  # noqa: PLC0415 - written, never read: torch's readers expect this very form

    content = pickle.dumps(metadata)
    files = [file for share in shares for file in share.files]
    manifest = manifest_of(
        read_metadata(content, "this save's metadata").contents,
        files,
        content,
        save_id=save_id,
        world_size=num_ranks,
    )
    sizes = {file.name: file.size_bytes for file in files}
    return Seal(manifest=manifest_bytes(manifest), metadata=content, sizes=sizes)
