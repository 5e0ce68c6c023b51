"""Files of one's own from the durable level into the caches, where they are protected like any step.

It stands where a save of the step stands, with the manifest that the step has already. Invariant: nothing is
believed that is not summed later: who restarts verifies what was fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.commit.base import MANIFEST_NAME, METADATA_NAME, Seal
from penstock.checkpoint.manifest import read_manifest
from penstock.checkpoint.own_files import writer_of
from penstock.checkpoint.staging.base import RankShare, ShareStats, WrittenFile
from penstock.checkpoint.tiers.assess import home_of
from penstock.checkpoint.tiers.copying import Copy, Pace, copy_files
from penstock.storage.powers import for_large_files
from penstock.storage.whole import read_object

if TYPE_CHECKING:
    from penstock.checkpoint.manifest import ManifestFile
    from penstock.checkpoint.staging.base import Urgency
    from penstock.checkpoint.stored import Stored
    from penstock.progress import Progress
    from penstock.storage import Storage

NUM_THREADS = 2
_NOTHING = np.zeros(0, dtype=np.int64)


class Fetched:
    """One rank's part of fetching a step: a `PreparedSave` and its `StagedSave` in one."""

    def __init__(self, stored: Stored, *, rank: int, num_ranks: int) -> None:
        self._stored = stored
        self._rank = rank
        self._manifest = bytes(read_object(stored.storage, stored.key(MANIFEST_NAME)))
        manifest = read_manifest(self._manifest, stored.uri)
        self._all = manifest.files
        self._mine = tuple(
            file
            for file in manifest.files
            if home_of(writer_of(manifest, file), manifest.world_size, num_ranks) == rank
        )

    def stage(self, urgent: Urgency = "copy") -> Fetched:  # noqa: ARG002 - the protocol's
        """Nothing is to be copied before the draft is there."""
        return self

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Nothing changes meanwhile: the step is committed."""

    def cancel(self) -> None:
        """Nothing is in flight between two calls."""

    def write_to(
        self, storage: Storage, key_of: Callable[[str], str], progress: Progress | None = None
    ) -> RankShare:
        """Copy this rank's files."""
        copies = [Copy(from_key=self._stored.key(file.name), to_key=key_of(file.name)) for file in self._mine]
        source = for_large_files(self._stored.storage)
        copy_files(copies, source, storage, threads=NUM_THREADS, pace=Pace(None))
        size_bytes = sum(file.size_bytes for file in self._mine)
        if progress is not None:
            progress.begin("bytes", size_bytes)
            progress.advance(size_bytes)
        return RankShare(
            rank=self._rank,
            files=tuple(map(_written, self._mine)),
            stats=ShareStats(rank=self._rank, payload_bytes=size_bytes, file_bytes=size_bytes),
        )

    def seal(self, shares: Sequence[RankShare], facts: Mapping[str, object]) -> Seal:  # noqa: ARG002 - as saved
        """What sealed the step when it was saved."""
        metadata = bytes(read_object(self._stored.storage, self._stored.key(METADATA_NAME)))
        sizes = {file.name: file.size_bytes for file in self._all}
        return Seal(manifest=self._manifest, metadata=metadata, sizes=sizes)


def _written(file: ManifestFile) -> WrittenFile:
    return WrittenFile(
        name=file.name,
        size_bytes=file.size_bytes,
        item_offset=_NOTHING,
        item_bytes=_NOTHING,
        payload_offset=_NOTHING,
        sums=b"",
    )
