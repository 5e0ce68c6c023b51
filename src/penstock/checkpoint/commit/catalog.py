"""Where checkpoints lie: a path or URI becomes a storage and a name in it, a name becomes what is committed.

The one way from a user's words to `commit`. Invariant: a `Stored` checkpoint was committed when it was found.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import Unavailable
from penstock.storage.capabilities import find_folder_tree, unwrap
from penstock.storage.uri import parse_uri

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.storage import Storage

from typing import TYPE_CHECKING

from penstock.checkpoint.commit.folder_commit import FolderShelf
from penstock.checkpoint.commit.protocol import Shelf
from penstock.checkpoint.commit.record_commit import RecordShelf

if TYPE_CHECKING:
    from penstock.storage import Storage

import logging
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME
from penstock.checkpoint.formats.checksums import sum_of
from penstock.checkpoint.formats.manifest import read_manifest
from penstock.errors import StorageError, UsageError
from penstock.storage.object_io import read_object, write_object
from penstock.storage.registry import open_here
from penstock.storage.uri import FILE_SCHEMES

if TYPE_CHECKING:
    from penstock.checkpoint.commit.protocol import Committed
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


POINTER_NAME: Final = "latest"
_STEP_NAME: Final = re.compile(r"step-(0|[1-9][0-9]*)")


def step_dirname(step: int) -> str:
    """What the checkpoint of a step is called."""
    if isinstance(step, bool) or step < 0:
        raise UsageError(f"{step} is no step", fix="Count steps from 0.")
    return f"step-{step}"


def parse_step(name: str) -> int | None:
    """The step that a checkpoint's name means; None for other names."""
    found = _STEP_NAME.fullmatch(name)
    return int(found[1]) if found else None


def choose_surplus(steps: Sequence[int], keep: int | None, is_whole: Callable[[int], bool]) -> list[int]:
    """The steps to remove so that the newest `keep` remain, oldest first; None keeps all.

    If none of those is whole, the newest whole one before them stays, too. `is_whole` is asked for the newest
    first and no more often than needed.
    """
    ordered = sorted(steps)
    if keep is None or len(ordered) <= keep:
        return []
    removed, kept = ordered[:-keep], ordered[-keep:]
    if any(is_whole(step) for step in reversed(kept)):
        return removed
    saved = next((step for step in reversed(removed) if is_whole(step)), None)
    return [step for step in removed if step != saved]


class Steps:
    """The committed steps below one root. Any rank may ask; only rank 0 changes anything."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._shelf = open_shelf(storage)

    def committed(self) -> list[int]:
        """All committed steps, ascending."""
        steps = (parse_step(name) for name in self._shelf.names())
        return sorted(step for step in steps if step is not None)

    def find(self, step: int) -> Stored:
        """Where a step lies; `ObjectNotFound` where it is not committed."""
        return Stored(self.storage, self._shelf.find(step_dirname(step)))

    def surplus(self, keep: int | None) -> list[int]:
        """The steps to remove so that the newest `keep` remain, as `choose_surplus` decides."""
        return choose_surplus(self.committed(), keep, lambda step: self.find(step).is_whole())

    def remove(self, step: int) -> None:
        """Remove a step."""
        self._shelf.remove(self._shelf.find(step_dirname(step)))

    def point_to(self, step: int) -> None:
        """Write the pointer."""
        write_object(self.storage, POINTER_NAME, [f"{step_dirname(step)}\n".encode()])


def open_shelf(storage: Storage) -> Shelf:
    """What is committed in this storage."""
    tree = find_folder_tree(storage)
    return FolderShelf(storage, tree) if tree is not None else RecordShelf(storage)


def local_path(storage: Storage, key: str) -> Path:
    """Where an object lies on this machine; `Unavailable` for a storage that is no file system."""
    if find_folder_tree(storage) is None:
        raise Unavailable(
            "Files of one's own need paths, and this storage has none",
            where=storage.uri,
            fix="Give a cache=, a folder on each node: files are written there and flushed.",
        )
    return Path(parse_uri(unwrap(storage).uri).root) / key
