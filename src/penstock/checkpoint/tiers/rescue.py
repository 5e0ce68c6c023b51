"""After a crash, without the trainer: caches get back what they lost, or what they hold becomes durable.

Collective over a job of its own, with a rank or more on each node. Invariant: nothing that a cache holds is
taken from it; what becomes durable was held against its sums first, and has the very manifest of its save.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.checkpoint.commit.base import MANIFEST_NAME, Seal
from penstock.checkpoint.commit.place import begin
from penstock.checkpoint.manifest import read_manifest
from penstock.checkpoint.steps import name_of, step_of
from penstock.checkpoint.tiers.copying import Copy, Pace, copy_files
from penstock.checkpoint.tiers.damage import damaged_shares
from penstock.cluster.collectives import all_gather_results
from penstock.errors import RankFailed
from penstock.storage.powers import for_large_files
from penstock.storage.whole import read_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.commit.place import Place
    from penstock.checkpoint.steps import Steps
    from penstock.checkpoint.tiers.assess import Assessment
    from penstock.checkpoint.tiers.cache import CacheLevel
    from penstock.cluster.comm import Comm

NUM_THREADS = 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """What was found of a cached step, and what it came to."""

    step: int
    missing: tuple[int, ...] = ()
    """The ranks that saved whose shares no cache had."""
    damaged: tuple[int, ...] = ()
    """Those whose files were not what their sums say."""
    reason: str = ""
    """Why the caches cannot give the step; empty where they can."""

    @property
    def outcome(self) -> str:
        """In two words at most."""
        if self.reason:
            return "beyond repair"
        return "rebuilt" if self.missing or self.damaged else "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scavenged:
    """What was made durable, and what had to be passed over for it."""

    step: int | None
    """None where no cached step is newer than the durable ones and can be had."""
    uri: str = ""
    looked_at: tuple[Mended, ...] = ()
    """Newest first; the last one is the step that was taken."""


def cached_steps(cache: CacheLevel, comm: Comm) -> list[int]:
    """Every step of which some node has a share, ascending; unlike a restart, this removes nothing."""
    told = all_gather_results(
        comm,
        lambda: cache.names_here() if cache.leads else [],
        awaiting="all nodes to list their caches",
    )
    names = {name for names in told for name in names}
    return sorted(step for name in names if (step := step_of(name)) is not None)


def mend(cache: CacheLevel, comm: Comm, step: int, *, verified: bool = True) -> Mended:
    """Rebuild what a step has lost, until every share lies in a cache. Sums are read only if `verified`."""
    return _mend(cache, comm, step, verified=verified)[0]


def scavenge(cache: CacheLevel, comm: Comm, durable: Steps, steps: Sequence[int]) -> Scavenged:
    """Make the newest of `steps` durable that the caches can give."""
    looked_at: list[Mended] = []
    for step in sorted(steps, reverse=True):
        mended, found = _mend(cache, comm, step, verified=True)
        looked_at.append(mended)
        if not mended.reason:
            uri = _make_durable(cache, comm, durable, step, found)
            return Scavenged(step=step, uri=uri, looked_at=tuple(looked_at))
    return Scavenged(step=None, looked_at=tuple(looked_at))


def _mend(cache: CacheLevel, comm: Comm, step: int, *, verified: bool) -> tuple[Mended, Assessment]:
    name = name_of(step)
    found = cache.assess(name)
    mended = Mended(step=step, missing=found.lost, reason=found.reason)
    if found.reason:
        return mended, found
    if verified and (damaged := damaged_shares(cache, comm, name, found)):
        found = cache.assess(name, damaged=damaged)
        mended = replace(mended, damaged=damaged, reason=found.reason)
    if found.is_rebuildable:
        try:
            cache.repair(name, found)
        except RankFailed as error:
            return replace(mended, reason=f"it could not be rebuilt: {error}"), found
        found = cache.assess(name)
    return mended, found


def _make_durable(cache: CacheLevel, comm: Comm, durable: Steps, step: int, found: Assessment) -> str:
    name = name_of(step)
    manifest, metadata = cache.told_seal(name, found)
    uri = f"{durable.storage.uri}/{name}"
    if _is_there(comm, durable, step, manifest):
        return uri
    sizes = {file.name: file.size_bytes for file in read_manifest(manifest, uri).files}
    with ExitStack() as undo:
        place = begin(durable.storage, name, comm)
        undo.callback(place.abandon)
        all_gather_results(
            comm,
            lambda: _copy_shares(cache, found, place, name, comm.rank),
            awaiting=f"all ranks to copy what they hold of {name}",
        )
        place.commit(lambda: Seal(manifest=manifest, metadata=metadata, sizes=sizes))
        undo.pop_all()
    if comm.rank == 0 and step == max(durable.committed()):
        durable.point_to(step)
    return uri


def _is_there(comm: Comm, durable: Steps, step: int, manifest: bytes) -> bool:
    """Whether this very save is durable already."""

    def look() -> bool:
        if comm.rank != 0 or step not in durable.committed():
            return False
        stored = durable.find(step)
        return bytes(read_object(stored.storage, stored.key(MANIFEST_NAME))) == manifest

    return all_gather_results(comm, look, awaiting="rank 0 to look at the durable level")[0]


def _copy_shares(cache: CacheLevel, found: Assessment, place: Place, name: str, rank: int) -> None:
    """Copy the files of all who saved whose shares this rank has at hand."""
    files = [file for saved, actor in found.actors.items() if actor == rank for file in found.files_of(saved)]
    if not files:
        return
    held = cache.holds(name)
    copies = [Copy(from_key=held.key(file.name), to_key=place.key(file.name)) for file in files]
    copy_files(copies, for_large_files(held.storage), place.for_data, threads=NUM_THREADS, pace=Pace(None))
