"""The engine's writer behind the interface that Megatron and NVIDIA's resiliency extension call.

Planning and finishing happen in the trainer, writing in whichever process or thread the caller chooses,
forked or spawned. Those frameworks own the folder and put files of theirs beside ours, so nothing is renamed
here. Invariant: `.metadata`, without which there is no checkpoint, is written when all files of all ranks are
durable, and is removed before any of them is overwritten.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.metadata import StorageMeta

from penstock.checkpoint.commit.catalog import AnyPath
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME, require_complete
from penstock.checkpoint.engine import WrittenShare
from penstock.checkpoint.plan.save_plan import SaveOptions
from penstock.checkpoint.saving.file_layout import FileLayout, payload_of_bytes, payload_of_tensor
from penstock.checkpoint.saving.staging import SaveShare, StagedFiles, StagingMemory, choose_pipeline_settings
from penstock.checkpoint.torch_dcp.writer import RankItems, build_seal
from penstock.errors import ObjectNotFound, PenstockError, StorageError
from penstock.storage.capabilities import prefer_direct_access
from penstock.storage.protocol import write_object
from penstock.storage.uri import open_here

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult


DEFAULT_STAGING_BYTES = 256 << 20
TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteTask:
    """One rank's files and where their bytes are; travels to the process that writes them."""

    folder: str
    rank: int
    layouts: tuple[FileLayout, ...]
    parts: Mapping[str, Sequence[bytes | torch.Tensor]]
    """By file: the packed object or the tensor of each item, in order."""
    num_bytes: int
    writers: int
    staging_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """Copies tensors from devices to main memory. Called by the process that writes."""

    task: WriteTask

    def __call__(self) -> WriteTask:
        """The same task with every tensor in main memory."""
        parts = {
            file: [item.to("cpu") if isinstance(item, torch.Tensor) else item for item in items]
            for file, items in self.task.parts.items()
        }
        return replace(self.task, parts=parts)


def write(rank: int, task: WriteTask, report: str) -> None:  # noqa: ARG001 - callers give the rank first
    """Write one rank's files, each durable, and store the result or the error in the file `report`."""
    outcome: WrittenShare | PenstockError
    try:
        outcome = _write_files(task)
    except PenstockError as error:
        outcome = error
    except (OSError, RuntimeError, ValueError) as error:
        outcome = StorageError(f"Could not write: {error!r}", uri=task.folder)
    pending = Path(f"{report}.pending")
    pending.write_bytes(pickle.dumps(outcome))
    pending.rename(report)


class AsyncWriter:
    """Writes one checkpoint into an existing folder, the same on all ranks; one writer for each save.

    With `snapshots`, tensors in main memory are copied before `prepare_write_data` returns, as the process
    that writes may share them with the trainer. A caller that waits for the writing needs no copy.
    """

    can_run_decentralized_global_plan = True

    def __init__(
        self,
        folder: AnyPath,
        *,
        writers: int = 2,
        separation_hint: str | None = None,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        snapshots: bool = True,
    ) -> None:
        self.checkpoint_id = os.fspath(folder)
        self._options = SaveOptions(writers=writers, separation_hint=separation_hint)
        self._staging_bytes = staging_bytes
        self._snapshots = snapshots
        self._items: RankItems | None = None
        self._task: WriteTask | None = None
        self._report = ""

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:  # noqa: FBT001 - torch's
        """All ranks, first: remove manifest and metadata of an older checkpoint in this folder."""
        if not is_coordinator:
            return
        storage = open_here(self.checkpoint_id)
        for name in (METADATA_NAME, MANIFEST_NAME):
            with suppress(ObjectNotFound):
                storage.delete(name)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """All ranks: nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: nothing to add, as each rank knows its number."""
        return plans

    def prepare_decentralized_global_plan(self, plan: SavePlan) -> SavePlan:
        """All ranks, if each finishes its own plan: nothing to add."""
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """All ranks: lay out this rank's files."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._items = items = RankItems(plan.items, planner, rank, self._options)
        layouts = items.layouts()
        if not layouts:
            return
        self._task = WriteTask(
            folder=self.checkpoint_id,
            rank=rank,
            layouts=layouts,
            parts=_parts_of(items, copies=self._snapshots),
            num_bytes=items.payload_bytes,
            writers=self._options.writers,
            staging_bytes=self._staging_bytes,
        )
        descriptor, self._report = tempfile.mkstemp(prefix="penstock-share-")
        os.close(descriptor)
        Path(self._report).unlink()

    def get_save_function_and_args(self) -> tuple[Callable[..., None] | None, HostCopy | None, list[Any]]:
        """All ranks: a function for any process, a call that prepares its second argument, its arguments.

        None on a rank that has nothing to write.
        """
        if self._task is None:
            return None, None, []
        return write, HostCopy(self._task), [self._task.rank, self._task, self._report]

    def retrieve_write_results(self) -> list[WriteResult] | Any:
        """All ranks, after the writing: its results, or the failure as torch passes it to other ranks."""
        assert self._items is not None, "prepare_write_data comes first"
        if self._task is None:
            return []
        report, self._task = Path(self._report), None
        try:
            # This program wrote it, to a file that only its user may write to.
            outcome = pickle.loads(report.read_bytes())  # noqa: S301
        except FileNotFoundError:
            error = StorageError("The process that writes ended early", uri=self.checkpoint_id)
            return _wrap_exception(error)
        report.unlink()
        return self._items.results(outcome) if isinstance(outcome, WrittenShare) else _wrap_exception(outcome)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: write manifest and metadata once all ranks have written."""
        seal = build_seal(metadata, results, self.storage_meta(), save_id="")
        storage = open_here(self.checkpoint_id)
        sizes = {info.key: info.size_bytes for info in storage.list() if info.key in seal.sizes}
        require_complete(sizes, seal.sizes, storage.uri)
        write_object(storage, MANIFEST_NAME, [seal.manifest])
        write_object(storage, METADATA_NAME, [seal.metadata])

    def storage_meta(self) -> StorageMeta:
        """The part of `.metadata` that describes this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)


def _parts_of(items: RankItems, *, copies: bool) -> dict[str, list[bytes | torch.Tensor]]:
    """The content of the files, in a form that can be pickled; with `copies`, main memory is copied."""

    def part_of(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # Tensors of devices are copied to main memory before they are written, by `HostCopy`.
        memory = memory.to(dtype)
        return memory.clone() if copies and memory.is_cpu else memory

    return items.contents(bytes, part_of)


def _write_files(task: WriteTask) -> WrittenShare:
    payloads = {
        file: [
            payload_of_tensor(item) if isinstance(item, torch.Tensor) else payload_of_bytes(item)
            for item in items
        ]
        for file, items in task.parts.items()
    }
    share = SaveShare(
        rank=task.rank,
        layouts=task.layouts,
        payloads=payloads,
        payload_bytes=task.num_bytes,
        paths={},
        plan_s=0.0,
    )
    settings = choose_pipeline_settings(task.layouts, task.writers, task.staging_bytes)
    memory = StagingMemory(task.staging_bytes)
    staged = StagedFiles(share, memory, settings, copies_first=False, timeout_s=TIMEOUT_S)
    storage = open_here(task.folder, rank=task.rank)
    return staged.write_to(prefer_direct_access(storage), lambda name: name)
