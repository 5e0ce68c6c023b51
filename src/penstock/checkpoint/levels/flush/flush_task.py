"""One flush order in progress (copied, marked, published with those of other nodes), and the queue policy.

Acts for the daemon, a little at a time. Each node copies its files into one shared draft and marks itself
done; when all have, any of them publishes. Invariant: whatever is killed, the next `advance` learns from the
journal and the durable level what is left to do; what the journal says was durable before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property, partial
from typing import Final

from penstock.checkpoint.commit.catalog import CheckpointRef, StepCatalog, apply_retention, open_catalog
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME, Seal
from penstock.checkpoint.commit.shared_draft import SharedDraft
from penstock.checkpoint.commit.transaction import open_draft_store, sweep_dead_saves
from penstock.checkpoint.formats.manifest import ManifestFile, checksum_object, read_manifest
from penstock.checkpoint.levels.flush import file_copy, flush_folder
from penstock.errors import DataDamaged, ObjectNotFound, StorageError, Unavailable
from penstock.storage import Storage
from penstock.storage.capabilities import find_folder_tree, prefer_direct_access
from penstock.storage.protocol import read_object

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


def superseded_by(step: int, durable: Collection[int], keep: int | None) -> list[int]:
    """The durable steps that supersede this one, newest first; empty if it must be flushed.

    A step is superseded if retention would remove it with the next step that becomes durable.
    """
    newer = sorted((other for other in durable if other > step), reverse=True)
    return newer[:keep] if keep is not None and len(newer) >= keep else []


def retry_delay(num_failures: int) -> float:
    """Seconds to wait after this many failures in a row: doubles with each."""
    return min(FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 16), LONGEST_PAUSE_S) if num_failures else 0.0


def poll_delay(waited_s: float) -> float:
    """Seconds until the next look at shared storage: the longer it has been, the longer."""
    return min(max(0.05, waited_s / 10), 5.0)


TAKEOVER_S: Final = 30.0
"""How long each node waits for the one before it to publish.

Node 0 publishes at once, node 1 after one such time: normally only one does, and none depends on another."""

logger = logging.getLogger(__name__)


class FlushTask:
    """Executes one order. Called by one thread."""

    def __init__(
        self,
        order: flush_folder.FlushOrder,
        cache: Storage,
        open_durable: Callable[[str], Storage],
        journal: flush_folder.Journal,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.order = order
        self.not_before_s = 0.0
        """When to call `advance` next, by the clock."""
        self.waits_for: tuple[int, ...] = ()
        """The nodes whose files are not durable yet."""
        self._cache = cache
        self._open_durable = open_durable
        self._journal = journal
        self._clock = clock
        self._waiting_since_s: float | None = None
        self._has_joined = False
        self._copied_here: set[str] = set()
        """Files copied by this process, which need no check unless the draft was removed."""

    @property
    def state(self) -> flush_folder.SaveState:
        """The state of this save in the journal."""
        key = self.order.step, self.order.save_id
        return self._journal.states.get(key, flush_folder.SaveState(step=self.order.step))

    def advance(self, take: file_copy.WaitForTurn, yields: Callable[[], bool]) -> bool:
        """Do what can be done now; returns whether the order is over. `yields` is called before each file."""
        if self.state.outcome is not None:
            return True
        if f'"save_id":"{self.order.save_id}"'.encode() not in self._seal.manifest:
            self._draft.clear_up()
            return self._end("replaced", "the step was saved anew")
        if self._draft.is_committed(self._seal.manifest):
            # Published by another node, or by this one before it was killed.
            self._draft.clear_up()
            return self._end("durable")
        if newer := superseded_by(self.order.step, self._flushed_since(), self.order.keep):
            self._draft.clear_up()
            return self._end("superseded", f"{', '.join(map(str, newer))} are durable and no more are kept")
        if not self.state.is_marked:
            try:
                self._copy(take, yields)
            except ObjectNotFound:
                if self.order.node in self._draft.marks():
                    raise
                # Another node has removed the draft: it knew already that the step is durable or superseded.
                return self._restart()
        return self.state.is_marked and self._publish_if_all_are_done()

    def _flushed_since(self) -> set[int]:
        """The durable steps of later orders. What was there before may belong to a run that was left."""
        ended = [state.outcome for state in self._journal.states.values() if state.outcome is not None]
        later = {end.step for end in ended if end.what == "durable" and end.at_s >= self.order.given_s}
        return later.intersection(self._steps.committed()) if later else set()

    def renew(self) -> None:
        """Renew the lease of the draft, while it is copied and while it waits for other nodes."""
        if self._has_joined and self.state.outcome is None:
            self._draft.renew()

    def _copy(self, take: file_copy.WaitForTurn, yields: Callable[[], bool]) -> None:
        """Copy what is not durable yet and tell the other nodes; may leave files for later."""
        self._write("begun")
        if self.order.node == 0:
            sweep_dead_saves(open_draft_store(self._durable), self._durable)
        self._draft.join()
        self._has_joined = True
        self._draft.mark("copying")
        copy_one = partial(
            self._copy_one,
            state=self.state,
            source=prefer_direct_access(self._cached.storage),
            target=prefer_direct_access(self._durable),
            take=take,
        )

        def copy_unless_newer(file: flush_folder.OrderedFile) -> dict[str, str | int]:
            return {} if yields() else copy_one(file)

        with ThreadPoolExecutor(self.order.threads, thread_name_prefix="penstock-flush") as threads:
            copies = [threads.submit(copy_unless_newer, file) for file in self.order.files]
            for copied in as_completed(copies):
                if copied.exception() is None and (facts := copied.result()):
                    self._write("copied", **facts)
        if all(copied.result() for copied in copies):
            self._draft.mark("done")
            self._write("marked")

    def _copy_one(
        self,
        file: flush_folder.OrderedFile,
        *,
        state: flush_folder.SaveState,
        source: Storage,
        target: Storage,
        take: file_copy.WaitForTurn,
    ) -> dict[str, str | int]:
        """Copy one file, unless an earlier daemon did; returns the fields of its journal entry."""
        to_key = self._draft.draft.key(file.name)
        known = state.copied.get(file.name)
        if known is not None and (file.name in self._copied_here or _is_unchanged(target, to_key, known)):
            return {"file": file.name, "size_bytes": known.size_bytes, "sum": known.sum}
        sums = file_copy.StreamChecksums(self._files[file.name])
        file_copy.copy_file(
            file_copy.FileCopy(from_key=self._cached.key(file.name), to_key=to_key),
            source,
            target,
            take,
            see=sums.see,
            block_bytes=file_copy.block_bytes_for(self.order.bytes_per_s),
        )
        sums.require_right(self._cached.uri)
        self._copied_here.add(file.name)
        return {"file": file.name, "size_bytes": file.size_bytes, "sum": sums.sum()}

    def _publish_if_all_are_done(self) -> bool:
        marks = self._draft.marks()
        done = {node for node, (mark, _) in marks.items() if mark.progress == "done"}
        self._has_joined = True
        if self.order.node not in done:
            return self._restart()
        self.waits_for = tuple(node for node in range(len(self.order.nodes)) if node not in done)
        now_s = self._clock()
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        waited_s = now_s - self._waiting_since_s
        if self.waits_for or waited_s < TAKEOVER_S * self.order.node:
            self.not_before_s = now_s + poll_delay(waited_s)
            return False
        self._publish()
        return self._end("durable")

    def _restart(self) -> bool:
        """The mark of this node is gone: the step is durable, or the draft was removed."""
        if self._draft.is_committed(self._seal.manifest):
            return self._end("durable")
        logger.warning(
            "The copied files of %s have disappeared from the durable level: copying them again",
            self.order.name,
        )
        self._copied_here.clear()
        self._write("begun")
        return False

    def _publish(self) -> None:
        try:
            self._draft.publish(self._seal)
        except StorageError:
            missing = set(self._draft.missing(self._seal))
            self._draft.retract_marks(
                [
                    node
                    for node, files in enumerate(self.order.nodes)
                    if any(file.name in missing for file in files)
                ]
            )
            raise
        apply_retention(self._steps, self.order.step, self.order.keep)()

    def _end(self, what: flush_folder.EntryKind, reason: str = "") -> bool:
        self._write(what, reason=reason)
        logger.info("%s is %s%s", self.order.name, what, f": {reason}" if reason else "")
        return True

    def _write(self, what: flush_folder.EntryKind, **facts: str | int) -> None:
        save = {"step": self.order.step, "save_id": self.order.save_id}
        self._journal.write(
            flush_folder.JournalEntry.model_validate({"at_s": self._clock(), "what": what, **save, **facts})
        )

    @cached_property
    def _durable(self) -> Storage:
        return self._open_durable(self.order.durable)

    @cached_property
    def _steps(self) -> StepCatalog:
        return StepCatalog(self._durable)

    @cached_property
    def _draft(self) -> SharedDraft:
        tree = find_folder_tree(self._durable)
        if tree is None:
            raise Unavailable(
                "The flush daemon writes to file systems only",
                where=self._durable.uri,
                fix='Let the trainer flush to object services: pc.Flush(by="trainer").',
            )
        return SharedDraft(self._durable, tree, self.order.name, self.order.save_id, node=self.order.node)

    @cached_property
    def _cached(self) -> CheckpointRef:
        return CheckpointRef(self._cache, open_catalog(self._cache).find(self.order.name))

    @cached_property
    def _seal(self) -> Seal:
        manifest, metadata = (
            bytes(read_object(self._cache, self._cached.key(name))) for name in (MANIFEST_NAME, METADATA_NAME)
        )
        return Seal(manifest=manifest, metadata=metadata, sizes=self.order.sizes)

    @cached_property
    def _files(self) -> dict[str, ManifestFile]:
        manifest = read_manifest(self._seal.manifest, self._cached.uri)
        return {file.name: file for file in manifest.files}


def _is_unchanged(storage: Storage, key: str, entry: flush_folder.JournalEntry) -> bool:
    """Whether a file has the size and checksum of its journal entry."""
    try:
        if storage.stat(key).size_bytes != entry.size_bytes:
            return False
        return checksum_object(storage, key).hex() == entry.sum
    except (ObjectNotFound, DataDamaged):
        return False
