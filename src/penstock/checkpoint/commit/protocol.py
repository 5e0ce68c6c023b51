"""The waist of the commit: what a save needs from a place that keeps checkpoints, and what it hands in.

`place.begin` makes a `Place` on every rank, ranks write their files through it, `Place.commit` makes all of
them one checkpoint. Invariant: a committed checkpoint is never written to, only replaced whole.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Protocol

from penstock.errors import ShortTransfer, StorageError
from penstock.storage.process_id import ProcessId

if TYPE_CHECKING:
    from collections.abc import Mapping

MANIFEST_NAME: Final = "penstock.json"
METADATA_NAME: Final = ".metadata"

LEASE_S: Final = 900.0
"""An unfinished save not renewed for so long is taken for dead, where nobody can ask for its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """What makes files a checkpoint. Rank 0 builds it from what all ranks report, and writes it last."""

    manifest: bytes
    """Becomes `penstock.json`."""
    metadata: bytes
    """Becomes `.metadata`, which stock DCP reads; the last file of all."""
    sizes: Mapping[str, int]
    """Every data file of every rank and its bytes: exactly these must lie there, seen from rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A save that nobody can see yet: it is to be called `name`, and its files go below `folder`."""

    name: str
    folder: str
    save_id: str

    def key(self, file_name: str) -> str:
        """Where a file of this checkpoint is to be written."""
        return f"{self.folder}/{file_name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint that is whole and durable: called `name`, its files lie below `folder`.

    On file systems both are the same. `version` is what replacing or removing it is conditional on.
    """

    name: str
    folder: str
    version: str = ""

    def key(self, file_name: str) -> str:
        """Where a file of this checkpoint lies."""
        return f"{self.folder}/{file_name}"


class Drafts(Protocol):
    """The writing half of a place that keeps checkpoints; called by rank 0 alone, which tells the others.

    `start`, then `publish` or `drop`; `renew` from any thread meanwhile. A process killed in between leaves
    what `sweep` of any later process collects, and no trace in the `Shelf`.
    """

    def start(self, name: str, save_id: str) -> Draft:
        """Make room for a checkpoint that will be called `name`, under a lease.

        `UsageError` where something lies under that name that is no checkpoint and must not be replaced.
        """

    def renew(self, draft: Draft) -> None:
        """Show that this save is alive."""

    def publish(self, draft: Draft, seal: Seal) -> Committed:
        """Check that all files lie there, write manifest and metadata, and make it visible in one step.

        A checkpoint of that name is replaced and removed. When this returns, all of it survives a power cut.
        """

    def drop(self, draft: Draft) -> None:
        """Remove a draft and all of its files."""

    def sweep(self) -> list[str]:
        """Remove what dead saves and interrupted removals left; their names. Drafts of the living stay."""


class Shelf(Protocol):
    """The reading half: which checkpoints are committed. Any rank may call."""

    def names(self) -> list[str]:
        """The names of all committed checkpoints, in no order."""

    def find(self, name: str) -> Committed:
        """Where the checkpoint of this name lies; `ObjectNotFound` where none is committed."""

    def remove(self, committed: Committed) -> None:
        """Take a checkpoint away: first its name in one step, then its files. Safe if it is gone already."""


_VERSION: Final = 1


def lease_text(owner: ProcessId) -> bytes:
    """A lease of this owner, as it lies in storage."""
    return json.dumps({"lease_version": _VERSION, "owner": asdict(owner)}).encode()


def is_dead(text: bytes | bytearray, *, age_s: float, observer: ProcessId) -> bool:
    """Whether the save of this lease, renewed `age_s` ago, is over. In doubt, only age tells."""
    try:
        document = json.loads(text)
        gone = ProcessId(**document["owner"]).has_ended(observer=observer)
    except (ValueError, TypeError, KeyError):
        gone = None
    return age_s > LEASE_S if gone is None else gone


_NUM_NAMED: Final = 3


def require_whole(found: Mapping[str, int], expected: Mapping[str, int], uri: str) -> None:
    """Raise unless `found` (name to bytes) is exactly what is `expected`."""
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise StorageError(
            f"{len(missing)} of {len(expected)} files of this checkpoint are not there, as rank 0 sees it: "
            f"{_named(missing)}",
            uri=uri,
            fix="All ranks must write to the same storage: give a path on a shared file system.",
        )
    for name, size_bytes in sorted(expected.items()):
        if found[name] != size_bytes:
            raise ShortTransfer(
                f"{name} has {found[name]} bytes, but {size_bytes} were written",
                uri=f"{uri}/{name}",
                expected_bytes=size_bytes,
                actual_bytes=found[name],
                fix="Something else wrote or cut this file, or the storage lost data: save again.",
            )
    strangers = sorted(found.keys() - expected.keys())
    if strangers:
        raise StorageError(
            f"{len(strangers)} files lie in this checkpoint that no rank wrote: {_named(strangers)}",
            uri=uri,
            fix="Find out what else writes there, and save again.",
        )


def _named(names: list[str]) -> str:
    rest = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
