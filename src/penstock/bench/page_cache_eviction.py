"""Evicts files from the page cache before they are read, and measures what stayed in memory.

Outside of all timed sections. A read counts as a read from storage only if the kernel reports, after the
eviction, that the data cannot come from memory.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from penstock.cluster.comm import Comm, all_gather_results
from penstock.errors import Unavailable
from penstock.storage import Storage, capabilities, residency
from penstock.transfer.pipeline import PlannedObject

logger = logging.getLogger(__name__)

MAX_EVICTION_S: Final = 24 * 3600.0
"""Eviction writes back what was written without fsync first, which takes as long as it takes."""

WARM_SHARE: Final = 0.01
"""A read of which more than this share is in memory does not measure storage."""

Path = Literal["page cache dropped", "past the page cache", "no page cache", "not known"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEviction:
    """The bytes in memory, over all nodes, before and after the eviction of what is about to be read."""

    before_bytes: int = 0
    resident_bytes: int = 0
    total_bytes: int = 0
    elapsed_s: float = 0.0
    path: Path | None = None
    """The path of a checkpoint's reads; if the kernel gives no counts, all bytes count as resident."""

    @property
    def resident_share(self) -> float:
        """The share that may be read from memory instead of storage; 0 is a cold start."""
        return self.resident_bytes / self.total_bytes if self.total_bytes else 0.0

    def document(self) -> dict[str, Any]:
        """As plain data."""
        found = {**asdict(self), "resident_share": self.resident_share}
        if self.path is None:
            del found["path"]
        return found

    @property
    def is_cold(self) -> bool:
        """True if the read measures storage."""
        return self.resident_share <= WARM_SHARE


def evict_objects(storage: Storage, planned: Sequence[PlannedObject], *, comm: Comm) -> CacheEviction:
    """Evict what this rank is about to read from its node's memory. Collective; the same on all ranks.

    Another rank may have written a file on this node. Each rank evicts what it reads itself, on the node on
    which it will read it, because only that cache matters.
    """
    files = capabilities.find_local_paths(storage)
    if files is None:
        return CacheEviction(path="no page cache")
    if not files.uses_page_cache:
        return CacheEviction(path="past the page cache")
    began_s = time.monotonic()
    paths = [files.local_path(object_.key) for object_ in planned]
    counts = all_gather_results(
        comm,
        lambda: _evict_or_assume_cached(paths, sum(object_.size_bytes for object_ in planned)),
        awaiting="all nodes to drop a checkpoint from memory",
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


def evict_keys(
    keys: Iterable[str],
    storage: Storage,
    *,
    comm: Comm,
    advance: Callable[[int], None],
    explained: AbstractContextManager[None],
) -> CacheEviction:
    """Evict the files that this rank is about to read, from its own node's memory. Collective.

    A file that several ranks read counts once for each of them. A rank's error passes through `explained`
    before the other ranks hear of it.
    """
    paths = capabilities.find_local_paths(storage)
    assert paths is not None

    def evict() -> tuple[int, int, int]:
        with explained:
            return _evict((paths.local_path(key) for key in keys), advance)

    began_s = time.monotonic()
    counts = all_gather_results(
        comm,
        evict,
        awaiting="all nodes to drop what they are about to read from memory",
        timeout_s=max(MAX_EVICTION_S, comm.timeout_s),
    )
    before, resident, total = (sum(column) for column in zip(*counts, strict=True))
    return CacheEviction(
        before_bytes=before,
        resident_bytes=resident,
        total_bytes=total,
        elapsed_s=time.monotonic() - began_s,
    )


def _evict_or_assume_cached(paths: Sequence[str], size_bytes: int) -> tuple[bool, int, int, int]:
    try:
        return (True, *_evict(paths))
    except Unavailable as error:
        logger.warning("Cannot prove that reads come from storage: %s", error)
        return False, size_bytes, size_bytes, size_bytes


def _evict(
    paths: Iterable[str], advance: Callable[[int], None] = lambda _files: None
) -> tuple[int, int, int]:
    """Bytes in memory before and after, and in total."""
    drop = residency.evict_files(paths, advance)
    return drop.before.resident_bytes, drop.after.resident_bytes, drop.after.total_bytes
