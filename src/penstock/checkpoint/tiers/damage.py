"""Whose shares of a cached step are damaged: every file held against its sum, on the node that has it.

Asked after a load has failed, or before caches are trusted without one. Invariant: a node whose manifest
cannot be believed has no share that can.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.checkpoint.commit.base import MANIFEST_NAME, METADATA_NAME
from penstock.checkpoint.manifest import read_manifest
from penstock.checkpoint.sums import sum_of, sum_of_object
from penstock.checkpoint.verify import damage_in_files
from penstock.cluster.collectives import all_gather_results
from penstock.errors import DataDamaged, StorageError
from penstock.storage.powers import for_large_files
from penstock.storage.whole import read_object

if TYPE_CHECKING:
    from penstock.checkpoint.manifest import Manifest
    from penstock.checkpoint.stored import Stored
    from penstock.checkpoint.tiers.assess import Assessment
    from penstock.checkpoint.tiers.cache import CacheLevel
    from penstock.cluster.comm import Comm

logger = logging.getLogger(__name__)


def damaged_shares(cache: CacheLevel, comm: Comm, name: str, found: Assessment) -> tuple[int, ...]:
    """The ranks that saved some of whose files are not what the manifest says. Collective."""

    def look() -> list[int]:
        mine = [rank for rank, actor in found.actors.items() if actor == comm.rank and rank not in found.lost]
        if not mine:
            return []
        held = cache.holds(name)
        try:
            manifest = _sound_manifest(held)
        except StorageError as error:
            # What tells of all files of this node is damaged: none of them can be believed.
            logger.warning("%s: %s", held.uri, error)
            return mine
        return [rank for rank in mine if _is_damaged(held, manifest, found, rank)]

    told = all_gather_results(comm, look, awaiting=f"all ranks to check the files of {name}")
    return tuple(sorted(rank for ranks in told for rank in ranks))


def _is_damaged(held: Stored, manifest: Manifest, found: Assessment, rank: int) -> bool:
    names = {file.name for file in found.files_of(rank)}
    files = [file for file in manifest.files if file.name in names]
    damage = damage_in_files(held.storage, held.committed.folder, manifest, files)
    for each in damage:
        logger.warning("%s: %s", held.uri, each)
    bad = [
        file.name
        for file in found.kept_by(rank)
        if sum_of_object(for_large_files(held.storage), held.key(file.name)).hex() != file.sum
    ]
    for name in bad:
        logger.warning("%s: %s: its checksum differs", held.uri, name)
    return bool(damage or bad)


def _sound_manifest(held: Stored) -> Manifest:
    manifest = read_manifest(read_object(held.storage, held.key(MANIFEST_NAME)), held.uri)
    if sum_of(read_object(held.storage, held.key(METADATA_NAME))) != manifest.metadata_sum:
        raise DataDamaged("The checksum of its .metadata differs", where=held.uri)
    return manifest
