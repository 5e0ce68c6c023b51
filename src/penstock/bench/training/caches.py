"""The page cache of this data set, dropped on every node before each epoch, and what stayed in it.

Place in the flow: between epochs, outside the score. Invariant: what is said to be cold was seen to be, by
the kernel's own count after the drop.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cluster.collectives import all_gather_results
from penstock.storage.residency import SupportsLocalPaths, drop_file

if TYPE_CHECKING:
    from penstock.bench.training.files import TrainingFiles
    from penstock.cluster.comm import Comm
    from penstock.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDrop:
    """Over all nodes: how much of the data set was in memory before and after, of how much."""

    before_bytes: int
    resident_bytes: int
    total_bytes: int
    elapsed_s: float

    @property
    def resident_share(self) -> float:
        """The part that an epoch may read from memory instead of storage; 0 is a cold start."""
        return self.resident_bytes / self.total_bytes if self.total_bytes else 0.0

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "before_bytes": self.before_bytes,
            "resident_bytes": self.resident_bytes,
            "total_bytes": self.total_bytes,
            "resident_share": self.resident_share,
            "elapsed_s": self.elapsed_s,
        }


def keeps_page_cache(storage: Storage) -> bool:
    """Whether reads of this storage may come out of this node's memory: only files that are read buffered."""
    return storage.uri.startswith("file://") and isinstance(storage, SupportsLocalPaths)


def drop_caches(files: TrainingFiles, storage: Storage, *, comm: Comm) -> CacheDrop:
    """Drop the files' pages on every node; the ranks of a node share its files. Collective."""
    assert isinstance(storage, SupportsLocalPaths)
    began_s = time.monotonic()
    hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
    neighbours = [rank for rank, host in enumerate(hosts) if host == comm.host]
    first, step = neighbours.index(comm.rank), len(neighbours)
    counts = all_gather_results(
        comm,
        lambda: _drop_own(files, storage, first=first, step=step),
        awaiting="all nodes to drop the data set from memory",
    )
    before, resident, total = (sum(column) for column in zip(*counts, strict=True))
    return CacheDrop(
        before_bytes=before,
        resident_bytes=resident,
        total_bytes=total,
        elapsed_s=time.monotonic() - began_s,
    )


def _drop_own(
    files: TrainingFiles, storage: SupportsLocalPaths, *, first: int, step: int
) -> tuple[int, int, int]:
    before = resident = total = 0
    for key in files.keys(first=first, step=step):
        drop = drop_file(storage.local_path(key))
        before += drop.before.resident_bytes
        resident += drop.after.resident_bytes
        total += drop.after.total_bytes
    return before, resident, total
