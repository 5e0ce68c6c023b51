"""Planning for torch's own `dcp.save`: replicas divide their bytes, and objects of each rank are kept.

`SavePlanner` fills torch's interface from the engine's planners. Invariant: its plan writes every byte of
every tensor once, and works with torch's storage writers as well as with ours.
"""

from __future__ import annotations

import io
from collections import ChainMap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from penstock.checkpoint.plan.objects import place_objects
from penstock.checkpoint.plan.records import SaveOptions
from penstock.checkpoint.plan.saving import share_saving
from penstock.checkpoint.tensors import hold

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    from penstock.checkpoint.plan.records import Held, PlacedObject, SharedSavePlan
    from penstock.checkpoint.tensors import Holding


@dataclass(frozen=True, slots=True)
class _Told:
    """What each rank sends to the coordinator beside its empty plan, and what its own plan brings back."""

    held: Held
    paths: dict[str, tuple[str | int, ...]]


class SavePlanner(DefaultSavePlanner):
    """A drop-in for torch's `DefaultSavePlanner`: `dcp.save(state, planner=pc.SavePlanner(), ...)`.

    `min_cut_bytes`: a replicated tensor below twice this size is written whole by one rank.
    """

    def __init__(self, *, min_cut_bytes: int = 64 * 1024) -> None:
        super().__init__()
        self._options = SaveOptions(min_cut_bytes=min_cut_bytes)
        self._holding: Holding | None = None
        self._plain_names: dict[str, str] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - as torch has it
    ) -> None:
        """All ranks: look at what this rank holds."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._holding = hold(state_dict)

    def create_local_plan(self) -> SavePlan:
        """All ranks: tell the coordinator what this rank holds; it decides who writes what."""
        assert self._holding is not None, "torch calls set_up_planner first"
        paths = {leaf.name: leaf.path for leaf in self._holding.leaves}
        self.plan = SavePlan([], planner_data=_Told(self._holding.held, paths))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Coordinator: divide what all ranks hold."""
        told: list[_Told] = [plan.planner_data for plan in all_plans]
        shared = share_saving([each.held for each in told], self._options)
        objects = place_objects([each.held.objects for each in told])
        plans = [
            replace(plan, items=_items(shared, objects[rank], rank), planner_data=_plain_names(objects[rank]))
            for rank, plan in enumerate(all_plans)
        ]
        plans, metadata = create_default_global_save_plan(plans)
        metadata.planner_data = dict(ChainMap(*(each.paths for each in told)))
        for placed in (each for rank in objects for each in rank if each.stored_name != each.name):
            metadata.planner_data[placed.stored_name] = (placed.stored_name,)
        self.global_plan, self.metadata = plans, metadata
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """All ranks: take what the coordinator decided."""
        self._plain_names = new_plan.planner_data
        self.plan = new_plan
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The memory of a box, live and perhaps strided, or a packed object."""
        assert self._holding is not None, "torch calls set_up_planner first"
        name = write_item.index.fqn
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(self._holding.objects[self._plain_names.get(name, name)])
        assert write_item.tensor_data is not None, "every other item is a tensor's"
        chunk = write_item.tensor_data.chunk
        memory = self._holding.view(name, tuple(chunk.offsets), tuple(chunk.sizes))
        # Readers other than torch's own know nothing of views that stand for their conjugates.
        return memory.resolve_conj().resolve_neg()


def _plain_names(objects: list[PlacedObject]) -> dict[str, str]:
    """The leaf's name of each object that is stored under another."""
    return {each.stored_name: each.name for each in objects if each.stored_name != each.name}


def _items(shared: SharedSavePlan, objects: list[PlacedObject], rank: int) -> list[WriteItem]:
    """One rank's part in torch's words."""
    items = [WriteItem(MetadataIndex(each.stored_name), WriteItemType.BYTE_IO) for each in objects]
    mine = shared.boxes.take(shared.rank == rank)
    for row, number in enumerate(mine.tensor.tolist()):
        facts = shared.tensors[number]
        offsets, sizes = mine.box(row, len(facts.shape))
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            properties=TensorProperties(dtype=getattr(torch, facts.dtype)),
            size=torch.Size(facts.shape),
        )
        kind = WriteItemType.TENSOR if sizes == facts.shape else WriteItemType.SHARD
        items.append(WriteItem(MetadataIndex(facts.name, offsets), kind, tensor_data=data))
    return items
