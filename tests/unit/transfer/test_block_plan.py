"""Blocks cover every span once, in order, and few of them are needed."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.transfer.reader import GAP_BYTES, LAST_BLOCK_BYTES, Block, Span, plan_blocks

PAGE = 4096


@st.composite
def sorted_spans(draw: st.DrawFn) -> list[Span]:
    spans: list[Span] = []
    for file in range(draw(st.integers(1, 3))):
        at = 0
        for _ in range(draw(st.integers(0, 6))):
            begin = at + draw(st.sampled_from([0, 1, 700, GAP_BYTES, GAP_BYTES + 1, 3 * GAP_BYTES]))
            at = begin + draw(st.sampled_from([1, 100, PAGE, 5 * PAGE + 3]))
            spans.append(Span(file, begin, at, draw(st.sampled_from([None, len(spans)]))))
    return spans


def blocks_of(spans: list[Span], num_pages: int = 2) -> list[Block]:
    return plan_blocks(spans, block_bytes=num_pages * PAGE, alignment_bytes=PAGE)


@given(sorted_spans(), st.integers(1, 8))
def test_parts_cover_each_span_once_and_in_order(spans: list[Span], num_pages: int) -> None:
    reached = [span.begin for span in spans]
    for block in blocks_of(spans, num_pages):
        assert block.begin % PAGE == 0
        assert 0 < block.end - block.begin <= num_pages * PAGE
        for part in block.parts:
            span = spans[part.span]
            assert (span.file, reached[part.span]) == (block.file, part.begin)
            assert block.begin <= part.begin < part.end <= block.end
            reached[part.span] = part.end
    assert reached == [span.end for span in spans]


@given(sorted_spans())
def test_a_block_is_marked_when_it_continues_an_item(spans: list[Span]) -> None:
    seen: set[int] = set()
    for block in blocks_of(spans):
        first = spans[block.parts[0].span].item
        assert block.continues == (first is not None and first in seen)
        seen |= {item for part in block.parts if (item := spans[part.span].item) is not None}


def test_neighbours_share_a_block_and_wide_gaps_are_not_read() -> None:
    near = [Span(0, 0, 100), Span(0, 200, 300)]
    assert len(blocks_of(near)) == 1
    far = [Span(0, 0, 100), Span(0, 100 * PAGE, 100 * PAGE + 50)]
    assert [(block.begin, block.end) for block in blocks_of(far)] == [(0, 100), (100 * PAGE, 100 * PAGE + 50)]


def test_without_spans_nothing_is_read() -> None:
    assert blocks_of([]) == []


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 8))
def test_for_several_streams_the_last_blocks_are_smaller(file_sizes: list[int], streams: int) -> None:
    spans = [Span(file, 0, size * LAST_BLOCK_BYTES + 7) for file, size in enumerate(file_sizes)]
    largest = 8 * LAST_BLOCK_BYTES
    blocks = plan_blocks(spans, block_bytes=largest, alignment_bytes=PAGE, tapered_for=streams)
    left = sum(span.end for span in spans)
    assert sum(block.end - block.begin for block in blocks) == left
    for block in blocks:
        size = block.end - block.begin
        assert size <= min(largest, max(left // (2 * streams), LAST_BLOCK_BYTES))
        assert size >= LAST_BLOCK_BYTES or block.end == spans[block.file].end
        left -= size
