"""Opens a checkpoint on all ranks of a large job: each gets its outline, and rows of its index stay apart.

The outline is what all ranks need: the properties of tensors, the objects that all share, and its own ones.
Where the parts of tensors lie, only some rank knows yet; `plan.shared_load` asks for what is wanted.
Invariant: all ranks have the same outline, or all raise the same error.
"""

from __future__ import annotations

import json
import pickle
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.formats.checkpoint_source import CheckpointSource, Format
from penstock.checkpoint.formats.dcp_metadata import DcpMetadata, Descriptors, Path
from penstock.checkpoint.formats.manifest import ChecksummedIndex
from penstock.checkpoint.plan.save_plan import RANK_MARK, is_of_one_rank
from penstock.checkpoint.plan.shared_load import NUM_SUM_WORDS, DescribedRows
from penstock.checkpoint.state.regions import (
    CheckpointIndex,
    Regions,
    StoredObject,
    StoredRegions,
    TensorFacts,
)
from penstock.cluster import rounds
from penstock.cluster.comm import Comm, run_on_all_ranks, run_on_rank0
from penstock.cluster.rounds import Rounds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.checkpoint.state.regions import Ints
    from penstock.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class _Objects:
    """Objects with the checksums of their items."""

    stored: tuple[StoredObject, ...]
    sums: tuple[bytes, ...]
    transforms: Mapping[str, Descriptors]
    lacking: frozenset[str] = frozenset()
    """Of one rank: the names that only others had when as many saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outline:
    """What all ranks need of a checkpoint."""

    folder: str
    uri: str
    tensors: tuple[TensorFacts, ...]
    objects: _Objects
    """Those that are not of one rank."""
    paths: Mapping[str, Path]
    files: bytes
    key_types: Mapping[str, str]
    identity: bytes


@dataclass(frozen=True, slots=True)
class SharedCheckpoint:
    """An opened checkpoint whose index has no rows, and those that this rank has read."""

    source: CheckpointSource
    described: DescribedRows
    num_objects: int
    """How many of the objects all ranks have; those of this rank follow."""

    def with_rows(self, described: DescribedRows) -> CheckpointSource:
        """The checkpoint with the rows that this rank needs."""
        index = replace(self.source.index, stored=described.stored)
        summed = self.source.summed
        assert summed is not None, "only checkpoints with checksums are opened like this"
        return replace(
            self.source,
            index=index,
            summed=replace(summed, index=index, sums=_words_to_sums(described.sums)),
        )


def open_shared(
    comm: Comm, storage: Storage, open_whole: Callable[[], CheckpointSource]
) -> SharedCheckpoint | CheckpointSource:
    """Open a checkpoint in `storage` on all ranks. Collective.

    Rank 0 reads its description with `open_whole`. All ranks do, and get all of it, if it is one that lacks
    checksums, or whose items have to be unpacked.
    """
    opened: list[CheckpointSource] = []

    def outline() -> _Outline | None:
        source = open_whole()
        opened.append(source)
        return _outline_of(source)

    common = run_on_rank0(comm, outline, awaiting="rank 0 to read what describes the checkpoint")
    if common is None:
        return run_on_all_ranks(
            comm,
            lambda: opened[0] if opened else open_whole(),
            awaiting="all ranks to parse the checkpoint's description",
        )
    own = comm.carry(
        _hand_out_objects(comm.rank, comm.size, opened[0] if opened else None),
        awaiting="rank 0 to tell which objects are of one rank",
    )
    source = replace(_source_of(common, own, storage), lacking={comm.rank: own.lacking})
    described = _described_by(opened[0]) if opened else _NO_ROWS
    return SharedCheckpoint(source, described, len(common.objects.stored))


def _outline_of(source: CheckpointSource) -> _Outline | None:
    """None for a checkpoint that each rank has to open."""
    stored, summed = source.index.stored, source.summed
    if summed is None or source.metadata is None or stored.packed.any():
        return None
    objects = _choose_objects(source, lambda name: not is_of_one_rank(name, source.paths))
    return _Outline(
        folder=source.folder,
        uri=source.uri,
        tensors=source.index.tensors,
        objects=objects,
        paths={name: path for name, path in source.paths.items() if not is_of_one_rank(name, source.paths)},
        files=pack_names(source.index.files),
        key_types=source.key_types,
        identity=source.identity,
    )


def _choose_objects(source: CheckpointSource, is_chosen: Callable[[str], bool]) -> _Objects:
    assert source.summed is not None, "only such checkpoints have outlines"
    numbers = [number for number, stored in enumerate(source.index.objects) if is_chosen(stored.name)]
    chosen = tuple(source.index.objects[number] for number in numbers)
    sums = tuple(source.summed.object_sums[number] for number in numbers)
    transforms = {stored.name: found for stored in chosen if (found := source.descriptors(stored))}
    return _Objects(stored=chosen, sums=sums, transforms=transforms)


def _hand_out_objects(rank: int, size: int, opened: CheckpointSource | None) -> Rounds[_Objects]:
    """Send each rank the objects that are of this rank alone; those of ranks that are not there stay."""
    texts = []
    if opened is not None:
        by_rank: dict[int, list[str]] = {}
        for stored in opened.index.objects:
            _, _, number = stored.name.rpartition(RANK_MARK)
            is_own = is_of_one_rank(stored.name, opened.paths)
            if is_own and number.isdecimal() and int(number) < size:
                by_rank.setdefault(int(number), []).append(stored.name)
        is_alike = opened.manifest is not None and opened.manifest.world_size == size
        lacking = opened.lacking if is_alike else {}
        for other in by_rank.keys() | lacking.keys():
            chosen = _choose_objects(opened, set(by_rank.get(other, ())).__contains__)
            chosen = replace(chosen, lacking=lacking.get(other, frozenset()))
            texts.append((other, pickle.dumps(chosen)))
    received = yield from rounds.route_texts(rank, size, texts)
    # Ranks of one job trust each other: a process that can send here already runs code as this user.
    parts: list[_Objects] = [pickle.loads(text) for _, text in received]  # noqa: S301 - as said
    return parts[0] if parts else _Objects(stored=(), sums=(), transforms={})


def _source_of(common: _Outline, own: _Objects, storage: Storage) -> CheckpointSource:
    index = CheckpointIndex(
        common.tensors, _NO_ROWS.stored, (*common.objects.stored, *own.stored), unpack_names(common.files)
    )
    nothing = np.zeros((0, 16), dtype=np.uint8)
    return CheckpointSource(
        uri=common.uri,
        format=Format.DCP,
        storage=storage,
        folder=common.folder,
        index=index,
        paths=common.paths,
        summed=ChecksummedIndex(index, nothing, (*common.objects.sums, *own.sums)),
        metadata=DcpMetadata(index=index, object_transforms={**common.objects.transforms, **own.transforms}),
        key_types=common.key_types,
        identity=common.identity,
    )


def _described_by(source: CheckpointSource) -> DescribedRows:
    assert source.summed is not None, "only such checkpoints have outlines"
    words = np.ascontiguousarray(source.summed.sums).view("<i4").astype(np.int64)
    return DescribedRows(source.index.stored, words)


def _words_to_sums(words: Ints) -> NDArray[np.uint8]:
    return np.ascontiguousarray(words.astype("<i4")).view(np.uint8).reshape(len(words), 16)


_NOTHING = np.zeros(0, dtype=np.int64)
_NO_ROWS = DescribedRows(
    StoredRegions(Regions.from_rows(()), _NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING.astype(np.bool_)),
    np.zeros((0, NUM_SUM_WORDS), dtype=np.int64),
)


_NUMBERS = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,17})(?![0-9])")
_MARK = "\0"
"""Stands for a number in the pattern of a name."""


def pack_names(names: Sequence[str]) -> bytes:
    """The names, compressed: about a byte for each name of a checkpoint's files."""
    patterns: dict[tuple[str, int], int] = {}
    rows: list[list[int]] = []
    before: dict[int, list[int]] = {}
    for name in names:
        numbers = [int(number) for number in _NUMBERS.findall(name)] if _MARK not in name else []
        pattern = _NUMBERS.sub(_MARK, name) if numbers else name
        kind = patterns.setdefault((pattern, len(numbers)), len(patterns))
        # Numbers of neighbours differ by little, mostly by the same.
        last = before.get(kind, [0] * len(numbers))
        rows.append([kind, *(number - other for number, other in zip(numbers, last, strict=True))])
        before[kind] = numbers
    return zlib.compress(
        json.dumps([[pattern for pattern, _ in patterns], rows], separators=(",", ":")).encode()
    )


def unpack_names(packed: bytes) -> tuple[str, ...]:
    """The names again."""
    patterns, rows = json.loads(zlib.decompress(packed))
    last: dict[int, list[int]] = {}
    names = []
    for kind, *steps in rows:
        before = last.get(kind, [0] * len(steps))
        last[kind] = numbers = [number + step for number, step in zip(before, steps, strict=True)]
        first, *rest = patterns[kind].split(_MARK) if steps else [patterns[kind]]
        names.append(first + "".join(f"{number}{part}" for number, part in zip(numbers, rest, strict=True)))
    return tuple(names)
