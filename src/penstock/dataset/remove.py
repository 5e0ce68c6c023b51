"""Delete a data set again: its files by their names, and its manifest; nothing else that lies there.

Place in the flow: after everything that used the files. Invariant: the manifest goes first, so that a
deletion that was interrupted never looks like a whole data set.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.dataset.manifest import KEY
from penstock.dataset.walk import DataFiles, each_file
from penstock.errors import ObjectNotFound

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm
    from penstock.dataset.formats.base import Plan
    from penstock.storage import Storage


def remove(files: DataFiles, storage: Storage, *, comm: Comm, threads: int) -> int:
    """Delete these files, those that are there, and the manifest; collective. Folders stay.

    How many files there were is known only where storage tells whether it deleted something.
    """

    def remove_one(plan: Plan) -> int:
        return max((_delete(storage, part.key(plan.name)) for part in plan.parts), default=0)

    if comm.rank == 0:
        _delete(storage, KEY)
    comm.barrier(awaiting="rank 0 to withdraw the manifest")
    removed = sum(each_file(files, remove_one, rank=comm.rank, num_ranks=comm.size, threads=threads))
    return comm.reduce(removed, "sum", awaiting="all ranks to delete their files")


def _delete(storage: Storage, key: str) -> int:
    """1 where something was deleted, 0 where nothing was."""
    with suppress(ObjectNotFound):
        storage.delete(key)
        return 1
    return 0
