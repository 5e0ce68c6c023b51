"""Checkpoints whose files the program writes itself: written in a block, made durable, found again.

    with manager.output("step-100") as out:  torch.save(state, out.path(f"rank_{rank}.pt"))
    with manager.restart() as found:         state = torch.load(found.path(f"rank_{rank}.pt"))

All ranks enter and leave a block together; in between each uses the paths it was given. Invariant: a set of
files is committed on all ranks or on none, checksums are of bytes read back after fsync, and every file is
verified by the rank that it is for before `restart` hands out a path.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from penstock import __version__
from penstock.checkpoint.commit.catalog import CheckpointRef, local_path, parse_step, step_dirname
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME, Seal
from penstock.checkpoint.engine import RankSaveStats, Urgency, WrittenShare
from penstock.checkpoint.formats.dcp_metadata import metadata_bytes
from penstock.checkpoint.formats.manifest import (
    Manifest,
    ManifestFile,
    WrittenFile,
    checksum_object,
    checksum_of,
    manifest_bytes,
    read_manifest,
)
from penstock.checkpoint.levels.redundancy.redundancy_record import choose_home_rank
from penstock.checkpoint.manager import step_store
from penstock.checkpoint.state.regions import CheckpointIndex, Regions, StoredRegions
from penstock.checkpoint.tools.verify import find_damage
from penstock.cluster.comm import Comm, format_cause
from penstock.errors import DataDamaged, ObjectNotFound, PenstockError, RankFailed, UsageError, name_some
from penstock.progress import Progress, Silent
from penstock.storage import Storage
from penstock.storage.files.durable import sync_open_file
from penstock.storage.protocol import check_key, read_object

_CONTENT: Final = "content"
_FILES: Final = "files"
_WRITER: Final = "rank "
_OURS: Final = (MANIFEST_NAME, METADATA_NAME, "parity-", "redundancy-")


def check_file_name(name: str) -> None:
    """`UsageError` for a name that a file of a step cannot have."""
    check_key(name, "path")
    if "/" in name or name.startswith((".", *_OURS)):
        raise UsageError(
            f"Invalid file name {name!r}",
            where="path",
            fix="Use a plain name such as rank_0.pt; all files of a step are in one folder.",
        )


class FinishedFiles:
    """A `PreparedSave` and its `StagedSave` in one, for files that exist already and are not copied first."""

    def stage(self, urgent: Urgency = "copy") -> Self:  # noqa: ARG002 - the protocol's
        """Return self."""
        return self

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Return at once: these files do not change."""

    def cancel(self) -> None:
        """Do nothing: no copy is in flight."""


class UserFilesSave(FinishedFiles):
    """What one rank has written into a draft."""

    def __init__(self, names: Sequence[str], *, rank: int, num_ranks: int) -> None:
        self._names = tuple(names)
        self._rank = rank
        self._num_ranks = num_ranks

    def count_bytes(self, storage: Storage, key_of: Callable[[str], str]) -> int:
        """The sizes of all files; one that is missing counts nothing, and is refused when it is written."""
        paths = [local_path(storage, key_of(name)) for name in self._names]
        return sum(path.stat().st_size for path in paths if path.is_file())

    def write_to(
        self, storage: Storage, key_of: Callable[[str], str], progress: Progress | None = None
    ) -> WrittenShare:
        """Make the files durable in place, then read and checksum them."""
        begin_s = time.monotonic()
        sizes = [_sync_user_file(local_path(storage, key_of(name)), self._rank) for name in self._names]
        progress = progress or Silent()
        progress.begin("bytes", sum(sizes))
        synced_s = time.monotonic()
        files = tuple(
            _checksum_file(storage, key_of(name), name, size_bytes, progress)
            for name, size_bytes in zip(self._names, sizes, strict=True)
        )
        stats = RankSaveStats(
            rank=self._rank,
            payload_bytes=sum(sizes),
            file_bytes=sum(sizes),
            write_s=time.monotonic() - synced_s,
            sync_s=synced_s - begin_s,
        )
        return WrittenShare(rank=self._rank, files=files, stats=stats)

    def seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, object]) -> Seal:
        """A manifest of whole files, and metadata without tensors."""
        save_id, step = str(facts.get("save_id", "")), facts.get("step")
        metadata = metadata_bytes(_empty_index())
        manifest = Manifest(
            step=step if isinstance(step, int) else None,
            save_id=save_id,
            written_by=f"penstock {__version__}",
            world_size=self._num_ranks,
            facts={_CONTENT: _FILES},
            metadata_bytes=len(metadata),
            metadata_sum=checksum_of(metadata),
            names=tuple(f"{_WRITER}{share.rank}" for share in shares),
            files=tuple(
                _build_manifest_file(file, place)
                for place, share in enumerate(shares)
                for file in share.files
            ),
        )
        return Seal(
            manifest=manifest_bytes(manifest),
            metadata=metadata,
            sizes={file.name: file.size_bytes for share in shares for file in share.files},
        )


def holds_user_files(manifest: Manifest) -> bool:
    """Whether a step consists of files that a program wrote itself."""
    return manifest.facts.get(_CONTENT) == _FILES


def parse_writer_rank(manifest: Manifest, file: ManifestFile) -> int:
    """The rank that wrote such a file."""
    return int(manifest.names[int(file.item_name[0])].removeprefix(_WRITER))


def _sync_user_file(path: Path, rank: int) -> int:
    """Make one file durable and return its size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise UsageError(
            f"Rank {rank} asked for a path and wrote no file to it: {error.strerror}",
            where=str(path),
            fix="Write every file before the block ends, or call mark_invalid().",
        ) from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise UsageError("Not a regular file", where=str(path), fix="Write a regular file to this path.")
        sync_open_file(descriptor)
    finally:
        os.close(descriptor)
    return facts.st_size


def _checksum_file(storage: Storage, key: str, name: str, size_bytes: int, progress: Progress) -> WrittenFile:
    return WrittenFile(
        name=name,
        size_bytes=size_bytes,
        item_offset=np.zeros(1, dtype=np.int64),
        item_bytes=np.array([size_bytes], dtype=np.int64),
        payload_offset=np.zeros(1, dtype=np.int64),
        sums=checksum_object(storage, key, progress.advance),
    )


def _build_manifest_file(file: WrittenFile, writer: int) -> ManifestFile:
    return ManifestFile(
        name=file.name,
        size_bytes=file.size_bytes,
        item_name=np.array([writer], dtype=np.int64),
        item_offset=file.item_offset,
        item_bytes=file.item_bytes,
        payload_offset=file.payload_offset,
        sums=file.sums,
    )


def _empty_index() -> CheckpointIndex:
    nothing = np.zeros(0, dtype=np.int64)
    regions = Regions.concatenated([])
    stored = StoredRegions(
        regions,
        file=nothing,
        item_offset=nothing,
        item_bytes=nothing,
        payload_offset=nothing,
        packed=np.zeros(0, dtype=np.bool_),
    )
    return CheckpointIndex((), stored, (), ())


InTurn = Callable[[Callable[[], Any]], Any]
"""Runs its argument on the save thread, between background saves, and returns its result."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _BlockEnd:
    """How one rank left its block."""

    host: str
    names: tuple[str, ...]
    is_valid: bool
    cause: str
    """Of the error raised in the block; empty if there was none."""


class UserOutput:
    """One rank's view of files being written. `path` and `mark_invalid` are not collective."""

    def __init__(
        self,
        name: str,
        comm: Comm,
        *,
        open_slot: Callable[[], step_store.StepSlot],
        in_turn: InTurn,
        timed: AbstractContextManager[None],
    ) -> None:
        self.name = name
        self.uri = ""
        """Set once the files are committed; empty before that, and if they were discarded."""
        self._comm = comm
        self._open_slot = open_slot
        self._in_turn = in_turn
        self._timed = timed
        self._slot: step_store.StepSlot | None = None
        self._names: dict[str, Path] = {}
        self._is_valid = True

    @property
    def is_committed(self) -> bool:
        """Whether the files were committed."""
        return bool(self.uri)

    def path(self, file_name: str) -> Path:
        """The path for this rank's file of that name; the same at every call."""
        if self._slot is None:
            raise UsageError(
                "path() was called outside its block", where=self.name, fix="Call it inside the `with`."
            )
        check_file_name(file_name)
        if file_name not in self._names:
            self._names[file_name] = self._slot.path(file_name)
        return self._names[file_name]

    def mark_invalid(self) -> None:
        """Discard the files of all ranks at the end of the block, because this rank's are not usable."""
        self._is_valid = False

    def __enter__(self) -> Self:
        self._slot = self._in_turn(self._open_slot)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._slot is not None, "it was entered"
        slot, self._slot = self._slot, None
        with ExitStack() as undo:
            undo.callback(self._in_turn, slot.abandon)
            if kind is not None and not issubclass(kind, Exception):
                # Ctrl-C: this program ends without another collective call; the other ranks notice its end.
                return
            view = _BlockEnd(
                self._comm.host,
                tuple(self._names),
                self._is_valid,
                "" if error is None else format_cause(error),
            )
            views = self._comm.gather(view, awaiting=f"all ranks to finish writing {self.name}")
            if error is not None or not _is_good(views, self.name):
                return
            undo.pop_all()
        files = UserFilesSave(tuple(self._names), rank=self._comm.rank, num_ranks=self._comm.size)
        with self._timed:
            self.uri, _ = self._in_turn(lambda: slot.complete(files, files, Silent()))
            self._in_turn(slot.clear_up)
        logger.info("Committed %s", self.uri)


def check_output_name(name: str | int, *, checkpoint: bool) -> str:
    """The name of the folder of an output; `UsageError` if it does not fit a checkpoint or results."""
    if isinstance(name, int):
        name = step_dirname(name)
    if checkpoint == (parse_step(name) is None):
        raise UsageError(
            f"{name!r} {'is not a step' if checkpoint else 'is the name of a step'}",
            where="output",
            fix="Name a checkpoint step-NUMBER; use any other name with checkpoint=False for results.",
        )
    check_key(name, "output")
    if "/" in name or name.startswith("."):
        raise UsageError(f"{name!r} is not a plain name", where="output", fix="Use a name such as results-7.")
    return name


def _is_good(views: Sequence[_BlockEnd], name: str) -> bool:
    """Whether to commit; raises on all ranks if one of them raised or two wrote the same file."""
    for rank, view in enumerate(views):
        if view.cause:
            raise RankFailed(rank, view.host, f"writing {name}: {view.cause}")
    bad = [rank for rank, view in enumerate(views) if not view.is_valid]
    if bad:
        logger.warning("%s is discarded: rank %d marked its files invalid", name, bad[0])
        return False
    counts = Counter(file_name for view in views for file_name in view.names)
    shared = [file_name for file_name, count in counts.items() if count > 1]
    if shared:
        ranks = [rank for rank, view in enumerate(views) if shared[0] in view.names]
        raise UsageError(
            f"Ranks {ranks[0]} and {ranks[1]} both wrote {shared[0]}",
            where=name,
            fix="Put the rank into the file names: all files of a step are in one folder.",
        )
    return True


class Restart:
    """One rank's view of a step to restart from. `path` and `mark_invalid` are not collective."""

    def __init__(
        self,
        search: step_store.RestoreSearch,
        comm: Comm,
        *,
        step: int | None = None,
        checkpoint: CheckpointRef | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        self.step = step
        """None if no step was ever committed."""
        self.search = search
        self._comm = comm
        self._checkpoint = checkpoint
        self._manifest = manifest
        self._is_valid = True

    @property
    def is_valid(self) -> bool:
        """After the block: whether all ranks could use it. Before: whether this rank has not rejected it."""
        return self._is_valid

    def path(self, file_name: str) -> Path:
        """The path of a file; `ObjectNotFound` if the step or this node does not have it."""
        if self._checkpoint is None or self._manifest is None:
            raise UsageError("No step was ever committed", fix="Check `found.step` first: it is None.")
        checkpoint = self._checkpoint
        writers = {file.name: parse_writer_rank(self._manifest, file) for file in self._manifest.files}
        if file_name not in writers:
            raise ObjectNotFound(
                f"Step {self.step} has no file {file_name}",
                uri=checkpoint.uri,
                fix=f"It has {len(writers)} files: {name_some(sorted(writers), 5)}.",
            )
        if checkpoint.readable is not None and file_name not in checkpoint.readable:
            home = choose_home_rank(writers[file_name], self._manifest.world_size, self._comm.size)
            raise ObjectNotFound(
                f"{file_name} is on the node of rank {home}, not on that of rank {self._comm.rank}",
                uri=checkpoint.uri,
                fix=f"Read it on rank {home} and broadcast it; each rank has the files that it wrote.",
            )
        return local_path(checkpoint.storage, checkpoint.key(file_name))

    def mark_invalid(self) -> None:
        """Reject this step: all ranks leave it at the end of the block."""
        self._is_valid = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.step is None or (kind is not None and not issubclass(kind, Exception)):
            return
        own_cause = "" if error is None else format_cause(error)
        views = self._comm.gather(
            (self._is_valid, own_cause, self._comm.host),
            awaiting=f"all ranks to restart from step {self.step}",
        )
        bad = [rank for rank, (is_valid, _, _) in enumerate(views) if not is_valid]
        self._is_valid = not bad
        if bad:
            self.search.reject(f"rank {bad[0]} marked it invalid")
            logger.warning("Step %d is rejected: rank %d marked it invalid", self.step, bad[0])
        for rank, (_, cause, host) in enumerate(views):
            if cause and error is None:
                raise RankFailed(rank, host, f"restarting from step {self.step}: {cause}")


def find_restart(search: step_store.RestoreSearch, comm: Comm, uri: str) -> Restart:
    """The next copy whose files are all there and undamaged. Collective."""
    checked: tuple[CheckpointRef, Manifest] | None = None

    def check(copy: step_store.StepCopy) -> None:
        nonlocal checked
        checked = _localize_and_verify(copy, comm)

    while copy := search.next_copy():
        reason = step_store.load_on_all_ranks(comm, partial(check, copy), search.step)
        if reason is None and checked is not None:
            checkpoint, manifest = checked
            return Restart(search, comm, step=search.step, checkpoint=checkpoint, manifest=manifest)
        search.reject(reason or "it was not checked")
    if search.skipped_steps:
        raise step_store.build_restore_error(search.skipped_steps, uri)
    return Restart(search, comm)


def explain_missing_state(checkpoint: CheckpointRef, error: PenstockError) -> None:
    """Raise `DataDamaged`, which leads to an older step, if the checkpoint has user files and no state."""
    try:
        manifest = _read_manifest(checkpoint)
    except PenstockError:
        return
    if holds_user_files(manifest):
        raise DataDamaged(
            "It contains files that a program wrote, and no state",
            where=checkpoint.uri,
            fix="manager.restart() returns their paths.",
        ) from error


def _localize_and_verify(copy: step_store.StepCopy, comm: Comm) -> tuple[CheckpointRef, Manifest]:
    manifest = _read_manifest(copy.open())
    if not holds_user_files(manifest):
        raise DataDamaged(
            "It contains a state, and no files of manager.output()", fix="manager.restore() loads it."
        )
    checkpoint = copy.localize()
    own_files = [
        file
        for file in manifest.files
        if choose_home_rank(parse_writer_rank(manifest, file), manifest.world_size, comm.size) == comm.rank
    ]
    damage = find_damage(checkpoint.storage, checkpoint.committed.folder, manifest, own_files)
    if damage:
        raise DataDamaged(f"{damage[0]}", where=checkpoint.uri)
    return checkpoint, manifest


def _read_manifest(checkpoint: CheckpointRef) -> Manifest:
    return read_manifest(read_object(checkpoint.storage, checkpoint.key(MANIFEST_NAME)), checkpoint.uri)
