"""One node's cache: the shares of steps that it has committed, and drafts of those in progress.

Below `cache.py`, which acts for all nodes. Nothing here is collective: the lead rank of the node calls.
Invariant: a share is committed as a whole, with the records of its groups and the manifest of the whole step.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.commit.catalog import CheckpointRef, open_catalog
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME, Draft, Seal
from penstock.checkpoint.commit.transaction import open_draft_store
from penstock.checkpoint.levels.redundancy.recoverability import NodeShares
from penstock.checkpoint.levels.redundancy.redundancy_record import GroupRecord, read_record, record_bytes
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.storage.capabilities import find_folder_tree
from penstock.storage.protocol import read_object, write_object

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from penstock.storage import Storage
    from penstock.storage.capabilities import FolderTree

RECORD_PREFIX: Final = "redundancy-"
DOUBT_PREFIX: Final = ".penstock-doubt-"
"""Prefix of a note beside a step, until all nodes are known to have committed it."""

logger = logging.getLogger(__name__)


class NodeCache:
    """The cache of this node, which `ranks` of the job use."""

    def __init__(self, storage: Storage, ranks: tuple[int, ...]) -> None:
        self.storage = storage
        self.ranks = ranks
        self._drafts, self._shelf = open_draft_store(storage), open_catalog(storage)
        self._tree = require_folders(storage)

    def names(self) -> list[str]:
        """The steps of which this node has committed a share, in no particular order."""
        return self._shelf.names()

    def held(self, name: str) -> CheckpointRef:
        """The share of a step on this node; `ObjectNotFound` if it has none."""
        return CheckpointRef(self.storage, self._shelf.find(name))

    def files(self, held: CheckpointRef) -> dict[str, int]:
        """The files of a share and their sizes."""
        start = f"{held.committed.folder}/"
        listed = self.storage.list(held.committed.folder)
        return {info.key.removeprefix(start): info.size_bytes for info in listed}

    def seal(self, name: str) -> tuple[bytes, bytes] | None:
        """Manifest and metadata of the whole step; None if this node does not have the step."""
        try:
            held = self.held(name)
        except ObjectNotFound:
            return None
        return (
            bytes(read_object(self.storage, held.key(MANIFEST_NAME))),
            bytes(read_object(self.storage, held.key(METADATA_NAME))),
        )

    def holding(self, name: str) -> NodeShares:
        """What this node can contribute to a step."""
        try:
            held = self.held(name)
            sizes = self.files(held)
            records = self._records(held, sizes)
        except StorageError as error:
            logger.info("The cache %s does not have %s: %s", self.storage.uri, name, error)
            return NodeShares(ranks=self.ranks)
        return NodeShares(ranks=self.ranks, sizes=sizes, records=records)

    def start(self, name: str, save_id: str) -> Draft:
        """Begin a draft of a step, after sweeping what dead saves left."""
        for swept in self._drafts.sweep():
            logger.info("Removed %s, the remains of a dead save, below %s", swept, self.storage.uri)
        return self._drafts.start(name, save_id)

    def drop(self, draft: Draft) -> None:
        """Remove a draft."""
        try:
            self._drafts.drop(draft)
        except StorageError as error:
            logger.warning("Could not remove the unfinished %s: %s", draft.folder, error)

    def publish(
        self,
        draft: Draft,
        manifest: bytes,
        metadata: bytes,
        records: Mapping[int, GroupRecord],
        saved: Collection[int],
    ) -> None:
        """Commit the shares of the ranks in `saved`, with the records of their groups."""
        sizes: dict[str, int] = {}
        for number, record in records.items():
            if set(record.ranks).isdisjoint(saved):
                continue
            written = write_object(self.storage, draft.key(_record_name(number)), [record_bytes(record)])
            sizes[_record_name(number)] = written.size_bytes
            for place, member in enumerate(record.members):
                if member.rank in saved:
                    sizes.update({file.name: file.size_bytes for file in member.files})
                    sizes.update({file.name: file.size_bytes for file in record.kept[place : place + 1]})
        self._drafts.publish(draft, Seal(manifest=manifest, metadata=metadata, sizes=sizes))

    def unconfirmed(self) -> set[str]:
        """The steps that this node has committed without knowing that all nodes did."""
        notes = {entry.name.removeprefix(DOUBT_PREFIX) for entry in self._tree.entries(prefix=DOUBT_PREFIX)}
        return notes & set(self.names())

    def mark_unconfirmed(self, draft: Draft) -> None:
        """Note, before committing, that other nodes may not: after a crash, nothing else would say so."""
        write_object(self.storage, DOUBT_PREFIX + draft.name, [draft.save_id.encode()])

    def confirm(self, name: str) -> None:
        """Remove the note: all nodes have committed the step, or none keeps it."""
        self._tree.remove(DOUBT_PREFIX + name)

    def rollback(self, draft: Draft) -> None:
        """Remove what was committed of a draft, because another node could not commit its own."""
        try:
            self.confirm(draft.name)
            held = self._shelf.find(draft.name)
            manifest = bytes(read_object(self.storage, held.key(MANIFEST_NAME)))
            if draft.save_id.encode() in manifest:
                self._shelf.remove(held)
        except StorageError as error:
            logger.debug("Nothing to roll back of %s: %s", draft.name, error)

    def remove(self, name: str) -> None:
        """Remove this node's share of a step."""
        try:
            self._shelf.remove(self._shelf.find(name))
        except ObjectNotFound:
            logger.debug("%s was not in the cache %s", name, self.storage.uri)

    def _records(self, held: CheckpointRef, names: Iterable[str]) -> dict[int, GroupRecord]:
        """The records in a share, by the number of the group."""
        records = {}
        for name in names:
            if name.startswith(RECORD_PREFIX):
                number = int(name.removeprefix(RECORD_PREFIX).removesuffix(".json"))
                content = read_object(self.storage, held.key(name))
                records[number] = read_record(content, f"{self.storage.uri}/{held.key(name)}")
        return records


def require_folders(storage: Storage) -> FolderTree:
    """The folders of a cache; `UsageError` if the storage is not a file system."""
    tree = find_folder_tree(storage)
    if tree is None:
        raise UsageError(
            "A cache must be a local folder of each node",
            where=storage.uri,
            fix="Use a path such as /local/ssd/run.",
        )
    return tree


def _record_name(group: int) -> str:
    return f"{RECORD_PREFIX}{group}.json"
