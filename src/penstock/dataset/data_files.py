"""The files of a data set, visited once over all ranks and threads, and their removal.

Rank r of n takes the files r, r + n, ...; file names are computed, never listed. Work that fails on one file
lets the files in progress finish, starts no other, and raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from penstock.dataset.dataset_manifest import KEY
from penstock.errors import ObjectNotFound

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm
    from penstock.dataset.file_naming import FileNames
    from penstock.dataset.formats.format_protocol import FileFormat, FilePlan
    from penstock.storage import Storage


Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class DataFiles:
    """All files of a data set, training files first: the number of a file is also that of its content."""

    kind: FileFormat
    train: FileNames
    evaluation: FileNames

    def __len__(self) -> int:
        return len(self.train) + len(self.evaluation)

    def plan(self, index: int) -> FilePlan:
        """File `index` as it is or will be."""
        num_train = len(self.train)
        if index < num_train:
            return self.kind.plan(index, self.train.name(index))
        return self.kind.plan(index, self.evaluation.name(index - num_train))


def for_each_file(
    files: DataFiles,
    work: Callable[[FilePlan], Outcome],
    *,
    rank: int,
    num_ranks: int,
    threads: int,
) -> Iterator[Outcome]:
    """What `work` made of this rank's files, in their order, `threads` of them at a time."""
    under_way: deque[Future[Outcome]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="penstock-files") as pool:
        try:
            for index in range(rank, len(files), num_ranks):
                under_way.append(pool.submit(_planned, files, index, work))
                if len(under_way) > 2 * threads:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _planned(files: DataFiles, index: int, work: Callable[[FilePlan], Outcome]) -> Outcome:
    return work(files.plan(index))


def remove(files: DataFiles, storage: Storage, *, comm: Comm, threads: int) -> int:
    """Delete these files, those that are there, and the manifest; collective. Folders stay.

    How many files there were is known only where storage tells whether it deleted something.
    """

    def remove_one(plan: FilePlan) -> int:
        return max((_delete(storage, part.key(plan.name)) for part in plan.parts), default=0)

    if comm.rank == 0:
        _delete(storage, KEY)
    comm.barrier(awaiting="rank 0 to withdraw the manifest")
    removed = sum(for_each_file(files, remove_one, rank=comm.rank, num_ranks=comm.size, threads=threads))
    return comm.reduce(removed, "sum", awaiting="all ranks to delete their files")


def _delete(storage: Storage, key: str) -> int:
    """1 where something was deleted, 0 where nothing was."""
    with suppress(ObjectNotFound):
        storage.delete(key)
        return 1
    return 0
