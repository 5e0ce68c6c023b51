"""Flushing from a cache to the durable level: the notes of pending steps, and the flusher that copies them.

The same `Flusher` runs in a thread of the trainer, in a detached process that outlives it, and behind
`penstock checkpoint flush`. It learns from folders what remains to be done, so any flusher can be killed at
any moment, and the next one continues:

    CACHE/.penstock-flush/step-N.json     a note: which save of the step awaits its flush, and where it goes
    CACHE/.penstock-flush/lock            held by the one flusher of this cache
    CACHE/.penstock-flush/progress.json   what that flusher has done, for `status` and for the trainer
    RUN/.penstock-save-ID-step-N          the draft that the flushers of all nodes copy their files into

Each flusher copies the files of its own cache; the first that finds the draft complete publishes it.
Invariants: a file in the draft under its final name is complete, durable and equal to its checksums; a note
is removed when its step is durable, or when retention would remove the step at once; a step with a note stays
in the cache. Notes and steps are trusted, and so a cache that another user may have changed is refused.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Annotated, Final, Literal

import numpy as np
import psutil
from pydantic import Field, ValidationError

import penstock
from penstock.checkpoint.commit import protocol
from penstock.checkpoint.commit.checkpoints import (
    CheckpointRef,
    StepCatalog,
    apply_retention,
    local_path,
    open_catalog,
    open_draft_store,
    parse_step,
    step_dirname,
    sweep_dead_saves,
)
from penstock.checkpoint.formats.description import SUM_BYTES, ItemChecksums, ManifestFile
from penstock.checkpoint.tools.tensor_slabs import Appender
from penstock.errors import AlreadyThere, DataDamaged, ObjectNotFound, PenstockError, StorageError
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.aligned import PAGE_BYTES, round_up
from penstock.storage.capabilities import find_folder_tree, prefer_direct_access
from penstock.storage.files.local_files import read_document, require_own, sync_folder, write_durably
from penstock.storage.files.system_calls import translate_os_errors
from penstock.storage.process_id import current_process
from penstock.storage.protocol import write_object
from penstock.storage.uri import open_here

FOLDER: Final = ".penstock-flush"
BLOCK_BYTES: Final = 16 << 20
SMALLEST_BLOCK_BYTES: Final = 256 << 10
BURST_S: Final = 0.5
"""The longest pause, for disks or between two steps, that a rate-limited flush may make up for."""
POLL_S: Final = 0.05
LONGEST_PAUSE_S: Final = 5.0
RETRY_S: Final = 60.0
"""The time for which a failure that may resolve itself is retried before it is reported."""
PATIENCE_S: Final = 3600.0
"""The time for which a detached flusher retries failures or waits for other nodes before it gives up."""
GRACE_S: Final = 30.0
"""The time for which files of a draft may be invisible before they count as lost and are copied again."""
REPORT_S: Final = 0.25

logger = logging.getLogger(__name__)


class FlushNote(protocol.StoredRecord):
    """A save of a step that awaits its flush, and the options of that flush. Stored as JSON."""

    save_id: str
    durable: str
    """The URI of the durable level, with its options."""
    keep: Annotated[int, Field(ge=1)] | None = None
    """The number of durable steps to keep; None keeps all."""
    bytes_per_s: Annotated[float, Field(gt=0)] | None = None
    threads: Annotated[int, Field(ge=1)] = 2


FlushPhase = Literal["given", "copying", "waiting", "durable", "superseded", "failing"]
"""The phase of a step. "waiting": for the files of other nodes. "superseded": newer durable steps are kept
instead.
"""


class FlushState(protocol.StoredRecord):
    """The progress of this node's share of a step."""

    phase: FlushPhase = "given"
    size_bytes: int = 0
    copied_bytes: int = 0
    reason: str = ""
    """Why the step is failing, or what it is waiting for."""
    is_lasting: bool = False
    """True if the step has failed for a minute, or retries cannot succeed until someone removes the cause."""

    @property
    def is_over(self) -> bool:
        """True if the caches may remove the step."""
        return self.phase in ("durable", "superseded")


class FlushProgress(protocol.StoredRecord):
    """A flusher's work, as it last reported it."""

    pid: int = 0
    step: int | None = None
    """The step that the flusher is copying."""
    bytes_per_s: float = 0.0
    states: dict[int, FlushState] = Field(default_factory=dict)


class FlushFolder:
    """The notes, the lock and the progress of one cache's flusher; any process of its user may read them."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.path = cache / FOLDER
        self.log = self.path / "log"
        require_own(cache, self.path)

    def put(self, step: int, note: FlushNote) -> None:
        """Record that a save of a step awaits its flush. Replaces the note of an older save of the step."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(self._note(step), note.model_dump_json().encode())

    def noted_steps(self) -> list[int]:
        """Return the steps with a note. They stay in the cache, even if the note cannot be parsed."""
        try:
            # Not with glob, to which a folder that cannot be listed looks empty.
            with translate_os_errors("Listing", str(self.path)):
                names = [path.name for path in self.path.iterdir()]
        except ObjectNotFound:
            return []
        found = (parse_step(name.removesuffix(".json")) for name in names if name.endswith(".json"))
        return [step for step in found if step is not None]

    def notes(self) -> dict[int, FlushNote]:
        """Return the notes of the pending steps, newest first.

        Notes that cannot be parsed are logged.
        """
        found = {}
        for step in self.noted_steps():
            name = self._note(step)
            try:
                with translate_os_errors("Reading", str(name)):
                    found[step] = FlushNote.model_validate_json(read_document(name))
            except ObjectNotFound:
                continue
            except ValidationError as error:
                logger.warning(
                    "%s cannot be parsed, and its step is not flushed: %s", name, error.errors()[0]
                )
        return dict(sorted(found.items(), reverse=True))

    def remove(self, step: int, save_id: str = "") -> None:
        """Remove the note of the step; with `save_id`, only if it is the note of that save."""
        with suppress(FileNotFoundError, ValidationError):
            note = self._note(step)
            if not save_id or FlushNote.model_validate_json(read_document(note)).save_id == save_id:
                note.unlink()
                sync_folder(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this cache's only flusher; raise `BlockingIOError` if another flusher holds it."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.path / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    def is_locked(self) -> bool:
        """Return whether a flusher is working on this cache."""
        try:
            with (self.path / "lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def write_progress(self, progress: FlushProgress) -> None:
        """Publish this flusher's progress for other processes. It is not worth an fsync."""
        unfinished = self.path / f".progress-{secrets.token_hex(4)}"
        with suppress(OSError):
            unfinished.write_text(progress.model_dump_json())
            unfinished.replace(self.path / "progress.json")

    def progress(self) -> FlushProgress:
        """Return the last report of the flusher."""
        try:
            return FlushProgress.model_validate_json(read_document(self.path / "progress.json"))
        except (OSError, ValidationError):
            return FlushProgress()

    def states(self) -> dict[int, FlushState]:
        """Return the state of each pending step."""
        known = self.progress().states
        return {step: known.get(step, FlushState()) for step in reversed(self.notes())}

    def _note(self, step: int) -> Path:
        return self.path / f"{step_dirname(step)}.json"


class RateLimiter:
    """Limits the rate of all threads together: each waits as long as the bytes requested before its own take.

    Unused time is kept for `BURST_S`, so that waiting for the disk does not lower the rate.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = Lock()
        self._free_at_s = time.monotonic()

    def take(self, num_bytes: int) -> None:
        """Wait until the rate allows another `num_bytes`."""
        with self._lock:
            now_s = time.monotonic()
            begins_s = max(self._free_at_s, now_s - BURST_S)
            self._free_at_s = begins_s + num_bytes / self.bytes_per_s
        time.sleep(max(begins_s - now_s, 0))


def copy_file(
    source: Storage,
    from_key: str,
    target: Storage,
    to_key: str,
    *,
    see: Callable[[memoryview], None] = lambda _: None,
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Copy one file with two buffers: one is read into while the other is written.

    `see` receives each block.
    """
    with closing(source.open(from_key)) as file:
        size_bytes = file.size_bytes
        buffer_bytes = min(block_bytes, round_up(max(size_bytes, 1), PAGE_BYTES))
        appender = Appender(buffer_bytes=buffer_bytes, num_buffers=2)
        with appender.writing(target.create(to_key, size_bytes)):
            appender.copy(appender.pieces_of(size_bytes, file.read_into), see)


def require_right(file: ManifestFile, sums: bytes, where: str) -> None:
    """Raise `DataDamaged` if the `sums` of a file's items differ from those of the save."""
    differs = np.frombuffer(sums, np.uint8) != np.frombuffer(file.sums, np.uint8)
    wrong = np.flatnonzero(differs.reshape(-1, SUM_BYTES).any(axis=1))
    if len(wrong):
        raise DataDamaged(
            f"{file.name} is damaged in the cache: {len(wrong)} of {len(file)} items differ from their "
            f"checksums, the first at byte {file.item_offset[wrong[0]]}",
            where=where,
            fix="Run `penstock checkpoint flush` on all nodes: it rebuilds what its redundancy allows.",
        )


class Flusher:
    """Makes the noted steps of one cache durable, newest first. Called by one thread at a time."""

    def __init__(
        self, cache: Storage, *, durable: Storage | None = None, progress: Progress | None = None
    ) -> None:
        """Prepare to flush `cache` to `durable` or, if that is None, to the URI in each note.

        Pass `durable` if the caller gave an open `Storage`, which cannot be opened again from its URI.
        """
        self._cache = cache
        self._folder = FlushFolder(local_path(cache, ""))
        self._durable = durable
        self._progress = progress or Progress()
        self._pace = RateLimiter(math.inf)
        self._lock = Lock()
        self._now = FlushProgress(pid=os.getpid())
        self._opened: dict[str, Storage] = {}
        self._failing: dict[int, tuple[float, type]] = {}
        """Since when the flush of a step has failed, and the class of the last error."""
        self._waiting_since_s: dict[int, float] = {}
        self._reported_s = self._renewed_s = 0.0
        self._began_s, self._moved_bytes = 0.0, 0

    def run(self, *, patience_s: float, persists: bool = False) -> dict[int, FlushState]:
        """Flush until no notes are left, or nothing was copied for `patience_s`. Return each step's state.

        While another flusher works on this cache, follow its progress, and take over if it ends. Also return
        when only lasting failures are left, unless this flusher `persists`.
        """
        moved, moved_s, is_ours, is_stuck = object(), time.monotonic(), False, False
        with ExitStack() as undo:
            while (notes := self._folder.notes()) and not is_stuck:
                if not is_ours:
                    with suppress(BlockingIOError):
                        undo.enter_context(self._folder.locked())
                        is_ours, self._now = True, FlushProgress(pid=os.getpid())
                if is_ours:
                    self._try_all(notes)
                else:
                    self._now = self._folder.progress()
                movement = {
                    step: (state.phase, state.copied_bytes) for step, state in self._now.states.items()
                }
                if movement != moved:
                    moved, moved_s = movement, time.monotonic()
                waited_s = time.monotonic() - moved_s
                is_stuck = waited_s > patience_s
                if notes := self._folder.notes():
                    is_stuck |= not persists and all(self._state(step).is_lasting for step in notes)
                    # The longer nothing was copied, the longer the pause, because each look is a request to
                    # shared storage.
                    time.sleep(0 if is_stuck else min(max(POLL_S, waited_s / 10), LONGEST_PAUSE_S))
        # A trainer that saw the lock held may have put a note after this flusher last looked.
        has_more = not is_stuck and bool(self._folder.notes())
        return self.run(patience_s=patience_s, persists=persists) if has_more else self._now.states

    def _try_all(self, notes: dict[int, FlushNote]) -> None:
        """Advance each noted step as far as is possible now."""
        durable_steps: list[int] = []
        over: list[tuple[int, str]] = []
        for step, note in notes.items():
            if note.keep is not None and len(durable_steps) >= note.keep:
                newer = ", ".join(map(str, durable_steps[: note.keep]))
                self._set(step, phase="superseded", reason=f"{newer} are durable and no more are kept")
                self._folder.remove(step, note.save_id)
                continue
            try:
                if self._flush(step, note):
                    durable_steps.append(step)
                    over.append((step, note.save_id))
                self._failing.pop(step, None)
            except (PenstockError, OSError) as error:
                since_s, last_kind = self._failing.get(step, (time.monotonic(), None))
                # Its text is different at each try: it names temporary files.
                if last_kind is not type(error):
                    logger.warning("%s: %s", step_dirname(step), error)
                self._failing[step] = since_s, type(error)
                may_pass = isinstance(error, StorageError | OSError) and not isinstance(error, DataDamaged)
                is_lasting = not may_pass or time.monotonic() - since_s > RETRY_S
                self._set(step, phase="failing", reason=str(error), is_lasting=is_lasting)
        # Last, because newer steps must count until the older ones are known to be superseded.
        for step, save_id in over:
            self._folder.remove(step, save_id)

    def _flush(self, step: int, note: FlushNote) -> bool:
        """Copy this cache's files of a step; publish a complete draft. Return True to remove the note."""
        name = step_dirname(step)
        try:
            share = CheckpointRef(self._cache, open_catalog(self._cache).find(name), step=step)
        except ObjectNotFound:
            return True  # removed on purpose
        manifest, seal = share.read_seal()
        if manifest.save_id != note.save_id:
            return True  # the step was saved again, and no flush of that save was requested
        durable = self._durable or self._opened.setdefault(note.durable, open_here(note.durable))
        draft = _SharedDraft(durable, name, note.save_id)
        if is_committed(durable, name, seal.manifest):
            draft.clear_up()
            self._set(step, phase="durable", reason="")
            return True
        here = {path.name for path in (self._folder.cache / share.committed.folder).iterdir()}
        files = [file for file in manifest.files if file.name in here]
        size_bytes = sum(file.size_bytes for file in files)
        there = draft.sizes()
        left = [file for file in files if there.get(file.name) != file.size_bytes]
        was_waiting = self._state(step).phase == "waiting"
        if left and was_waiting and time.monotonic() - self._waiting_since_s[step] < GRACE_S:
            return False  # another flusher has taken the draft and is about to publish it
        copied_bytes = size_bytes - sum(file.size_bytes for file in left)
        self._set(
            step,
            phase="copying",
            size_bytes=size_bytes,
            copied_bytes=copied_bytes,
            reason="",
            is_lasting=False,
        )
        if left or time.monotonic() - self._renewed_s > protocol.LEASE_S / 4:
            self._renewed_s = time.monotonic()
            draft.join()
        if left:
            self._copy(step, note, share, left, draft)
        self._waiting_since_s[step] = time.monotonic()
        reason = ""
        if any(draft.sizes().get(name) != size_bytes for name, size_bytes in seal.sizes.items()):
            reason = "the files of other nodes"
        elif draft.publish(seal):
            # A newer step may have become durable since, and retention after it could not remove this one.
            for newest in filter(step.__le__, sorted({step, *self._folder.noted_steps()})):
                apply_retention(StepCatalog(durable), newest, note.keep)()
        # Another node may have published the draft since, also while its files were looked at.
        is_durable = is_committed(durable, name, seal.manifest)
        self._set(
            step,
            phase="durable" if is_durable else "waiting",
            copied_bytes=size_bytes,
            reason="" if is_durable else reason,
        )
        logger.info("%s is %s", name, self._state(step).phase)
        return is_durable

    def _copy(
        self, step: int, note: FlushNote, share: CheckpointRef, files: list[ManifestFile], draft: _SharedDraft
    ) -> None:
        """Copy several files at a time, bypassing the page cache.

        A file gets its final name once it is durable.
        """
        rate = note.bytes_per_s or math.inf
        if self._pace.bytes_per_s != rate:
            self._pace = RateLimiter(rate)
        self._now = self._now.model_copy(update={"step": step})
        self._began_s, self._moved_bytes = time.monotonic(), 0
        # At most what the rate allows in a tenth of a second, so that the rate stays even.
        wanted = int(min(rate / 10, BLOCK_BYTES)) // PAGE_BYTES * PAGE_BYTES
        block_bytes = max(wanted, SMALLEST_BLOCK_BYTES)
        source = prefer_direct_access(self._cache, reads=share.key(files[0].name))

        def copy_one(file: ManifestFile) -> None:
            ends = file.item_offset + file.item_bytes
            sums = ItemChecksums(file.item_offset.tolist(), ends.tolist())

            def see(block: memoryview) -> None:
                sums.add(block)
                self._pace.take(block.nbytes)
                self._count(step, block.nbytes)
                if time.monotonic() - self._renewed_s > protocol.LEASE_S / 4:
                    self._renewed_s = time.monotonic()
                    draft.renew()

            with draft.adding(file.name) as (target, key):
                copy_file(source, share.key(file.name), target, key, see=see, block_bytes=block_bytes)
                require_right(file, sums.all(), share.uri)

        try:
            with ThreadPoolExecutor(note.threads, thread_name_prefix="penstock-flush") as threads:
                # After a failure or Ctrl-C, `map` cancels the files that have not begun.
                for _ in threads.map(copy_one, files):
                    continue
        finally:
            self._now = self._now.model_copy(update={"step": None, "bytes_per_s": 0.0})

    def _count(self, step: int, num_bytes: int) -> None:
        with self._lock:
            self._moved_bytes += num_bytes
            self._progress.advance(num_bytes)
            rate = self._moved_bytes / max(time.monotonic() - self._began_s, 1e-3)
            self._now = self._now.model_copy(update={"bytes_per_s": rate})
            self._set(step, copied_bytes=self._state(step).copied_bytes + num_bytes)

    def _state(self, step: int) -> FlushState:
        return self._now.states.get(step, FlushState())

    def _set(self, step: int, **facts: object) -> None:
        self._now.states[step] = self._state(step).model_copy(update=facts)
        if "phase" in facts or time.monotonic() - self._reported_s > REPORT_S:
            self._reported_s = time.monotonic()
            self._folder.write_progress(self._now)


def is_committed(durable: Storage, name: str, manifest: bytes) -> bool:
    """Return whether the checkpoint of this name is the one that `manifest` describes."""
    try:
        folder = open_catalog(durable).find(name).folder
    except ObjectNotFound:
        return False
    return protocol.read_identity(durable, folder) == manifest[: protocol.IDENTITY_BYTES]


class _SharedDraft:
    """A draft that flushers of several nodes fill. Any of them may publish it, so none has to survive."""

    def __init__(self, durable: Storage, name: str, save_id: str) -> None:
        self._durable = durable
        self._drafts = open_draft_store(durable)
        self._tree = find_folder_tree(durable)
        self._draft = protocol.name_draft(name, save_id)
        if self._tree is None:
            self._draft = replace(self._draft, folder=f"{name}/{save_id}")

    def join(self) -> None:
        """Create the draft unless another node has created it."""
        sweep_dead_saves(self._drafts, self._durable)
        if self._tree is not None:
            protocol.require_replaceable(self._durable, self._tree, self._draft.name)
        self.renew()
        if self._tree is not None:
            with suppress(AlreadyThere):
                self._tree.make(self._draft.folder, keep_name=False)

    def renew(self) -> None:
        """Renew the lease on behalf of all flushers: it grows old only if all of them are dead."""
        # The lease names no process that could be looked up, because the work of all must not end with one.
        nobody = replace(current_process(), kernel="", numbering="")
        write_object(self._durable, self._draft.folder + protocol.LEASE_ENDING, [protocol.lease_text(nobody)])

    def sizes(self) -> dict[str, int]:
        """Return the complete files and their sizes."""
        if self._tree is not None:
            return {entry.name: entry.size_bytes for entry in self._tree.entries(self._draft.folder)}
        objects = self._durable.list(self._draft.folder)
        return {info.key.rpartition("/")[2]: info.size_bytes for info in objects}

    @contextmanager
    def adding(self, name: str) -> Iterator[tuple[Storage, str]]:
        """Yield the `Storage` and key to write a file to; it gets its final name if the block succeeds."""
        if self._tree is None:
            yield self._durable, self._draft.key(name)  # an object appears only when it is complete
            return
        part = self._draft.key(f".penstock-part-{secrets.token_hex(8)}-{name}")
        with ExitStack() as undo:
            undo.callback(self._tree.remove, part)
            yield prefer_direct_access(self._durable), part
            with suppress(AlreadyThere):  # another flusher copied the same file
                self._tree.move(part, self._draft.key(name))
                undo.pop_all()

    def publish(self, seal: protocol.Seal) -> bool:
        """Commit the complete draft; return False if another flusher does."""
        if self._tree is None:
            self._drafts.publish(self._draft, seal)
            return True
        # One of several flushers takes the folder from the others, and then continues like any other save.
        own = protocol.name_draft(self._draft.name, secrets.token_hex(8))
        self._drafts.renew(own)
        with ExitStack() as undo:
            undo.callback(self._drafts.end_lease, own)
            try:
                self._tree.move(self._draft.folder, own.folder)
            except ObjectNotFound:
                return False
            with ExitStack() as give_back:
                give_back.callback(self._tree.move, own.folder, self._draft.folder)
                for entry in list(self._tree.entries(own.folder)):
                    if entry.name not in seal.sizes:
                        self._tree.remove(own.key(entry.name))  # left half copied by a killed flusher
                self._tree.sync(own.folder)
                self._drafts.publish(own, seal)
                give_back.pop_all()
        self._drafts.end_lease(self._draft)
        return True

    def clear_up(self) -> None:
        """Remove a draft that a late flusher created again after another had published it."""
        if self._tree is not None and self.sizes():
            self._tree.remove(self._draft.folder)
        self._drafts.end_lease(self._draft)


def main(cache: str) -> None:
    """Run as the detached flusher of this cache, at the lowest priority, until nothing is left to do."""
    # %r escapes line breaks, so that no name in a message can begin a line. Standard error is the log.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)r")
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    with suppress(psutil.Error, OSError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
    Flusher(open_here(cache)).run(patience_s=PATIENCE_S, persists=True)


_PROGRAM: Final = """\
import os, sys
sys.path.append({packages!r})
if os.fork():
    os._exit(0)
from penstock.checkpoint.levels.flush import main
main({cache!r})
"""
"""Forks before anything is loaded: a fork copies only the thread that calls it, so locks held by other
threads would stay locked. The parent exits at once, so that init adopts the flusher. Otherwise the flusher
would be a child of the trainer, and the launcher may wait for all children or kill them.
"""


def start_detached(folder: FlushFolder) -> None:
    """Start a flusher of this cache in a process that outlives this one, unless a flusher is already running.

    The process has its own session and no parent, so no signal to the job or its terminal reaches it. Raises
    `OSError` or `subprocess.SubprocessError` if no process can be started.
    """
    if folder.is_locked():
        return
    packages = Path(penstock.__file__).resolve().parent.parent
    program = _PROGRAM.format(packages=str(packages), cache=str(folder.cache))
    # Not through a link, which would lead to another file.
    with open(
        folder.log, "ab", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)
    ) as log:
        subprocess.run(
            [sys.executable, "-P", "-c", program],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
            timeout=120,
        )
