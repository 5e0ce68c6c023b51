"""Planners for torch's `dcp.save` and `dcp.load`, built on the engine's own.

`SavePlanner` lets replicas share the work and keeps each rank's own objects; `LoadPlanner` selects and
renames. Both work with torch's storage writers and readers as well as with ours. Invariant: each byte is
written once, and everything is loaded back into its place in the state.
"""

from __future__ import annotations

import io
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from penstock.checkpoint.engine import LoadChoice
from penstock.checkpoint.formats.dcp_item import load_object
from penstock.checkpoint.match import LeafSelection, find_matches, require_matches, select_leaves
from penstock.checkpoint.plan.save_plan import Holdings, PlacedObject, RankRegions, SaveOptions, plan_job
from penstock.checkpoint.state.tensors import LocalState, collect_for_load, collect_for_save, warn_of_losses
from penstock.checkpoint.state.walk import NamePatterns, Owner, Path, find_leaf_name
from penstock.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata


class LoadPlanner(DefaultLoadPlanner):
    """A drop-in for torch's `DefaultLoadPlanner`: `dcp.load(state, planner=pc.LoadPlanner(), ...)`.

    `only`, `exclude`, `rename`, `strict`, `trust` and the others are those of `pc.load`; after the load,
    `selection` says what was not loaded. Works with torch's storage readers as well as with `pc.Reader`.
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
        self._local_state: LocalState | None = None
        self.selection: LeafSelection | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - as torch has it
    ) -> None:
        """All ranks: find the memory to load into."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._local_state = collect_for_load(state_dict)

    def create_local_plan(self) -> planner.LoadPlan:
        """All ranks: plan which stored chunks go into which of this rank's shards."""
        assert self._local_state is not None, "torch calls set_up_planner first"
        assert self.metadata is not None, "torch calls set_up_planner with it"
        stored = self.metadata.state_dict_metadata
        names = [leaf.name for leaf in self._local_state.leaves]
        self.selection = select_leaves(
            names, stored, self._choice, rank=dist.get_rank() if dist.is_initialized() else 0
        )
        items: list[planner.ReadItem] = []
        for name, stored_name in self.selection.stored_names.items():
            about = stored[stored_name]
            if isinstance(about, BytesStorageMetadata):
                items.append(_object_item(name, stored_name))
            else:
                items += self._tensor_items(name, stored_name, about)
        return planner.LoadPlan(items, planner_data=find_matches(self._choice, names, stored))

    def create_global_plan(self, global_plan: list[planner.LoadPlan]) -> list[planner.LoadPlan]:
        """Coordinator: refuse a choice that no rank has anything of."""
        met = [any(of_ranks) for of_ranks in zip(*(plan.planner_data for plan in global_plan), strict=True)]
        stored = list(self.metadata.state_dict_metadata) if self.metadata is not None else []
        require_matches(self._choice, met, stored, 0)
        return super().create_global_plan(global_plan)

    def load_bytes(self, read_item: planner.ReadItem, value: io.BytesIO) -> None:
        """Unpickle an object, only as harmless data unless `trust` is set, and put it in place."""
        assert self._local_state is not None, "torch calls set_up_planner first"
        name = read_item.dest_index.fqn
        loaded = load_object(value.getvalue(), name, trust=self._choice.trust, where="this checkpoint")
        (leaf,) = (leaf for leaf in self._local_state.leaves if leaf.name == name)
        leaf.put(loaded)

    def resolve_tensor(self, read_item: planner.ReadItem) -> torch.Tensor:
        """The state's memory that a read goes to."""
        assert self._local_state is not None, "torch calls set_up_planner first"
        index = read_item.dest_index
        corner = tuple(index.offset or (0,) * len(read_item.lengths))
        begin = [at + inside for at, inside in zip(corner, read_item.dest_offsets, strict=True)]
        return self._local_state.view(index.fqn, begin, tuple(read_item.lengths))

    def _tensor_items(
        self, name: str, stored_name: str, about: TensorStorageMetadata
    ) -> list[planner.ReadItem]:
        assert self._local_state is not None, "torch calls set_up_planner first"
        if name not in self._local_state.shards:
            raise UsageError(
                f"{name!r} is an object in the state, but {stored_name!r} is a tensor in the checkpoint",
                fix="Give the state a tensor there, or skip this part with exclude=.",
            )
        (facts,) = (facts for facts in self._local_state.holdings.tensors if facts.name == name)
        if facts.shape != tuple(about.size):
            raise UsageError(
                f"Size mismatch: {name!r} is {list(facts.shape)} in the state and {list(about.size)} in the"
                " checkpoint",
                fix="Build the state with the configuration it was saved with, or skip this part.",
            )
        chunks = [
            ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))
            for shard in self._local_state.shards[name]
        ]
        items = create_read_items_for_chunk_list(stored_name, about, chunks)
        return [
            replace(item, dest_index=MetadataIndex(name, item.dest_index.offset, item.dest_index.index))
            for item in items
        ]


def _object_item(name: str, stored_name: str) -> planner.ReadItem:
    nothing = torch.Size((0,))
    return planner.ReadItem(
        type=planner.LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(name),
        dest_offsets=nothing,
        storage_index=MetadataIndex(stored_name),
        storage_offsets=nothing,
        lengths=nothing,
    )


class SavePlanner(DefaultSavePlanner):
    """A drop-in for torch's `DefaultSavePlanner`: `dcp.save(state, planner=pc.SavePlanner(), ...)`.

    `min_cut_bytes`: a replicated tensor below twice this size is written whole by one rank.
    """

    def __init__(self, *, min_cut_bytes: int = 64 * 1024) -> None:
        super().__init__()
        self._options = SaveOptions(min_cut_bytes=min_cut_bytes)
        self._local_state: LocalState | None = None
        self._plain_names: dict[str, str] = {}
        self._told: set[str] = set()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - as torch has it
    ) -> None:
        """All ranks: list what this rank holds."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        # torch has replaced parts by their states, and has no names for empty dicts.
        self._local_state = collect_for_save(state_dict, owner_of=lambda _: Owner.FIXED)
        warn_of_losses(self._local_state, dist.get_rank() if dist.is_initialized() else 0, self._told, set())

    def create_local_plan(self) -> planner.SavePlan:
        """All ranks: send the coordinator what this rank holds."""
        assert self._local_state is not None, "torch calls set_up_planner first"
        paths = {leaf.name: leaf.path for leaf in self._local_state.leaves}
        self.plan = planner.SavePlan([], planner_data=(self._local_state.holdings, paths))
        return self.plan

    def create_global_plan(
        self, all_plans: list[planner.SavePlan]
    ) -> tuple[list[planner.SavePlan], Metadata]:
        """Coordinator: decide which rank writes what."""
        facts: list[tuple[Holdings, dict[str, Path]]] = [plan.planner_data for plan in all_plans]
        shared, objects = plan_job([holdings for holdings, _ in facts], self._options)
        plans = [
            replace(
                plan,
                items=_write_items(shared, objects[rank].placed, rank),
                planner_data=_plain_names(objects[rank].placed),
            )
            for rank, plan in enumerate(all_plans)
        ]
        plans, metadata = create_default_global_save_plan(plans)
        metadata.planner_data = dict(ChainMap(*(paths for _, paths in facts)))
        for name in metadata.state_dict_metadata:
            metadata.planner_data.setdefault(name, (name,))
        self.global_plan, self.metadata = plans, metadata
        return plans, metadata

    def finish_plan(self, new_plan: planner.SavePlan) -> planner.SavePlan:
        """All ranks: keep what the coordinator decided."""
        self._plain_names = new_plan.planner_data
        self.plan = new_plan
        return new_plan

    def resolve_data(self, write_item: planner.WriteItem) -> torch.Tensor | io.BytesIO:
        """The memory of a region, live and perhaps strided, or a packed object."""
        assert self._local_state is not None, "torch calls set_up_planner first"
        name = write_item.index.fqn
        if write_item.type is planner.WriteItemType.BYTE_IO:
            return io.BytesIO(self._local_state.objects[self._plain_names.get(name, name)])
        assert write_item.tensor_data is not None, "every other item is a tensor's"
        chunk = write_item.tensor_data.chunk
        leaf = find_leaf_name(name, self._local_state.shards)
        memory = self._local_state.view(leaf, tuple(chunk.offsets), tuple(chunk.sizes))
        # Readers other than torch's own do not know views that stand for their conjugates.
        return memory.resolve_conj().resolve_neg()


def _plain_names(objects: Sequence[PlacedObject]) -> dict[str, str]:
    """The leaf's name of each object that is stored under another name."""
    return {placed.stored_name: placed.name for placed in objects if placed.stored_name != placed.name}


def _write_items(shared: RankRegions, objects: Sequence[PlacedObject], rank: int) -> list[planner.WriteItem]:
    """One rank's part of the plan as torch's write items."""
    items = [
        planner.WriteItem(MetadataIndex(placed.stored_name), planner.WriteItemType.BYTE_IO)
        for placed in objects
    ]
    regions = shared.regions.take(shared.rank == rank)
    for row, number in enumerate(regions.tensor.tolist()):
        facts = shared.tensors[number]
        offsets, sizes = regions.region(row, len(facts.shape))
        data = planner.TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            properties=TensorProperties(dtype=getattr(torch, facts.dtype)),
            size=torch.Size(facts.shape),
        )
        kind = planner.WriteItemType.TENSOR if sizes == facts.shape else planner.WriteItemType.SHARD
        items.append(planner.WriteItem(MetadataIndex(facts.name, offsets), kind, tensor_data=data))
    return items
