"""One node's cache: the steps of which it has committed its share, and drafts of those on their way.

Below `cache.py`, which speaks for all nodes. Nothing here is collective: the rank that leads its node calls.
Invariant: a share is committed whole, with the records of its groups and what describes the whole step.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.commit.catalog import Stored, open_shelf
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME, Draft, Seal
from penstock.checkpoint.commit.transaction import open_drafts
from penstock.checkpoint.levels.redundancy.recoverability import NodeHolding
from penstock.checkpoint.levels.redundancy.redundancy_record import GroupRecord, read_record, record_bytes
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.storage.capabilities import find_folder_tree
from penstock.storage.object_io import read_object, write_object

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from penstock.storage import Storage
    from penstock.storage.capabilities import FolderTree

RECORD_PREFIX: Final = "redundancy-"
DOUBT_PREFIX: Final = ".penstock-doubt-"
"""Begins the name of a note that lies beside a step until all nodes are known to have committed it."""

logger = logging.getLogger(__name__)


class NodeCache:
    """What lies in the cache of this node, which `ranks` of the job use."""

    def __init__(self, storage: Storage, ranks: tuple[int, ...]) -> None:
        self.storage = storage
        self.ranks = ranks
        self._drafts, self._shelf = open_drafts(storage), open_shelf(storage)
        self._tree = folders_of(storage)

    def names(self) -> list[str]:
        """Every step of which this node has committed a share, in no order."""
        return self._shelf.names()

    def held(self, name: str) -> Stored:
        """Where the share of this node lies; `ObjectNotFound` where it has none."""
        return Stored(self.storage, self._shelf.find(name))

    def files(self, held: Stored) -> dict[str, int]:
        """The files of a share and their sizes."""
        start = f"{held.committed.folder}/"
        listed = self.storage.list(held.committed.folder)
        return {info.key.removeprefix(start): info.size_bytes for info in listed}

    def seal(self, name: str) -> tuple[bytes, bytes] | None:
        """The whole step's manifest and metadata; None where this node has not got the step."""
        try:
            held = self.held(name)
        except ObjectNotFound:
            return None
        return (
            bytes(read_object(self.storage, held.key(MANIFEST_NAME))),
            bytes(read_object(self.storage, held.key(METADATA_NAME))),
        )

    def holding(self, name: str) -> NodeHolding:
        """What this node can bring to a step."""
        try:
            held = self.held(name)
            sizes = self.files(held)
            records = self._records(held, sizes)
        except StorageError as error:
            logger.info("The cache %s has not got %s: %s", self.storage.uri, name, error)
            return NodeHolding(ranks=self.ranks)
        return NodeHolding(ranks=self.ranks, sizes=sizes, records=records)

    def start(self, name: str, save_id: str) -> Draft:
        """Make room for a step, where what dead saves left is removed first."""
        for swept in self._drafts.sweep():
            logger.info("Removed %s, which a save left that died, below %s", swept, self.storage.uri)
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
        """Commit exactly the shares of ranks that `saved`, with the records of their groups."""
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

    def doubtful(self) -> set[str]:
        """The steps that this node has committed without having heard that all nodes did."""
        notes = {entry.name.removeprefix(DOUBT_PREFIX) for entry in self._tree.entries(prefix=DOUBT_PREFIX)}
        return notes & set(self.names())

    def announce(self, draft: Draft) -> None:
        """Note that a step is being committed on all nodes: after a crash nobody else could tell."""
        write_object(self.storage, DOUBT_PREFIX + draft.name, [draft.save_id.encode()])

    def confirm(self, name: str) -> None:
        """All nodes have committed it, or none keeps it."""
        self._tree.remove(DOUBT_PREFIX + name)

    def take_back(self, draft: Draft) -> None:
        """Remove what was committed of a draft, because other nodes could not commit theirs."""
        try:
            self.confirm(draft.name)
            held = self._shelf.find(draft.name)
            manifest = bytes(read_object(self.storage, held.key(MANIFEST_NAME)))
            if draft.save_id.encode() in manifest:
                self._shelf.remove(held)
        except StorageError as error:
            logger.debug("Nothing to take back of %s: %s", draft.name, error)

    def remove(self, name: str) -> None:
        """Take this node's share of a step out of its cache."""
        try:
            self._shelf.remove(self._shelf.find(name))
        except ObjectNotFound:
            logger.debug("%s was not in the cache %s", name, self.storage.uri)

    def _records(self, held: Stored, names: Iterable[str]) -> dict[int, GroupRecord]:
        """The records of groups that lie in a share, by the group's number."""
        records = {}
        for name in names:
            if name.startswith(RECORD_PREFIX):
                number = int(name.removeprefix(RECORD_PREFIX).removesuffix(".json"))
                content = read_object(self.storage, held.key(name))
                records[number] = read_record(content, f"{self.storage.uri}/{held.key(name)}")
        return records


def folders_of(storage: Storage) -> FolderTree:
    """The folders of a cache; `UsageError` for a storage that has none."""
    tree = find_folder_tree(storage)
    if tree is None:
        raise UsageError(
            "A cache is a folder of each node", where=storage.uri, fix="Give a path, such as /local/ssd/run."
        )
    return tree


def _record_name(group: int) -> str:
    return f"{RECORD_PREFIX}{group}.json"
