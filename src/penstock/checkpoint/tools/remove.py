"""Removes a checkpoint, but not the last complete one of its run unless told to.

Invariant: another checkpoint was verified before anything changes; then the checkpoint loses its name in one
step and durably, before the first of its files is removed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.checkpoint.commit.catalog import (
    AnyPath,
    StepCatalog,
    open_catalog,
    open_parent,
    parse_step,
    split_path,
)
from penstock.checkpoint.formats.checkpoint_source import checkpoint_uri
from penstock.checkpoint.tools.inspection import CheckpointListing, CheckpointState, list_storage
from penstock.checkpoint.tools.verify import verify
from penstock.errors import ObjectNotFound, UsageError
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.protocol import ObjectInfo
from penstock.storage.uri import parse_uri

_COMPLETE: Final = (CheckpointState.COMMITTED, CheckpointState.UNSUMMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedCheckpoint:
    """A removed checkpoint. `stays` is a complete one that remains; empty if none was looked for."""

    uri: str
    step: int | None
    size_bytes: int
    num_files: int
    stays: str


def find_other_whole(
    checkpoints: Sequence[CheckpointListing], name: str, is_whole: Callable[[str], bool]
) -> str | None:
    """A complete checkpoint other than `name`; `is_whole` is called for the newest first, until one is."""
    others = [other for other in checkpoints if other.name != name and other.state in _COMPLETE]
    others.sort(key=lambda other: (other.step is not None, other.step or 0), reverse=True)
    return next((other.name for other in others if is_whole(other.name)), None)


def remove(
    path: AnyPath, *, even_last: bool = False, verified: bool = True, progress: Progress | None = None
) -> RemovedCheckpoint:
    """Remove the committed checkpoint at a path or URI; `ObjectNotFound` if none is committed there.

    Another checkpoint of its run must be complete, else this is a `UsageError`, unless `even_last`. It is
    verified to its last byte; without `verified`, only its files and their sizes are checked. A checkpoint
    that is damaged may always be removed, and so may what an interrupted removal left of one on objects.
    """
    storage, name = open_parent(path)
    catalog = open_catalog(storage)
    try:
        committed = catalog.find(name)
    except ObjectNotFound:
        left = catalog.finish_hiding(name)
        if not left:
            raise
        return _removed_rest(storage, name, left)
    checkpoints = list_storage(storage)
    (removed,) = (checkpoint for checkpoint in checkpoints if checkpoint.name == name)
    stays = ""
    if not even_last and not removed.is_damaged:
        stays = _require_another(path, checkpoints, name, verified=verified, progress=progress or Progress())
    catalog.hide(committed)()
    StepCatalog(storage).point_past(name)
    return RemovedCheckpoint(
        uri=checkpoint_uri(storage, name),
        step=removed.step,
        size_bytes=removed.size_bytes,
        num_files=removed.num_files,
        stays=stays,
    )


def _removed_rest(storage: Storage, name: str, left: Sequence[ObjectInfo]) -> RemovedCheckpoint:
    """The rest of a checkpoint that an earlier removal took the name of, before an error or a kill."""
    return RemovedCheckpoint(
        uri=checkpoint_uri(storage, name),
        step=parse_step(name),
        size_bytes=sum(info.size_bytes for info in left),
        num_files=len(left),
        stays="",
    )


def _require_another(
    path: AnyPath, checkpoints: Sequence[CheckpointListing], name: str, *, verified: bool, progress: Progress
) -> str:
    parent = parse_uri(split_path(path)[0])

    def is_whole(other: str) -> bool:
        location = replace(parent, root=f"{parent.root.rstrip('/')}/{other}")
        return not verified or verify(location.text, progress).is_whole

    other = find_other_whole(checkpoints, name, is_whole)
    if other is None:
        reason = "it is the only one" if len(checkpoints) == 1 else "no other one next to it is complete"
        raise UsageError(
            f"{name} is the last complete checkpoint here: {reason}",
            where=str(path),
            fix="Give --even-last if the run is over.",
        )
    return other
