"""Files that programs write themselves, saved as a state is: made durable, summed, told by a manifest.

Between `output.py`, which hands out paths in a draft, and the commit. Invariant: what is summed was read back
from the file after it was made durable, so a file that changes later is found out.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from penstock import __version__
from penstock.checkpoint.commit.catalog import local_path, parse_step, step_dirname
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME, Seal
from penstock.checkpoint.engine import RankShare, ShareStats, WrittenFile
from penstock.checkpoint.formats.checksums import sum_of, sum_of_object
from penstock.checkpoint.formats.dcp_metadata import DcpMetadata, metadata_bytes
from penstock.checkpoint.formats.manifest import Manifest, ManifestFile, manifest_bytes, read_manifest
from penstock.checkpoint.levels.redundancy.recoverability import home_of
from penstock.checkpoint.manager.step_store import Search, none_restorable, try_step
from penstock.checkpoint.state.regions import Boxes, Contents, StoredBoxes
from penstock.checkpoint.tools.verify import damage_in_files
from penstock.cluster.collectives import format_cause
from penstock.errors import DataDamaged, ObjectNotFound, PenstockError, RankFailed, UsageError
from penstock.progress import Silent
from penstock.storage.object_io import read_object
from penstock.storage.uri import check_key

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import TracebackType

    from penstock.checkpoint.commit.catalog import Stored
    from penstock.checkpoint.engine import Urgency
    from penstock.checkpoint.manager.step_store import Find, Slot
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress
    from penstock.storage import Storage


_CONTENT: Final = "content"
_FILES: Final = "files"
_WRITER: Final = "rank "
_OURS: Final = (MANIFEST_NAME, METADATA_NAME, "parity-", "redundancy-")


def check_file_name(name: str) -> None:
    """`UsageError` unless a file of a step may be called so."""
    check_key(name, "route")
    if "/" in name or name.startswith((".", *_OURS)):
        raise UsageError(
            f"{name!r} cannot be the name of a file in a step",
            where="route",
            fix="Give a plain name, such as rank_0.pt; all files of a step lie in one folder.",
        )


class OwnFiles:
    """What one rank has written into a draft: a `PreparedSave` and its `StagedSave` in one."""

    def __init__(self, names: Sequence[str], *, rank: int, num_ranks: int) -> None:
        self._names = tuple(names)
        self._rank = rank
        self._num_ranks = num_ranks

    def stage(self, urgent: Urgency = "copy") -> OwnFiles:  # noqa: ARG002 - the protocol's
        """Nothing is to be copied: the files lie there."""
        return self

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """They do from the start."""

    def cancel(self) -> None:
        """Nothing is in flight."""

    def write_to(
        self, storage: Storage, key_of: Callable[[str], str], progress: Progress | None = None
    ) -> RankShare:
        """Make the files durable where they lie, and sum them."""
        began_s = time.monotonic()
        sizes = [_settled(local_path(storage, key_of(name)), self._rank) for name in self._names]
        seen = progress or Silent()
        seen.begin("bytes", sum(sizes))
        synced_s = time.monotonic()
        files = tuple(
            _summed(storage, key_of(name), name, size_bytes, seen)
            for name, size_bytes in zip(self._names, sizes, strict=True)
        )
        stats = ShareStats(
            rank=self._rank,
            payload_bytes=sum(sizes),
            file_bytes=sum(sizes),
            write_s=time.monotonic() - synced_s,
            sync_s=synced_s - began_s,
        )
        return RankShare(rank=self._rank, files=files, stats=stats)

    def seal(self, shares: Sequence[RankShare], facts: Mapping[str, object]) -> Seal:
        """A manifest of whole files, and the metadata of no tensor."""
        save_id, step = str(facts.get("save_id", "")), facts.get("step")
        metadata = metadata_bytes(DcpMetadata(contents=_no_contents(), save_id=save_id))
        manifest = Manifest(
            step=step if isinstance(step, int) else None,
            save_id=save_id,
            written_by=f"penstock {__version__}",
            world_size=self._num_ranks,
            facts={_CONTENT: _FILES},
            metadata_bytes=len(metadata),
            metadata_sum=sum_of(metadata),
            names=tuple(f"{_WRITER}{share.rank}" for share in shares),
            files=tuple(
                _described(file, place) for place, share in enumerate(shares) for file in share.files
            ),
        )
        return Seal(
            manifest=manifest_bytes(manifest),
            metadata=metadata,
            sizes={file.name: file.size_bytes for share in shares for file in share.files},
        )


def holds_own_files(manifest: Manifest) -> bool:
    """Whether a step consists of files that programs wrote themselves."""
    return manifest.facts.get(_CONTENT) == _FILES


def writer_of(manifest: Manifest, file: ManifestFile) -> int:
    """The rank that wrote one of such files."""
    return int(manifest.names[int(file.item_name[0])].removeprefix(_WRITER))


def _settled(path: Path, rank: int) -> int:
    """Make one file durable; its size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise UsageError(
            f"Rank {rank} asked for a path and left no file there: {error.strerror}",
            where=str(path),
            fix="Write every file that is routed before the block ends, or call invalid().",
        ) from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise UsageError("This is no plain file", where=str(path), fix="Write a file to the routed path.")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return facts.st_size


def _summed(storage: Storage, key: str, name: str, size_bytes: int, progress: Progress) -> WrittenFile:
    return WrittenFile(
        name=name,
        size_bytes=size_bytes,
        item_offset=np.zeros(1, dtype=np.int64),
        item_bytes=np.array([size_bytes], dtype=np.int64),
        payload_offset=np.zeros(1, dtype=np.int64),
        sums=sum_of_object(storage, key, progress.advance),
    )


def _described(file: WrittenFile, writer: int) -> ManifestFile:
    return ManifestFile(
        name=file.name,
        size_bytes=file.size_bytes,
        item_name=np.array([writer], dtype=np.int64),
        item_offset=file.item_offset,
        item_bytes=file.item_bytes,
        payload_offset=file.payload_offset,
        sums=file.sums,
    )


def _no_contents() -> Contents:
    nothing = np.zeros(0, dtype=np.int64)
    boxes = Boxes.concatenated([])
    stored = StoredBoxes(
        boxes,
        file=nothing,
        item_offset=nothing,
        item_bytes=nothing,
        payload_offset=nothing,
        packed=np.zeros(0, dtype=np.bool_),
    )
    return Contents((), stored, (), ())


InTurn = Callable[[Callable[[], Any]], Any]
"""Calls what it is given between the saves of the background, and returns its result."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _View:
    """How one rank left its block."""

    host: str
    names: tuple[str, ...]
    is_valid: bool
    cause: str
    """Of what was raised in the block; empty where nothing was."""


class Output:
    """One rank's view of a set of files that is being written. `route` and `invalid` are not collective."""

    def __init__(
        self,
        name: str,
        comm: Comm,
        *,
        open_slot: Callable[[], Slot],
        in_turn: InTurn,
        timed: AbstractContextManager[None],
    ) -> None:
        self.name = name
        self.uri = ""
        """Where the set lies once it is committed; empty before, and where it was discarded."""
        self._comm = comm
        self._open_slot = open_slot
        self._in_turn = in_turn
        self._timed = timed
        self._slot: Slot | None = None
        self._names: dict[str, Path] = {}
        self._is_valid = True

    @property
    def is_committed(self) -> bool:
        """Whether the set was committed."""
        return bool(self.uri)

    def route(self, file_name: str) -> Path:
        """Where to write this rank's file of that name; the same path, however often it is asked for."""
        if self._slot is None:
            raise UsageError("route() outside of its block", where=self.name, fix="Call it in the `with`.")
        check_file_name(file_name)
        if file_name not in self._names:
            self._names[file_name] = self._slot.path(file_name)
        return self._names[file_name]

    def invalid(self) -> None:
        """Say that this rank's files are not good: the set is discarded on all ranks when the block ends."""
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
                # Interrupted: the program ends, and whoever waits for this rank learns it by that.
                return
            view = _View(
                self._comm.host,
                tuple(self._names),
                self._is_valid,
                "" if error is None else format_cause(error),
            )
            views = self._comm.gather(view, awaiting=f"all ranks to finish writing {self.name}")
            if error is not None or not _is_good(views, self.name):
                return
            undo.pop_all()
        files = OwnFiles(tuple(self._names), rank=self._comm.rank, num_ranks=self._comm.size)
        with self._timed:
            self.uri, _ = self._in_turn(lambda: slot.complete(files, files, Silent()))
        logger.info("Committed %s", self.uri)


def set_name(name: str | int, *, checkpoint: bool) -> str:
    """What a set is called; `UsageError` where its name does not fit what it is."""
    if isinstance(name, int):
        name = step_dirname(name)
    if checkpoint == (parse_step(name) is None):
        raise UsageError(
            f"{name!r} {'is no step' if checkpoint else 'is the name of a step'}",
            where="output",
            fix="Call a checkpoint step-NUMBER, or give the number; results are called otherwise, with "
            "checkpoint=False.",
        )
    check_key(name, "output")
    if "/" in name or name.startswith("."):
        raise UsageError(f"{name!r} is no plain name", where="output", fix="Give one like results-7.")
    return name


def _is_good(views: list[_View], name: str) -> bool:
    """Whether all ranks left well; raises on all of them what went wrong on any."""
    for rank, view in enumerate(views):
        if view.cause:
            raise RankFailed(rank, view.host, f"writing {name}: {view.cause}")
    bad = [rank for rank, view in enumerate(views) if not view.is_valid]
    if bad:
        logger.warning("%s is discarded: rank %d called its files invalid", name, bad[0])
        return False
    counts = Counter(file_name for view in views for file_name in view.names)
    shared = [file_name for file_name, count in counts.items() if count > 1]
    if shared:
        ranks = [rank for rank, view in enumerate(views) if shared[0] in view.names]
        raise UsageError(
            f"Ranks {ranks[0]} and {ranks[1]} both wrote {shared[0]}",
            where=name,
            fix="Put the rank into the names of files; all files of a step lie in one folder.",
        )
    return True


class Restart:
    """One rank's view of a step to restart from. `route` and `invalid` are not collective."""

    def __init__(
        self,
        search: Search,
        comm: Comm,
        *,
        step: int | None = None,
        stored: Stored | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        self.step = step
        """None where no step was ever committed."""
        self.search = search
        self._comm = comm
        self._stored = stored
        self._manifest = manifest
        self._is_valid = True

    @property
    def is_valid(self) -> bool:
        """After the block: whether all ranks could use it. Before: whether this rank has said otherwise."""
        return self._is_valid

    def route(self, file_name: str) -> Path:
        """Where the file of that name lies; `ObjectNotFound` where the step or this node has none such."""
        if self._stored is None or self._manifest is None:
            raise UsageError("No step was ever committed", fix="Look at `found.step` first: it is None.")
        stored = self._stored
        writers = {file.name: writer_of(self._manifest, file) for file in self._manifest.files}
        if file_name not in writers:
            there = ", ".join(sorted(writers)[:5])
            raise ObjectNotFound(
                f"Step {self.step} has no file {file_name}",
                uri=stored.uri,
                fix=f"It has {len(writers)} files: {there}{', ...' if len(writers) > 5 else ''}.",
            )
        if stored.readable is not None and file_name not in stored.readable:
            home = home_of(writers[file_name], self._manifest.world_size, self._comm.size)
            raise ObjectNotFound(
                f"{file_name} does not lie on the node of rank {self._comm.rank}, but on that of rank {home}",
                uri=stored.uri,
                fix=f"Read it on rank {home}, and broadcast it; each rank finds the files that it wrote.",
            )
        return local_path(stored.storage, stored.key(file_name))

    def invalid(self) -> None:
        """Say that this step is no good: when the block ends, all ranks leave it."""
        self._is_valid = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.step is None or (kind is not None and not issubclass(kind, Exception)):
            return
        cause = "" if error is None else format_cause(error)
        views = self._comm.gather(
            (self._is_valid, cause, self._comm.host), awaiting=f"all ranks to restart from step {self.step}"
        )
        bad = [rank for rank, (is_valid, _, _) in enumerate(views) if not is_valid]
        self._is_valid = not bad
        if bad:
            self.search.refuse(f"rank {bad[0]} called it invalid")
            logger.warning("Step %d is left: rank %d called it invalid", self.step, bad[0])
        for rank, (_, each, host) in enumerate(views):
            if each and error is None:
                raise RankFailed(rank, host, f"restarting from step {self.step}: {each}")


def next_restart(search: Search, comm: Comm, uri: str) -> Restart:
    """The next copy whose files are all there and as they were written. Collective."""
    settled: list[tuple[Stored, Manifest]] = []
    while copy := search.next_copy():
        reason = try_step(comm, partial(_settle, copy, comm, settled), search.step)
        if reason is None:
            stored, manifest = settled[-1]
            return Restart(search, comm, step=search.step, stored=stored, manifest=manifest)
        search.refuse(reason)
    if search.passed_over:
        raise none_restorable(search.passed_over, uri)
    return Restart(search, comm)


def require_state(stored: Stored, error: PenstockError) -> None:
    """Explain an error of loading a state, where the step holds none, by one that leads to an older step."""
    try:
        manifest = _manifest_of(stored)
    except PenstockError:
        return
    if holds_own_files(manifest):
        raise DataDamaged(
            "It holds files that a program wrote, and no state",
            where=stored.uri,
            fix="manager.restart() gives their paths.",
        ) from error


def _settle(copy: Find, comm: Comm, settled: list[tuple[Stored, Manifest]]) -> None:
    manifest = _manifest_of(copy.find())
    if not holds_own_files(manifest):
        raise DataDamaged("It holds a state, and no files of one's own", fix="manager.restore() loads it.")
    stored = copy.settle()
    mine = [
        file
        for file in manifest.files
        if home_of(writer_of(manifest, file), manifest.world_size, comm.size) == comm.rank
    ]
    damage = damage_in_files(stored.storage, stored.committed.folder, manifest, mine)
    if damage:
        raise DataDamaged(f"{damage[0]}", where=stored.uri)
    settled.append((stored, manifest))


def _manifest_of(stored: Stored) -> Manifest:
    return read_manifest(read_object(stored.storage, stored.key(MANIFEST_NAME)), stored.uri)
