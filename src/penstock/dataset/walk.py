"""Every file of a data set once, shared out over ranks and threads: the frame of generation and verification.

Rank r of n takes the files r, r + n, ...; nothing is ever listed or kept per file. Invariant: work that fails
on one file lets the files under way end, begins no other, and raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from penstock.dataset.formats.base import FileFormat, Plan
    from penstock.dataset.namespace import Namespace

Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class DataFiles:
    """All files of a data set, training files first: the number of a file is also that of its content."""

    kind: FileFormat
    train: Namespace
    evaluation: Namespace

    def __len__(self) -> int:
        return len(self.train) + len(self.evaluation)

    def plan(self, index: int) -> Plan:
        """File `index` as it is or will be."""
        num_train = len(self.train)
        if index < num_train:
            return self.kind.plan(index, self.train.name(index))
        return self.kind.plan(index, self.evaluation.name(index - num_train))


def each_file(
    files: DataFiles,
    work: Callable[[Plan], Outcome],
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


def _planned(files: DataFiles, index: int, work: Callable[[Plan], Outcome]) -> Outcome:
    return work(files.plan(index))
