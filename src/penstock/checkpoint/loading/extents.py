"""Which blocks of which files to read, so that every span comes along: sorted, coalesced, cut to buffers.

Pure. Invariant: the parts of all blocks cover every span, in its order, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GAP_BYTES = 64 * 1024
"""Unwanted bytes between spans that are read along: one request costs more than reading so much."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of one file that are wanted. Spans with the same `item` are summed together, in order."""

    file: int
    begin: int
    end: int
    item: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """What a block has of a span: bytes `begin` to `end` of the file."""

    span: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Block:
    """One request: bytes `begin` to `end` of a file."""

    file: int
    begin: int
    end: int
    parts: tuple[Part, ...]
    continues: bool
    """The first part's item began in the block before: that one is summed first."""


def lay_out(spans: Sequence[Span], *, block_bytes: int, alignment_bytes: int) -> list[Block]:
    """Blocks for `spans`, which are sorted by file and beginning.

    Blocks begin at multiples of `alignment_bytes`, which `block_bytes` is one of as well; they end where the
    spans do, so a reader may round up as far as its file goes.
    """
    blocks: list[Block] = []
    for first, last, begin, end in _extents(spans):
        file = spans[first].file
        pending = first
        for block_begin in range(begin - begin % alignment_bytes, end, block_bytes):
            block_end = min(block_begin + block_bytes, end)
            while pending < last and spans[pending].end <= block_begin:
                pending += 1
            parts = tuple(_parts(spans, range(pending, last), block_begin, block_end))
            if parts:
                blocks.append(
                    Block(file, block_begin, block_end, parts, _continues(spans, parts[0], block_begin))
                )
    return blocks


def _extents(spans: Sequence[Span]) -> Iterator[tuple[int, int, int, int]]:
    """Runs of spans with small gaps: first and last (exclusive) span, first byte and end."""
    first, end = 0, spans[0].end if spans else 0
    for number, span in enumerate(spans):
        if span.file != spans[first].file or span.begin > end + GAP_BYTES:
            yield first, number, spans[first].begin, end
            first, end = number, span.end
        end = max(end, span.end)
    if spans:
        yield first, len(spans), spans[first].begin, end


def _parts(spans: Sequence[Span], numbers: range, begin: int, end: int) -> Iterator[Part]:
    for number in numbers:
        span = spans[number]
        if span.begin >= end:
            return
        if max(span.begin, begin) < min(span.end, end):
            yield Part(number, max(span.begin, begin), min(span.end, end))


def _continues(spans: Sequence[Span], part: Part, block_begin: int) -> bool:
    item = spans[part.span].item
    if item is None:
        return False
    if spans[part.span].begin < block_begin:
        return True
    return part.span > 0 and spans[part.span - 1].item == item
