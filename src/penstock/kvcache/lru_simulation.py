"""Hit ratios of caches of every size in one pass: LRU by stack distances.

A block is in an LRU cache of C blocks exactly if fewer than C different blocks were used since its last use.
A hit serves a request only while all blocks before it hit, too. Pure numpy: O(n log n) for n blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.kvcache.block_trace import BlockTrace, Integers

NEVER: Final = 1 << 36
"""The distance of a first use: no cache has the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """For each block of a trace the smallest cache that has it, and that also has all blocks before it."""

    capacity_for_block: Integers
    capacity_for_prefix: Integers

    def prefix_hit_ratio(self, capacity_blocks: int | None) -> float:
        """The share of blocks that a cache of this size serves; None: of unlimited size."""
        if not len(self.capacity_for_prefix):
            return 0.0
        return float(np.mean(self.capacity_for_prefix <= limit_of(capacity_blocks)))


def limit_of(capacity_blocks: int | None) -> int:
    """A capacity as a number: without limit, a cache has every block that was used before."""
    return NEVER - 1 if capacity_blocks is None else min(capacity_blocks, NEVER - 1)


def find_reuse(trace: BlockTrace) -> Reuse:
    """The next use of each block of the trace."""
    needed = stack_distances(trace.block_ids) + 1
    requests = np.repeat(np.arange(trace.num_requests, dtype=np.int64), trace.blocks_of_requests)
    # A running maximum that starts again with each request: later ones are shifted above all earlier ones.
    shift = requests * (2 * NEVER)
    return Reuse(capacity_for_block=needed, capacity_for_prefix=np.maximum.accumulate(needed + shift) - shift)


def stack_distances(ids: Integers) -> Integers:
    """For each use the number of other ids since the last use of its id; `NEVER` for a first use.

    With p the place of the last use, these are the uses j after p whose own last use is not after p. No use
    up to p has a later one, so it is enough to count uses before i with a last use up to p, less p + 1.
    """
    num = len(ids)
    order = np.argsort(ids, kind="stable")
    is_same = ids[order[1:]] == ids[order[:-1]]
    last_use = np.full(num, -1, np.int64)
    last_use[order[1:][is_same]] = order[:-1][is_same]
    ranks = np.empty(num, np.int64)
    ranks[np.argsort(last_use, kind="stable")] = np.arange(num)
    distances = _count_smaller_before(ranks) - (last_use + 1)
    distances[last_use < 0] = NEVER - 1
    return distances


def _count_smaller_before(ranks: Integers) -> Integers:
    """For each element of a permutation, how many smaller ones stand before it.

    Sorts stably by one bit after the other, from the highest: two elements part where their highest
    different bit is looked at, and are still in their first order there.
    """
    num = len(ranks)
    counts = np.zeros(num, np.int64)
    current, places = ranks, np.arange(num)
    for bit in range(max(num - 1, 0).bit_length() - 1, -1, -1):
        start = (current >> (bit + 1)) << (bit + 1)
        is_one = (current >> bit & 1).astype(bool)
        zeros_before = np.zeros(num + 1, np.int64)
        np.cumsum(~is_one, out=zeros_before[1:])
        zeros_in_group = zeros_before[:-1] - zeros_before[start]
        counts[current[is_one]] += zeros_in_group[is_one]
        ones_begin = np.minimum(start + (1 << bit), num)
        target = np.where(is_one, ones_begin + places - start - zeros_in_group, start + zeros_in_group)
        following = np.empty(num, np.int64)
        following[target] = current
        current = following
    return counts[ranks]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFigures:
    """The blocks that one tier serves and takes. Tiers keep the blocks used last, written through."""

    tier: str
    capacity_blocks: int | None
    hit_blocks: int
    written_blocks: int


def simulate_tiers(reuse: Reuse, tiers: Mapping[str, int | None]) -> list[TierFigures]:
    """Find the tier, fastest first, that serves each hit of a prefix, and what each tier has to take.

    `tiers` have their capacity in blocks, None: without limit.

    A prefix is served if every block of it is in some tier. A tier takes each block that it does not have.
    """
    largest = max((limit_of(capacity) for capacity in tiers.values()), default=0)
    is_hit = reuse.capacity_for_prefix <= largest
    is_served = np.zeros(len(is_hit), bool)
    figures = []
    for name, capacity in tiers.items():
        has_block = reuse.capacity_for_block <= limit_of(capacity)
        serves = is_hit & has_block & ~is_served
        is_served |= serves
        figures.append(
            TierFigures(
                tier=name,
                capacity_blocks=capacity,
                hit_blocks=int(serves.sum()),
                written_blocks=0 if capacity == 0 else int((~has_block).sum()),
            )
        )
    return figures
