"""What every way of committing shares: drafts, the catalog, leases of unfinished saves, completeness.

A `DraftStore` makes a draft that no reader sees, ranks write their files into it, `publish` turns all of it
into one checkpoint. File systems do so by renaming folders (`folder_commit`), object services by a record
(`record_commit`). Invariant: a committed checkpoint is never written to, only replaced as a whole.
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
"""A lease not renewed for this long has expired, if its process cannot be looked up from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """What turns files into a checkpoint. Rank 0 builds it from what all ranks report, and writes it last."""

    manifest: bytes
    """Becomes `penstock.json`."""
    metadata: bytes
    """Becomes `.metadata`, which stock DCP reads; the last file of all."""
    sizes: Mapping[str, int]
    """Size by name of every data file of every rank: rank 0 must see exactly these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A save that readers cannot see yet. It will be called `name`; its files are written below `folder`."""

    name: str
    folder: str
    save_id: str

    def key(self, file_name: str) -> str:
        """The key that a file of this checkpoint is written to."""
        return f"{self.folder}/{file_name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A complete and durable checkpoint called `name`, with its files below `folder`.

    On file systems both are the same. Replacing or removing it is conditional on `version`.
    """

    name: str
    folder: str
    version: str = ""

    def key(self, file_name: str) -> str:
        """The key of a file of this checkpoint."""
        return f"{self.folder}/{file_name}"


class DraftStore(Protocol):
    """The writing half of a commit protocol; called by rank 0 alone, which tells the others.

    `start`, then `publish` or `drop`; `renew` from any thread meanwhile. What a process killed in between
    leaves is collected by `sweep` in any later one, and never shows up in the `Catalog`.
    """

    def start(self, name: str, save_id: str) -> Draft:
        """Begin a draft of a checkpoint that will be called `name`, under a lease.

        Raises `UsageError` if something else than a checkpoint has that name: it must not be replaced.
        """

    def renew(self, draft: Draft) -> None:
        """Renew the lease, so that others see that this save is alive."""

    def publish(self, draft: Draft, seal: Seal) -> Committed:
        """Check all files, write manifest and metadata, and make the checkpoint visible at once.

        An older checkpoint of that name is replaced and removed. On return, all of it survives a power cut.
        """

    def drop(self, draft: Draft) -> None:
        """Remove a draft and all of its files."""

    def sweep(self) -> list[str]:
        """Remove what dead saves and interrupted removals left; their names. Drafts of live saves stay."""


class Catalog(Protocol):
    """The reading half of a commit protocol: which checkpoints are committed. Any rank may call."""

    def names(self) -> list[str]:
        """The names of all committed checkpoints, in no particular order."""

    def find(self, name: str) -> Committed:
        """The committed checkpoint of this name; `ObjectNotFound` if there is none."""

    def remove(self, committed: Committed) -> None:
        """Remove a checkpoint: first its name, at once, then its files. Safe if it is gone already."""


_VERSION: Final = 1


def lease_text(owner: ProcessId) -> bytes:
    """The content of a lease file: which process an unfinished save belongs to."""
    return json.dumps({"lease_version": _VERSION, "owner": asdict(owner)}).encode()


def is_lease_expired(text: bytes | bytearray, *, age_s: float, observer: ProcessId) -> bool:
    """Whether the save of this lease, renewed `age_s` ago, is over.

    The process decides if it can be looked up from here, else the age. A lease that cannot be parsed is
    judged by its age, too: it must never make a save fail.
    """
    try:
        document = json.loads(text)
        gone = ProcessId(**document["owner"]).has_ended(observer=observer)
    except (ValueError, TypeError, KeyError):
        gone = None
    return age_s > LEASE_S if gone is None else gone


_NUM_NAMED: Final = 3


def require_complete(found: Mapping[str, int], expected: Mapping[str, int], uri: str) -> None:
    """Raise unless the files `found` (size by name) are exactly those `expected`."""
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise StorageError(
            f"{len(missing)} of {len(expected)} files of this checkpoint are missing, as rank 0 sees it: "
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
                fix="Another program changed this file, or the storage lost data: save again.",
            )
    strangers = sorted(found.keys() - expected.keys())
    if strangers:
        raise StorageError(
            f"This checkpoint contains {len(strangers)} files that no rank wrote: {_named(strangers)}",
            uri=uri,
            fix="Find out which other program writes there, then save again.",
        )


def _named(names: list[str]) -> str:
    rest = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
