"""Where checkpoints lie: a path or URI becomes a storage and a name in it, a name becomes what is committed.

The one way from a user's words to `commit`. Invariant: a `Stored` checkpoint was committed when it was found.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.checkpoint.commit.base import MANIFEST_NAME, METADATA_NAME
from penstock.checkpoint.commit.place import open_shelf
from penstock.checkpoint.manifest import read_manifest
from penstock.checkpoint.sums import sum_of
from penstock.errors import StorageError, Unavailable, UsageError
from penstock.storage.registry import open_here
from penstock.storage.uri import FILE_SCHEMES, parse_uri
from penstock.storage.whole import read_object

if TYPE_CHECKING:
    from penstock.checkpoint.commit.base import Committed
    from penstock.storage import Storage

logger = logging.getLogger(__name__)

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A committed checkpoint and the storage that holds it."""

    storage: Storage
    committed: Committed
    readable: tuple[str, ...] | None = None
    """The files that this rank can open, where not every rank can open all; on all ranks, or on none."""

    @property
    def uri(self) -> str:
        """How messages name it."""
        return f"{self.storage.uri.rstrip('/')}/{self.committed.name}"

    def key(self, file_name: str) -> str:
        """The key of one of its files."""
        return self.committed.key(file_name)

    def is_whole(self) -> bool:
        """Whether manifest, metadata and all files are there in their sizes; sums of payloads are not read.

        A checkpoint without a manifest cannot be checked, and counts as not whole.
        """
        try:
            manifest = read_manifest(read_object(self.storage, self.key(MANIFEST_NAME)), self.uri)
            metadata = read_object(self.storage, self.key(METADATA_NAME))
            sizes = {info.key: info.size_bytes for info in self.storage.list(self.committed.folder)}
        except (StorageError, Unavailable) as error:
            logger.info("%s is not whole: %s", self.uri, error)
            return False
        return sum_of(metadata) == manifest.metadata_sum and all(
            sizes.get(self.key(file.name)) == file.size_bytes for file in manifest.files
        )


def split_path(path: AnyPath) -> tuple[str, str]:
    """The URI of the folder above a checkpoint, options and all, and the checkpoint's name."""
    text = os.fspath(path)
    location = parse_uri(text)
    above, _, name = location.root.rstrip("/").rpartition("/")
    if not name or not (above or location.scheme in FILE_SCHEMES):
        raise UsageError(
            f"{text!r} is the root of a storage, and not a checkpoint in it",
            fix="Add a name for the checkpoint, as in /data/run/step-100 or s3://bucket/run/step-100.",
        )
    query = "&".join(f"{option}={value}" for option, value in location.options.items())
    return f"{location.scheme}://{above or '/'}{'?' + query if query else ''}", name


def open_around(path: AnyPath, *, rank: int = 0) -> tuple[Storage, str]:
    """The storage above a checkpoint's path, and its name there: for saving, and for finding."""
    above, name = split_path(path)
    return open_here(above, rank=rank), name


def find_stored(path: AnyPath, *, rank: int = 0) -> Stored:
    """The committed checkpoint at this path; `ObjectNotFound` where there is none."""
    storage, name = open_around(path, rank=rank)
    return Stored(storage, open_shelf(storage).find(name))
