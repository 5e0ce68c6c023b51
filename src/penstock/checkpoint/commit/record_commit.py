"""Commit on object services: every save writes keys of its own, and a record says which save a name means.

    NAME/ID/...                the files of one save, which no other save writes
    NAME/ID.lease              the process it belongs to, until it is committed
    NAME/penstock-commit.json  the record: written last, on condition that no other save has changed it

Object services have no rename: a checkpoint cannot be moved into place, but a small object can be replaced in
one conditional write. Invariant: of two saves of one name one wins as a whole and the other fails; neither
can overwrite the other's data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.checkpoint.commit import protocol
from penstock.checkpoint.formats.manifest import require_complete
from penstock.errors import AlreadyThere, ObjectNotFound, StorageError
from penstock.storage import Storage
from penstock.storage.capabilities import SupportsConditionalWrites, defer_sync, find_folder_tree
from penstock.storage.protocol import ObjectInfo, exists, read_described

RECORD_NAME: Final = "penstock-commit.json"
_SAVE: Final = re.compile(r"(?P<folder>(?P<name>[^/]+)/[0-9a-f]{16})(\.lease|/.+)")
_FOLDER: Final = re.compile(r"[^/]+/[0-9a-f]{16}")
_VERSION: Final = 1
NUM_DELETING_THREADS: Final = 4


def is_written_once(storage: Storage, folder: str) -> bool:
    """Return whether these are files of one save, which no other save of the name will ever replace."""
    return _FOLDER.fullmatch(folder) is not None and find_folder_tree(storage) is None


class RecordDraftStore(protocol.DraftStore):
    """Drafts below keys of their own."""

    def __init__(self, storage: Storage, conditional: SupportsConditionalWrites, **choices: Any) -> None:
        super().__init__(storage, **choices)
        # Its answer has all that is asked of the record, so nothing else is.
        quick = defer_sync(storage, "names")
        self._conditional = quick if isinstance(quick, SupportsConditionalWrites) else conditional
        self._catalog = RecordCatalog(storage)
        self._older: dict[str, protocol.Committed | None] = {}
        """By save ID, the checkpoint that the draft is to replace."""

    def start(self, name: str, save_id: str) -> protocol.Draft:
        """Write the lease; objects need no folder."""
        draft = protocol.Draft(name=name, folder=f"{name}/{save_id}", save_id=save_id)
        self._older[save_id] = self._catalog.find_if_any(name)
        self.renew(draft)
        return draft

    def publish(self, draft: protocol.Draft, seal: protocol.SealParts) -> protocol.Committed:
        """Write manifest and metadata, check all files, then write the record."""
        # In this order one listing checks all of them. No record names the folder yet.
        expected = dict(seal.sizes) | self._write_seal(draft, seal)
        prefix = f"{draft.folder}/"
        objects = self._storage.list(draft.folder)
        sizes = {info.key.removeprefix(prefix): info.size_bytes for info in objects}
        require_complete(sizes, expected, f"{self._storage.uri}/{draft.folder}")
        older = self._catalog.find_if_any(draft.name)
        # Removed meanwhile is as good as never there; anything else is another save's.
        if older is not None and older != self._older.pop(draft.save_id, older):
            raise self._overtaken(draft)
        committed = self._write_record(draft, older)
        self._published.add(draft.save_id)
        self._clear_up(draft, partial(self._remove_older, draft, older))
        return committed

    def drop(self, draft: protocol.Draft) -> None:
        """Delete the draft's objects."""
        if draft.save_id not in self._published:
            _delete_all(self._storage, self._storage.list(draft.folder))
            self._end_lease(draft)

    def _find_remains(self) -> Iterator[tuple[str, Callable[[], bool]]]:
        saves: dict[str, list[ObjectInfo]] = {}
        for info in self._storage.list():
            if save := _SAVE.fullmatch(info.key):
                saves.setdefault(save["folder"], []).append(info)
        for folder, objects in saves.items():
            yield folder, partial(self._sweep_save, folder, objects)

    def _sweep_save(self, folder: str, objects: list[ObjectInfo]) -> bool:
        """Delete the objects of a save that no record names and whose lease has expired."""
        # The lease before the record: a save that commits between the two has its record by then.
        if not self._is_dead(folder, objects):
            return False
        committed = self._catalog.find_if_any(folder.rpartition("/")[0])
        if committed is not None and committed.folder == folder:
            objects = [info for info in objects if info.key == folder + protocol.LEASE_ENDING]
        _delete_all(self._storage, objects)
        return bool(objects)

    def _is_dead(self, folder: str, objects: list[ObjectInfo]) -> bool:
        times = {info.key: info.modified_s for info in objects}
        key = folder + protocol.LEASE_ENDING
        if key not in times:
            return self._clock() - max(times.values()) > protocol.LEASE_S
        try:
            return self._has_expired(key, times[key])
        except ObjectNotFound:
            return False

    def _write_record(self, draft: protocol.Draft, older: protocol.Committed | None) -> protocol.Committed:
        record = _Record(save_id=draft.save_id, folder=draft.folder, record_version=_VERSION)
        try:
            info = self._conditional.write_if(
                f"{draft.name}/{RECORD_NAME}",
                record.model_dump_json().encode(),
                replaces=older.version if older else None,
            )
        except AlreadyThere as error:
            # If the first attempt wrote the record and its answer was lost, the retry is refused.
            current = self._catalog.find_if_any(draft.name)
            if current is not None and current.folder == draft.folder:
                return current
            raise self._overtaken(draft) from error
        return protocol.Committed(name=draft.name, folder=draft.folder, version=info.checksum or "")

    def _overtaken(self, draft: protocol.Draft) -> AlreadyThere:
        return protocol.overtaken(f"{self._storage.uri}/{draft.name}", draft.name)

    def _remove_older(self, draft: protocol.Draft, older: protocol.Committed | None) -> None:
        if older is not None and older.folder != draft.folder:
            _delete_all(self._storage, self._storage.list(older.folder))


class RecordCatalog:
    """The `Catalog` of records, and of checkpoints of other writers: a `.metadata` right below a name."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def names(self) -> list[str]:
        """All names with a record, or with metadata right below them."""
        ends = (RECORD_NAME, protocol.METADATA_NAME)
        keys = (info.key.rpartition("/") for info in self._storage.list())
        return sorted({name for name, _, last in keys if name and "/" not in name and last in ends})

    def find(self, name: str) -> protocol.Committed:
        """The save that the record of this name means."""
        committed = self.find_if_any(name)
        if committed is not None:
            return committed
        foreign = protocol.Committed(name=name, folder=name)
        self._storage.stat(foreign.key(protocol.METADATA_NAME))
        return foreign

    def find_if_any(self, name: str) -> protocol.Committed | None:
        """The save that the record of this name means; None if there is no record."""
        key = f"{name}/{RECORD_NAME}"
        try:
            info, text = read_described(self._storage, key)
        except ObjectNotFound:
            return None
        record = _parse_record(text, f"{self._storage.uri}/{key}")
        return protocol.Committed(name=name, folder=record.folder, version=info.checksum or "")

    def hide(self, committed: protocol.Committed) -> Callable[[], None]:
        """Delete the record; the call that this gives deletes the files."""
        if committed.folder == committed.name:
            self._storage.delete(committed.key(protocol.METADATA_NAME))
        else:
            self._storage.delete(f"{committed.name}/{RECORD_NAME}")
        return lambda: _delete_all(self._storage, self._storage.list(committed.folder))

    def finish_hiding(self, name: str) -> list[ObjectInfo]:
        """Remove the objects of saves of this name that have no lease and that no record names.

        A save has its lease from before its first object until after its record, so these are nobody's; a
        sweep, which nobody has asked for this name, waits until they are old.
        """
        saves: dict[str, list[ObjectInfo]] = {}
        for info in self._storage.list(name):
            if (save := _SAVE.fullmatch(info.key)) and save["folder"].startswith(f"{name}/"):
                saves.setdefault(save["folder"], []).append(info)
        # Leases after the listing, in which a save that began meanwhile may be without one; then the record.
        left = [folder for folder in saves if not exists(self._storage, folder + protocol.LEASE_ENDING)]
        committed = self.find_if_any(name)
        removed = [
            info
            for folder in left
            if committed is None or committed.folder != folder
            for info in saves[folder]
            if not info.key.endswith(protocol.LEASE_ENDING)
        ]
        _delete_all(self._storage, removed)
        return removed


class _Record(BaseModel):
    """Find the save that a name means."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    record_version: int
    save_id: str
    folder: str


def _parse_record(text: bytes | bytearray, uri: str) -> _Record:
    try:
        record = _Record.model_validate_json(bytes(text))
    except ValidationError as error:
        raise StorageError(
            f"The commit record of this checkpoint cannot be parsed: {error.errors()[0]['msg']}",
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


def _delete_all(storage: Storage, objects: Iterable[ObjectInfo]) -> None:
    """Delete these objects, several at a time; another process may be deleting them at the same time."""

    def delete(info: ObjectInfo) -> None:
        with suppress(ObjectNotFound):
            storage.delete(info.key)

    with ThreadPoolExecutor(NUM_DELETING_THREADS) as threads:
        for _ in threads.map(delete, list(objects)):
            continue
