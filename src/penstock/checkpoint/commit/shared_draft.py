"""A draft that processes of several nodes write; any of them may publish it, so none needs to survive.

    .penstock-save-ID-NAME           the draft, as for any save
    .penstock-save-ID-NAME.lease     renewed by all of them; only its age tells that all are dead
    .penstock-flush-ID-NAME/node-N   the progress of process N: copying its files, or done

publish: manifest and metadata -> check all files -> rename -> fsync of the parent. Any process may do it, and
several at once: they write the same bytes, the rename happens once, and latecomers find it done. Invariant:
only a folder with every file of the seal gets the name.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.checkpoint.commit import protocol
from penstock.checkpoint.formats.manifest import require_complete
from penstock.errors import AlreadyThere, ObjectNotFound, StorageError
from penstock.storage import Storage
from penstock.storage.capabilities import FolderTree
from penstock.storage.files.file_storage import is_unfinished
from penstock.storage.process_id import ProcessId, current_process
from penstock.storage.protocol import read_object, write_object

IDENTITY_BYTES: Final = 80
"""A manifest begins with its own checksum: this many bytes tell it from any other."""

MarkProgress = Literal["copying", "done"]

logger = logging.getLogger(__name__)


class NodeMark(BaseModel):
    """The progress of one process, for the others to read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: Literal[1] = 1
    node: int
    progress: MarkProgress
    host: str
    pid: int


class SharedDraft:
    """One process's view of a draft that it shares with those of other nodes."""

    def __init__(
        self,
        storage: Storage,
        tree: FolderTree,
        name: str,
        save_id: str,
        *,
        node: int,
        owner: Callable[[], ProcessId] = current_process,
    ) -> None:
        self.draft = protocol.Draft(
            name=name, folder=f"{protocol.HIDDEN_PREFIX}save-{save_id}-{name}", save_id=save_id
        )
        self._storage = storage
        self._tree = tree
        self._marks = f"{protocol.HIDDEN_PREFIX}flush-{save_id}-{name}"
        self._node = node
        self._owner = owner

    def join(self) -> None:
        """Make the draft, unless another process has."""
        self.renew()
        try:
            self._tree.make(self.draft.folder, keep_name=False)
        except AlreadyThere:
            logger.debug("%s exists already", self.draft.folder)

    def renew(self) -> None:
        """Renew the lease, for all processes."""
        # The lease names no process that can be looked up: the death of one must not end the work of others.
        anonymous = replace(self._owner(), kernel="", numbering="")
        write_object(
            self._storage, self.draft.folder + protocol.LEASE_ENDING, [protocol.lease_text(anonymous)]
        )

    def mark(self, progress: MarkProgress) -> None:
        """Record the progress of this process for the others; what is done survives a power cut."""
        if progress == "done":
            self._tree.sync(self.draft.folder)
        owner = self._owner()
        mark = NodeMark(node=self._node, progress=progress, host=owner.host, pid=owner.pid)
        write_object(self._storage, f"{self._marks}/node-{self._node}", [mark.model_dump_json().encode()])

    def marks(self) -> dict[int, tuple[NodeMark, float]]:
        """All marks by node, each with its time by the storage's clock."""
        marks = {}
        for entry in self._tree.entries(self._marks, prefix="node-"):
            try:
                text = read_object(self._storage, f"{self._marks}/{entry.name}")
                mark = NodeMark.model_validate_json(bytes(text))
            except (ValidationError, ObjectNotFound) as error:
                logger.debug("The mark %s cannot be read: %s", entry.name, error)
                continue
            marks[mark.node] = mark, entry.modified_s
        return marks

    def retract_marks(self, nodes: list[int]) -> None:
        """Remove marks that turned out to be wrong, so that these processes copy again."""
        for node in nodes:
            self._tree.remove(f"{self._marks}/node-{node}")

    def is_committed(self, manifest: bytes) -> bool:
        """Whether the checkpoint of this name is the one with this manifest."""
        identity = manifest[:IDENTITY_BYTES]
        try:
            source = self._storage.open(f"{self.draft.name}/{protocol.MANIFEST_NAME}")
        except ObjectNotFound:
            return False
        with closing(source):
            beginning = bytearray(min(len(identity), source.size_bytes))
            source.read_into(0, memoryview(beginning))
        return beginning == identity

    def missing(self, seal: protocol.Seal) -> list[str]:
        """The files of the seal that are not in the draft with their sizes."""
        sizes = self._sizes()
        return [name for name, size_bytes in seal.sizes.items() if sizes.get(name) != size_bytes]

    def publish(self, seal: protocol.Seal) -> protocol.Committed:
        """Commit the draft. On return, the checkpoint survives a power cut.

        Raises `StorageError` if files are missing; the draft is unchanged and may be published later.
        """
        if not self.is_committed(seal.manifest):
            try:
                self._seal(seal)
                self._give_name()
            except StorageError:
                if not self.is_committed(seal.manifest):
                    raise
        self._tree.sync()
        self.clear_up()
        return protocol.Committed(name=self.draft.name, folder=self.draft.name)

    def clear_up(self) -> None:
        """Remove what is left of the draft, its marks and lease. Failures are left to a sweep."""
        for folder in (self.draft.folder, self._marks):
            try:
                protocol.hide_folder(self._tree, folder)()
            except StorageError as error:
                logger.warning("Could not remove %s: %s", folder, error)
        try:
            with suppress(ObjectNotFound):
                self._storage.delete(self.draft.folder + protocol.LEASE_ENDING)
        except StorageError as error:
            logger.warning("Could not remove the lease of %s: %s", self.draft.folder, error)

    def _seal(self, seal: protocol.Seal) -> None:
        """Write manifest and metadata, and check that everything else is there."""
        for name in self._sizes():
            if is_unfinished(name):
                # The process that was writing manifest or metadata was killed.
                self._tree.remove(self.draft.key(name))
        write_object(self._storage, self.draft.key(protocol.MANIFEST_NAME), [seal.manifest])
        write_object(self._storage, self.draft.key(protocol.METADATA_NAME), [seal.metadata])
        own = {protocol.MANIFEST_NAME: len(seal.manifest), protocol.METADATA_NAME: len(seal.metadata)}
        # Not before: if another process has just renamed the folder, the lines above made a new one.
        require_complete(self._sizes(), {**seal.sizes, **own}, f"{self._storage.uri}/{self.draft.folder}")

    def _give_name(self) -> None:
        """Rename the draft; an older checkpoint is renamed first, to a name where readers still find it."""
        try:
            self._tree.move(self.draft.folder, self.draft.name)
        except AlreadyThere:
            protocol.require_replaceable(self._storage, self._tree, self.draft.name)
        else:
            return
        # Not an exchange: if another process did one just before, a second one would undo it.
        aside = f"{protocol.HIDDEN_PREFIX}old-{secrets.token_hex(8)}-{self.draft.name}"
        self._tree.move(self.draft.name, aside)
        try:
            self._tree.move(self.draft.folder, self.draft.name)
        except ObjectNotFound:
            # What was renamed is this very save: another process had just given it its name.
            self._tree.move(aside, self.draft.name)
            return
        self._tree.sync()
        protocol.hide_folder(self._tree, aside)()

    def _sizes(self) -> dict[str, int]:
        return {entry.name: entry.size_bytes for entry in self._tree.entries(self.draft.folder)}
