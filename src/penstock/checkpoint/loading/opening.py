"""One look into a checkpoint for all ranks: rank 0 reads what describes it and tells the others.

A thousand ranks that each read a large `.metadata` are a load of its own on a file server. Invariant: all
ranks see the same description, or all get the same error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME
from penstock.checkpoint.opened import Opened, open_checkpoint, open_folder
from penstock.cluster.collectives import all_gather_results, run_on_all_ranks
from penstock.errors import ObjectNotFound
from penstock.storage.in_memory import MemorySource
from penstock.storage.object_io import read_object
from penstock.storage.wrapping import WrappedStorage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.checkpoint.commit.catalog import AnyPath
    from penstock.cluster.comm import Comm
    from penstock.storage.protocol import Source, Storage


class DescribedStorage(WrappedStorage):
    """A storage some of whose small objects are known already; None for one that is known not to be there."""

    def __init__(self, inside: Storage, known: Mapping[str, bytes | None]) -> None:
        super().__init__(inside)
        self._known = known

    def open(self, key: str) -> Source:
        """Open what is known from memory, all else inside."""
        if key not in self._known:
            return self.inside.open(key)
        content = self._known[key]
        if content is None:
            raise ObjectNotFound(f"No object {key!r}", uri=f"{self.uri}/{key}", fix="Check the name.")
        return MemorySource(np.frombuffer(content, dtype=np.uint8), self.uri, self.counters)


def open_together(storage: Storage, folder: str, uri: str, comm: Comm) -> Opened:
    """Open the checkpoint in a folder; collective. Formats without `.metadata` are opened by each rank."""

    def read() -> dict[str, bytes | None]:
        return _description(storage, folder) if comm.rank == 0 else {}

    if comm.size == 1:
        return open_folder(storage, folder, uri)
    known = all_gather_results(comm, read, awaiting="rank 0 to read what describes the checkpoint")[0]
    return run_on_all_ranks(
        comm,
        lambda: open_folder(DescribedStorage(storage, known), folder, uri),
        awaiting="all ranks to understand the checkpoint",
    )


def open_path_together(path: AnyPath, comm: Comm) -> Opened:
    """Open any path or URI that can hold a checkpoint, one file of `torch.save` among them; collective."""
    return run_on_all_ranks(
        comm,
        lambda: open_checkpoint(path, rank=comm.rank),
        awaiting="all ranks to open the checkpoint",
    )


def _description(storage: Storage, folder: str) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for name in (METADATA_NAME, MANIFEST_NAME):
        key = f"{folder}/{name}" if folder else name
        try:
            found[key] = bytes(read_object(storage, key))
        except ObjectNotFound:
            found[key] = None
    return found
