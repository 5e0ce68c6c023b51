"""Compare two checkpoints tensor by tensor, whatever their formats and however they were sharded.

If both have the same regions and checksums, equal checksums mean equal bytes, and nothing is read. Invariant:
memory is limited to two slabs, and whatever is reported as the same has the same bytes in both checkpoints.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.commit.checkpoints import AnyPath
from penstock.checkpoint.formats.checkpoint_source import CheckpointSource, Format, open_checkpoint
from penstock.checkpoint.formats.torch_save import is_plain, with_elements
from penstock.checkpoint.state.regions import TensorFacts
from penstock.checkpoint.state.walk import matches_pattern
from penstock.checkpoint.tools.tensor_slabs import SlabReader, cut_into_slabs
from penstock.progress import Progress
from penstock.transfer.buffers import WarmMemory

SLAB_BYTES: Final = 16 << 20
_LONGEST_TEXT: Final = 100


class Outcome(StrEnum):
    """The result for one name."""

    SAME = "same"
    VALUES = "values differ"
    FORM = "shape or type differs"
    ONLY_FIRST = "only in the first"
    ONLY_SECOND = "only in the second"
    UNKNOWN = "cannot be compared"
    """The objects cannot be rebuilt without running code, and their bytes differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameComparison:
    """The comparison of one name that is in at least one of the checkpoints."""

    name: str
    outcome: Outcome
    first: str = ""
    second: str = ""
    """The type and shape of a tensor, or the value of an object."""
    different_elements: int = 0
    largest_difference: float | None = None
    """The largest difference between numbers, as float64; None if numpy lacks the type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointComparison:
    """The comparison of all names of two checkpoints."""

    first: str
    second: str
    parts: tuple[NameComparison, ...]
    read_bytes: int
    """Bytes read from each checkpoint; tensors with equal checksums are not read."""

    @property
    def are_same(self) -> bool:
        return all(part.outcome is Outcome.SAME for part in self.parts)


def compare(
    first: AnyPath, second: AnyPath, *, only: Sequence[str] = (), progress: Progress | None = None
) -> CheckpointComparison:
    """Compare the checkpoints at two paths or URIs; `only` has patterns of the names to compare."""
    progress = progress or Progress()
    pair = open_checkpoint(first), open_checkpoint(second)
    for checkpoint in pair:
        # Equal checksums do not reveal that files are missing.
        if checkpoint.format is Format.DCP:
            with checkpoint.explaining_damage():
                checkpoint.require_files()
    numbers = [{facts.name: number for number, facts in enumerate(each.index.tensors)} for each in pair]
    chosen = only or ["*"]
    names = [name for name in dict.fromkeys((*numbers[0], *numbers[1])) if matches_pattern(name, chosen)]
    sizes = {facts.name: facts.size_bytes for facts in pair[0].index.tensors}
    progress.begin("bytes", sum(sizes.get(name, 0) for name in names))
    parts, read_bytes, memory = [], 0, WarmMemory(2 * SLAB_BYTES)
    with closing(SlabReader(pair[0])) as one, closing(SlabReader(pair[1])) as other:
        for name in names:
            place = numbers[0].get(name), numbers[1].get(name)
            texts = [
                "" if number is None else f"{(facts := each.index.tensors[number]).dtype}{list(facts.shape)}"
                for each, number in zip(pair, place, strict=True)
            ]
            part = partial(NameComparison, name=name, first=texts[0], second=texts[1])
            if place[0] is None or place[1] is None:
                parts.append(part(outcome=Outcome.ONLY_SECOND if place[0] is None else Outcome.ONLY_FIRST))
            elif texts[0] != texts[1]:
                parts.append(part(outcome=Outcome.FORM))
            elif (sums := _list_checksums(pair[0], one, place[0])) is not None and sums == _list_checksums(
                pair[1], other, place[1]
            ):
                # An item is an envelope and elements: equal region and checksum mean equal elements.
                parts.append(part(outcome=Outcome.SAME))
            else:
                facts = pair[0].index.tensors[place[0]]
                count, largest = _read_both(facts, (one, place[0]), (other, place[1]), memory.view)
                read_bytes += facts.size_bytes
                outcome = Outcome.VALUES if count else Outcome.SAME
                parts.append(part(outcome=outcome, different_elements=count, largest_difference=largest))
            progress.advance(sizes.get(name, 0))
    parts += _compare_all_objects(*pair, chosen)
    return CheckpointComparison(
        first=pair[0].uri, second=pair[1].uri, parts=tuple(parts), read_bytes=read_bytes
    )


def _read_both(
    facts: TensorFacts, one: tuple[SlabReader, int], other: tuple[SlabReader, int], view: memoryview
) -> tuple[int, float | None]:
    """Return the number of elements that differ, and the largest difference between numbers."""
    for reader, number in (one, other):
        reader.require_whole(number)
    num_different, largest = 0, None
    for slab, num_bytes in cut_into_slabs(facts.shape, facts.element_bytes, SLAB_BYTES):
        both = view[:num_bytes], view[SLAB_BYTES : SLAB_BYTES + num_bytes]
        for (reader, number), target in zip((one, other), both, strict=True):
            reader.read_slab(number, slab, target)
        count, difference = count_differences(both[0], both[1], facts.dtype, facts.element_bytes)
        num_different += count
        largest = difference if largest is None else max(largest, difference or 0.0)
    return num_different, largest if num_different else None


def count_differences(
    first: memoryview, second: memoryview, dtype: str, element_bytes: int
) -> tuple[int, float | None]:
    """Count elements whose bytes differ between two equally long runs; also return the largest difference."""
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
    """Return the elements as numbers that can be subtracted; None for types that numpy lacks."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype.startswith(("float8", "float4", "bits")) or dtype == "complex32":
        return None
    known = bits.view(np.dtype(dtype))
    return known if known.dtype.kind == "c" else known.astype(np.float64)


def _list_checksums(
    checkpoint: CheckpointSource, reader: SlabReader, tensor: int
) -> set[tuple[bytes, ...]] | None:
    """Return a tensor's regions with checksums, or None if there are none or items are packed."""
    rows = reader.rows(tensor)
    stored = checkpoint.index.stored
    if checkpoint.index.sums is None or stored.packed[rows].any():
        return None
    columns = (stored.regions.offsets, stored.regions.sizes, checkpoint.index.sums)
    return {tuple(column[row].tobytes() for column in columns) for row in rows.tolist()}


def _compare_all_objects(
    first: CheckpointSource, second: CheckpointSource, chosen: Sequence[str]
) -> Iterator[NameComparison]:
    ours, theirs = ({held.name: held for held in each.index.objects} for each in (first, second))
    for name in dict.fromkeys((*ours, *theirs)):
        if not matches_pattern(name, chosen):
            continue
        one, other = ours.get(name), theirs.get(name)
        texts = [
            "" if held is None else format_value(each.parse(held)[0])
            for each, held in ((first, one), (second, other))
        ]
        if one is None or other is None:
            outcome = Outcome.ONLY_SECOND if one is None else Outcome.ONLY_FIRST
        else:
            values = with_elements(*first.parse(one)), with_elements(*second.parse(other))
            outcome = Outcome.SAME if are_same(*values) else Outcome.VALUES
            if not (is_plain(values[0]) and is_plain(values[1])):
                # Two opaque values are known to be the same only if their archives are, byte by byte.
                are_archives = first.archive is None and second.archive is None
                is_same = are_archives and first.read_object_item(one) == second.read_object_item(other)
                outcome = Outcome.SAME if is_same else Outcome.UNKNOWN
        yield NameComparison(name=name, outcome=outcome, first=texts[0], second=texts[1])


def are_same(one: Any, other: Any) -> bool:
    """Return True if plain values have equal types and bits: NaN is NaN, and 1 is not True."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        keys = {key: key for key in other}
        return len(one) == len(other) and all(
            key in keys and are_same(key, keys[key]) and are_same(inner, other[key])
            for key, inner in one.items()
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_same, one, other))
    if isinstance(one, set | frozenset):
        return {(type(each), each) for each in one} == {(type(each), each) for each in other}
    if isinstance(one, float | complex):
        # The text tells signs of zero and NaN apart.
        return repr(one) == repr(other)
    return bool(one == other)


def format_value(value: object) -> str:
    """Return a value in a few words: the value itself if it is short and plain."""
    try:
        text = repr(value)
    except ValueError:
        # Python does not convert integers of more than 4300 digits to text.
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_TEXT and is_plain(value) else f"<{type(value).__name__}>"
