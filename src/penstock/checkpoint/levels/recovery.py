"""Getting back what caches lost: finding damaged shares, rebuilding steps, and making survivors durable.

Used by a restore whose first copy was damaged, and after a crash by `penstock checkpoint rebuild` and
`scavenge`, as a job of its own with a rank or more on each node. Invariant: nothing is removed from a cache;
what becomes durable was verified against its checksums first, and has the same manifest as its save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.commit.catalog import (
    CheckpointRef,
    StepCatalog,
    local_path,
    parse_step,
    step_dirname,
)
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME, RunInUse, Seal, WriterLease
from penstock.checkpoint.commit.transaction import SaveTransaction
from penstock.checkpoint.engine import RankSaveStats, WrittenShare
from penstock.checkpoint.formats.manifest import (
    Manifest,
    ManifestFile,
    WrittenFile,
    checksum_object,
    read_manifest,
)
from penstock.checkpoint.levels import agreement
from penstock.checkpoint.levels.cache import CachedSave
from penstock.checkpoint.levels.flush.file_copy import FileCopy, RateLimiter, copy_files
from penstock.checkpoint.levels.flush.flush_folder import DueSteps, FlushFolder
from penstock.checkpoint.levels.flush.flusher import copy_share, flush_step
from penstock.checkpoint.levels.redundancy.redundancy_record import Assessment, choose_home_rank
from penstock.checkpoint.manager.step_store import warn_once_per_job
from penstock.checkpoint.manager.user_files import FinishedFiles, parse_writer_rank
from penstock.checkpoint.tools.verify import find_damage
from penstock.cluster.comm import Comm, run_on_all_ranks, run_on_rank0
from penstock.errors import RankFailed, StorageError, Unavailable
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.capabilities import prefer_direct_access
from penstock.storage.protocol import read_object

if TYPE_CHECKING:
    from penstock.checkpoint.levels.cache import CacheLevel
    from penstock.checkpoint.levels.flush.flusher import Flusher


logger = logging.getLogger(__name__)


def find_damaged_shares(cache: CacheLevel, comm: Comm, name: str, assessment: Assessment) -> tuple[int, ...]:
    """The ranks that saved and whose files differ from the manifest. Collective.

    If the manifest of a node is damaged itself, all of its shares count as damaged.
    """

    def check_own() -> list[int]:
        own_ranks = [
            rank
            for rank, actor in assessment.holders.items()
            if actor == comm.rank and rank not in assessment.lost
        ]
        if not own_ranks:
            return []
        share = cache.node.find(name)
        try:
            manifest, _ = share.read_seal()
        except StorageError as error:
            logger.warning("%s: %s", share.uri, error)
            return own_ranks
        return [rank for rank in own_ranks if _is_damaged(share, manifest, assessment, rank)]

    awaiting = f"all ranks to check the files of {name}"
    own = run_on_all_ranks(comm, check_own, awaiting=awaiting)
    answers = comm.gather(own, awaiting=awaiting)
    return tuple(sorted(rank for ranks in answers for rank in ranks))


def _is_damaged(share: CheckpointRef, manifest: Manifest, assessment: Assessment, rank: int) -> bool:
    names = {file.name for file in assessment.files_of(rank)}
    files = [file for file in manifest.files if file.name in names]
    damage = find_damage(share.storage, share.committed.folder, manifest, files)
    for damaged_bytes in damage:
        logger.warning("%s: %s", share.uri, damaged_bytes)
    bad = [file.name for file in assessment.kept_by(rank) if _sum_of(share, file.name) != file.sum]
    for name in bad:
        logger.warning("%s: %s: its checksum differs", share.uri, name)
    return bool(damage or bad)


def _sum_of(share: CheckpointRef, file_name: str) -> str:
    key = share.key(file_name)
    return checksum_object(prefer_direct_access(share.storage, reads=key), key).hex()


NUM_THREADS = 2
_NOTHING = np.zeros(0, dtype=np.int64)


class FetchedFiles(FinishedFiles):
    """Copies a durable step of user files to the caches, in place of a save, with the same manifest.

    What is copied is not verified here: a restart verifies all files.
    """

    def __init__(self, stored: CheckpointRef, *, rank: int, num_ranks: int) -> None:
        self._stored = stored
        self._rank = rank
        self._manifest = bytes(read_object(stored.storage, stored.key(MANIFEST_NAME)))
        manifest = read_manifest(self._manifest, stored.uri)
        self._all = manifest.files
        self._mine = tuple(
            file
            for file in manifest.files
            if choose_home_rank(parse_writer_rank(manifest, file), manifest.world_size, num_ranks) == rank
        )

    def count_bytes(self, storage: Storage, key_of: Callable[[str], str]) -> int:  # noqa: ARG002 - as saved
        """The sizes of this rank's files."""
        return sum(file.size_bytes for file in self._mine)

    def write_to(
        self, storage: Storage, key_of: Callable[[str], str], progress: Progress | None = None
    ) -> WrittenShare:
        """Copy this rank's files."""
        copies = [
            FileCopy(from_key=self._stored.key(file.name), to_key=key_of(file.name)) for file in self._mine
        ]
        copy_files(copies, self._stored.storage, storage, threads=NUM_THREADS, pace=RateLimiter(None))
        size_bytes = sum(file.size_bytes for file in self._mine)
        if progress is not None:
            progress.begin("bytes", size_bytes)
            progress.advance(size_bytes)
        return WrittenShare(
            rank=self._rank,
            files=tuple(map(_written, self._mine)),
            stats=RankSaveStats(rank=self._rank, payload_bytes=size_bytes, file_bytes=size_bytes),
        )

    def seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, object]) -> Seal:  # noqa: ARG002 - as saved
        """The manifest and metadata of the durable step."""
        metadata = bytes(read_object(self._stored.storage, self._stored.key(METADATA_NAME)))
        sizes = {file.name: file.size_bytes for file in self._all}
        return Seal(manifest=self._manifest, metadata=metadata, sizes=sizes)


def _written(file: ManifestFile) -> WrittenFile:
    return WrittenFile(
        name=file.name,
        size_bytes=file.size_bytes,
        item_offset=_NOTHING,
        item_bytes=_NOTHING,
        payload_offset=_NOTHING,
        sums=b"",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRepair:
    """The condition of a cached step, and what a repair achieved."""

    step: int
    missing: tuple[int, ...] = ()
    """The ranks that saved and whose shares no cache had."""
    damaged: tuple[int, ...] = ()
    """The ranks that saved and whose files were damaged."""
    reason: str = ""
    """Why the caches cannot provide the step; empty if they can."""

    @property
    def outcome(self) -> str:
        """The outcome in at most two words."""
        if self.reason:
            return "beyond repair"
        return "rebuilt" if self.missing or self.damaged else "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScavengeReport:
    """The step that was made durable, and those that could not be."""

    step: int | None
    """None if no cached step is newer than the durable ones and usable."""
    uri: str = ""
    looked_at: tuple[StepRepair, ...] = ()
    """Newest first; the last one is the step that was made durable."""


def list_cached_steps(cache: CacheLevel, comm: Comm) -> list[int]:
    """Every step of which some node has a share, ascending. Unlike a restart, this removes nothing."""
    confirmed, doubted = agreement.list_names(comm, cache.node)
    return sorted(step for name in confirmed | doubted if (step := parse_step(name)) is not None)


def repair_step(cache: CacheLevel, comm: Comm, step: int, *, verified: bool = True) -> StepRepair:
    """Rebuild the lost shares of a step. Checksums are verified only if `verified`."""
    return _repair_step(cache, comm, step, verified=verified)[0]


def scavenge(cache: CacheLevel, comm: Comm, durable: StepCatalog, steps: Sequence[int]) -> ScavengeReport:
    """Make the newest of `steps` durable that the caches can provide."""
    looked_at: list[StepRepair] = []
    for step in sorted(steps, reverse=True):
        repaired, assessment = _repair_step(cache, comm, step, verified=True)
        looked_at.append(repaired)
        if not repaired.reason:
            uri = _make_durable(cache, comm, durable, step, assessment)
            return ScavengeReport(step=step, uri=uri, looked_at=tuple(looked_at))
    return ScavengeReport(step=None, looked_at=tuple(looked_at))


def _repair_step(
    cache: CacheLevel, comm: Comm, step: int, *, verified: bool
) -> tuple[StepRepair, Assessment]:
    name = step_dirname(step)
    assessment = cache.assess(name)
    repaired = StepRepair(step=step, missing=assessment.lost, reason=assessment.reason)
    if assessment.reason:
        return repaired, assessment
    if verified and (damaged := find_damaged_shares(cache, comm, name, assessment)):
        assessment = cache.assess(name, damaged=damaged)
        repaired = replace(repaired, damaged=damaged, reason=assessment.reason)
    if assessment.is_rebuildable:
        try:
            cache.repair(name, assessment)
        except (StorageError, RankFailed) as error:
            return replace(repaired, reason=f"it could not be rebuilt: {error}"), assessment
        assessment = cache.assess(name)
    return repaired, assessment


def _make_durable(
    cache: CacheLevel, comm: Comm, durable: StepCatalog, step: int, assessment: Assessment
) -> str:
    name = step_dirname(step)
    uri = f"{durable.storage.uri}/{name}"
    seal = _fetch_seal(cache, comm, name, assessment)
    if _is_durable(comm, durable, step, seal):
        return uri
    flush_step(name, seal, durable.storage, comm, partial(_copy_shares, cache, assessment, comm.rank))
    if comm.rank == 0 and step == max(durable.committed()):
        durable.set_latest(step)
    return uri


def _fetch_seal(cache: CacheLevel, comm: Comm, name: str, assessment: Assessment) -> Seal | None:
    """What seals a cached step, on rank 0."""
    found = agreement.fetch_seal(comm, cache.node, name, assessment, [0])
    if found is None:
        return None
    manifest, metadata = found
    sizes = {file.name: file.size_bytes for file in read_manifest(manifest, name).files}
    return Seal(manifest=manifest, metadata=metadata, sizes=sizes)


def _is_durable(comm: Comm, durable: StepCatalog, step: int, seal: Seal | None) -> bool:
    """Whether this very save of the step is durable already; rank 0 has its seal."""

    def compare_manifests() -> bool:
        if seal is None or step not in durable.committed():
            return False
        stored = durable.find(step)
        return read_object(stored.storage, stored.key(MANIFEST_NAME)) == seal.manifest

    return run_on_rank0(comm, compare_manifests, awaiting="rank 0 to look at the durable level")


def _copy_shares(cache: CacheLevel, assessment: Assessment, rank: int, transaction: SaveTransaction) -> None:
    """Copy the files of all shares that this rank holds."""
    saved = [saved for saved, holder in assessment.holders.items() if holder == rank]
    names = [file.name for saved_rank in saved for file in assessment.files_of(saved_rank)]
    if names:
        copy_share(cache.node.find(transaction.draft.name), names, transaction)


def resume_flushes(cache: CacheLevel, comm: Comm, flusher: Flusher, durable: StepCatalog) -> None:
    """Hand over again what the trainer of an earlier job was to make durable, and did not. Collective.

    What the caches cannot provide now stays noted: the nodes that have it may come back.
    """
    notes = FlushFolder(local_path(cache.storage, "")).due
    awaiting = "all nodes to list what is still to become durable"
    own = run_on_all_ranks(comm, lambda: _list_due(cache, notes) if cache.is_lead else {}, awaiting=awaiting)
    answers = comm.gather(own, awaiting=awaiting)
    for step, save_id in sorted({save for answer in answers for save in answer.items()}):
        try:
            is_left = _resume_flush(cache, comm, flusher, durable, (step, save_id))
        except (StorageError, Unavailable, RankFailed) as error:
            warn_once_per_job(logger, comm.rank, "Step %d is not durable, only cached: %s", step, error)
            is_left = True
        if not is_left and cache.is_lead:
            notes.remove(step, save_id)


def _list_due(cache: CacheLevel, notes: DueSteps) -> dict[int, str]:
    try:
        WriterLease(cache.storage).require_free()
    except RunInUse:
        # A living job flushes them.
        return {}
    return notes.all()


def _resume_flush(
    cache: CacheLevel, comm: Comm, flusher: Flusher, durable: StepCatalog, save: tuple[int, str]
) -> bool:
    """Hand a step over; False if this very save is durable already, was replaced by another, or removed."""
    step, save_id = save
    name = step_dirname(step)
    repaired, found = _repair_step(cache, comm, step, verified=True)
    if not found.records:
        return False
    if repaired.reason:
        raise StorageError(repaired.reason)
    assessment = cache.assess_all(name)
    if assessment.save_id != save_id:
        return False
    seal = _fetch_seal(cache, comm, name, assessment)
    try:
        if _is_durable(comm, durable, step, seal):
            return False
    except (StorageError, Unavailable, RankFailed) as error:
        logger.info("Whether step %d is durable is not known: %s", step, error)
    files: list[dict[str, int]] = [{} for _ in range(comm.size)]
    for saved, holder in assessment.holders.items():
        files[holder].update({file.name: file.size_bytes for file in assessment.files_of(saved)})
    warn_once_per_job(logger, comm.rank, "Step %d of an earlier job is not durable yet: flushing it", step)
    flusher.take_over(step, CachedSave(name=name, save_id=save_id, files=tuple(files), stats=(), seal=seal))
    return True
