"""Computes the names of a data set's files, works on each file on all ranks and threads, and removes files.

File names are computed or looked up in a listing, never held as a list in memory. Rank r of n takes the files
r, r + n, ...; if the work fails on one file, the files in progress are finished, no others are started, and
the error is raised.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from penstock.cluster.comm import Comm
from penstock.dataset.dataset_manifest import KEY
from penstock.dataset.file_listing import Listing
from penstock.dataset.formats.format_protocol import FileFormat, FilePlan
from penstock.errors import ObjectNotFound
from penstock.storage import Storage
from penstock.workload.spec import Dataset

Outcome = TypeVar("Outcome")

_TASK_S: Final = 0.01
_MOST_IN_A_ROW: Final = 64


@dataclass(frozen=True, slots=True)
class DataFiles:
    """All files of a data set, training files first. A file's number also identifies its content."""

    kind: FileFormat
    train: NumberedFiles | Listing
    evaluation: NumberedFiles | Listing

    def __len__(self) -> int:
        return len(self.train) + len(self.evaluation)

    def plan(self, index: int) -> FilePlan:
        """Return the plan of file `index`, whether it exists or not."""
        num_train = len(self.train)
        if index < num_train:
            return self.kind.plan(index, self.train.name(index))
        return self.kind.plan(index, self.evaluation.name(index - num_train))


def for_each_group(
    files: DataFiles,
    work: Callable[[Iterator[FilePlan]], list[Outcome]],
    *,
    rank: int,
    num_ranks: int,
    threads: int,
    in_a_row: int | None = None,
) -> Iterator[Outcome]:
    """Yield the results of `work` on groups of this rank's files, in order, `threads` groups at a time.

    A group has `in_a_row` files. By default, it has several if they are so small that waking a thread for
    each file would take longer than the work.
    """
    in_progress: deque[Future[tuple[list[Outcome], float]]] = deque()
    stopped = threading.Event()

    def work_on(indices: range) -> tuple[list[Outcome], float]:
        began_s = time.monotonic()
        plans = (files.plan(index) for index in indices if not stopped.is_set())
        return work(plans), time.monotonic() - began_s

    indices, start, step = range(rank, len(files), num_ranks), 0, in_a_row or 1
    with ThreadPoolExecutor(threads, thread_name_prefix="penstock-files") as pool:
        try:
            while in_progress or start < len(indices):
                if start < len(indices):
                    in_progress.append(pool.submit(work_on, indices[start : start + step]))
                    start += step
                # Results come in order: twice as many tasks as threads keep the threads busy behind a slow
                # task.
                if len(in_progress) > 2 * threads or start >= len(indices):
                    outcomes, elapsed_s = in_progress.popleft().result()
                    if in_a_row is None:
                        step = min(_MOST_IN_A_ROW, max(1, int(len(outcomes) * _TASK_S / elapsed_s)))
                    yield from outcomes
        finally:
            stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)


def remove(files: DataFiles, storage: Storage, *, comm: Comm, threads: int) -> int:
    """Delete the manifest and whichever files exist; return how many existed. Collective. Folders stay.

    On storage that deletes without checking, such as object storage, all of them count as existing.
    """

    def delete(*keys: str) -> int:
        """Return 1 if any of the objects was deleted, otherwise 0."""
        deleted = 0
        for key in keys:
            with suppress(ObjectNotFound):
                storage.delete(key)
                deleted = 1
        return deleted

    def remove_group(plans: Iterator[FilePlan]) -> list[int]:
        return [delete(*(part.key(plan.name) for part in plan.parts)) for plan in plans]

    # The manifest goes first: a data set that claims to be complete must never lack files.
    if comm.rank == 0:
        delete(KEY)
    comm.barrier(awaiting="rank 0 to withdraw the manifest")
    removed = sum(for_each_group(files, remove_group, rank=comm.rank, num_ranks=comm.size, threads=threads))
    return comm.reduce(removed, "sum", awaiting="all ranks to delete their files")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedFiles:
    """Names like those of DLIO's generator: `train/03/img_0017_of_1000.npz`.

    `num_subfolders` of 0 or 1 means none; otherwise, file i is in subfolder i mod n. Numbers are padded with
    zeros to the width of the counts themselves: 10 subfolders are 00 to 09.
    """

    folder: str
    count: int
    suffix: str
    prefix: str = "img"
    num_subfolders: int = 0

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        """Return the key of file `index`."""
        if not 0 <= index < self.count:
            raise IndexError(f"file {index} of {self.count}")
        number = f"{index:0{len(str(self.count))}}"
        return f"{self._folder_of(index)}{self.prefix}_{number}_of_{self.count}.{self.suffix}"

    def folders(self) -> tuple[str, ...]:
        """Return the folders that hold all of the files."""
        numbers = range(max(1, self.num_subfolders))
        return tuple(self._folder_of(number).rstrip("/") for number in numbers)

    def _folder_of(self, index: int) -> str:
        if self.num_subfolders <= 1:
            return f"{self.folder}/"
        width = len(str(self.num_subfolders))
        return f"{self.folder}/{index % self.num_subfolders:0{width}}/"


def training_files(dataset: Dataset) -> NumberedFiles:
    """Return the names of the training files."""
    return NumberedFiles(
        folder="train",
        count=dataset.num_files_train,
        suffix=dataset.format.value,
        prefix=dataset.file_prefix,
        num_subfolders=dataset.num_subfolders_train,
    )


def evaluation_files(dataset: Dataset) -> NumberedFiles:
    """Return the names of the evaluation files."""
    return NumberedFiles(
        folder="valid",
        count=dataset.num_files_eval,
        suffix=dataset.format.value,
        prefix=dataset.file_prefix,
        num_subfolders=dataset.num_subfolders_eval,
    )
