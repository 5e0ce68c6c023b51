"""The engine's writer behind the interface that Megatron and NVIDIA's resiliency extension call.

Planning and finishing happen in the trainer, writing in whichever process or thread the caller chooses,
forked or spawned (`write_task`). Those frameworks own the folder and put files of theirs beside ours, so
nothing is renamed here. Invariant: `.metadata`, without which there is no checkpoint, is written when all
files of all ranks are durable, and is removed before any of them is overwritten.
"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.futures import Future

from penstock.checkpoint.adapters.write_task import HostCopy, WriteTask, read_report, release, write
from penstock.checkpoint.commit.catalog import AnyPath, can_be_named
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME
from penstock.checkpoint.engine import WrittenShare
from penstock.checkpoint.formats.dcp_item import require_known_transforms
from penstock.checkpoint.formats.manifest import require_complete
from penstock.checkpoint.plan.save_plan import SaveOptions
from penstock.checkpoint.torch_dcp.writer import RankItems, build_seal
from penstock.errors import ObjectNotFound, PenstockError, UsageError
from penstock.storage.protocol import write_object
from penstock.storage.uri import open_here

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult


DEFAULT_STAGING_BYTES = 256 << 20

logger = logging.getLogger(__name__)


class AsyncWriter(FileSystemWriter):
    """Writes one checkpoint into an existing folder, the same on all ranks; one writer for each save.

    Each rank writes at most `writers` files, half of them for names that begin with `separation_hint`.
    Tensors may change once the framework has scheduled the save: a forked process has them as they were, and
    the others get copies.
    """

    can_run_decentralized_global_plan = True

    def __init__(
        self,
        folder: AnyPath,
        *,
        writers: int = 2,
        separation_hint: str | None = None,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        transforms: Sequence[str] = (),
    ) -> None:
        require_known_transforms(transforms)
        if separation_hint is not None and writers < 2:
            raise UsageError(
                f"separation_hint={separation_hint!r} needs files of its own, beyond writers={writers}",
                fix="Use at least 2 writers.",
            )
        super().__init__(folder, thread_count=writers)
        self._folder = os.fspath(folder)
        groups = 1 if separation_hint is None else 2
        self._options = SaveOptions(writers=writers // groups, separation_hint=separation_hint)
        self._writers = writers
        self._staging_bytes = staging_bytes
        self._transforms = tuple(transforms)
        self._items: RankItems | None = None
        self._copy: HostCopy | None = None
        self._report = ""

    @property
    def checkpoint_id(self) -> str:
        """The folder, as it was given."""
        return self._folder

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, perhaps in another folder."""
        super().reset(checkpoint_id)
        if checkpoint_id is not None:
            self._folder = os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:  # noqa: FBT001 - torch's
        """All ranks, first: remove manifest and metadata of an older checkpoint in this folder."""
        if not is_coordinator:
            return
        storage = open_here(self._folder)
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
        """All ranks: lay out this rank's files. Nothing is copied yet."""
        start_s = time.perf_counter()
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._copy, self._items = None, RankItems(plan.items, planner, rank, self._options)
        layouts = self._items.layouts()
        if not layouts:
            return
        task = WriteTask(
            folder=self._folder,
            rank=rank,
            layouts=layouts,
            parts=self._items.contents(bytes, _memory_of),
            num_bytes=self._items.payload_bytes,
            writers=self._writers,
            staging_bytes=self._staging_bytes,
            transforms=self._transforms,
            planner_pid=os.getpid(),
            plan_s=time.perf_counter() - start_s,
        )
        self._copy = HostCopy(task)
        self._report = f"{tempfile.gettempdir()}/penstock-share-{secrets.token_hex(16)}"

    def get_save_function_and_args(self) -> tuple[Callable[..., None] | None, HostCopy | None, list[Any]]:
        """All ranks: a function for any process, a call that prepares its second argument, its arguments.

        None on a rank that has nothing to write.
        """
        if self._copy is None:
            return None, None, []
        task = self._copy.task
        return write, self._copy, [task.rank, task, self._report]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """All ranks, for callers without a process for it: prepare, write, and return the results."""
        self.prepare_write_data(plan, planner)
        if self._copy is not None:
            task = self._copy()
            write(task.rank, task, self._report)
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._finished_results())
        return done

    def retrieve_write_results(self) -> list[WriteResult] | Any:
        """All ranks, after the writing: its results, or the failure as torch passes it to other ranks."""
        try:
            return self._finished_results()
        except PenstockError as error:
            return _wrap_exception(error)

    def _finished_results(self) -> list[WriteResult]:
        assert self._items is not None, "prepare_write_data comes first"
        if self._copy is None:
            return []
        release(self._copy.task)
        self._copy = None
        outcome = read_report(Path(self._report), self._folder)
        if not isinstance(outcome, WrittenShare):
            raise outcome
        logger.info("rank %d, %s: %s", outcome.rank, self._folder, outcome.stats.describe())
        return self._items.results(outcome, self._transforms)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: write manifest and metadata once all ranks have written."""
        seal = build_seal(metadata, results, self.storage_meta())
        storage = open_here(self._folder)
        sizes = {info.key: info.size_bytes for info in storage.list() if info.key in seal.sizes}
        require_complete(sizes, seal.sizes, storage.uri)
        write_object(storage, MANIFEST_NAME, [seal.manifest])
        write_object(storage, METADATA_NAME, [seal.metadata])

    def storage_meta(self) -> StorageMeta:
        """The part of `.metadata` that describes this save."""
        return StorageMeta(checkpoint_id=self._folder, save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any path, and URIs of known storages."""
        return can_be_named(checkpoint_id)


def _memory_of(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Here and not where it is written: torch's threads do not survive a fork.
    return memory.to(dtype).resolve_conj().resolve_neg()
