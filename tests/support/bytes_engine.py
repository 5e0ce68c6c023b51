"""An engine without tensors: each rank's state is some bytes, saved to one file. For tests of caches.

Place in the flow: stands where the engine for torch stands. Invariant: it stages by copying, so a state that
changes after `wait_staged` is saved as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.checkpoint.commit.protocol import MANIFEST_NAME, Seal
from penstock.checkpoint.engine import RankSaveStats, SaveCancelled, WrittenShare
from penstock.checkpoint.formats.description import (
    Manifest,
    ManifestFile,
    WrittenFile,
    checksum_of,
    manifest_bytes,
    read_manifest,
)
from penstock.errors import DataDamaged, UsageError
from penstock.progress import Progress
from penstock.storage.protocol import read_object, write_object

if TYPE_CHECKING:
    from penstock.checkpoint.commit.checkpoints import CheckpointRef
    from penstock.checkpoint.engine import LoadChoice, SaveChoice, State, Urgency
    from penstock.cluster.comm import Comm
    from penstock.storage import Storage

METADATA = b"known"
_NOTHING = np.zeros(0, dtype=np.int64)


def file_of(rank: int) -> str:
    """The one file of a rank."""
    return f"__{rank}_0.distcp"


@dataclass(slots=True, eq=False)
class BytesEngine:
    """An engine whose state is `{"bytes": bytearray}` on each rank.

    `hold` keeps every write until it is set or cancelled; `spoil` is called before a write and may raise.
    """

    hold: threading.Event | None = None
    spoil: Callable[[], None] | None = None
    is_closed: bool = field(default=False, init=False)

    def prepare(self, state: State, comm: Comm, choice: SaveChoice) -> _Prepared:
        """Agree on nothing: every rank writes all it has."""
        if choice.only is not None and choice.only != "bytes":
            raise UsageError(f"Nothing of the state is called {choice.only}", fix="It has only bytes.")
        return _Prepared(self, comm.rank, state["bytes"])

    def load(
        self,
        state: State,
        stored: CheckpointRef,
        comm: Comm,
        _choice: LoadChoice,
        _progress: Progress | None,
    ) -> None:
        """Read this rank's file, checked against the manifest."""
        rank = comm.rank
        manifest = read_manifest(read_object(stored.storage, stored.key(MANIFEST_NAME)), stored.uri)
        content = read_object(stored.storage, stored.key(file_of(rank)))
        if checksum_of(content).hex() != manifest.facts.get(f"rank_{rank}"):
            raise DataDamaged(f"{file_of(rank)} is not as it was written", where=stored.uri)
        target = state["bytes"]
        if len(target) != len(content):
            raise UsageError(f"The state has {len(target)} bytes, the step {len(content)}", fix="Fit it.")
        target[:] = content

    def close(self) -> None:
        """Note that somebody closed it."""
        self.is_closed = True


@dataclass(slots=True, eq=False)
class _Prepared:
    engine: BytesEngine
    rank: int
    content: bytearray

    def stage(self, urgent: Urgency = "copy") -> _Staged:
        return _Staged(self.engine, self.rank, bytes(self.content))

    def seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, Any]) -> Seal:
        files = [file for share in shares for file in share.files]
        sums = {f"rank_{share.stats.rank}": share.files[0].sums.hex() for share in shares}
        manifest = Manifest(
            step=facts["step"],
            save_id=facts["save_id"],
            world_size=len(shares),
            facts=sums,
            metadata_bytes=len(METADATA),
            metadata_sum=checksum_of(METADATA),
            names=(),
            files=tuple(_described(file) for file in files),
        )
        return Seal(
            manifest=manifest_bytes(manifest),
            metadata=METADATA,
            sizes={file.name: file.size_bytes for file in files},
        )


def _described(file: WrittenFile) -> ManifestFile:
    return ManifestFile(
        name=file.name,
        size_bytes=file.size_bytes,
        item_name=_NOTHING,
        item_offset=_NOTHING,
        item_bytes=_NOTHING,
        payload_offset=_NOTHING,
        sums=b"",
    )


@dataclass(slots=True, eq=False)
class _Staged:
    engine: BytesEngine
    rank: int
    content: bytes
    given_up: threading.Event = field(default_factory=threading.Event)

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """It is, from the start."""

    def count_bytes(self, _storage: Storage, _key_of: Callable[[str], str]) -> int:
        return len(self.content)

    def write_to(
        self, storage: Storage, key_of: Callable[[str], str], progress: Progress | None = None
    ) -> WrittenShare:
        seen = progress or Progress()
        seen.begin("writing", len(self.content))
        while self.engine.hold is not None and not self.engine.hold.wait(0.01):
            if self.given_up.is_set():
                raise SaveCancelled
        if self.engine.spoil is not None:
            self.engine.spoil()
        if self.given_up.is_set():
            raise SaveCancelled
        name = file_of(self.rank)
        info = write_object(storage, key_of(name), [self.content], size_bytes=len(self.content))
        seen.advance(len(self.content))
        written = WrittenFile(
            name=name,
            size_bytes=info.size_bytes,
            item_offset=_NOTHING,
            item_bytes=_NOTHING,
            payload_offset=_NOTHING,
            sums=checksum_of(self.content),
        )
        stats = RankSaveStats(rank=self.rank, payload_bytes=len(self.content), file_bytes=info.size_bytes)
        return WrittenShare(files=(written,), stats=stats)

    def cancel(self) -> None:
        self.given_up.set()
