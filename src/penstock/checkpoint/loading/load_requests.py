"""What this rank wants of a checkpoint: regions of tensors and whole items, in the checkpoint's numbering.

Objects, and items that can only be read whole, are requested as one-dimensional tensors of bytes, so one plan
serves all. Invariant: what passes here exists in the checkpoint to the last element, with the shape and dtype
of the state, and every leaf is either selected or listed as left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import accumulate, chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np

from penstock.checkpoint.formats.dcp_item import HEAD_BYTES
from penstock.checkpoint.plan.load_plan import missing_elements, uncovered
from penstock.checkpoint.plan.region_arithmetic import find_overlaps
from penstock.checkpoint.plan.save_plan import RANK_MARK, find_stored_name, is_of_one_rank, rank_object_name
from penstock.checkpoint.state.regions import (
    UNKNOWN,
    CheckpointIndex,
    Ints,
    Regions,
    StoredRegions,
    TensorFacts,
)
from penstock.checkpoint.state.walk import Path, matches_pattern
from penstock.cluster.comm import Comm, run_on_all_ranks
from penstock.did_you_mean import nearest
from penstock.errors import DataDamaged, ObjectNotFound, UsageError, name_some

if TYPE_CHECKING:
    from penstock.checkpoint.engine import LoadChoice
    from penstock.checkpoint.formats.checkpoint_source import CheckpointSource
    from penstock.checkpoint.state.tensors import LocalState
    from penstock.checkpoint.state.walk import NamePatterns
    from penstock.storage.protocol import Source

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ByteItemIndex:
    """A checkpoint's index in which items that are read whole are tensors of bytes, after its own tensors.

    The rows of `stored` are first those that can be read in part, then one for each packed row, then one for
    each object; `source_row` has the row in the checkpoint's index, or -1 - k for the k-th object.
    """

    tensors: tuple[TensorFacts, ...]
    stored: StoredRegions
    source_row: Ints
    packed_rows: Ints
    first_packed: int
    """Tensor number of the first packed row; those of objects follow."""

    @property
    def first_object(self) -> int:
        """Tensor number of the first object."""
        return self.first_packed + len(self.packed_rows)


@dataclass(frozen=True, slots=True, eq=False)
class Unpacking:
    """A part of a wanted region that is cut out of a packed item once that is loaded."""

    row: int
    want: int
    regions: Regions
    part: int


@dataclass(frozen=True, slots=True, eq=False)
class LoadRequests:
    """What a rank wants: `regions` in the tensor numbers of `ByteItemIndex`, shards first, then whole items.

    `names` has for each shard its leaf's name, and its number among the leaf's shards.
    """

    regions: Regions
    names: tuple[tuple[str, int], ...]
    items: tuple[int, ...]
    """Tensor numbers of the whole items, in the order of their rows after the shards."""
    unpacking: tuple[Unpacking, ...]
    objects: Mapping[str, int]
    """Leaf name -> the object's number in the checkpoint's index."""


def index_byte_items(index: CheckpointIndex) -> ByteItemIndex:
    """Index packed regions and objects as tensors of bytes, so that one plan serves all of them."""
    stored = index.stored
    packed_rows = np.flatnonzero(stored.packed)
    plain_rows = np.flatnonzero(~stored.packed)
    objects = index.objects
    first_packed = len(index.tensors)
    packed = stored.take(packed_rows)
    columns = [(stored.size_bytes, stored.offset, stored.file) for stored in objects]
    object_sizes, object_offsets, object_files = np.array(columns, dtype=np.int64).reshape(-1, 3).T
    sizes = np.concatenate([packed.item_bytes, object_sizes])
    offsets = np.concatenate([packed.item_offset, object_offsets])
    file = np.concatenate([packed.file, object_files])
    names = [index.tensors[number].name for number in packed.regions.tensor.tolist()]
    names += [stored.name for stored in objects]
    byte_tensors = tuple(
        TensorFacts(name, "uint8", (size,), 1) for name, size in zip(names, sizes.tolist(), strict=True)
    )
    whole = _byte_regions(np.arange(len(byte_tensors)) + first_packed, sizes)
    plain = stored.take(plain_rows)
    return ByteItemIndex(
        tensors=(*index.tensors, *byte_tensors),
        stored=StoredRegions(
            Regions.concatenated([plain.regions, whole]),
            np.concatenate([plain.file, file]),
            np.concatenate([plain.item_offset, offsets]),
            np.concatenate([plain.item_bytes, sizes]),
            np.concatenate([plain.payload_offset, offsets]),
            np.zeros(len(plain) + len(whole), dtype=np.bool_),
        ),
        source_row=np.concatenate([plain_rows, packed_rows, -1 - np.arange(len(objects))]),
        packed_rows=packed_rows,
        first_packed=first_packed,
    )


def _byte_regions(tensor: Ints, sizes: Ints) -> Regions:
    return Regions(tensor, np.zeros((len(tensor), 1), dtype=np.int64), sizes[:, None])


def build_requests(
    local_state: LocalState,
    selection: LeafSelection,
    index: CheckpointIndex,
    item_index: ByteItemIndex,
    *,
    converts: bool,
    where: str,
) -> LoadRequests:
    """What this rank wants. Raises `UsageError` where state and checkpoint do not match.

    Raises `DataDamaged` where the checkpoint, called `where`, lacks a part of what it lists; `converts`
    allows other dtypes.
    """
    numbers = {facts.name: number for number, facts in enumerate(index.tensors)}
    objects = {stored.name: number for number, stored in enumerate(index.objects)}
    wanted_objects: dict[str, int] = {}
    rows: list[tuple[int, Sequence[int], Sequence[int]]] = []
    names: list[tuple[str, int]] = []
    own = {facts.name: facts for facts in local_state.holdings.tensors}
    for name, stored_name in selection.stored_names.items():
        if name in own and stored_name in numbers:
            number = numbers[stored_name]
            _check_fit(own[name], index.tensors[number], converts=converts)
            for place, piece in enumerate(local_state.shards[name]):
                rows.append((number, piece.offsets, piece.sizes))
                names.append((name, place))
        elif name not in own and stored_name in objects:
            wanted_objects[name] = objects[stored_name]
        else:
            raise _kinds_differ(name, stored_name, is_tensor=name in own)
    regions = Regions.from_rows(rows)
    check_covered(index, regions, where)
    return build_matched_requests(regions, tuple(names), wanted_objects, index, item_index)


def build_matched_requests(
    regions: Regions,
    names: tuple[tuple[str, int], ...],
    wanted_objects: Mapping[str, int],
    index: CheckpointIndex,
    item_index: ByteItemIndex,
) -> LoadRequests:
    """The requests for regions and objects that are already matched and checked."""
    unpacking = _unpackings(index, item_index, regions)
    items = dict.fromkeys(item_index.first_packed + part.row for part in unpacking)
    items.update(dict.fromkeys(item_index.first_object + number for number in wanted_objects.values()))
    sizes = np.array([item_index.tensors[number].shape[0] for number in items], dtype=np.int64)
    whole = _byte_regions(np.array(list(items), dtype=np.int64), sizes)
    return LoadRequests(
        regions=Regions.concatenated([regions, whole]),
        names=names,
        items=tuple(items),
        unpacking=unpacking,
        objects=wanted_objects,
    )


def _check_fit(own: TensorFacts, stored: TensorFacts, *, converts: bool) -> None:
    if own.shape != stored.shape:
        raise UsageError(
            f"{own.name!r} is {list(own.shape)} in the state and {list(stored.shape)} in the checkpoint",
            fix="Build the state with the configuration it was saved with, or skip this part with exclude=.",
        )
    if own.dtype != stored.dtype and not converts:
        raise UsageError(
            f"{own.name!r} is {own.dtype} in the state and {stored.dtype} in the checkpoint",
            fix="Give the state the checkpoint's dtype, or convert it with convert_dtypes=True.",
        )


def _kinds_differ(name: str, stored_name: str, *, is_tensor: bool) -> UsageError:
    own, stored = ("a tensor", "an object") if is_tensor else ("an object", "a tensor")
    return UsageError(
        f"{name!r} is {own} in the state, but {stored_name!r} is {stored} in the checkpoint",
        fix="Give the state the same kind of value, or skip this part with exclude=.",
    )


def check_covered(index: CheckpointIndex, regions: Regions, where: str) -> None:
    """Raise `DataDamaged` for the first wanted region whose elements are not all stored exactly once."""
    missing = missing_elements(index.stored.regions, regions)
    rows = np.flatnonzero(missing)
    if len(rows):
        row = int(rows[0])
        raise uncovered(index.tensors[int(regions.tensor[row])], regions, row, int(missing[row]), where)


def _unpackings(index: CheckpointIndex, item_index: ByteItemIndex, regions: Regions) -> tuple[Unpacking, ...]:
    if not len(item_index.packed_rows):
        return ()
    met = find_overlaps(regions, index.stored.regions.take(item_index.packed_rows))
    return tuple(
        Unpacking(row=int(met.right[part]), want=int(met.left[part]), regions=met.regions, part=part)
        for part in range(len(met.left))
    )


def with_payloads(index: CheckpointIndex, positions: Ints, rows: Ints) -> CheckpointIndex:
    """`index` with payload positions in the file for `rows`; -1 means that an item must be read whole."""
    payload, packed = index.stored.payload_offset.copy(), index.stored.packed.copy()
    payload[rows] = positions
    packed[rows] |= positions < 0
    return replace(index, stored=replace(index.stored, payload_offset=payload, packed=packed))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSelection:
    """`stored_names` by leaf name.

    `left` leaves are not changed, `unused` names of the checkpoint not read.
    """

    stored_names: Mapping[str, str]
    left: tuple[str, ...]
    unused: tuple[str, ...]
    missing: tuple[str, ...]
    """Those of the `left` ones that the checkpoint lacks."""

    def warn_of_missing(self, rank: int) -> None:
        """Name what a load that is not strict has left as it was. Ranks hardly differ there, so one tells."""
        if self.missing and rank == 0:
            logger.warning("Left as it was, as the checkpoint lacks it: %s", name_some(self.missing, 10))


def select_leaves(
    names: Iterable[str],
    stored: Collection[str],
    choice: LoadChoice,
    *,
    rank: int,
    paths: Mapping[str, Path] = MappingProxyType({}),
) -> LeafSelection:
    """Match the leaves of a state with the names in a checkpoint, whose places in its state are `paths`.

    Raises `UsageError` for a chosen leaf that the checkpoint lacks, unless the choice is not strict.
    """
    stored_names: dict[str, str] = {}
    left = []
    missing = []
    for name in names:
        asked = asked_name(name, choice)
        if asked is None:
            left.append(name)
            continue
        stored_name = find_stored_name(asked, rank, stored)
        if stored_name is not None:
            stored_names[name] = stored_name
        else:
            missing.append(name)
    if missing and choice.strict:
        raise _missing(missing, stored, choice)
    used = set(stored_names.values())

    def is_known(name: str) -> bool:
        # What another rank had of its own belongs to what this rank takes.
        return name in used or (is_of_one_rank(name, paths) and name.partition(RANK_MARK)[0] in used)

    unused = (name for name in stored if not is_known(name))
    return LeafSelection(
        stored_names=stored_names, left=(*left, *missing), unused=tuple(unused), missing=tuple(missing)
    )


def apply_rename(name: str, rename: Mapping[str, str]) -> str:
    """The checkpoint's name for the leaf `name`: `{"model.*": "module.*"}` replaces its beginning."""
    if name in rename:
        return rename[name]
    for pattern, target in rename.items():
        if pattern.endswith("*") and name.startswith(pattern[:-1]):
            return target.removesuffix("*") + name[len(pattern) - 1 :]
    return name


def asked_name(name: str, choice: LoadChoice) -> str | None:
    """The checkpoint's name for this name of the state; None if it is not to be loaded."""
    is_skipped = (choice.only is not None and not matches_pattern(name, choice.only)) or (
        choice.exclude is not None and matches_pattern(name, choice.exclude)
    )
    return None if is_skipped else apply_rename(name, choice.rename or {})


@dataclass(frozen=True, slots=True)
class ChoicePattern:
    """One pattern of a choice, and the option that has it."""

    option: Literal["only", "exclude", "rename"]
    text: str

    def matches(self, names: Iterable[str], stored: Iterable[str]) -> bool:
        """Whether it means one of the `names` of this rank's state.

        To exclude what only the checkpoint has is common, where some programs have a part and others not.
        """
        if self.option == "rename":
            return any(apply_rename(name, {self.text: "\0"}) != name for name in names)
        known = chain(names, stored) if self.option == "exclude" else names
        return any(matches_pattern(name, self.text) for name in known)


def patterns_of(choice: LoadChoice) -> list[ChoicePattern]:
    """All patterns of a choice."""

    def each(patterns: NamePatterns | None) -> Iterable[str]:
        return (patterns,) if isinstance(patterns, str) else patterns or ()

    # No pattern at all matches as little as an empty one.
    only = "" if choice.only is not None and not choice.only else choice.only

    return [
        *(ChoicePattern("only", text) for text in each(only)),
        *(ChoicePattern("exclude", text) for text in each(choice.exclude)),
        *(ChoicePattern("rename", text) for text in choice.rename or ()),
    ]


def require_met(
    patterns: Sequence[ChoicePattern], met: Sequence[bool], stored: Sequence[str], rank: int
) -> None:
    """Raise `UsageError` if nothing would be loaded; warn on rank 0 of patterns without a match on any rank.

    A job may exclude or rename what only some of its checkpoints have, so that is no error.
    """
    only = [pattern.text for pattern in patterns if pattern.option == "only"]
    if only and not any(met[: len(only)]):
        example = f", for example {stored[0]!r} in the checkpoint" if stored else ""
        raise UsageError(
            f"No part of the state matches only={only if len(only) > 1 else only[0]!r}",
            fix=f"Names are keys joined by dots{example}.",
        )
    idle = [pattern for pattern, is_met in zip(patterns, met, strict=True) if not is_met]
    if idle and rank == 0:
        logger.warning(
            "No part of the state matches %s", name_some([f"{each.option}={each.text!r}" for each in idle])
        )


class Skipped(Enum):
    """Stands for what the checkpoint has, but the load does not take: it gets no place."""

    SKIPPED = "skipped"


SKIPPED = Skipped.SKIPPED

StoredPlaces = Mapping[Path, TensorFacts | Skipped | None]
"""By place what is stored there; None: an object."""


class StoredNames:
    """The names in a checkpoint with their places in the nested state.

    `find` has for a name of the state the one that is loaded into it, None if the name is not chosen.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        paths: Mapping[str, Path],
        key_types: Mapping[str, str] | None = None,
        rank: int = 0,
        find: Callable[[str], str | None] = str,
        *,
        lacking: Collection[str] = (),
    ) -> None:
        self._paths = paths
        self._lacking = lacking
        self.find = find
        self.key_types = key_types or {}
        self._rank = rank
        self._tensors = {facts.name: facts for facts in index.tensors}
        known = dict.fromkeys((*self._tensors, *(stored.name for stored in index.objects)))
        # Places are in the order of the state that was saved.
        self._known = {name: None for name in paths if name in known} | known
        self.names = tuple(self._known)

    def is_of_one_rank(self, name: str) -> bool:
        """Whether it is a value that a rank had of its own."""
        return is_of_one_rank(name, self._paths)

    def is_of_others(self, name: str) -> bool:
        """Whether this rank has no place for it: a rank's own value, or an entry that only others had."""
        return name in self._lacking or self.is_of_one_rank(name)

    def below(self, prefix: str, key: str) -> StoredPlaces:
        """What the checkpoint has of the part `key`, below a name that ends with a dot, or at its top level.

        Other ranks' own values are left out: they have the same places as the common ones.
        """
        found: dict[Path, TensorFacts | Skipped | None] = {}
        for name in self.names:
            if name.startswith(prefix):
                found |= self._place(name, prefix, key)
        return found

    def below_each(self, keys: Mapping[str, str]) -> dict[str, StoredPlaces]:
        """`below` for several names, `keys` by prefix: none of them is empty, or below another one."""
        found: dict[str, dict[Path, TensorFacts | Skipped | None]] = {prefix: {} for prefix in keys}
        for name in self.names if keys else ():
            ends = accumulate(f"{step}." for step in name.split("."))
            if (prefix := next((end for end in ends if end in keys), None)) is not None:
                found[prefix] |= self._place(name, prefix, keys[prefix])
        return dict(found)

    def facts(self, name: str) -> TensorFacts | Skipped | None:
        """What is stored under a name, as this rank had it; skipped if it is nothing."""
        own = rank_object_name(name, self._rank)
        if name in self._lacking:
            return SKIPPED
        found = own if own in self._known else name
        return self._tensors.get(found) if found in self._known else SKIPPED

    def _place(self, name: str, prefix: str, key: str) -> Mapping[Path, TensorFacts | Skipped | None]:
        """The place below `prefix`, if this name has one, and what is stored there."""
        rest = () if self.is_of_others(name) else _rest_of(self._paths.get(name, ()), prefix)
        is_chosen = rest and self.find(f"{key}.{name[len(prefix) :]}") == name
        return {rest: self.facts(name) if is_chosen else SKIPPED} if rest else {}


def _rest_of(path: Path, prefix: str) -> Path:
    if not prefix:
        return path
    text = ""
    for number, step in enumerate(path):
        text += f"{step}."
        if text == prefix:
            return path[number + 1 :]
    return ()


class MissingName(UsageError, RuntimeError):
    """The checkpoint lacks a name that the state has. Torch's planners raise a `RuntimeError` for this."""


def _missing(missing: list[str], stored: Collection[str], choice: LoadChoice) -> MissingName:
    wanted = apply_rename(missing[0], choice.rename or {})
    similar = nearest(wanted, list(stored)[:10_000])
    hint = f"The most similar name is {similar!r}. " if similar else ""
    prefix, _, rest = wanted.partition(".")
    if rest in stored:
        hint = f"It holds {rest!r}, without {prefix!r}: rename={{'{prefix}.*': ''}} finds it. "
    deeper = [name for name in stored if name.endswith(f".{wanted}")]
    if len(deeper) == 1:
        above = deeper[0].removesuffix(f".{wanted}")
        hint = f"It holds {deeper[0]!r}, below {above!r}: rename={{'*': '{above}.*'}} finds it. "
    return MissingName(
        f"Missing key in checkpoint: it does not hold {name_some([repr(wanted), *missing[1:]], 1)}",
        fix=f"{hint}Map names with rename=, skip parts with exclude=, or keep missing parts unchanged with"
        " strict=False.",
    )


def untaken_error(names: Sequence[str]) -> UsageError:
    """The error for names of the checkpoint that belong to a part of the state which does not take them."""
    return UsageError(
        f"The checkpoint holds {name_some([repr(name) for name in names])}, which no part of the state takes",
        fix="Build the state as it was saved, and load an optimizer together with its model. Or skip this"
        " with exclude=, or leave it with a warning: strict=False.",
    )


LARGE_BYTES = 256 << 20


def require_lengths(checkpoint: CheckpointSource, item_index: ByteItemIndex, items: Iterable[int]) -> None:
    """Raise `DataDamaged` for a large item that goes beyond its file, before memory is taken for it."""
    for number in items:
        facts = item_index.tensors[number]
        if facts.shape[0] < LARGE_BYTES:
            continue
        row = len(item_index.stored) - len(item_index.tensors) + number
        key = checkpoint.key(checkpoint.index.files[int(item_index.stored.file[row])])
        # A file that is only on another rank's node is read there, and its length is looked at there.
        with suppress(ObjectNotFound):
            size_bytes = checkpoint.storage.stat(key).size_bytes
            end = int(item_index.stored.item_offset[row]) + facts.shape[0]
            if end > size_bytes:
                raise DataDamaged(
                    f"{facts.name!r} should end at byte {end} of a file that has {size_bytes}",
                    where=f"{checkpoint.uri}, {key}",
                    fix="Load an older checkpoint.",
                )


NUM_HEAD_READERS = 16
"""Heads are small, so reading them is bound by latency."""


def locate_payloads(checkpoint: CheckpointSource, comm: Comm) -> CheckpointIndex:
    """The index with the positions of all payloads, read from items that no manifest describes. Collective.

    Heads of items are read through the page cache: with direct I/O, scattered pages take four times as long.
    """
    index = checkpoint.index
    rows = unlocated_rows(index)
    if not len(rows):
        return index
    own_rows = rows[comm.rank :: comm.size]
    own_positions = run_on_all_ranks(
        comm, lambda: _positions(checkpoint, own_rows), awaiting="all ranks to locate payloads"
    )
    positions = np.empty(len(rows), dtype=np.int64)
    for rank, part in enumerate(comm.gather(own_positions, awaiting="where all payloads begin")):
        positions[rank :: comm.size] = part
    return with_payloads(index, positions, rows)


def unlocated_rows(index: CheckpointIndex) -> Ints:
    """Rows of plain items whose payload can only be located from their own heads."""
    stored = index.stored
    return np.flatnonzero((stored.payload_offset == UNKNOWN) & ~stored.packed)


def _positions(checkpoint: CheckpointSource, rows: Ints) -> Ints:
    """Positions in the file, -1 where only the whole item has the payload."""
    stored = checkpoint.index.stored
    positions = np.full(len(rows), UNKNOWN, dtype=np.int64)
    with ThreadPoolExecutor(NUM_HEAD_READERS) as threads:
        for file in np.unique(stored.file[rows]).tolist():
            places = np.flatnonzero(stored.file[rows] == file)
            with ExitStack() as opening:
                source = checkpoint.storage.open(checkpoint.key(checkpoint.index.files[file]))
                opening.callback(source.close)
                look = partial(_position, checkpoint, source)
                positions[places] = list(threads.map(look, rows[places].tolist()))
    return positions


def _position(checkpoint: CheckpointSource, source: Source, row: int) -> int:
    stored = checkpoint.index.stored
    begin, size = int(stored.item_offset[row]), int(stored.item_bytes[row])
    head = bytearray(min(HEAD_BYTES, size))
    source.read_into(begin, memoryview(head))
    offset = checkpoint.payload_in(row, head)
    return UNKNOWN if offset is None else begin + offset
