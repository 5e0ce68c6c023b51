"""One order on its way: copied, marked, and published with what the other nodes have copied.

Acts for the daemon, a little at a time. Invariant: whatever is killed, the next `advance` finds in the
journal and on the durable level what is left to do; what is journaled was durable before.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.commit.catalog import Steps, Stored, open_shelf
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME, Seal
from penstock.checkpoint.commit.shared_draft import SharedDraft
from penstock.checkpoint.commit.transaction import open_drafts
from penstock.checkpoint.formats.manifest import read_manifest
from penstock.checkpoint.levels.flush.file_copy import (
    Copy,
    PassingSums,
    block_bytes_for,
    copy_file,
    sum_of_file,
)
from penstock.checkpoint.levels.flush.journal import Line, Standing
from penstock.checkpoint.manager.step_store import retire
from penstock.errors import DataDamaged, ObjectNotFound, StorageError, Unavailable
from penstock.storage.capabilities import find_folder_tree, prefer_direct_access
from penstock.storage.object_io import read_object

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from penstock.checkpoint.formats.manifest import ManifestFile
    from penstock.checkpoint.levels.flush.file_copy import Take
    from penstock.checkpoint.levels.flush.flush_folder import Order, OrderedFile
    from penstock.checkpoint.levels.flush.journal import Journal, What
    from penstock.storage import Storage


FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


def in_order(steps: Iterable[int]) -> list[int]:
    """Newest first: the newest is what a restart wants, and may make older ones needless."""
    return sorted(steps, reverse=True)


def superseded_by(step: int, durable: Collection[int], keep: int | None) -> list[int]:
    """The durable steps that make this one needless, newest first; empty where it is to be flushed."""
    newer = sorted((each for each in durable if each > step), reverse=True)
    return newer[:keep] if keep is not None and len(newer) >= keep else []


def pause_after(num_failures: int) -> float:
    """How many seconds to wait after so many failures in a row: twice as long after each."""
    return min(FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 16), LONGEST_PAUSE_S) if num_failures else 0.0


def look_again_s(waited_s: float) -> float:
    """How long until the next look at a shared storage: seldom where much time has passed already."""
    return min(max(0.05, waited_s / 10), 5.0)


TAKEOVER_S: Final = 30.0
"""So long each node waits for the one before it to publish what all have copied."""

logger = logging.getLogger(__name__)


class Job:
    """What the daemon does for one order. One thread calls."""

    def __init__(
        self,
        order: Order,
        cache: Storage,
        open_durable: Callable[[str], Storage],
        journal: Journal,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.order = order
        self.not_before_s = 0.0
        """When the next `advance` makes sense, by the clock."""
        self.waits_for: tuple[int, ...] = ()
        """The nodes whose files are not yet durable."""
        self._cache = cache
        self._open_durable = open_durable
        self._journal = journal
        self._clock = clock
        self._waiting_since_s: float | None = None
        self._has_joined = False
        self._copied_here: set[str] = set()
        """By this process, which need not look at them again as long as nobody removed the draft."""

    @property
    def standing(self) -> Standing:
        """What the journal says of this save."""
        key = self.order.step, self.order.save_id
        return self._journal.standings.get(key, Standing(step=self.order.step))

    def advance(self, take: Take, yields: Callable[[], bool]) -> bool:
        """Do what can be done now; whether the order is over. `yields` is asked before each file."""
        if self.standing.outcome is not None:
            return True
        if f'"save_id":"{self.order.save_id}"'.encode() not in self._seal.manifest:
            self._draft.clear_up()
            return self._end("replaced", "the step was saved anew")
        if self._draft.is_committed(self._seal.manifest):
            # By another node, or by this one before it was killed.
            self._draft.clear_up()
            return self._end("durable")
        if newer := superseded_by(self.order.step, self._steps.committed(), self.order.keep):
            self._draft.clear_up()
            return self._end("superseded", f"durable are {', '.join(map(str, newer))}, and so many are kept")
        if not self.standing.is_marked:
            self._copy(take, yields)
        return self.standing.is_marked and self._publish_if_all_are_done()

    def renew(self) -> None:
        """Show that the draft is wanted: while it is copied, and while it waits for other nodes."""
        if self._has_joined and self.standing.outcome is None:
            self._draft.renew()

    def _copy(self, take: Take, yields: Callable[[], bool]) -> None:
        """Copy what is not durable yet, and say so to the other nodes; or leave some for later."""
        self._write("begun")
        if self.order.node == 0:
            for swept in open_drafts(self._durable).sweep():
                logger.info("Removed %s, which was left by something that died", swept)
        self._draft.join()
        self._has_joined = True
        self._draft.mark("copying")
        copy_one = partial(
            self._copy_one,
            standing=self.standing,
            source=prefer_direct_access(self._held.storage),
            target=prefer_direct_access(self._durable),
            take=take,
        )

        def copy_unless_newer(file: OrderedFile) -> dict[str, str | int]:
            return {} if yields() else copy_one(file)

        with ThreadPoolExecutor(self.order.threads, thread_name_prefix="penstock-flush") as crew:
            copies = [crew.submit(copy_unless_newer, file) for file in self.order.files]
            for copied in as_completed(copies):
                if copied.exception() is None and (facts := copied.result()):
                    self._write("copied", **facts)
        told = [copied.result() for copied in copies]
        if all(told):
            self._draft.mark("done")
            self._write("marked")

    def _copy_one(
        self, file: OrderedFile, *, standing: Standing, source: Storage, target: Storage, take: Take
    ) -> dict[str, str | int]:
        """One file, unless a daemon before this one has: what the journal is to say of it."""
        to_key = self._draft.draft.key(file.name)
        known = standing.copied.get(file.name)
        if known is not None and (file.name in self._copied_here or _lies_there(target, to_key, known)):
            return {"file": file.name, "size_bytes": known.size_bytes, "sum": known.sum}
        sums = PassingSums(self._files[file.name])
        copy_file(
            Copy(from_key=self._held.key(file.name), to_key=to_key),
            source,
            target,
            take,
            see=sums.see,
            block_bytes=block_bytes_for(self.order.bytes_per_s),
        )
        sums.require_right(self._held.uri)
        self._copied_here.add(file.name)
        return {"file": file.name, "size_bytes": file.size_bytes, "sum": sums.sum()}

    def _publish_if_all_are_done(self) -> bool:
        marks = self._draft.marks()
        done = {node for node, (mark, _) in marks.items() if mark.progress == "done"}
        self._has_joined = True
        if self.order.node not in done:
            return self._begin_again()
        self.waits_for = tuple(node for node in range(len(self.order.nodes)) if node not in done)
        now_s = self._clock()
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        waited_s = now_s - self._waiting_since_s
        if self.waits_for or waited_s < TAKEOVER_S * self.order.node:
            self.not_before_s = now_s + look_again_s(waited_s)
            return False
        self._publish()
        return self._end("durable")

    def _begin_again(self) -> bool:
        """The mark of this node is gone: all is done, or what lay in the draft was removed."""
        if self._draft.is_committed(self._seal.manifest):
            return self._end("durable")
        logger.warning("What was copied of %s is gone from the durable level: again", self.order.name)
        self._copied_here.clear()
        self._write("begun")
        return False

    def _publish(self) -> None:
        try:
            self._draft.publish(self._seal)
        except StorageError:
            missing = set(self._draft.missing(self._seal))
            self._draft.withdraw(
                [
                    node
                    for node, files in enumerate(self.order.nodes)
                    if any(file.name in missing for file in files)
                ]
            )
            raise
        retire(self._steps, self.order.step, self.order.keep)

    def _end(self, what: What, reason: str = "") -> bool:
        self._write(what, reason=reason)
        logger.info("%s is %s%s", self.order.name, what, f": {reason}" if reason else "")
        return True

    def _write(self, what: What, **facts: str | int) -> None:
        line = {"at_s": self._clock(), "what": what, "step": self.order.step, "save_id": self.order.save_id}
        self._journal.write(Line.model_validate({**line, **facts}))

    @cached_property
    def _durable(self) -> Storage:
        return self._open_durable(self.order.durable)

    @cached_property
    def _steps(self) -> Steps:
        return Steps(self._durable)

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
    def _held(self) -> Stored:
        return Stored(self._cache, open_shelf(self._cache).find(self.order.name))

    @cached_property
    def _seal(self) -> Seal:
        manifest = bytes(read_object(self._cache, self._held.key(MANIFEST_NAME)))
        metadata = bytes(read_object(self._cache, self._held.key(METADATA_NAME)))
        return Seal(manifest=manifest, metadata=metadata, sizes=self.order.sizes)

    @cached_property
    def _files(self) -> dict[str, ManifestFile]:
        manifest = read_manifest(self._seal.manifest, self._held.uri)
        return {file.name: file for file in manifest.files}


def _lies_there(storage: Storage, key: str, line: Line) -> bool:
    """Whether a file is what the journal says."""
    try:
        return sum_of_file(storage, key) == (line.size_bytes, line.sum)
    except (ObjectNotFound, DataDamaged):
        return False
