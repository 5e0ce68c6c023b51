"""The page cache of what is about to be read: dropped on every node, and what stayed in it all the same.

Place in the flow: before each read, outside its time. Invariant: a read counts as storage's only if the
kernel's own count after the drop says that it cannot come from memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from penstock.cluster.collectives import all_gather_results
from penstock.errors import Unavailable
from penstock.storage.residency import SupportsLocalPaths, drop_file

if TYPE_CHECKING:
    from penstock.checkpoint.pipe.base import PlannedObject
    from penstock.cluster.comm import Comm
    from penstock.storage import Storage

logger = logging.getLogger(__name__)

LONGEST_DROP_S: Final = 24 * 3600.0
"""Dropping writes back first: what was written without fsync takes as long as it takes."""

WARM_SHARE: Final = 0.01
"""A read of which more than this share lies in memory is no measurement of storage."""

Path = Literal["page cache dropped", "past the page cache", "no page cache", "not known"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coldness:
    """How a read came to its bytes. `resident_bytes` of `total_bytes` were in memory, over all nodes.

    Where a kernel does not tell, the path is "not known", and all bytes count as resident: nothing is proven.
    """

    path: Path
    before_bytes: int = 0
    resident_bytes: int = 0
    total_bytes: int = 0
    elapsed_s: float = 0.0

    @property
    def resident_share(self) -> float:
        """The part that the read may have taken from memory."""
        return self.resident_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def is_cold(self) -> bool:
        """Whether the read's figures are storage's."""
        return self.resident_share <= WARM_SHARE


def make_cold(storage: Storage, planned: Sequence[PlannedObject], *, comm: Comm) -> Coldness:
    """Get what this rank is about to read out of its node's memory. Collective; the same on all ranks.

    Whoever wrote a file on this node may be another rank: each drops what it reads itself, on the node on
    which it will read it, and that is what counts.
    """
    if storage.uri.startswith("direct://"):
        return Coldness(path="past the page cache")
    if not (storage.uri.startswith("file://") and isinstance(storage, SupportsLocalPaths)):
        return Coldness(path="no page cache")
    began_s = time.monotonic()
    paths = [storage.local_path(each.key) for each in planned]
    counts = all_gather_results(
        comm,
        lambda: _drop_or_doubt(paths, sum(each.size_bytes for each in planned)),
        awaiting="all nodes to drop a checkpoint from memory",
        timeout_s=max(LONGEST_DROP_S, comm.timeout_s),
    )
    is_known = all(known for known, *_ in counts)
    before, resident, total = (sum(column) for column in list(zip(*counts, strict=True))[1:])
    return Coldness(
        path="page cache dropped" if is_known else "not known",
        before_bytes=before,
        resident_bytes=resident,
        total_bytes=total,
        elapsed_s=time.monotonic() - began_s,
    )


def _drop_or_doubt(paths: Sequence[str], size_bytes: int) -> tuple[bool, int, int, int]:
    try:
        return (True, *_drop(paths))
    except Unavailable as error:
        logger.warning("Reads cannot be proven to be cold: %s", error)
        return False, size_bytes, size_bytes, size_bytes


def _drop(paths: Sequence[str]) -> tuple[int, int, int]:
    before = resident = total = 0
    for path in paths:
        drop = drop_file(path)
        before += drop.before.resident_bytes
        resident += drop.after.resident_bytes
        total += drop.after.total_bytes
    return before, resident, total
