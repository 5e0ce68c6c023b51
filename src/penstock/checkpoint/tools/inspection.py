"""List the checkpoints of a run, describe one, remove one. No tensor is read, except to verify what remains.

Completeness is judged by metadata, manifest and file sizes; only `verify` reads everything. Invariant: one
unreadable checkpoint does not hide the others; a checkpoint is removed only after another one was verified,
and its name is removed atomically and durably before the first of its files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

import numpy as np

from penstock.checkpoint.commit.checkpoints import (
    AnyPath,
    StepCatalog,
    follow_link,
    open_catalog,
    open_parent,
    parse_step,
    require_step,
    split_path,
)
from penstock.checkpoint.commit.protocol import METADATA_NAME
from penstock.checkpoint.formats.checkpoint_source import (
    CheckpointSource,
    Format,
    checkpoint_uri,
    open_checkpoint,
    open_folder,
)
from penstock.checkpoint.state.regions import StoredObject, element_sizes
from penstock.checkpoint.tools.diff import format_value
from penstock.checkpoint.tools.verify import verify
from penstock.errors import AccessRefused, DataDamaged, ObjectNotFound, PenstockError, UsageError
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.uri import open_here, parse_uri


class CheckpointState(StrEnum):
    """The state of a checkpoint, as far as it can be determined without reading tensors."""

    COMMITTED = "committed"
    """Written by Penstock: manifest and metadata are unchanged, and all files have the right sizes."""
    UNSUMMED = "no sums"
    """Written by another program: all files that its metadata names exist and are long enough."""
    DAMAGED = "damaged"
    REFUSED = "no access"
    """This user may not read the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointListing:
    """One checkpoint of a run. `complaint` says what is wrong with a damaged one, or who refused access."""

    name: str
    step: int | None
    state: CheckpointState
    size_bytes: int = 0
    num_files: int = 0
    num_tensors: int = 0
    modified_s: float = 0.0
    """When the checkpoint was committed, in seconds since 1970; 0 if that could not be read."""
    complaint: str = ""

    @property
    def is_damaged(self) -> bool:
        """True if files are missing or too short, or cannot be parsed."""
        return self.state is CheckpointState.DAMAGED


def list_checkpoints(path: AnyPath) -> list[CheckpointListing]:
    """Return the checkpoints in the folder at a path or URI, by step and name; or the one at the path."""
    if checkpoints := list_storage(open_here(path)):
        return checkpoints
    storage, name = open_parent(path)
    try:
        return [_list_checkpoint(storage, name)]
    except ObjectNotFound as error:
        # If it is incomplete or missing, the error below explains that better.
        is_archive = open_checkpoint(path).format is Format.TORCH_SAVE
        kind = "an archive of torch.save" if is_archive else "a checkpoint of safetensors"
        raise ObjectNotFound(
            f"This is {kind}, and only folders with distributed checkpoints are listed",
            uri=checkpoint_uri(storage, name),
            fix="`penstock checkpoint show` describes it, and `verify` reads all of it.",
        ) from error


def list_storage(storage: Storage) -> list[CheckpointListing]:
    """Return all committed checkpoints below the root of `storage`, by step and name."""
    checkpoints = []
    for name in open_catalog(storage).names():
        try:
            checkpoints.append(_list_checkpoint(storage, name))
        except (AccessRefused, DataDamaged) as error:
            state = CheckpointState.REFUSED if isinstance(error, AccessRefused) else CheckpointState.DAMAGED
            unread = CheckpointListing(name=name, step=parse_step(name), state=state, complaint=str(error))
            checkpoints.append(unread)
    return sorted(checkpoints, key=lambda each: (each.step is None, each.step or 0, each.name))


def _list_checkpoint(storage: Storage, name: str) -> CheckpointListing:
    listed = name
    storage, name = follow_link(storage, name)
    committed = open_catalog(storage).find(name)
    files = {info.key: info for info in storage.list(committed.folder)}
    metadata = files.get(committed.key(METADATA_NAME))
    state, complaint, step, num_tensors = CheckpointState.DAMAGED, "", parse_step(name), 0
    try:
        source = open_folder(storage, committed.folder, checkpoint_uri(storage, name))
        num_tensors = len(source.index.tensors)
        step = source.manifest.step if source.manifest and source.manifest.step is not None else step
        require_step(source.manifest, parse_step(listed), source.uri)
        source.require_files()
        state = CheckpointState.UNSUMMED if source.manifest is None else CheckpointState.COMMITTED
    except AccessRefused:
        raise
    except PenstockError as error:
        complaint = str(error)
    return CheckpointListing(
        name=listed,
        step=step,
        state=state,
        size_bytes=sum(info.size_bytes for info in files.values()),
        num_files=len(files),
        num_tensors=num_tensors,
        modified_s=metadata.modified_s if metadata else 0.0,
        complaint=complaint,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDetails:
    """One tensor of a checkpoint, and where its parts are stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    num_parts: int
    files: tuple[str, ...]
    note: str = ""
    """The reason why the tensor cannot be read in part; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectDetails:
    """One value that is not a tensor; `value` is its text if it is plain and short."""

    name: str
    size_bytes: int
    file: str
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDetails:
    """The description of a checkpoint, without the bytes of its tensors."""

    uri: str
    format: Format
    step: int | None
    written_by: str
    world_size: int | None
    mesh: Mapping[str, int]
    facts: Mapping[str, Any]
    has_sums: bool
    tensors: tuple[TensorDetails, ...]
    objects: tuple[ObjectDetails, ...]

    @property
    def size_bytes(self) -> int:
        """The total size of the tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def show(path: AnyPath) -> CheckpointDetails:
    """Describe the checkpoint at a path or URI."""
    source = open_checkpoint(path)
    manifest = source.manifest
    return CheckpointDetails(
        uri=source.uri,
        format=source.format,
        step=manifest.step if manifest else parse_step(source.uri.rpartition("/")[2]),
        written_by=manifest.written_by if manifest else "",
        world_size=manifest.world_size if manifest else None,
        mesh=manifest.mesh if manifest else {},
        facts=manifest.facts if manifest else {},
        has_sums=manifest is not None,
        tensors=_describe_tensors(source),
        objects=tuple(
            ObjectDetails(
                name=stored.name,
                size_bytes=stored.size_bytes,
                file=source.index.files[stored.file],
                value=_read_value(source, stored),
            )
            for stored in source.index.objects
        ),
    )


def _describe_tensors(source: CheckpointSource) -> tuple[TensorDetails, ...]:
    index, stored = source.index, source.index.stored
    order = np.argsort(stored.regions.tensor, kind="stable")
    begins = np.searchsorted(stored.regions.tensor[order], np.arange(len(index.tensors) + 1))
    widths = element_sizes(index.tensors)
    sizes = np.zeros(len(index.tensors), dtype=np.int64)
    np.add.at(sizes, stored.regions.tensor, stored.regions.num_bytes(widths))
    tensors = []
    for number, facts in enumerate(index.tensors):
        rows = order[begins[number] : begins[number + 1]]
        files = sorted({index.files[file] for file in stored.file[rows].tolist()})
        tensors.append(
            TensorDetails(
                name=facts.name,
                dtype=facts.dtype,
                shape=facts.shape,
                size_bytes=int(sizes[number]),
                num_parts=len(rows),
                files=tuple(files),
                note=_explain_reading(source, rows.tolist()),
            )
        )
    return tuple(tensors)


def _explain_reading(source: CheckpointSource, rows: list[int]) -> str:
    stored = source.index.stored
    if not stored.packed[rows].any():
        return ""
    transforms = sorted({name for row in rows for name in source.index.transforms_of(row)})
    return f"{', '.join(transforms) or 'strided'}: read whole"


_LARGEST_READ = 1 << 16


def _read_value(source: CheckpointSource, stored: StoredObject) -> str:
    """Return a value as text, if it is small and can be parsed without running code from the checkpoint."""
    if stored.size_bytes > _LARGEST_READ and source.archive is None:
        return ""
    try:
        return format_value(source.parse(stored)[0])
    except PenstockError:
        return "?"


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
    """Return a complete checkpoint other than `name`, or None.

    `is_whole` is called for the newest first, until one is complete.
    """
    others = [other for other in checkpoints if other.name != name and other.state in _COMPLETE]
    others.sort(key=lambda other: (other.step is not None, other.step or 0), reverse=True)
    return next((other.name for other in others if is_whole(other.name)), None)


def remove(
    path: AnyPath, *, even_last: bool = False, verified: bool = True, progress: Progress | None = None
) -> RemovedCheckpoint:
    """Remove the committed checkpoint at a path or URI; raise `ObjectNotFound` if none is committed there.

    Raises `UsageError` unless another checkpoint of the run is complete or `even_last` is set. That other
    checkpoint is verified completely; without `verified`, only its files and their sizes are checked. A
    damaged checkpoint may always be removed, and so may the remains of an interrupted removal on object
    storage.
    """
    storage, name = open_parent(path)
    catalog, uri = open_catalog(storage), checkpoint_uri(storage, name)
    try:
        committed = catalog.find(name)
    except ObjectNotFound:
        left = catalog.finish_hiding(name)
        if not left:
            raise
        size_bytes = sum(info.size_bytes for info in left)
        return RemovedCheckpoint(
            uri=uri, step=parse_step(name), size_bytes=size_bytes, num_files=len(left), stays=""
        )
    checkpoints = list_storage(storage)
    (removed,) = (checkpoint for checkpoint in checkpoints if checkpoint.name == name)
    parent = parse_uri(split_path(path)[0])

    def is_whole(other: str) -> bool:
        location = replace(parent, root=f"{parent.root.rstrip('/')}/{other}")
        return not verified or verify(location.text, progress).is_whole

    stays = None
    if not even_last and not removed.is_damaged:
        stays = find_other_whole(checkpoints, name, is_whole)
        if stays is None:
            reason = "it is the only one" if len(checkpoints) == 1 else "no other one next to it is complete"
            raise UsageError(
                f"{name} is the last complete checkpoint here: {reason}",
                where=str(path),
                fix="Give --even-last if the run is over.",
            )
    catalog.hide(committed)()
    StepCatalog(storage).point_past(name)
    return RemovedCheckpoint(
        uri=uri,
        step=removed.step,
        size_bytes=removed.size_bytes,
        num_files=removed.num_files,
        stays=stays or "",
    )
