"""A save that a forked or spawned process writes for a trainer.

A `WriteTask` has one rank's files and tensors; `HostCopy` makes it safe from changes while the trainer
waits, and `write` stores the result in a file for the trainer. Invariant: the trainer learns how the writing
ended, and a forked process that was killed is named with its signal.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import signal
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from penstock.checkpoint.engine import WrittenShare
from penstock.checkpoint.file_layout import (
    FileLayout,
    open_device_streams,
    payload_of_bytes,
    payload_of_tensor,
)
from penstock.checkpoint.formats.dcp_metadata import paused_garbage_collection
from penstock.checkpoint.saver import (
    SaveShare,
    StagedFiles,
    choose_pipeline_settings,
    copy_to_host,
)
from penstock.cluster.comm import format_cause
from penstock.errors import PenstockError, StorageError
from penstock.storage.aligned import PAGE_BYTES, round_up
from penstock.storage.capabilities import prefer_direct_access, sync_names
from penstock.storage.uri import open_here
from penstock.transfer.buffers import StagingMemory, WarmMemory

TIMEOUT_S: Final = 1800.0

Parts = Mapping[str, Sequence[bytes | torch.Tensor]]

_MEMORY = StagingMemory(None, is_shared=True)
"""Memory of this process for copies of devices' tensors, kept between saves. The frameworks'
own writers allocate such memory for each save, too, and have no limit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteTask:
    """One rank's files and where their bytes are; may travel to the process that writes them."""

    folder: str
    rank: int
    layouts: tuple[FileLayout, ...]
    parts: Parts
    """By file: the packed object or the tensor of each item, in order."""
    num_bytes: int
    writers: int
    staging_bytes: int
    transforms: tuple[str, ...]
    planner_pid: int
    """The process that made this task."""
    plan_s: float
    was_sent: bool = False
    """Whether it was pickled for another process, which then has copies of tensors in main memory."""
    loan: WarmMemory | None = None
    """The memory that tensors were copied to, here or in the process that this one was forked from."""
    stage_s: float = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        # torch would share the trainer's own memory with the other process. The trainer waits for that to
        # answer a request with `HostCopy`, so the copy is of the moment even if another thread pickles.
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values |= {"parts": _shared_copies(self.parts), "was_sent": True, "loan": None}
        return partial(WriteTask, **values), ()


def _shared_copies(parts: Parts) -> Parts:
    """The same with tensors in main memory copied to one piece of shared memory."""
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
    """Copies what may change before it is written. Called while the trainer waits, there or in its worker.

    A forked process has the trainer's memory of the moment without a copy, but for memory that processes
    share and memory that devices write to.
    """

    task: WriteTask

    def __call__(self) -> WriteTask:
        """The same task with every tensor in main memory, none of which changes."""
        start_s = time.perf_counter()
        tensors = list(_tensors_of(self.task.parts))
        shared = set() if self.task.was_sent else _find_shared(tensors)
        moving = [tensor for tensor in tensors if not tensor.is_cpu or id(tensor) in shared]
        if not moving:
            return self.task
        sizes = [tensor.nbytes for tensor in moving]
        loan = _MEMORY.borrow(max(sum(round_up(size, PAGE_BYTES) for size in sizes), PAGE_BYTES), TIMEOUT_S)
        payloads = [payload_of_tensor(tensor) for tensor in moving]
        views = copy_to_host(payloads, sizes, loan, open_device_streams(payloads))
        copies = {
            id(tensor): torch.frombuffer(view, dtype=tensor.dtype).view(tensor.shape)
            if view
            else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            for tensor, view in zip(moving, views, strict=True)
        }
        parts = _with_tensors(self.task.parts, lambda tensor: copies.get(id(tensor), tensor))
        stage_s = time.perf_counter() - start_s
        self.task = replace(self.task, parts=parts, loan=loan, stage_s=stage_s)
        return self.task


def release(task: WriteTask) -> None:
    """Free the memory of a task for later saves; called once, in the process that has copied."""
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
    """The IDs of the tensors whose memory a forked process shares, which torch does not know of mapped files.

    What torch itself has allocated it knows, and the kernel takes a millisecond to list all that is mapped.
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


def write(rank: int, task: WriteTask, report: str) -> None:  # noqa: ARG001 - callers give the rank first
    """Write one rank's files, each durable, and store the result or the error in the file `report`.

    Collecting garbage here would free what belongs to the trainer, tensors of its devices among it.
    """
    with paused_garbage_collection():
        # A process that was forked for this ends with it.
        if not task.was_sent and os.getpid() != task.planner_pid:
            _write_in_fork(task, report)
        else:
            _store(report, _write_or_fail(task))
    if task.was_sent:
        release(task)


def read_report(report: Path, folder: str) -> WrittenShare | PenstockError:
    """The result of a task, once the process that writes has ended; removes the file."""
    try:
        # This program wrote it, to a file that only its user may write to.
        outcome: WrittenShare | PenstockError = pickle.loads(report.read_bytes())  # noqa: S301
    except FileNotFoundError:
        return StorageError(
            f"The process that writes ended early, without its report {report}",
            uri=folder,
            fix="It was killed: look for the kernel's out-of-memory killer in dmesg. Or is that disk full?",
        )
    report.unlink()
    return outcome


def _write_in_fork(task: WriteTask, report: str) -> None:
    """Write in a further process, so that this one can tell what killed it."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _end_with(parent)
            _store(report, _write_or_fail(task))
            code = 0
        finally:
            # Nothing of what the trainer runs at its exit.
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if Path(report).exists():
        return
    death = f"ended with exit code {os.waitstatus_to_exitcode(status)}"
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        hint = ", as the kernel does when memory runs out (see dmesg)" if name == "SIGKILL" else ""
        death = f"was killed by {name}{hint}"
    _store(report, StorageError(f"The process that writes (pid {pid}) {death}", uri=task.folder))


PR_SET_PDEATHSIG: Final = 1


def _end_with(parent: int) -> None:
    """Have the kernel end this process together with its parent, which frameworks kill to abort a save."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _write_or_fail(task: WriteTask) -> WrittenShare | PenstockError:
    with ThreadPoolExecutor(1) as worker:
        # A future keeps errors of every kind, memory that ran out among them.
        done = worker.submit(_write_files, task)
    error = done.exception()
    if error is None:
        return done.result()
    if isinstance(error, PenstockError):
        return error
    return StorageError(f"Could not write: {format_cause(error)}", uri=task.folder)


def _store(report: str, outcome: WrittenShare | PenstockError) -> None:
    pending = Path(f"{report}.pending")
    pending.write_bytes(pickle.dumps(outcome))
    pending.rename(report)


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
        plan_s=task.plan_s,
    ).transformed(task.transforms)
    settings = choose_pipeline_settings(share.layouts, task.writers, task.staging_bytes)
    memory = StagingMemory(task.staging_bytes)
    staged = StagedFiles(share, memory, settings, copies="with the writes", timeout_s=TIMEOUT_S)
    storage = open_here(task.folder, rank=task.rank)
    written = staged.write_to(prefer_direct_access(storage), lambda name: name)
    sync_names(storage, "")
    held_bytes = task.loan.size_bytes if task.loan is not None else 0
    stats = replace(written.stats, stage_s=task.stage_s, memory_bytes=written.stats.memory_bytes + held_bytes)
    return replace(written, stats=stats)
