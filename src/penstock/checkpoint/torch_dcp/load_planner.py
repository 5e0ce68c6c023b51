"""Planning for torch's own `dcp.load`: chosen and renamed parts, objects of each rank, safe unpickling.

`LoadPlanner` fills torch's interface from the engine's parts. Invariant: everything goes back to the very
place in the state that it was found at, keys that are no text included.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from penstock.checkpoint.dcp.objects import load_object
from penstock.checkpoint.engine import LoadChoice
from penstock.checkpoint.loading.selecting import Selection, select
from penstock.checkpoint.tensors import destinations
from penstock.errors import UsageError

if TYPE_CHECKING:
    import io

    import torch
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    from penstock.checkpoint.engine import Names
    from penstock.checkpoint.tensors import Holding


class LoadPlanner(DefaultLoadPlanner):
    """A drop-in for torch's `DefaultLoadPlanner`: `dcp.load(state, planner=pc.LoadPlanner(), ...)`.

    The choices are those of `pc.load`; after the load, `selection` says what was left. Works with torch's
    storage readers as well as with `pc.Reader`.
    """

    def __init__(
        self,
        *,
        only: Names | None = None,
        exclude: Names | None = None,
        rename: dict[str, str] | None = None,
        strict: bool = True,
        trust: bool = False,
    ) -> None:
        super().__init__(allow_partial_load=not strict)
        self._choice = LoadChoice(only=only, exclude=exclude, rename=rename, strict=strict, trust=trust)
        self._holding: Holding | None = None
        self.selection: Selection | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - as torch has it
    ) -> None:
        """All ranks: look at what this rank has room for."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._holding = destinations(state_dict)

    def create_local_plan(self) -> LoadPlan:
        """All ranks: which stored chunks go into which of this rank's pieces."""
        assert self._holding is not None, "torch calls set_up_planner first"
        assert self.metadata is not None, "torch calls set_up_planner with it"
        stored = self.metadata.state_dict_metadata
        names = [leaf.name for leaf in self._holding.leaves]
        self.selection = select(names, stored, self._choice, rank=_rank())
        items: list[ReadItem] = []
        for name, stored_name in self.selection.stored_names.items():
            about = stored[stored_name]
            if isinstance(about, BytesStorageMetadata):
                items.append(_object_item(name, stored_name))
            else:
                items += self._tensor_items(name, stored_name, about)
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """An object has come: unpickle it as harmless data, or as anything with `trust`; put it in place."""
        assert self._holding is not None, "torch calls set_up_planner first"
        name = read_item.dest_index.fqn
        found = load_object(value.getvalue(), name, trust=self._choice.trust, where="this checkpoint")
        (leaf,) = (each for each in self._holding.leaves if each.name == name)
        leaf.put(found)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The live memory that a read goes to."""
        assert self._holding is not None, "torch calls set_up_planner first"
        index = read_item.dest_index
        corner = tuple(index.offset or (0,) * len(read_item.lengths))
        begin = [at + inside for at, inside in zip(corner, read_item.dest_offsets, strict=True)]
        return self._holding.view(index.fqn, begin, tuple(read_item.lengths))

    def _tensor_items(self, name: str, stored_name: str, about: TensorStorageMetadata) -> list[ReadItem]:
        assert self._holding is not None, "torch calls set_up_planner first"
        if name not in self._holding.pieces:
            raise UsageError(
                f"{name!r} is no tensor in the state, but {stored_name!r} is one in the checkpoint",
                fix="Give the state a tensor there, or leave this part out with exclude=.",
            )
        (facts,) = (each for each in self._holding.held.tensors if each.name == name)
        if facts.shape != tuple(about.size):
            raise UsageError(
                f"{name!r} is {list(facts.shape)} in the state and {list(about.size)} in the checkpoint",
                fix="Build the state with the configuration it was saved with, or leave this part out.",
            )
        chunks = [
            ChunkStorageMetadata(_size(piece.offsets), _size(piece.sizes))
            for piece in self._holding.pieces[name]
        ]
        items = create_read_items_for_chunk_list(stored_name, about, chunks)
        return [
            replace(item, dest_index=MetadataIndex(name, item.dest_index.offset, item.dest_index.index))
            for item in items
        ]


def _object_item(name: str, stored_name: str) -> ReadItem:
    nothing = _size((0,))
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(name),
        dest_offsets=nothing,
        storage_index=MetadataIndex(stored_name),
        storage_offsets=nothing,
        lengths=nothing,
    )


def _size(numbers: tuple[int, ...]) -> torch.Size:
    from torch import Size  # noqa: PLC0415 - torch is loaded by now

    return Size(numbers)


def _rank() -> int:
    import torch.distributed as dist  # noqa: PLC0415 - likewise

    return dist.get_rank() if dist.is_initialized() else 0
