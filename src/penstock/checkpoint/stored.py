"""Where checkpoints lie: a path or URI becomes a storage and a name in it, a name becomes what is committed.

The one way from a user's words to `commit`. Invariant: a `Stored` checkpoint was committed when it was found.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.checkpoint.commit.place import open_shelf
from penstock.errors import UsageError
from penstock.storage.registry import open_here
from penstock.storage.uri import FILE_SCHEMES, parse_uri

if TYPE_CHECKING:
    from penstock.checkpoint.commit.base import Committed
    from penstock.storage import Storage

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A committed checkpoint and the storage that holds it."""

    storage: Storage
    committed: Committed

    @property
    def uri(self) -> str:
        """How messages name it."""
        return f"{self.storage.uri.rstrip('/')}/{self.committed.name}"

    def key(self, file_name: str) -> str:
        """The key of one of its files."""
        return self.committed.key(file_name)


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
