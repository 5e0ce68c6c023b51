"""A step whose files programs wrote themselves, found again: `with manager.restart() as found`.

Beside `restoring.py`, which loads states. Invariant: before a path is handed out, every file of the step was
verified by the rank that it is for.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Self

from penstock.checkpoint.commit.base import MANIFEST_NAME
from penstock.checkpoint.manifest import read_manifest
from penstock.checkpoint.own_files import holds_own_files, local_path, writer_of
from penstock.checkpoint.restoring import Search, none_restorable, try_step
from penstock.checkpoint.tiers.assess import home_of
from penstock.checkpoint.verify import damage_in_files
from penstock.cluster.collectives import format_cause
from penstock.errors import DataDamaged, ObjectNotFound, PenstockError, RankFailed, UsageError
from penstock.storage.whole import read_object

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from penstock.checkpoint.keeping import Find
    from penstock.checkpoint.manifest import Manifest
    from penstock.checkpoint.stored import Stored
    from penstock.cluster.comm import Comm

logger = logging.getLogger(__name__)


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
