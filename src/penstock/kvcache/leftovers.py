"""What runs leave in a store, and its removal: entries of their own, and objects that dead writers began.

A plan begins with an empty cache. What an earlier run of it left, because it was killed or asked to keep its
entries, is removed before; the entries of others stay, and are counted.
"""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Final

import numpy as np

from penstock.errors import ObjectNotFound
from penstock.kvcache.block_trace import Integers
from penstock.kvcache.entries import EntryLayout, EntryOutcome
from penstock.kvcache.io_plan import Op, Operations
from penstock.progress import Progress, Silent
from penstock.storage import Storage, capabilities

_REMOVERS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What was in the store before a run: entries of the same plan, now removed, and objects of others."""

    left_entries: int
    other_objects: int
    other_bytes: int


def remove_leftovers(storage: Storage, operations: Operations, layout: EntryLayout) -> Leftovers:
    """Make the store as a plan expects it: without any entry that its operations write."""
    own: frozenset[str] | None = None
    left: list[str] = []
    other_objects = other_bytes = 0
    with suppress(ObjectNotFound):
        for info in storage.list(layout.folder):
            # Only a store that is not empty is worth naming all entries.
            own = own if own is not None else _written_keys(operations, layout)
            if info.key in own:
                left.append(info.key)
            else:
                other_objects += 1
                other_bytes += info.size_bytes
    _remove(storage, left, Silent())
    return Leftovers(left_entries=len(left), other_objects=other_objects, other_bytes=other_bytes)


def remove_entries(
    storage: Storage, operations: Operations, layout: EntryLayout, outcomes: Integers, progress: Progress
) -> None:
    """Remove the objects that these operations leave; all that they write unless each was run."""
    objects = operations["entry"] * layout.parts + operations["part"]
    is_whole = bool((outcomes != EntryOutcome.NOT_RUN).all())
    if is_whole:
        # The last operation on each object tells whether it is still there.
        _, from_end = np.unique(objects[::-1], return_index=True)
        operations = operations[len(operations) - 1 - from_end]
        operations = operations[operations["op"] != Op.DELETE]
    _remove(storage, _written_keys(operations, layout, reads=is_whole), progress)


def sync_entry_names(storage: Storage, operations: Operations, layout: EntryLayout) -> None:
    """Make the names of entries that these operations wrote survive a power cut; their bytes do already."""
    paths = [PurePosixPath(key) for key in _written_keys(operations, layout)]
    for folder in {parent for path in paths for parent in path.parents}:
        with suppress(ObjectNotFound):  # not all operations were run
            capabilities.sync_names(storage, "" if folder == PurePosixPath() else str(folder))


def _written_keys(operations: Operations, layout: EntryLayout, *, reads: bool = False) -> frozenset[str]:
    written = operations if reads else operations[operations["op"] == Op.WRITE]
    objects = np.unique(written[["entry", "part"]])
    return frozenset(layout.key(entry, part) for entry, part in objects.tolist())


def _remove(storage: Storage, keys: Collection[str], progress: Progress) -> None:
    progress.begin("removing entries", len(keys))
    with ThreadPoolExecutor(_REMOVERS) as pool:
        for _ in pool.map(partial(_delete, storage), keys):
            progress.advance(1)


def _delete(storage: Storage, key: str) -> None:
    with suppress(ObjectNotFound):
        storage.delete(key)
