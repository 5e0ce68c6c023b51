"""The training that a study emulates on each rank: a state, steps that take time, and savers of checkpoints.

A step computes for the same time in every row, so any extra time during a flush is the flush's cost. A save
is durable on the row's level when `save` returns, unless the row saves in the background.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from penstock.bench.compute import SystemClock, compute_until
from penstock.bench.state_layout import StateLayout
from penstock.checkpoint import Flush, Manager
from penstock.cluster.comm import Comm
from penstock.storage import Storage, capabilities
from penstock.workflows.levels_study.study_plan import NUM_KEPT, SaveMode, StudyLevel, StudyRow

_WORK_BYTES: Final = 8 << 20
"""Memory that a step touches: a host's work for an accelerator, some milliseconds of one core."""
_PIECE_BYTES: Final = 16 << 20


class EmulatedTrainer:
    """One rank's state and steps."""

    def __init__(self, layout: StateLayout, rank: int, *, step_s: float) -> None:
        self.rank = rank
        random = np.random.Generator(np.random.SFC64(rank))
        # Names contain the rank: the engine writes entries that ranks share only once.
        self.state: Mapping[str, torch.Tensor] = {
            f"rank_{rank}/{file.name}": torch.from_numpy(_random_bytes(random, file.size_bytes))
            for file in layout.files_of(rank)
        }
        self._step_ns = round(step_s * 1e9)
        self._work = np.ones(_WORK_BYTES // 8, dtype=np.int64)
        self._clock = SystemClock()

    def files(self) -> Iterator[tuple[str, memoryview]]:
        """The state as plain files."""
        for name, tensor in self.state.items():
            yield name, tensor.numpy().data

    def step(self) -> None:
        """Wait as long as an accelerator computes, then do the host's work."""
        compute_until(time.monotonic_ns() + self._step_ns, self._clock)
        self._work += 1


def _random_bytes(random: np.random.Generator, size_bytes: int) -> NDArray[np.uint8]:
    """Incompressible bytes, drawn in pieces: a state may take half of a host's memory."""
    drawn = np.empty(size_bytes, dtype=np.uint8)
    for start in range(0, size_bytes, _PIECE_BYTES):
        piece = drawn[start : start + _PIECE_BYTES]
        piece[:] = np.frombuffer(random.bytes(piece.nbytes), dtype=np.uint8)
    return drawn


@contextmanager
def process_group(comm: Comm, meeting: Path) -> Iterator[None]:
    """Make the ranks of `comm` torch's default group, over gloo, unless there is one. Collective.

    They meet at `meeting`, a file on a shared file system that is removed afterwards.
    """
    if comm.size == 1 or dist.is_initialized():
        yield
        return
    torch.set_num_threads(1)
    if comm.rank == 0:
        meeting.unlink(missing_ok=True)
    comm.barrier(awaiting="rank 0 to remove an old meeting file")
    store = dist.FileStore(str(meeting), comm.size)  # type: ignore[attr-defined] # not in torch's stubs
    limit = timedelta(seconds=comm.timeout_s)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()
    comm.barrier(awaiting="all ranks to leave the process group")
    if comm.rank == 0:
        meeting.unlink(missing_ok=True)


CHUNK_BYTES: Final = 16 << 20
WRITERS: Final = 2
"""Files that a rank writes at a time: as many as a manager does."""

OpenLevel = Callable[[StudyLevel, str], "Storage"]
"""Opens a folder on a level, traced and rate-limited."""


class StudySaver(Protocol):
    """Saves one rank's part of each checkpoint; collective."""

    def save(self, number: int) -> None:
        """Save checkpoint `number`; returns when training may continue."""

    def close(self) -> None:
        """Finish pending work."""


class FileSaver:
    """Writes each rank's files, durably, into one folder per checkpoint, without a commit."""

    def __init__(self, storage: Storage, root: Path, trainer: EmulatedTrainer) -> None:
        self._storage = capabilities.prefer_direct_access(storage)
        self._root = root
        self._trainer = trainer
        self._threads = ThreadPoolExecutor(WRITERS, thread_name_prefix="study-files")

    def save(self, number: int) -> None:
        """Write the files, then remove the oldest checkpoint."""
        writing = [
            self._threads.submit(self._write, f"{_rank_folder(number, self._trainer.rank)}/{name}", content)
            for name, content in self._trainer.files()
        ]
        for future in writing:
            future.result()
        capabilities.sync_names(self._storage, _rank_folder(number, self._trainer.rank))
        if number > NUM_KEPT:
            shutil.rmtree(
                self._root / _rank_folder(number - NUM_KEPT, self._trainer.rank), ignore_errors=True
            )

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown()

    def _write(self, key: str, content: memoryview) -> None:
        with ExitStack() as undo:
            sink = self._storage.create(key, content.nbytes)
            undo.callback(sink.abort)
            for start in range(0, content.nbytes, CHUNK_BYTES):
                sink.submit(content[start : start + CHUNK_BYTES])
            sink.finish()
            undo.pop_all()


def _rank_folder(number: int, rank: int) -> str:
    return f"step-{number}/rank-{rank}"


class ManagedSaver:
    """The engine, as a training loop uses it."""

    def __init__(self, manager: Manager, trainer: EmulatedTrainer, saving: SaveMode) -> None:
        self._manager = manager
        self._trainer = trainer
        self._saving = saving

    def save(self, number: int) -> None:
        """Save the state."""
        if self._saving is SaveMode.BACKGROUND:
            self._manager.save_async(number, self._trainer.state)
        else:
            self._manager.save(number, self._trainer.state)

    def close(self) -> None:
        """Wait for saves and flushes."""
        self._manager.close()


def make_saver(
    row: StudyRow,
    trainer: EmulatedTrainer,
    open_level: OpenLevel,
    *,
    root: Path,
    domain: str,
    saving: SaveMode,
) -> StudySaver:
    """The saver of a row; collective. `root` is the folder of bare files on the row's level."""
    if row.is_bare:
        return FileSaver(open_level(row.level, ""), root, trainer)
    if row.caching is None:
        return ManagedSaver(Manager(open_level(row.level, ""), keep=NUM_KEPT), trainer, saving)
    manager = Manager(
        open_level(StudyLevel.SLOW, ""),
        keep=NUM_KEPT,
        cache=open_level(StudyLevel.FAST, domain),
        redundancy=row.caching.schemes,
        # A daemon would not be in this process's trace.
        flush=Flush(by="trainer") if row.caching.is_flushed else None,
        keep_cached=NUM_KEPT,
        failure_domain=domain,
    )
    return ManagedSaver(manager, trainer, saving)
