"""Checkpoints whose files the program writes itself: written in a block, made durable, found again.

    with manager.output("step-100") as out:  torch.save(state, out.path(f"rank_{rank}.pt"))
    with manager.restart() as found:         state = torch.load(found.path(f"rank_{rank}.pt"))

All ranks enter and leave a block together; inside it, each rank uses the paths it was given. Invariant: a set
of files is committed on all ranks or on none, checksums are computed from bytes read back after fsync, and
`restart` returns the path of a file only after the rank that will use it has verified the file.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, cast

import numpy as np

from penstock import __version__
from penstock.checkpoint.commit.checkpoints import (
    CheckpointRef,
    SaveTransaction,
    local_path,
    parse_step,
    step_dirname,
)
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME, Seal
from penstock.checkpoint.engine import RankSaveStats, Urgency, WrittenShare
from penstock.checkpoint.formats.description import (
    Manifest,
    ManifestFile,
    checksum_object,
    checksum_of,
    manifest_bytes,
    metadata_bytes,
)
from penstock.checkpoint.levels.redundancy import choose_home_rank
from penstock.checkpoint.manager import step_store
from penstock.checkpoint.state.regions import CheckpointIndex, Regions, StoredRegions
from penstock.checkpoint.tools.verify import find_damage, require_undamaged
from penstock.cluster.comm import Comm, format_cause
from penstock.errors import DataDamaged, ObjectNotFound, PenstockError, RankFailed, UsageError, name_some
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.files.local_files import sync_open_file
from penstock.storage.protocol import check_key

_OURS: Final = (MANIFEST_NAME, METADATA_NAME, "parity-", "redundancy-")

logger = logging.getLogger(__name__)


class FinishedFiles:
    """A `PreparedSave` and its `StagedSave` in one, for files that already exist and need no staging."""

    def stage(self, urgent: Urgency = "copy") -> Self:  # noqa: ARG002 - the protocol's
        return self

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Return at once: these files do not change."""

    def cancel(self) -> None:
        """Do nothing: no copy is in flight."""


class _WrittenFiles(FinishedFiles):
    """The files that one rank has written into a draft of a checkpoint."""

    def __init__(self, names: Sequence[str], comm: Comm) -> None:
        self._names = names
        self._comm = comm

    def count_bytes(self, storage: Storage, key_of: Callable[[str], str]) -> int:
        """Return the total size of the files. A missing file counts as empty here; `write_to` refuses it."""
        paths = [local_path(storage, key_of(name)) for name in self._names]
        return sum(path.stat().st_size for path in paths if path.is_file())

    def write_to(
        self, storage: Storage, key_of: Callable[[str], str], progress: Progress | None = None
    ) -> WrittenShare:
        """Make the files durable in place, then read and checksum them."""
        begin_s = time.monotonic()
        sizes = [_sync_file(local_path(storage, key_of(name)), self._comm.rank) for name in self._names]
        synced_s = time.monotonic()
        files = tuple(
            ManifestFile(
                name=name,
                size_bytes=size_bytes,
                item_name=np.array([self._comm.rank], dtype=np.int64),
                item_offset=np.zeros(1, dtype=np.int64),
                item_bytes=np.array([size_bytes], dtype=np.int64),
                payload_offset=np.zeros(1, dtype=np.int64),
                sums=checksum_object(storage, key_of(name), progress.advance if progress else None),
            )
            for name, size_bytes in zip(self._names, sizes, strict=True)
        )
        stats = RankSaveStats(
            rank=self._comm.rank,
            payload_bytes=sum(sizes),
            file_bytes=sum(sizes),
            write_s=time.monotonic() - synced_s,
            sync_s=synced_s - begin_s,
        )
        return WrittenShare(files=files, stats=stats)

    def seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, object]) -> Seal:
        """Return a manifest with one item per file, named after its rank, and metadata without tensors."""
        step, nothing = facts.get("step"), np.zeros(0, dtype=np.int64)
        regions, packed = Regions.concatenated([]), np.zeros(0, dtype=np.bool_)
        stored = StoredRegions(regions, nothing, nothing, nothing, nothing, packed)
        metadata = metadata_bytes(CheckpointIndex((), stored, (), ()))
        files = tuple(cast("ManifestFile", file) for share in shares for file in share.files)
        manifest = Manifest(
            step=step if isinstance(step, int) else None,
            save_id=str(facts.get("save_id", "")),
            written_by=f"penstock {__version__}",
            world_size=self._comm.size,
            facts={"content": "files"},
            metadata_bytes=len(metadata),
            metadata_sum=checksum_of(metadata),
            names=tuple(f"rank {rank}" for rank in range(self._comm.size)),
            files=files,
        )
        sizes = {file.name: file.size_bytes for file in files}
        return Seal(manifest=manifest_bytes(manifest), metadata=metadata, sizes=sizes)


def _sync_file(path: Path, rank: int) -> int:
    """Make one file durable and return its size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise UsageError(
            f"Rank {rank} called path() but wrote no file to it: {error.strerror}",
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


def parse_writer_rank(manifest: Manifest, file: ManifestFile) -> int:
    """Return the rank that wrote `file`, one of the program's own files."""
    return int(manifest.names[int(file.item_name[0])].removeprefix("rank "))


InTurn = Callable[[Callable[[], Any]], Any]
"""A function that runs its argument on the save thread, between background saves, and returns the result."""


class UserOutput:
    """One rank's view of files while they are written. `path` and `mark_invalid` are not collective."""

    def __init__(
        self,
        name: str,
        comm: Comm,
        store: step_store.StepStore,
        *,
        is_last: bool,
        in_turn: InTurn,
        timed: AbstractContextManager[None],
    ) -> None:
        self.name = name
        self.uri = ""
        """Empty until the files are committed; stays empty if they are discarded."""
        self._comm = comm
        self._store = store
        self._is_last = is_last
        self._in_turn = in_turn
        self._timed = timed
        self._transaction: SaveTransaction | None = None
        self._paths: dict[str, Path] = {}
        self._is_valid = True

    @property
    def is_committed(self) -> bool:
        return bool(self.uri)

    def path(self, file_name: str) -> Path:
        """Return the path for this rank's file called `file_name`; every call returns the same path."""
        if self._transaction is None:
            raise UsageError(
                "path() was called outside its block", where=self.name, fix="Call it inside the `with`."
            )
        check_key(file_name, "path")
        if "/" in file_name or file_name.startswith((".", *_OURS)):
            raise UsageError(
                f"Invalid file name {file_name!r}",
                where="path",
                fix="Use a plain name such as rank_0.pt; all files of a step are in one folder.",
            )
        if file_name not in self._paths:
            key = self._transaction.draft.key(file_name)
            self._paths[file_name] = local_path(self._transaction.storage, key)
        return self._paths[file_name]

    def mark_invalid(self) -> None:
        """Discard the files of all ranks at the end of the block, because this rank's are unusable."""
        self._is_valid = False

    def __enter__(self) -> Self:
        self._transaction = self._in_turn(partial(self._store.open, self.name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._transaction is not None, "it was entered"
        transaction, self._transaction = self._transaction, None
        with ExitStack() as undo:
            undo.callback(self._in_turn, transaction.abandon)
            if kind is not None and not issubclass(kind, Exception):
                # Ctrl-C: this program ends without another collective call; the other ranks notice that it is
                # gone.
                return
            cause = "" if error is None else format_cause(error)
            ends = self._comm.gather(
                (self._comm.host, tuple(self._paths), self._is_valid, cause),
                awaiting=f"all ranks to finish writing {self.name}",
            )
            if error is not None:
                return
            writers: dict[str, int] = {}
            for rank, (host, _, _, other_cause) in enumerate(ends):
                if other_cause:
                    raise RankFailed(rank, host, f"writing {self.name}: {other_cause}")
            for rank, (_, names, is_valid, _) in enumerate(ends):
                if not is_valid:
                    logger.warning("%s is discarded: rank %d marked its files invalid", self.name, rank)
                    return
                for name in names:
                    if (first := writers.setdefault(name, rank)) != rank:
                        raise UsageError(
                            f"Ranks {first} and {rank} both wrote {name}",
                            where=self.name,
                            fix="Put the rank into the file names: all files of a step are in one folder.",
                        )
            undo.pop_all()
        files = _WrittenFiles(tuple(self._paths), self._comm)
        with self._timed:
            complete = partial(self._store.complete, is_last=self._is_last)
            self.uri, _, clear_up = self._in_turn(partial(complete, transaction, files, files, None))
            self._in_turn(clear_up)
        logger.info("Committed %s", self.uri)


def check_output_name(name: str | int, *, checkpoint: bool) -> str:
    """Return the name of an output's folder.

    Raises `UsageError` unless a checkpoint is named `step-N` and results have any other plain name.
    """
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


class Restart:
    """One rank's view of a step to restart from. `path` and `mark_invalid` are not collective."""

    def __init__(self, search: step_store.RestoreSearch, comm: Comm) -> None:
        """Find the next copy whose files are all there and undamaged. Collective."""
        self.step: int | None = None
        """None if no step was ever committed."""
        self.search = search
        self.is_valid = True
        """False once this rank has rejected the step. After the block: True if all ranks could use it."""
        self._comm = comm
        for copy in search.copies:
            with search:
                manifest = copy.open().read_manifest()
                if manifest.facts.get("content") != "files":
                    raise DataDamaged(
                        "It contains a state, but no files of manager.output()",
                        fix="manager.restore() loads it.",
                    )
                stored = copy.localize()
                homes = {
                    file.name: choose_home_rank(
                        parse_writer_rank(manifest, file), manifest.world_size, comm.size
                    )
                    for file in manifest.files
                }
                own = [file for file in manifest.files if homes[file.name] == comm.rank]
                damage = find_damage(stored.storage, stored.committed.folder, manifest, own)
                require_undamaged(damage, stored.uri)
            if search.has_loaded:
                self.step, self._stored, self._homes = search.step, stored, homes
                return
        search.require_any()

    def path(self, file_name: str) -> Path:
        """Return the path of a file; raise `ObjectNotFound` if the step or this node does not have it."""
        if self.step is None:
            raise UsageError("No step was ever committed", fix="Check `found.step` first: it is None.")
        stored, homes = self._stored, self._homes
        if file_name not in homes:
            raise ObjectNotFound(
                f"Step {self.step} has no file {file_name}",
                uri=stored.uri,
                fix=f"It has {len(homes)} files: {name_some(sorted(homes), 5)}.",
            )
        if stored.readable is not None and file_name not in stored.readable:
            home = homes[file_name]
            raise ObjectNotFound(
                f"{file_name} is on the node of rank {home}, not on that of rank {self._comm.rank}",
                uri=stored.uri,
                fix=f"Read it on rank {home} and broadcast it; each rank has the files that it wrote.",
            )
        return local_path(stored.storage, stored.key(file_name))

    def mark_invalid(self) -> None:
        """Reject this step: at the end of the block, all ranks give it up."""
        self.is_valid = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.step is None or (kind is not None and not issubclass(kind, Exception)):
            return
        ends = self._comm.gather(
            (self.is_valid, "" if error is None else format_cause(error), self._comm.host),
            awaiting=f"all ranks to restart from step {self.step}",
        )
        bad = [rank for rank, (is_valid, _, _) in enumerate(ends) if not is_valid]
        self.is_valid = not bad
        if bad:
            self.search.reject(f"rank {bad[0]} marked it invalid")
            logger.warning("Step %d is rejected: rank %d marked it invalid", self.step, bad[0])
        for rank, (_, cause, host) in enumerate(ends):
            if cause and error is None:
                raise RankFailed(rank, host, f"restarting from step {self.step}: {cause}")


def explain_missing_state(checkpoint: CheckpointRef, error: PenstockError) -> None:
    """Raise `DataDamaged` if the checkpoint has only user files and no state. An older step is then tried."""
    try:
        manifest = checkpoint.read_manifest()
    except PenstockError:
        return
    if manifest.facts.get("content") == "files":
        raise DataDamaged(
            "It contains files that a program wrote, but no state",
            where=checkpoint.uri,
            fix="manager.restart() returns their paths.",
        ) from error
