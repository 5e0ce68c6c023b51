"""Hits of all capacities from stack distances, against a plain LRU cache and against published figures."""

import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kvcache.block_trace import BlockTrace, find_reuse, offsets, simulate_tiers
from penstock.kvcache.read_traces import read_trace

FIXTURES = Path(os.environ.get("PENSTOCK_MOONCAKE_FIXTURES", "/nowhere"))
CONVERSATION = FIXTURES / "conversation_trace.jsonl"

REQUESTS = st.lists(st.lists(st.integers(0, 12), max_size=6), max_size=12)


def trace_of(requests: list[list[int]], block_tokens: int = 512) -> BlockTrace:
    counts = np.array([len(blocks) for blocks in requests], np.int64)
    return BlockTrace(
        name="test",
        block_tokens=block_tokens,
        arrival_s=np.arange(len(requests), dtype=np.float64),
        input_tokens=counts * block_tokens,
        output_tokens=np.ones(len(requests), np.int64),
        first_block=offsets(counts),
        block_ids=np.array([block for blocks in requests for block in blocks], np.int64),
    )


def plain_prefix_hits(requests: list[list[int]], capacity: int) -> int:
    """One LRU cache, block after block."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks in requests:
        is_prefix = True
        for block in blocks:
            is_prefix &= block in cache
            hits += is_prefix
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


@given(REQUESTS, st.integers(0, 14))
def test_hits_are_those_of_a_plain_cache(requests: list[list[int]], capacity: int) -> None:
    trace = trace_of(requests)
    ratio = find_reuse(trace).prefix_hit_ratio(capacity)
    assert round(ratio * trace.num_blocks) == plain_prefix_hits(requests, capacity)


@given(REQUESTS, st.lists(st.integers(0, 10), min_size=3, max_size=3))
def test_tiers_serve_together_what_the_largest_alone_would(
    requests: list[list[int]], capacities: list[int]
) -> None:
    trace = trace_of(requests)
    reuse = find_reuse(trace)
    figures = simulate_tiers(reuse, {str(number): blocks for number, blocks in enumerate(capacities)})
    served = sum(tier["hit_blocks"] for tier in figures)
    assert served == round(reuse.prefix_hit_ratio(max(capacities)) * trace.num_blocks)


@pytest.mark.skipif(not CONVERSATION.is_file(), reason="PENSTOCK_MOONCAKE_FIXTURES has no conversation_trace")
def test_conversation_trace_has_the_published_hit_ratios() -> None:
    trace = read_trace(CONVERSATION)
    reuse = find_reuse(trace)
    assert (trace.num_requests, trace.num_blocks, trace.num_unique) == (12_031, 288_500, 182_790)
    assert (trace.block_tokens, trace.notes) == (512, ())
    ratios = {blocks: reuse.prefix_hit_ratio(blocks) for blocks in (1000, 10**4, 30_000, 50_000, 10**5, None)}
    assert [round(ratio, 3) for ratio in ratios.values()] == [0.044, 0.211, 0.326, 0.355, 0.364, 0.366]
