"""Commit on object services: every save writes keys of its own, and a record says which save a name means.

    NAME/ID/...                the files of one save, which no other save writes
    NAME/ID.lease              the process it belongs to, until it is committed
    NAME/penstock-commit.json  the record: written last, on condition that no other save has changed it

Object services have no rename: a checkpoint cannot be moved into place, but a small object can be replaced in
one conditional write. Invariant: of two saves of one name one wins as a whole and the other fails; neither
can overwrite the other's data.
"""

from __future__ import annotations

import json
import logging
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.commit.protocol import (
    LEASE_S,
    MANIFEST_NAME,
    METADATA_NAME,
    Committed,
    Draft,
    Seal,
    is_lease_expired,
    lease_text,
    require_complete,
)
from penstock.errors import AlreadyThere, ObjectNotFound, StorageError
from penstock.storage.process_id import ProcessId, current_process
from penstock.storage.protocol import read_object, write_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.storage import Storage
    from penstock.storage.capabilities import SupportsConditionalWrites
    from penstock.storage.protocol import ObjectInfo

RECORD_NAME: Final = "penstock-commit.json"
LEASE_ENDING: Final = ".lease"
_SAVE: Final = re.compile(r"(?P<folder>(?P<name>[^/]+)/[0-9a-f]{16})(\.lease|/.+)")
_VERSION: Final = 1

logger = logging.getLogger(__name__)


class RecordDraftStore:
    """`Drafts` below keys of their own."""

    def __init__(
        self,
        storage: Storage,
        conditional: SupportsConditionalWrites,
        *,
        owner: Callable[[], ProcessId] = current_process,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._conditional = conditional
        self._shelf = RecordCatalog(storage)
        self._owner = owner
        self._clock = clock
        self._published: set[str] = set()

    def start(self, name: str, save_id: str) -> Draft:
        """Write the lease; objects need no folder."""
        draft = Draft(name=name, folder=f"{name}/{save_id}", save_id=save_id)
        self.renew(draft)
        return draft

    def renew(self, draft: Draft) -> None:
        """Write the lease again: its age is what others look at."""
        write_object(self._storage, draft.folder + LEASE_ENDING, [lease_text(self._owner())])

    def publish(self, draft: Draft, seal: Seal) -> Committed:
        """Check the files, write manifest and metadata, then the record."""
        prefix = f"{draft.folder}/"
        found = {info.key.removeprefix(prefix): info.size_bytes for info in self._storage.list(draft.folder)}
        require_complete(found, seal.sizes, f"{self._storage.uri}/{draft.folder}")
        write_object(self._storage, draft.key(MANIFEST_NAME), [seal.manifest])
        write_object(self._storage, draft.key(METADATA_NAME), [seal.metadata])
        older = self._shelf.find_if_any(draft.name)
        committed = self._write_record(draft, older)
        self._published.add(draft.save_id)
        self._clear_up(draft, older)
        return committed

    def drop(self, draft: Draft) -> None:
        """Delete the draft's objects."""
        if draft.save_id not in self._published:
            delete_all(self._storage, self._storage.list(draft.folder))
            self._end_lease(draft)

    def sweep(self) -> list[str]:
        """Delete the objects of saves that no record names and whose lease has expired."""
        saves: dict[str, list[ObjectInfo]] = {}
        for info in self._storage.list():
            if found := _SAVE.fullmatch(info.key):
                saves.setdefault(found["folder"], []).append(info)
        swept = []
        for folder, objects in saves.items():
            try:
                if self._sweep_one(folder, objects):
                    swept.append(folder)
            except StorageError as error:
                logger.debug("Could not sweep %s: %s", folder, error)
        return swept

    def _sweep_one(self, folder: str, objects: Sequence[ObjectInfo]) -> bool:
        # The lease before the record: a save that commits between the two has its record by then.
        if not self._is_expired(folder, objects):
            return False
        committed = self._shelf.find_if_any(folder.rpartition("/")[0])
        if committed is not None and committed.folder == folder:
            objects = [info for info in objects if info.key == folder + LEASE_ENDING]
        delete_all(self._storage, objects)
        return bool(objects)

    def _is_expired(self, folder: str, objects: Sequence[ObjectInfo]) -> bool:
        times = {info.key: info.modified_s for info in objects}
        key = folder + LEASE_ENDING
        if key not in times:
            return self._clock() - max(times.values()) > LEASE_S
        try:
            text = read_object(self._storage, key)
        except ObjectNotFound:
            return False
        return is_lease_expired(text, age_s=self._clock() - times[key], observer=self._owner())

    def _write_record(self, draft: Draft, older: Committed | None) -> Committed:
        record = _Record(save_id=draft.save_id, folder=draft.folder)
        try:
            info = self._conditional.write_if(
                f"{draft.name}/{RECORD_NAME}", record.text(), replaces=older.version if older else None
            )
        except AlreadyThere as error:
            # If the first attempt wrote the record and its answer was lost, the retry is refused.
            now = self._shelf.find_if_any(draft.name)
            if now is not None and now.folder == draft.folder:
                return now
            raise AlreadyThere(
                f"Another save committed {draft.name} first; this one was given up",
                uri=f"{self._storage.uri}/{draft.name}",
                fix="Let one job at a time save to this folder, or give each job its own.",
            ) from error
        return Committed(name=draft.name, folder=draft.folder, version=info.checksum or "")

    def _clear_up(self, draft: Draft, older: Committed | None) -> None:
        """Remove the older checkpoint and the lease. The save is committed: failures are left to a sweep."""
        try:
            if older is not None and older.folder != draft.folder:
                delete_all(self._storage, self._storage.list(older.folder))
            self._end_lease(draft)
        except StorageError as error:
            logger.warning("Could not remove the older checkpoint that %s replaced: %s", draft.name, error)

    def _end_lease(self, draft: Draft) -> None:
        with suppress(ObjectNotFound):
            self._storage.delete(draft.folder + LEASE_ENDING)


class RecordCatalog:
    """`Shelf` of records, and of checkpoints that somebody else put there: a `.metadata` below a name."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def names(self) -> list[str]:
        """All names with a record, or with metadata right below them."""
        ends = (RECORD_NAME, METADATA_NAME)
        found = (info.key.rpartition("/") for info in self._storage.list())
        return sorted({name for name, _, last in found if name and "/" not in name and last in ends})

    def find(self, name: str) -> Committed:
        """The save that the record of this name means."""
        committed = self.find_if_any(name)
        if committed is not None:
            return committed
        plain = Committed(name=name, folder=name)
        self._storage.stat(plain.key(METADATA_NAME))
        return plain

    def find_if_any(self, name: str) -> Committed | None:
        """The save that the record of this name means; None if there is no record."""
        key = f"{name}/{RECORD_NAME}"
        try:
            version = self._storage.stat(key).checksum
            text = read_object(self._storage, key)
        except ObjectNotFound:
            return None
        record = _Record.parse(text, f"{self._storage.uri}/{key}")
        return Committed(name=name, folder=record.folder, version=version or "")

    def remove(self, committed: Committed) -> None:
        """Delete the record, then the files."""
        if committed.folder == committed.name:
            self._storage.delete(committed.key(METADATA_NAME))
        else:
            self._storage.delete(f"{committed.name}/{RECORD_NAME}")
        delete_all(self._storage, self._storage.list(committed.folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """Which save a name means."""

    save_id: str
    folder: str
    record_version: int = field(default=_VERSION)

    def text(self) -> bytes:
        return json.dumps(
            {"record_version": self.record_version, "save_id": self.save_id, "folder": self.folder}
        ).encode()

    @classmethod
    def parse(cls, text: bytes | bytearray, uri: str) -> _Record:
        try:
            document = json.loads(text)
            record = cls(**document)
        except (ValueError, TypeError) as error:
            raise StorageError(
                f"The commit record of this checkpoint cannot be parsed: {error}",
                uri=uri,
                fix="Save the step again; other steps are not affected.",
            ) from error
        if record.record_version != _VERSION:
            raise StorageError(
                f"The commit record of this checkpoint has version {record.record_version}; "
                f"this Penstock reads version {_VERSION}",
                uri=uri,
                fix="Use the Penstock that wrote it, or a newer one.",
            )
        return record


def delete_all(storage: Storage, objects: Iterable[ObjectInfo]) -> None:
    """Delete these objects; another process may be deleting them at the same time."""
    for info in list(objects):
        try:
            storage.delete(info.key)
        except ObjectNotFound:
            continue
