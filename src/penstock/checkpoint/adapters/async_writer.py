"""The engine's writer behind the interface that Megatron and NVIDIA's resiliency extension call.

`AsyncWriter` plans and finishes a save in the trainer. In between, a thread, or a forked or spawned process,
of the caller's choice calls `write` with a `WriteTask`; `HostCopy` protects the task's tensors from changes,
and `TaskReport` returns the result. The frameworks own the folder and put their own files next to the
engine's, so nothing is renamed here. Invariant: `.metadata`, without which there is no checkpoint, is written
when all files of all ranks are durable, and is removed before any of them is overwritten. The trainer always
learns how the writing ended, even if the writing process was killed.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.futures import Future

from penstock.checkpoint.commit.checkpoints import AnyPath, can_be_named
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME
from penstock.checkpoint.engine import TRANSFER_TIMEOUT_S, RankSaveStats, WrittenShare
from penstock.checkpoint.file_layout import (
    FileLayout,
    open_device_streams,
    payload_of_bytes,
    payload_of_tensor,
)
from penstock.checkpoint.formats.dcp_item import require_known_transforms
from penstock.checkpoint.formats.description import paused_garbage_collection, require_complete
from penstock.checkpoint.plan.save_plan import SaveOptions
from penstock.checkpoint.saver import (
    SaveShare,
    copy_to_host,
    write_share,
)
from penstock.checkpoint.torch_dcp import RankItems, build_seal, own_rank
from penstock.cluster.comm import format_cause
from penstock.errors import ObjectNotFound, PenstockError, StorageError, UsageError
from penstock.storage.aligned import PAGE_BYTES, round_up
from penstock.storage.capabilities import sync_names
from penstock.storage.protocol import write_object
from penstock.storage.uri import open_here
from penstock.transfer.buffers import StagingMemory, WarmMemory

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult

Parts = Mapping[str, Sequence[bytes | torch.Tensor]]

_MEMORY = StagingMemory(None, is_shared=True)
"""This process's memory for copies of device tensors, kept between saves. It has no limit; the frameworks'
own writers also allocate such memory, and do so for each save.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteTask:
    """One rank's files and their content; can be pickled for another process, which then writes the files."""

    folder: str
    layouts: tuple[FileLayout, ...]
    parts: Parts
    """The packed object or the tensor of each item, by file and in order."""
    stats: RankSaveStats
    """The costs known before the writing; `stage_s` is set once the tensors are copied."""
    writers: int
    staging_bytes: int
    transforms: tuple[str, ...]
    was_sent: bool = False
    """True if the task was pickled for another process, which then has copies of all tensors in memory."""
    loan: WarmMemory | None = None
    """The memory to which tensors were copied, in this process or in the one from which it was forked."""

    def __reduce__(self) -> tuple[Any, ...]:
        # torch would share the trainer's own memory with the other process. The trainer does not continue
        # until that process has called `HostCopy`, so the copy shows the state at the save even if another
        # thread pickles.
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values |= {"parts": _shared_copies(self.parts), "was_sent": True, "loan": None}
        return partial(WriteTask, **values), ()


def _shared_copies(parts: Parts) -> Parts:
    """Return `parts`, with all tensors in main memory copied into one block of shared memory."""
    in_host = [tensor for tensor in _tensors_of(parts) if tensor.is_cpu]
    sizes = [round_up(tensor.nbytes, PAGE_BYTES) for tensor in in_host]
    whole: torch.Tensor = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu").share_memory_()  # type: ignore[no-untyped-call] # as torch has it
    places = iter(torch.split(whole, sizes))

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cpu:
            return tensor
        place: torch.Tensor = next(places)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return place.copy_(tensor)

    return _with_tensors(parts, copied)


@dataclass(slots=True, eq=False)
class HostCopy:
    """Copies the tensors that may change before they are written.

    Called in the trainer or its worker while training waits. A forked process has a snapshot of the trainer's
    memory without a copy, except for memory that processes share and memory that devices write to.
    """

    task: WriteTask

    def __call__(self) -> WriteTask:
        """Return the task with every tensor in main memory, where nothing changes it any more."""
        start_s = time.perf_counter()
        tensors = list(_tensors_of(self.task.parts))
        shared = set() if self.task.was_sent else _find_shared(tensors)
        moving = [tensor for tensor in tensors if not tensor.is_cpu or id(tensor) in shared]
        if not moving:
            return self.task
        sizes = [tensor.nbytes for tensor in moving]
        needed_bytes = sum(round_up(size, PAGE_BYTES) for size in sizes)
        loan = _MEMORY.borrow(max(needed_bytes, PAGE_BYTES), TRANSFER_TIMEOUT_S)
        payloads = [payload_of_tensor(tensor) for tensor in moving]
        views = copy_to_host(payloads, sizes, loan, open_device_streams(payloads))
        copies = {
            id(tensor): torch.frombuffer(view, dtype=tensor.dtype).view(tensor.shape)
            if view
            else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            for tensor, view in zip(moving, views, strict=True)
        }
        parts = _with_tensors(self.task.parts, lambda tensor: copies.get(id(tensor), tensor))
        stats = replace(self.task.stats, stage_s=time.perf_counter() - start_s)
        self.task = replace(self.task, parts=parts, loan=loan, stats=stats)
        return self.task


def release(task: WriteTask) -> None:
    """Free a task's memory for later saves. Called once, in the process that copied the tensors."""
    if task.loan is not None:
        _MEMORY.give_back(task.loan)


def _tensors_of(parts: Parts) -> Iterator[torch.Tensor]:
    return (item for items in parts.values() for item in items if isinstance(item, torch.Tensor))


def _with_tensors(parts: Parts, change: Callable[[torch.Tensor], torch.Tensor]) -> Parts:
    return {
        file: [change(item) if isinstance(item, torch.Tensor) else item for item in items]
        for file, items in parts.items()
    }


_SHARED_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...s", re.MULTILINE)


def _find_shared(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Return the IDs of tensors whose memory a forked process shares with its parent, including mapped files.

    torch knows which of its own allocations are shared. Reading the kernel's mappings takes a millisecond, so
    they are read only if some memory was not allocated by torch.
    """
    in_host = [tensor for tensor in tensors if tensor.is_cpu]
    known = {
        id(tensor)
        for tensor in in_host
        if tensor.is_pinned() or tensor.is_shared()  # type: ignore[no-untyped-call] # torch leaves it untyped
    }
    foreign = [tensor for tensor in in_host if not tensor.untyped_storage().resizable()]
    if not foreign:
        return known
    mappings = _SHARED_MAPPING.findall(Path("/proc/self/maps").read_bytes())
    begins, ends = [int(begin, 16) for begin, _ in mappings], [int(end, 16) for _, end in mappings]

    def is_mapped(tensor: torch.Tensor) -> bool:
        number = bisect_right(begins, tensor.data_ptr()) - 1
        return number >= 0 and tensor.data_ptr() < ends[number]

    return known | {id(tensor) for tensor in foreign if is_mapped(tensor)}


class TaskReport:
    """The outcome of a task, in a file without a name: only a process that received the file can open it."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._file = os.memfd_create("penstock-report") if descriptor is None else descriptor

    def __del__(self) -> None:
        os.close(self._file)

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_report, (DupFd(self._file),)

    def store(self, outcome: WrittenShare | PenstockError) -> None:
        """Store the outcome. If the process is killed during this call, nothing is stored."""
        content = pickle.dumps(outcome)
        os.pwrite(self._file, content, 8)
        os.pwrite(self._file, len(content).to_bytes(8, "little"), 0)

    def read(self) -> WrittenShare | PenstockError | None:
        """Return the stored outcome, or None if nothing was stored."""
        size_bytes = int.from_bytes(os.pread(self._file, 8, 0), "little")
        content = os.pread(self._file, size_bytes, 8)
        outcome: WrittenShare | PenstockError | None = None
        if size_bytes and len(content) == size_bytes:
            # Only this process and those to which it gave the file can have written to it.
            outcome = pickle.loads(content)  # noqa: S301
        return outcome


def _receive_report(sent: Any) -> TaskReport:
    return TaskReport(sent.detach())


def write(rank: int, task: WriteTask, report: TaskReport) -> None:  # noqa: ARG001 - callers give the rank first
    """Write one rank's files, each durably, and store the result or the error in `report`.

    Garbage collection is paused, because here it would free what belongs to the trainer, including device
    tensors.
    """
    with paused_garbage_collection():
        report.store(_write_or_fail(task))
    if task.was_sent:
        release(task)


def _write_or_fail(task: WriteTask) -> WrittenShare | PenstockError:
    with ThreadPoolExecutor(1) as worker:
        # A future keeps every kind of error, including exhausted memory.
        done = worker.submit(_write_files, task)
    error = done.exception()
    if error is None:
        return done.result()
    if isinstance(error, PenstockError):
        return error
    return StorageError(f"Could not write: {format_cause(error)}", uri=task.folder)


def _write_files(task: WriteTask) -> WrittenShare:
    payloads = {
        file: [
            payload_of_tensor(item) if isinstance(item, torch.Tensor) else payload_of_bytes(item)
            for item in items
        ]
        for file, items in task.parts.items()
    }
    share = SaveShare(layouts=task.layouts, payloads=payloads, stats=task.stats)
    storage, memory = open_here(task.folder, rank=task.stats.rank), StagingMemory(task.staging_bytes)
    written = write_share(share, storage, str, memory, writers=task.writers, transforms=task.transforms)
    sync_names(storage, "")
    held_bytes = task.loan.size_bytes if task.loan is not None else 0
    stats = replace(
        written.stats, stage_s=task.stats.stage_s, memory_bytes=written.stats.memory_bytes + held_bytes
    )
    return replace(written, stats=stats)


DEFAULT_STAGING_BYTES = 256 << 20

logger = logging.getLogger(__name__)


class AsyncWriter(FileSystemWriter):
    """Writes one checkpoint into an existing folder, the same on all ranks. Each save needs a new writer.

    Each rank writes at most `writers` files, half of them for names that begin with `separation_hint`, if it
    is given. Tensors may change once the framework has scheduled the save: a forked process has a snapshot of
    them, whereas a thread or a spawned process receives copies.
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
                f"separation_hint={separation_hint!r} needs more files than writers={writers} allows",
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
        self._report: TaskReport | None = None

    @property
    def checkpoint_id(self) -> str:
        """The folder as the caller gave it."""
        return self._folder

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, perhaps in another folder."""
        super().reset(checkpoint_id)
        if checkpoint_id is not None:
            self._folder = os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:  # noqa: FBT001 - torch's
        """Remove the manifest and metadata of any checkpoint in the folder. Called first, on all ranks."""
        if not is_coordinator:
            return
        storage = open_here(self._folder)
        for name in (METADATA_NAME, MANIFEST_NAME):
            with suppress(ObjectNotFound):
                storage.delete(name)

    def _unchanged(self, planned: Any) -> Any:
        """Return the plan or plans unchanged: each rank names its files by its own number."""
        return planned

    prepare_local_plan = prepare_global_plan = prepare_decentralized_global_plan = _unchanged  # type: ignore[assignment] # of any kind

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Lay out this rank's files. Nothing is copied yet. Called on all ranks."""
        start_s = time.perf_counter()
        rank = own_rank()
        self._copy, self._items = None, RankItems(plan.items, planner, rank, self._options)
        if not self._items.layouts:
            return
        task = WriteTask(
            folder=self._folder,
            layouts=self._items.layouts,
            parts=self._items.contents(bytes, _memory_of),
            writers=self._writers,
            staging_bytes=self._staging_bytes,
            transforms=self._transforms,
            stats=RankSaveStats(
                rank=rank,
                payload_bytes=self._items.payload_bytes,
                plan_s=time.perf_counter() - start_s,
            ),
        )
        self._copy = HostCopy(task)
        self._report = TaskReport()

    def get_save_function_and_args(self) -> tuple[Callable[..., None] | None, HostCopy | None, list[Any]]:
        """Return the function to call, a callable that prepares its task, and its arguments.

        Called on all ranks. The function may run in any process. The first two are None on a rank that has
        nothing to write.
        """
        if self._copy is None:
            return None, None, []
        task = self._copy.task
        return write, self._copy, [task.stats.rank, task, self._report]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Prepare, write, and return the results.

        Called on all ranks, instead of the two methods above, if the caller has no process to write in.
        """
        self.prepare_write_data(plan, planner)
        if self._copy is not None and self._report is not None:
            task = self._copy()
            write(task.stats.rank, task, self._report)
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._finished_results())
        return done

    def retrieve_write_results(self) -> list[WriteResult] | Any:
        """Return the results, or the failure in the form that torch sends to other ranks.

        Called last, on all ranks.
        """
        try:
            return self._finished_results()
        except PenstockError as error:
            return _wrap_exception(error)

    def _finished_results(self) -> list[WriteResult]:
        assert self._items is not None, "prepare_write_data comes first"
        if self._copy is None or self._report is None:
            return []
        release(self._copy.task)
        outcome = self._report.read()
        self._copy = self._report = None
        if outcome is None:
            raise StorageError(
                "The writing process ended early, without a report",
                uri=self._folder,
                fix="It was killed: look for the kernel's out-of-memory killer in dmesg.",
            )
        if not isinstance(outcome, WrittenShare):
            raise outcome
        logger.info("rank %d, %s: %s", outcome.stats.rank, self._folder, outcome.stats)
        return self._items.results(outcome, self._transforms)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and metadata after all ranks' files. Called on the coordinator."""
        seal = build_seal(metadata, results, self.storage_meta())
        storage = open_here(self._folder)
        sizes = {info.key: info.size_bytes for info in storage.list() if info.key in seal.sizes}
        require_complete(sizes, seal.sizes, storage.uri)
        write_object(storage, MANIFEST_NAME, [seal.manifest])
        write_object(storage, METADATA_NAME, [seal.metadata])

    def storage_meta(self) -> StorageMeta:
        """Return the part of `.metadata` that describes this save."""
        return StorageMeta(checkpoint_id=self._folder, save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return can_be_named(checkpoint_id)


def _memory_of(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Done here rather than where the tensor is written, because torch's threads do not survive a fork.
    return memory.to(dtype).resolve_conj().resolve_neg()
