"""Compare two checkpoints tensor by tensor, whatever their formats and however they were sharded.

If both have the same regions and checksums, equal checksums mean equal bytes and nothing is read. Invariant:
memory is two slabs, and what is reported as the same was written the same, to the last byte.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.commit.catalog import AnyPath
from penstock.checkpoint.formats.checkpoint_source import CheckpointSource, Format, open_checkpoint
from penstock.checkpoint.formats.torch_save import is_plain
from penstock.checkpoint.state.regions import StoredObject, TensorFacts
from penstock.checkpoint.tools.tensor_slabs import SlabReader, cut_into_slabs, slab_bytes
from penstock.progress import Progress, Silent
from penstock.transfer.buffers import WarmMemory

SLAB_BYTES: Final = 16 << 20
_LONGEST_TEXT: Final = 100


class Outcome(StrEnum):
    """How one name compares."""

    SAME = "same"
    VALUES = "values differ"
    FORM = "shape or type differs"
    ONLY_FIRST = "only in the first"
    ONLY_SECOND = "only in the second"
    UNKNOWN = "cannot be compared"
    """Objects that cannot be rebuilt without running code, and whose bytes differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameComparison:
    """One name of either checkpoint."""

    name: str
    outcome: Outcome
    first: str = ""
    second: str = ""
    """Type and shape of tensors, values of objects."""
    different_elements: int = 0
    largest_difference: float | None = None
    """Of numbers, as float64; None if numpy does not know the type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointComparison:
    """All names of two checkpoints."""

    first: str
    second: str
    parts: tuple[NameComparison, ...]
    read_bytes: int
    """Of each checkpoint; tensors with equal checksums are not read."""

    @property
    def are_same(self) -> bool:
        """Whether nothing differs."""
        return all(part.outcome is Outcome.SAME for part in self.parts)


def compare(
    first: AnyPath, second: AnyPath, *, only: Sequence[str] = (), progress: Progress | None = None
) -> CheckpointComparison:
    """Compare the checkpoints at two paths or URIs; `only` are patterns of names."""
    progress = progress or Silent()
    pair = open_checkpoint(first), open_checkpoint(second)
    for checkpoint in pair:
        # Equal checksums say nothing about files that are gone.
        if checkpoint.format is Format.DCP:
            with checkpoint.explaining_damage():
                checkpoint.require_files()
    with closing(_TensorComparer(*pair, progress)) as comparer:
        tensors = list(comparer.compare_all(only))
    objects = list(_compare_all_objects(*pair, only))
    return CheckpointComparison(
        first=pair[0].uri,
        second=pair[1].uri,
        parts=tuple(tensors + objects),
        read_bytes=comparer.read_bytes,
    )


def _select_names(
    first: Mapping[str, object], second: Mapping[str, object], only: Sequence[str]
) -> Iterator[str]:
    for name in dict.fromkeys((*first, *second)):
        if not only or any(fnmatchcase(name, pattern) for pattern in only):
            yield name


class _TensorComparer:
    """Compares the tensors of two checkpoints."""

    def __init__(self, first: CheckpointSource, second: CheckpointSource, progress: Progress) -> None:
        self._checkpoints = (first, second)
        self._readers = (SlabReader(first), SlabReader(second))
        self._progress = progress
        self._memory: WarmMemory | None = None
        self.read_bytes = 0

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers:
            reader.close()

    def compare_all(self, only: Sequence[str]) -> Iterator[NameComparison]:
        """Compare every tensor of either, in the order of the first."""
        first, second = (
            {facts.name: number for number, facts in enumerate(checkpoint.index.tensors)}
            for checkpoint in self._checkpoints
        )
        names = list(_select_names(first, second, only))
        sizes = (self._facts(0, first[name]).size_bytes for name in names if name in first)
        self._progress.begin("bytes", sum(sizes))
        for name in names:
            yield self._compare(name, first.get(name), second.get(name))
            if name in first:
                self._progress.advance(self._facts(0, first[name]).size_bytes)

    def _facts(self, which: int, number: int) -> TensorFacts:
        return self._checkpoints[which].index.tensors[number]

    def _compare(self, name: str, first: int | None, second: int | None) -> NameComparison:
        texts = [
            "" if number is None else _format_type(self._facts(which, number))
            for which, number in enumerate((first, second))
        ]
        if first is None or second is None:
            outcome = Outcome.ONLY_SECOND if first is None else Outcome.ONLY_FIRST
            return NameComparison(name=name, outcome=outcome, first=texts[0], second=texts[1])
        if texts[0] != texts[1]:
            return NameComparison(name=name, outcome=Outcome.FORM, first=texts[0], second=texts[1])
        if self._have_equal_sums(first, second):
            return NameComparison(name=name, outcome=Outcome.SAME, first=texts[0], second=texts[1])
        num_different, largest = self._read_both(first, second)
        return NameComparison(
            name=name,
            outcome=Outcome.VALUES if num_different else Outcome.SAME,
            first=texts[0],
            second=texts[1],
            different_elements=num_different,
            largest_difference=largest,
        )

    def _have_equal_sums(self, first: int, second: int) -> bool:
        """Items are an envelope and elements: the same region and checksum mean the same elements."""
        regions = [
            _list_checksums(checkpoint, reader, number)
            for checkpoint, reader, number in zip(
                self._checkpoints, self._readers, (first, second), strict=True
            )
        ]
        return regions[0] is not None and regions[0] == regions[1]

    def _read_both(self, first: int, second: int) -> tuple[int, float | None]:
        """How many elements differ, and the largest difference of numbers."""
        if self._memory is None:
            self._memory = WarmMemory(2 * SLAB_BYTES)
        view, facts = self._memory.view, self._facts(0, first)
        for reader, number in zip(self._readers, (first, second), strict=True):
            reader.require_whole(number)
        num_different, largest = 0, None
        for slab in cut_into_slabs(facts.shape, facts.element_bytes, SLAB_BYTES):
            num_bytes = slab_bytes(slab, facts)
            both = view[:num_bytes], view[SLAB_BYTES : SLAB_BYTES + num_bytes]
            for reader, number, target in zip(self._readers, (first, second), both, strict=True):
                reader.read_slab(number, slab, target)
            self.read_bytes += num_bytes
            count, difference = count_differences(both[0], both[1], facts.dtype, facts.element_bytes)
            num_different += count
            largest = difference if largest is None else max(largest, difference or 0.0)
        return num_different, largest if num_different else None


def count_differences(
    first: memoryview, second: memoryview, dtype: str, element_bytes: int
) -> tuple[int, float | None]:
    """Elements whose bytes differ, and the largest difference, of two runs of equal length."""
    bits = np.dtype({16: "c16"}.get(element_bytes, f"u{element_bytes}"))
    one, other = np.frombuffer(first, dtype=bits), np.frombuffer(second, dtype=bits)
    if element_bytes == 16:
        unequal = (one.view("u8").reshape(-1, 2) != other.view("u8").reshape(-1, 2)).any(axis=1)
    else:
        unequal = one != other
    rows = np.flatnonzero(unequal)
    if not len(rows):
        return 0, None
    numbers = [_numbers(run[rows], dtype) for run in (one, other)]
    if numbers[0] is None or numbers[1] is None:
        return len(rows), None
    with np.errstate(invalid="ignore", over="ignore"):
        gaps = np.abs(numbers[0] - numbers[1])
    finite = gaps[np.isfinite(gaps)]
    return len(rows), float(finite.max()) if len(finite) else None


def _numbers(bits: NDArray[Any], dtype: str) -> NDArray[Any] | None:
    """Elements as numbers that can be subtracted; None for the types that numpy has not."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype.startswith(("float8", "float4", "bits")) or dtype == "complex32":
        return None
    known = bits.view(np.dtype(dtype))
    return known if known.dtype.kind == "c" else known.astype(np.float64)


def _format_type(facts: TensorFacts) -> str:
    return f"{facts.dtype}{list(facts.shape)}"


def _list_checksums(
    checkpoint: CheckpointSource, reader: SlabReader, tensor: int
) -> set[tuple[bytes, ...]] | None:
    """The regions of a tensor with their checksums; None if it has none, or those of packed items."""
    rows = reader.rows(tensor)
    stored = checkpoint.index.stored
    if checkpoint.index.sums is None or stored.packed[rows].any():
        return None
    columns = (stored.regions.offsets, stored.regions.sizes, checkpoint.index.sums)
    return {tuple(column[row].tobytes() for column in columns) for row in rows.tolist()}


def _compare_all_objects(
    first: CheckpointSource, second: CheckpointSource, only: Sequence[str]
) -> Iterator[NameComparison]:
    ours, theirs = (
        {stored.name: stored for stored in checkpoint.index.objects} for checkpoint in (first, second)
    )
    for name in _select_names(ours, theirs, only):
        if name not in theirs:
            yield NameComparison(
                name=name, outcome=Outcome.ONLY_FIRST, first=_format_object(first, ours[name])
            )
        elif name not in ours:
            yield NameComparison(
                name=name, outcome=Outcome.ONLY_SECOND, second=_format_object(second, theirs[name])
            )
        else:
            yield _compare_objects(first, ours[name], second, theirs[name])


def _compare_objects(
    first: CheckpointSource, one: StoredObject, second: CheckpointSource, other: StoredObject
) -> NameComparison:
    made = first.comparable(one), second.comparable(other)
    outcome = Outcome.SAME if made[0] == made[1] else Outcome.VALUES
    if not (is_plain(made[0]) and is_plain(made[1])):
        # Two opaque values are only known to be the same where their archives are, byte by byte.
        are_archives = first.archive is None and second.archive is None
        equal = are_archives and first.read_object_item(one) == second.read_object_item(other)
        outcome = Outcome.SAME if equal else Outcome.UNKNOWN
    return NameComparison(
        name=one.name, outcome=outcome, first=_format_object(first, one), second=_format_object(second, other)
    )


def _format_object(checkpoint: CheckpointSource, stored: StoredObject) -> str:
    return format_value(checkpoint.safe_value(stored))


def format_value(value: object) -> str:
    """A value in a few words: itself, if it is short and plain."""
    try:
        text = repr(value)
    except ValueError:
        # Python writes no integers of more than 4300 digits.
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_TEXT and is_plain(value) else f"<{type(value).__name__}>"
