"""Compare two checkpoints tensor by tensor, whatever their formats and however they were sharded.

Where both have the same regions and checksums, equal checksums mean equal bytes and nothing is read.
Invariant: memory is two slabs, and what is called the same was compared to the last byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.checkpoint.commit.catalog import AnyPath
from penstock.checkpoint.formats.checkpoint_source import CheckpointSource, open_checkpoint
from penstock.checkpoint.formats.torch_save import is_plain
from penstock.checkpoint.saving.buffers import WarmMemory
from penstock.checkpoint.state.regions import StoredObject, TensorFacts
from penstock.checkpoint.tools.tensor_slabs import Elements, slab_bytes, slabs
from penstock.progress import Progress, Silent

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
    """Objects that only running their code could rebuild, and whose bytes differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One name of either checkpoint."""

    name: str
    outcome: Outcome
    first: str = ""
    second: str = ""
    """Type and shape of tensors, values of objects."""
    different_elements: int = 0
    largest_difference: float | None = None
    """Of numbers, as float64; None where the type has no numbers that numpy knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All names of two checkpoints."""

    first: str
    second: str
    parts: tuple[Compared, ...]
    read_bytes: int
    """Of each checkpoint; what equal sums vouch for was not read."""

    @property
    def are_same(self) -> bool:
        """Whether nothing differs."""
        return all(part.outcome is Outcome.SAME for part in self.parts)


def compare(
    first: AnyPath, second: AnyPath, *, only: Sequence[str] = (), progress: Progress | None = None
) -> Comparison:
    """Compare the checkpoints at two paths or URIs; `only` are patterns of names."""
    progress = progress or Silent()
    one, other = open_checkpoint(first), open_checkpoint(second)
    with closing(_Comparing(one, other, progress)) as work:
        tensors = list(work.tensors(only))
    objects = list(_objects(one, other, only))
    return Comparison(
        first=one.uri, second=other.uri, parts=tuple(tensors + objects), read_bytes=work.read_bytes
    )


def _names(first: Mapping[str, object], second: Mapping[str, object], only: Sequence[str]) -> Iterator[str]:
    for name in dict.fromkeys((*first, *second)):
        if not only or any(fnmatchcase(name, pattern) for pattern in only):
            yield name


class _Comparing:
    """Tensors of two checkpoints, side by side."""

    def __init__(self, first: CheckpointSource, second: CheckpointSource, progress: Progress) -> None:
        self._opened = (first, second)
        self._elements = (Elements(first), Elements(second))
        self._progress = progress
        self._memory: WarmMemory | None = None
        self.read_bytes = 0

    def close(self) -> None:
        """Let go of the files."""
        for elements in self._elements:
            elements.close()

    def tensors(self, only: Sequence[str]) -> Iterator[Compared]:
        """Every tensor of either, in the order of the first."""
        first, second = (
            {facts.name: number for number, facts in enumerate(opened.index.tensors)}
            for opened in self._opened
        )
        names = list(_names(first, second, only))
        sizes = (self._facts(0, first[name]).size_bytes for name in names if name in first)
        self._progress.begin("bytes", sum(sizes))
        for name in names:
            yield self._compare(name, first.get(name), second.get(name))
            if name in first:
                self._progress.advance(self._facts(0, first[name]).size_bytes)

    def _facts(self, which: int, number: int) -> TensorFacts:
        return self._opened[which].index.tensors[number]

    def _compare(self, name: str, first: int | None, second: int | None) -> Compared:
        texts = [
            "" if number is None else _form(self._facts(which, number))
            for which, number in enumerate((first, second))
        ]
        if first is None or second is None:
            outcome = Outcome.ONLY_SECOND if first is None else Outcome.ONLY_FIRST
            return Compared(name=name, outcome=outcome, first=texts[0], second=texts[1])
        if texts[0] != texts[1]:
            return Compared(name=name, outcome=Outcome.FORM, first=texts[0], second=texts[1])
        if self._have_equal_sums(first, second):
            return Compared(name=name, outcome=Outcome.SAME, first=texts[0], second=texts[1])
        num_different, largest = self._read_both(first, second)
        return Compared(
            name=name,
            outcome=Outcome.VALUES if num_different else Outcome.SAME,
            first=texts[0],
            second=texts[1],
            different_elements=num_different,
            largest_difference=largest,
        )

    def _have_equal_sums(self, first: int, second: int) -> bool:
        """Items of one box are envelope and elements: the same box and the same sum are the same elements."""
        described = [
            _summed_boxes(opened, elements, number)
            for opened, elements, number in zip(self._opened, self._elements, (first, second), strict=True)
        ]
        return described[0] is not None and described[0] == described[1]

    def _read_both(self, first: int, second: int) -> tuple[int, float | None]:
        """How many elements differ, and the largest difference of numbers."""
        if self._memory is None:
            self._memory = WarmMemory(2 * SLAB_BYTES)
        view, facts = self._memory.view, self._facts(0, first)
        for elements, number in zip(self._elements, (first, second), strict=True):
            elements.require_whole(number)
        num_different, largest = 0, None
        for slab in slabs(facts.shape, facts.item_bytes, SLAB_BYTES):
            num_bytes = slab_bytes(slab, facts)
            both = view[:num_bytes], view[SLAB_BYTES : SLAB_BYTES + num_bytes]
            for elements, number, target in zip(self._elements, (first, second), both, strict=True):
                elements.read_slab(number, slab, target)
            self.read_bytes += num_bytes
            count, difference = differences(both[0], both[1], facts.dtype, facts.item_bytes)
            num_different += count
            largest = difference if largest is None else max(largest, difference or 0.0)
        return num_different, largest if num_different else None


def differences(
    first: memoryview, second: memoryview, dtype: str, item_bytes: int
) -> tuple[int, float | None]:
    """Elements whose bytes differ, and the largest difference, of two runs of equal length."""
    bits = np.dtype({16: "c16"}.get(item_bytes, f"u{item_bytes}"))
    one, other = np.frombuffer(first, dtype=bits), np.frombuffer(second, dtype=bits)
    if item_bytes == 16:
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


def _form(facts: TensorFacts) -> str:
    return f"{facts.dtype}{list(facts.shape)}"


def _summed_boxes(opened: CheckpointSource, elements: Elements, tensor: int) -> set[tuple[bytes, ...]] | None:
    """The boxes of a tensor with their sums, if it has any that tell of plain elements."""
    rows = elements.rows(tensor)
    stored = opened.index.stored
    if opened.summed is None or stored.packed[rows].any():
        return None
    columns = (stored.regions.offsets, stored.regions.sizes, opened.summed.sums)
    return {tuple(column[row].tobytes() for column in columns) for row in rows.tolist()}


def _objects(first: CheckpointSource, second: CheckpointSource, only: Sequence[str]) -> Iterator[Compared]:
    ours, theirs = ({stored.name: stored for stored in opened.index.objects} for opened in (first, second))
    for name in _names(ours, theirs, only):
        if name not in theirs:
            yield Compared(name=name, outcome=Outcome.ONLY_FIRST, first=_text(first, ours[name]))
        elif name not in ours:
            yield Compared(name=name, outcome=Outcome.ONLY_SECOND, second=_text(second, theirs[name]))
        else:
            yield _compare_objects(first, ours[name], second, theirs[name])


def _compare_objects(
    first: CheckpointSource, one: StoredObject, second: CheckpointSource, other: StoredObject
) -> Compared:
    made = first.comparable(one), second.comparable(other)
    outcome = Outcome.SAME if made[0] == made[1] else Outcome.VALUES
    if not (is_plain(made[0]) and is_plain(made[1])):
        # Two opaque values are only known to be the same where their archives are, byte by byte.
        are_archives = first.archive is None and second.archive is None
        equal = are_archives and first.read_object_item(one) == second.read_object_item(other)
        outcome = Outcome.SAME if equal else Outcome.UNKNOWN
    return Compared(name=one.name, outcome=outcome, first=_text(first, one), second=_text(second, other))


def _text(opened: CheckpointSource, stored: StoredObject) -> str:
    return short_text(opened.safe_value(stored))


def short_text(value: object) -> str:
    """A value in a few words: itself, if it is short and plain."""
    text = repr(value)
    return text if len(text) <= _LONGEST_TEXT and is_plain(value) else f"<{type(value).__name__}>"
