"""One rank's items of torch's save plan as the engine's files, and what came of them as torch's results.

For everything that writes behind torch's planners: `Writer`, and the writers of other frameworks. Invariant:
every item of the plan lies in one file, and gets one result.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from penstock.checkpoint.commit.protocol import Seal
from penstock.checkpoint.dcp.metadata import read_metadata
from penstock.checkpoint.image import FileImage, lay_out
from penstock.checkpoint.manifest import manifest_bytes, manifest_of
from penstock.checkpoint.pieces import Boxes, TensorFacts
from penstock.checkpoint.plan.records import PlacedObject, SaveOptions, SharedSavePlan
from penstock.checkpoint.plan.saving import rank_plans
from penstock.checkpoint.staging.base import RankShare, WrittenFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

SHARE_NAME = "penstock.share"
"""One result of each rank has this name and says what its files are; torch passes it on to `finish`."""


class RankItems:
    """The items of one rank, dealt to its files."""

    def __init__(
        self, items: Sequence[WriteItem], planner: SavePlanner, rank: int, options: SaveOptions
    ) -> None:
        self.rank = rank
        self._objects = {
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
            for name, content in self._objects.items()
        ]
        self._plan = rank_plans(shared, [*([()] * rank), objects], options, only=rank)[0]
        self._planner = planner

    @property
    def payload_bytes(self) -> int:
        """Of all tensors."""
        return self._plan.num_bytes

    def images(self) -> tuple[FileImage, ...]:
        """The files, laid out; none where there is nothing to write."""
        return tuple(lay_out(bucket, self._plan.tensors) for bucket in self._plan.buckets)

    def contents(
        self,
        of_object: Callable[[bytes], Any],
        of_tensor: Callable[[torch.Tensor, torch.dtype], Any],
    ) -> dict[str, list[Any]]:
        """By file, in order, what is made of each item: of a tensor with the dtype that the plan stores."""
        made: dict[str, list[Any]] = {}
        for bucket in self._plan.buckets:
            made[bucket.file] = [of_object(self._objects[each.name]) for each in bucket.objects]
            for item in self._boxes_of(bucket.boxes):
                memory = self._planner.resolve_data(item)
                assert isinstance(memory, torch.Tensor), "torch's planners resolve tensors to tensors"
                assert item.tensor_data is not None, "it is a tensor's item"
                made[bucket.file].append(of_tensor(memory.detach(), item.tensor_data.properties.dtype))
        return made

    def results(self, share: RankShare, transforms: Sequence[str] = ()) -> list[WriteResult]:
        """One result for each item, and the share itself."""
        results: list[WriteResult] = []
        for bucket, file in zip(self._plan.buckets, share.files, strict=True):
            indices = [MetadataIndex(each.name) for each in bucket.objects]
            indices += [item.index for item in self._boxes_of(bucket.boxes)]
            results += [_result(index, file, row, transforms) for row, index in enumerate(indices)]
        return [*results, WriteResult(MetadataIndex(SHARE_NAME), share.stats.file_bytes, share)]

    def _boxes_of(self, boxes: Boxes) -> list[WriteItem]:
        names = [self._plan.tensors[number] for number in boxes.tensor.tolist()]
        return [
            self._items[facts.name, boxes.box(row, len(facts.shape))[0]] for row, facts in enumerate(names)
        ]


def seal_of(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]], meta: StorageMeta, *, save_id: str
) -> Seal:
    """From what all ranks report: the planner's metadata as torch packs it, and our manifest beside it."""
    each = [result for of_rank in results for result in of_rank]
    shares = [result.storage_data for result in each if isinstance(result.storage_data, RankShare)]
    metadata.storage_data = {
        result.index: result.storage_data for result in each if not isinstance(result.storage_data, RankShare)
    }
    metadata.storage_meta = meta
    # Written, never read: torch's readers expect this very form.
    content = pickle.dumps(metadata)
    files = [file for share in shares for file in share.files]
    manifest = manifest_of(
        read_metadata(content, "this save's metadata").contents,
        files,
        content,
        save_id=save_id,
        world_size=len(results),
    )
    sizes = {file.name: file.size_bytes for file in files}
    return Seal(manifest=manifest_bytes(manifest), metadata=content, sizes=sizes)


def _packed(resolved: Any) -> bytes:
    return bytes(resolved.getbuffer())


def _box_of(item: WriteItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    assert item.tensor_data is not None, "it is a tensor's item"
    chunk = item.tensor_data.chunk
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _facts_of(item: WriteItem) -> TensorFacts:
    assert item.tensor_data is not None, "it is a tensor's item"
    dtype = item.tensor_data.properties.dtype
    name = str(dtype).removeprefix("torch.")
    return TensorFacts(item.index.fqn, name, tuple(item.tensor_data.size), dtype.itemsize)


def _result(index: MetadataIndex, file: WrittenFile, row: int, transforms: Sequence[str]) -> WriteResult:
    offset, size = int(file.item_offset[row]), int(file.item_bytes[row])
    info = _StorageInfo(file.name, offset, size)
    if transforms:
        # Versions of torch without this field read what is not transformed.
        info = _StorageInfo(file.name, offset, size, transform_descriptors=list(transforms))
    return WriteResult(index, size, info)
