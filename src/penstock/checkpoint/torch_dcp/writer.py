"""Writing for torch's own `dcp.save`: direct I/O, sums, and one commit at the end.

`Writer` fills torch's interface from the engine's parts. Invariant: nothing is visible at the path before
`finish`, which the coordinator calls when all ranks have written all they were told to.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from penstock.checkpoint.commit.catalog import open_around
from penstock.checkpoint.commit.transaction import Place, begin
from penstock.checkpoint.dcp.transforms import require_known
from penstock.checkpoint.plan.records import SaveOptions
from penstock.checkpoint.saving import WAITING_BUFFER_BYTES
from penstock.checkpoint.staging.memory import StagingMemory
from penstock.checkpoint.staging.packing import pack_file
from penstock.checkpoint.staging.payloads import payload_of_bytes, payload_of_tensor
from penstock.checkpoint.staging.staged import Share, Staged, pipe_settings
from penstock.checkpoint.torch_dcp.rank_items import RankItems, seal_of
from penstock.cluster.base_comm import SoloComm
from penstock.errors import UsageError
from penstock.storage.capabilities import prefer_direct_access
from penstock.storage.uri import FILE_SCHEMES, parse_uri

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from penstock.checkpoint.commit.catalog import AnyPath
    from penstock.checkpoint.commit.protocol import Draft
    from penstock.checkpoint.staging.payloads import Payload

MEMORY_TIMEOUT_S = 60.0


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
        meta = self.storage_meta()
        place, self._place = self._place, None
        place.commit(lambda: seal_of(metadata, results, meta, save_id=place.draft.save_id))

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
        items = RankItems(plan.items, planner, assigned.rank, self._options)
        share = _share_of(items, self._transforms)
        settings = pipe_settings(share.images, self._options.writers, self._memory.budget_bytes)
        # Memory is this writer's own, so an earlier save of its has long given it back.
        staged = Staged(share, self._memory, settings, copies_first=False, timeout_s=MEMORY_TIMEOUT_S)
        written = staged.write_to(prefer_direct_access(storage), assigned.draft.key)
        return items.results(written, self._transforms)

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


def _share_of(items: RankItems, transforms: tuple[str, ...]) -> Share:
    """What the engine is to write."""
    images = items.images()
    payloads: dict[str, list[Payload]] = items.contents(payload_of_bytes, payload_of_tensor)
    if transforms:
        packed = [pack_file(image, payloads[image.name], transforms) for image in images]
        images = tuple(image for image, _ in packed)
        payloads = {image.name: of_file for image, of_file in packed}
    return Share(
        rank=items.rank, images=images, payloads=payloads, payload_bytes=items.payload_bytes, paths={}
    )
