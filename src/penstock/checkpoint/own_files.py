"""Files that programs write themselves, saved as a state is: made durable, summed, told by a manifest.

Between `output.py`, which hands out paths in a draft, and the commit. Invariant: what is summed was read back
from the file after it was made durable, so a file that changes later is found out.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock import __version__
from penstock.checkpoint.commit.base import MANIFEST_NAME, METADATA_NAME, Seal
from penstock.checkpoint.dcp.metadata import DcpMetadata
from penstock.checkpoint.dcp.metadata_text import metadata_bytes
from penstock.checkpoint.manifest import Manifest, ManifestFile, manifest_bytes
from penstock.checkpoint.pieces import Boxes, Contents, StoredBoxes
from penstock.checkpoint.staging.base import RankShare, ShareStats, WrittenFile
from penstock.checkpoint.sums import sum_of, sum_of_object
from penstock.errors import Unavailable, UsageError
from penstock.progress import Silent
from penstock.storage.files.durable import sync_open_file
from penstock.storage.powers import find_folders, innermost
from penstock.storage.uri import check_key, parse_uri

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.checkpoint.staging.base import Urgency
    from penstock.progress import Progress
    from penstock.storage import Storage

_CONTENT: Final = "content"
_FILES: Final = "files"
_WRITER: Final = "rank "
_OURS: Final = (MANIFEST_NAME, METADATA_NAME, "parity-", "redundancy-")


def local_path(storage: Storage, key: str) -> Path:
    """Where an object lies on this machine; `Unavailable` for a storage that is no file system."""
    if find_folders(storage) is None:
        raise Unavailable(
            "Files of one's own need paths, and this storage has none",
            where=storage.uri,
            fix="Give a cache=, a folder on each node: files are written there and flushed.",
        )
    return Path(parse_uri(innermost(storage).uri).root) / key


def check_file_name(name: str) -> None:
    """`UsageError` unless a file of a step may be called so."""
    check_key(name, "route")
    if "/" in name or name.startswith((".", *_OURS)):
        raise UsageError(
            f"{name!r} cannot be the name of a file in a step",
            where="route",
            fix="Give a plain name, such as rank_0.pt; all files of a step lie in one folder.",
        )


class OwnFiles:
    """What one rank has written into a draft: a `PreparedSave` and its `StagedSave` in one."""

    def __init__(self, names: Sequence[str], *, rank: int, num_ranks: int) -> None:
        self._names = tuple(names)
        self._rank = rank
        self._num_ranks = num_ranks

    def stage(self, urgent: Urgency = "copy") -> OwnFiles:  # noqa: ARG002 - the protocol's
        """Nothing is to be copied: the files lie there."""
        return self

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """They do from the start."""

    def cancel(self) -> None:
        """Nothing is in flight."""

    def write_to(
        self, storage: Storage, key_of: Callable[[str], str], progress: Progress | None = None
    ) -> RankShare:
        """Make the files durable where they lie, and sum them."""
        began_s = time.monotonic()
        sizes = [_settled(local_path(storage, key_of(name)), self._rank) for name in self._names]
        seen = progress or Silent()
        seen.begin("bytes", sum(sizes))
        synced_s = time.monotonic()
        files = tuple(
            _summed(storage, key_of(name), name, size_bytes, seen)
            for name, size_bytes in zip(self._names, sizes, strict=True)
        )
        stats = ShareStats(
            rank=self._rank,
            payload_bytes=sum(sizes),
            file_bytes=sum(sizes),
            write_s=time.monotonic() - synced_s,
            sync_s=synced_s - began_s,
        )
        return RankShare(rank=self._rank, files=files, stats=stats)

    def seal(self, shares: Sequence[RankShare], facts: Mapping[str, object]) -> Seal:
        """A manifest of whole files, and the metadata of no tensor."""
        save_id, step = str(facts.get("save_id", "")), facts.get("step")
        metadata = metadata_bytes(DcpMetadata(contents=_no_contents(), save_id=save_id))
        manifest = Manifest(
            step=step if isinstance(step, int) else None,
            save_id=save_id,
            written_by=f"penstock {__version__}",
            world_size=self._num_ranks,
            facts={_CONTENT: _FILES},
            metadata_bytes=len(metadata),
            metadata_sum=sum_of(metadata),
            names=tuple(f"{_WRITER}{share.rank}" for share in shares),
            files=tuple(
                _described(file, place) for place, share in enumerate(shares) for file in share.files
            ),
        )
        return Seal(
            manifest=manifest_bytes(manifest),
            metadata=metadata,
            sizes={file.name: file.size_bytes for share in shares for file in share.files},
        )


def holds_own_files(manifest: Manifest) -> bool:
    """Whether a step consists of files that programs wrote themselves."""
    return manifest.facts.get(_CONTENT) == _FILES


def writer_of(manifest: Manifest, file: ManifestFile) -> int:
    """The rank that wrote one of such files."""
    return int(manifest.names[int(file.item_name[0])].removeprefix(_WRITER))


def _settled(path: Path, rank: int) -> int:
    """Make one file durable; its size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise UsageError(
            f"Rank {rank} asked for a path and left no file there: {error.strerror}",
            where=str(path),
            fix="Write every file that is routed before the block ends, or call invalid().",
        ) from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise UsageError("This is no plain file", where=str(path), fix="Write a file to the routed path.")
        sync_open_file(descriptor)
    finally:
        os.close(descriptor)
    return facts.st_size


def _summed(storage: Storage, key: str, name: str, size_bytes: int, progress: Progress) -> WrittenFile:
    return WrittenFile(
        name=name,
        size_bytes=size_bytes,
        item_offset=np.zeros(1, dtype=np.int64),
        item_bytes=np.array([size_bytes], dtype=np.int64),
        payload_offset=np.zeros(1, dtype=np.int64),
        sums=sum_of_object(storage, key, progress.advance),
    )


def _described(file: WrittenFile, writer: int) -> ManifestFile:
    return ManifestFile(
        name=file.name,
        size_bytes=file.size_bytes,
        item_name=np.array([writer], dtype=np.int64),
        item_offset=file.item_offset,
        item_bytes=file.item_bytes,
        payload_offset=file.payload_offset,
        sums=file.sums,
    )


def _no_contents() -> Contents:
    nothing = np.zeros(0, dtype=np.int64)
    boxes = Boxes.concatenated([])
    stored = StoredBoxes(
        boxes,
        file=nothing,
        item_offset=nothing,
        item_bytes=nothing,
        payload_offset=nothing,
        packed=np.zeros(0, dtype=np.bool_),
    )
    return Contents((), stored, (), ())
