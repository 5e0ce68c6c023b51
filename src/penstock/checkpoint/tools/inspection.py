"""List the checkpoints of a run with size, age and state; show the tensors of one. No tensor is read.

Completeness is judged by metadata, manifest and file sizes; only `verify` reads everything. Invariant:
looking changes nothing, and one unreadable checkpoint does not hide the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from penstock.checkpoint.commit.catalog import AnyPath, open_catalog, open_parent, parse_step
from penstock.checkpoint.commit.protocol import METADATA_NAME
from penstock.checkpoint.formats.checkpoint_source import (
    CheckpointSource,
    Format,
    checkpoint_uri,
    open_checkpoint,
    open_folder,
    require_dcp,
)
from penstock.checkpoint.state.regions import UNKNOWN, element_sizes
from penstock.checkpoint.tools.diff import short_text
from penstock.errors import ObjectNotFound, PenstockError, StorageError
from penstock.storage import Storage
from penstock.storage.uri import open_here


class State(StrEnum):
    """What a look without reading tensors tells of a checkpoint."""

    COMMITTED = "committed"
    """Ours: manifest and metadata are as written, and all files have their sizes."""
    UNSUMMED = "no sums"
    """Of another writer: all files that its metadata names are there and long enough."""
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One checkpoint of a run. `complaint` says what is wrong with a damaged one."""

    name: str
    step: int | None
    state: State
    size_bytes: int
    num_files: int
    num_tensors: int
    modified_s: float
    """When it was committed, in seconds since 1970."""
    complaint: str = ""


def list_checkpoints(path: AnyPath) -> list[Listed]:
    """The checkpoints in the folder at a path or URI, by step and name; or the one that lies there itself."""
    return list_all(open_here(path)) or [_listed_alone(path)]


def list_all(storage: Storage) -> list[Listed]:
    """All checkpoints below a storage's root; none, where nothing is committed."""
    return sorted((_listed(storage, name) for name in open_catalog(storage).names()), key=_order)


def _order(one: Listed) -> tuple[bool, int, str]:
    return one.step is None, one.step or 0, one.name


def _listed_alone(path: AnyPath) -> Listed:
    storage, name = open_parent(path)
    try:
        return _listed(storage, name)
    except ObjectNotFound as error:
        raise ObjectNotFound(
            "There are no checkpoints here",
            uri=checkpoint_uri(storage, name),
            fix="Name the folder that a run's checkpoints lie in, or one of them.",
        ) from error


def _listed(storage: Storage, name: str) -> Listed:
    committed = open_catalog(storage).find(name)
    found = {info.key: info for info in storage.list(committed.folder)}
    total = sum(info.size_bytes for info in found.values())
    facts = storage.stat(committed.key(METADATA_NAME))
    state, complaint, step, num_tensors = State.DAMAGED, "", parse_step(name), 0
    try:
        opened = open_folder(storage, committed.folder, checkpoint_uri(storage, name))
        num_tensors = len(opened.index.tensors)
        step = opened.manifest.step if opened.manifest and opened.manifest.step is not None else step
        _require_sizes(opened, {key: info.size_bytes for key, info in found.items()})
        state = State.COMMITTED if opened.manifest is not None else State.UNSUMMED
    except PenstockError as error:
        complaint = str(error)
    return Listed(
        name=name,
        step=step,
        state=state,
        size_bytes=total,
        num_files=len(found),
        num_tensors=num_tensors,
        modified_s=facts.modified_s,
        complaint=complaint,
    )


def _require_sizes(opened: CheckpointSource, sizes: Mapping[str, int]) -> None:
    """All files are there, and reach as far as they must."""
    for name, needed in _needed_sizes(opened).items():
        actual = sizes.get(opened.key(name))
        if actual is None:
            raise ObjectNotFound(f"The file {name} is missing", uri=opened.uri)
        wrong = actual != needed if opened.manifest is not None else actual < needed
        if wrong:
            raise StorageError(f"The file {name} has {actual} bytes, {needed} are needed", uri=opened.uri)


def _needed_sizes(opened: CheckpointSource) -> dict[str, int]:
    if opened.manifest is not None:
        return {file.name: file.size_bytes for file in opened.manifest.files}
    contents = opened.index
    ends = np.zeros(len(contents.files), dtype=np.int64)
    np.maximum.at(ends, contents.stored.file, contents.stored.item_offset + contents.stored.item_bytes)
    for one in contents.objects:
        ends[one.file] = max(int(ends[one.file]), one.offset + one.size_bytes)
    return dict(zip(contents.files, ends.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTensor:
    """One tensor of a checkpoint and where its parts lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    num_parts: int
    files: tuple[str, ...]
    note: str = ""
    """Why it cannot be read in part, or directly, where that is so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownObject:
    """One value that is no tensor; `value` only if it is plain and short."""

    name: str
    size_bytes: int
    file: str
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A checkpoint, without its tensors' bytes."""

    uri: str
    format: Format
    step: int | None
    written_by: str
    world_size: int | None
    mesh: Mapping[str, int]
    facts: Mapping[str, Any]
    has_sums: bool
    tensors: tuple[ShownTensor, ...]
    objects: tuple[ShownObject, ...]

    @property
    def size_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def show(path: AnyPath) -> Shown:
    """Look into the checkpoint at a path or URI."""
    opened = open_checkpoint(path)
    manifest = opened.manifest
    return Shown(
        uri=opened.uri,
        format=opened.format,
        step=manifest.step if manifest else parse_step(opened.uri.rpartition("/")[2]),
        written_by=manifest.written_by if manifest else "",
        world_size=manifest.world_size if manifest else None,
        mesh=manifest.mesh if manifest else {},
        facts=manifest.facts if manifest else {},
        has_sums=manifest is not None,
        tensors=_shown_tensors(opened),
        objects=tuple(
            ShownObject(
                name=one.name,
                size_bytes=one.size_bytes,
                file=opened.index.files[one.file],
                value=_short_value(opened, number),
            )
            for number, one in enumerate(opened.index.objects)
        ),
    )


def _shown_tensors(opened: CheckpointSource) -> tuple[ShownTensor, ...]:
    contents, stored = opened.index, opened.index.stored
    order = np.argsort(stored.regions.tensor, kind="stable")
    begins = np.searchsorted(stored.regions.tensor[order], np.arange(len(contents.tensors) + 1))
    widths = element_sizes(contents.tensors)
    sizes = np.zeros(len(contents.tensors), dtype=np.int64)
    np.add.at(sizes, stored.regions.tensor, stored.regions.num_bytes(widths))
    shown = []
    for number, facts in enumerate(contents.tensors):
        rows = order[begins[number] : begins[number + 1]]
        files = sorted({contents.files[file] for file in stored.file[rows].tolist()})
        shown.append(
            ShownTensor(
                name=facts.name,
                dtype=facts.dtype,
                shape=facts.shape,
                size_bytes=int(sizes[number]),
                num_parts=len(rows),
                files=tuple(files),
                note=_note(opened, rows.tolist()),
            )
        )
    return tuple(shown)


def _note(opened: CheckpointSource, rows: list[int]) -> str:
    stored = opened.index.stored
    if any(stored.packed[row] for row in rows):
        if opened.archive is not None:
            return "strided: read whole"
        metadata = require_dcp(opened)
        descriptors = sorted({name for row in rows for name in metadata.descriptors(row)})
        return f"{', '.join(descriptors)}: read whole"
    known = [int(stored.payload_offset[row]) for row in rows if stored.payload_offset[row] != UNKNOWN]
    return "" if opened.manifest is None or all(offset % 4096 == 0 for offset in known) else "unaligned"


_LARGEST_READ = 1 << 16


def _short_value(opened: CheckpointSource, number: int) -> str:
    """A value as text, if that is worth a look and it is one that can be told without running anything."""
    one = opened.index.objects[number]
    if one.size_bytes > _LARGEST_READ and opened.archive is None:
        return ""
    try:
        value = opened.safe_value(one)
    except PenstockError:
        return "?"
    return short_text(value)
