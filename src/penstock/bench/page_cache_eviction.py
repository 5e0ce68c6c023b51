"""Evicts files from the page cache before they are read, and measures what stayed in memory.

Eviction is outside all timed sections. A read counts as a read from storage only if the kernel reports, after
the eviction, that the data cannot come from memory.
"""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from penstock.cluster.comm import Comm, all_gather_results
from penstock.errors import Unavailable
from penstock.storage import Storage, capabilities, residency

logger = logging.getLogger(__name__)

MAX_EVICTION_S: Final = 24 * 3600.0
"""The time limit is long because eviction first writes back whatever was written without fsync."""

WARM_SHARE: Final = 0.01
"""If more than this share of a read is in memory, the read does not measure storage."""

Path = Literal["page cache dropped", "past the page cache", "no page cache", "not known"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEviction:
    """The bytes in memory, over all nodes, before and after evicting what is about to be read."""

    path: Path
    """The path that reads take, past or through the page cache. If the kernel gives no counts, all bytes
    count as resident.
    """
    before_bytes: int = 0
    resident_bytes: int = 0
    total_bytes: int = 0
    elapsed_s: float = 0.0

    @property
    def resident_share(self) -> float:
        """The share that may be read from memory instead of storage; 0 means a cold start."""
        return self.resident_bytes / self.total_bytes if self.total_bytes else 0.0

    def document(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {**asdict(self), "resident_share": self.resident_share}

    @property
    def is_cold(self) -> bool:
        """True if the read measures storage."""
        return self.resident_share <= WARM_SHARE


def evict(
    storage: Storage,
    keys: Iterable[str],
    *,
    comm: Comm,
    assumed_bytes: int | None = None,
    advance: Callable[[int], None] = lambda _files: None,
    explained: AbstractContextManager[object] | None = None,
) -> CacheEviction:
    """Evict from memory what this rank is about to read; return the totals of all ranks. Collective.

    Another rank on this node may have written a file. Each rank evicts what it will itself read, on the node
    where it will read it, because only that node's cache matters. A file that several ranks read counts once
    for each of them. If the kernel gives no counts, `assumed_bytes` count as resident; if that is None, this
    raises `Unavailable`. An error passes through `explained` before it is sent to the other ranks.
    """
    files = capabilities.find_local_paths(storage)
    if files is None:
        return CacheEviction(path="no page cache")
    if not files.uses_page_cache:
        return CacheEviction(path="past the page cache")

    def work() -> tuple[bool, int, int, int]:
        try:
            with explained or nullcontext():
                drop = residency.evict_files(map(files.local_path, keys), advance)
        except Unavailable as error:
            if assumed_bytes is None:
                raise
            logger.warning("Cannot prove that reads come from storage: %s", error)
            return False, assumed_bytes, assumed_bytes, assumed_bytes
        return True, drop.before.resident_bytes, drop.after.resident_bytes, drop.after.total_bytes

    began_s = time.monotonic()
    counts = all_gather_results(
        comm,
        work,
        awaiting="all nodes to drop what they are about to read from memory",
        timeout_s=max(MAX_EVICTION_S, comm.timeout_s),
    )
    known, before, resident, total = zip(*counts, strict=True)
    return CacheEviction(
        path="page cache dropped" if all(known) else "not known",
        before_bytes=sum(before),
        resident_bytes=sum(resident),
        total_bytes=sum(total),
        elapsed_s=time.monotonic() - began_s,
    )
