"""A trace of inference requests, each a sequence of token blocks, and the hits of caches of every size.

A block's number stands for the block and everything before it in its request, so equal numbers mean equal
cache content. Requests are in the order of their arrival. Hits are those of LRU caches, found by stack
distances: a cache of C blocks has a block exactly if fewer than C different blocks were used since the
block's last use. A block counts as a hit only if every earlier block of its request hits too. Pure numpy: O(n
log n) for n blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTrace:
    """Requests as columns. Request `r` has the blocks `block_ids[first_block[r]:first_block[r + 1]]`.

    Block numbers are dense: 0 to `num_unique - 1`, in the order of their first use.
    """

    name: str
    block_tokens: int
    arrival_s: NDArray[np.float64]
    input_tokens: Integers
    output_tokens: Integers
    first_block: Integers
    block_ids: Integers
    notes: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        """The number of requests."""
        return len(self.arrival_s)

    @property
    def num_blocks(self) -> int:
        """The number of blocks of all requests."""
        return len(self.block_ids)

    @property
    def num_unique(self) -> int:
        """The number of different blocks."""
        return int(self.block_ids.max()) + 1 if self.num_blocks else 0

    @property
    def blocks_of_requests(self) -> Integers:
        """The number of blocks of each request."""
        return np.diff(self.first_block)

    def head(self, num_requests: int) -> BlockTrace:
        """Return a trace of the first `num_requests` requests."""
        kept = min(num_requests, self.num_requests)
        return replace(
            self,
            arrival_s=self.arrival_s[:kept],
            input_tokens=self.input_tokens[:kept],
            output_tokens=self.output_tokens[:kept],
            first_block=self.first_block[: kept + 1],
            block_ids=self.block_ids[: self.first_block[kept]],
        )

    def with_chunks_of(self, chunk_tokens: int) -> BlockTrace:
        """Return the same requests in chunks whose size divides the block size or is a multiple of it.

        A chunk of several blocks is identified by its last block, which stands for everything before it.
        """
        if chunk_tokens == self.block_tokens:
            return self
        if chunk_tokens < 1 or (self.block_tokens % chunk_tokens and chunk_tokens % self.block_tokens):
            raise UsageError(
                f"Blocks of {self.block_tokens} tokens cannot be cut into chunks of {chunk_tokens}",
                where=self.name,
                fix=f"Choose a divisor or a multiple of {self.block_tokens}.",
            )
        counts = self.blocks_of_requests
        if chunk_tokens < self.block_tokens:  # blocks are split; the last block of a request may be shorter
            parts = self.block_tokens // chunk_tokens
            ids, listed = (self.block_ids[:, None] * parts + np.arange(parts)).ravel(), counts * parts
            chunks = np.minimum(-(-self.input_tokens // chunk_tokens), listed)
            is_kept = _position_in_request(listed) < np.repeat(chunks, listed)
        else:
            parts = chunk_tokens // self.block_tokens
            ids, position, chunks = self.block_ids, _position_in_request(counts), -(-counts // parts)
            is_kept = (position % parts == parts - 1) | (position == np.repeat(counts, counts) - 1)
        return replace(
            self,
            block_tokens=chunk_tokens,
            block_ids=number_densely(ids[is_kept]),
            first_block=offsets(chunks),
        )

    def statistics(self) -> dict[str, Any]:
        """Return statistics of this trace, as plain data."""
        uses = np.bincount(self.block_ids, minlength=1)
        return {
            "requests": self.num_requests,
            "span_s": float(self.arrival_s[-1] - self.arrival_s[0]) if self.num_requests else 0.0,
            "block_tokens": self.block_tokens,
            "blocks": self.num_blocks,
            "unique_blocks": self.num_unique,
            "used_once": float(np.mean(uses == 1)) if self.num_blocks else 0.0,
            "input_tokens": _describe(self.input_tokens),
            "output_tokens": _describe(self.output_tokens),
        }


def offsets(counts: Integers) -> Integers:
    """Return the start offset of each part, given the parts' lengths, followed by the end of the last one."""
    ends: Integers = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends


def number_densely(ids: Integers) -> Integers:
    """Replace each id with 0, 1, 2, ... in the order of first appearance."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    names = np.empty(len(first), np.int64)
    names[np.argsort(first, kind="stable")] = np.arange(len(first))
    return names[inverse]


def _position_in_request(counts: Integers) -> Integers:
    """Return the position of each block within its request."""
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(offsets(counts)[:-1], counts)


def _describe(values: Integers) -> dict[str, float]:
    if not len(values):
        return {}
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {
        "mean": float(values.mean()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(values.max()),
    }


NEVER: Final = 1 << 36
"""The distance of a first use: no cache has the block yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """For each block, the smallest cache that has it, and the smallest that also has all blocks before it."""

    capacity_for_block: Integers
    capacity_for_prefix: Integers

    def prefix_hit_ratio(self, capacity_blocks: int | None) -> float:
        """Return the share of blocks that a cache of this size serves; None means unlimited size."""
        if not len(self.capacity_for_prefix):
            return 0.0
        return float(np.mean(self.capacity_for_prefix <= limit_of(capacity_blocks)))


def limit_of(capacity_blocks: int | None) -> int:
    """Return the capacity as a number. A cache without limit has every block that was used before."""
    return NEVER - 1 if capacity_blocks is None else min(capacity_blocks, NEVER - 1)


def find_reuse(trace: BlockTrace) -> Reuse:
    """Find the smallest caches that serve each block of the trace."""
    needed = stack_distances(trace.block_ids) + 1
    requests = np.repeat(np.arange(trace.num_requests, dtype=np.int64), trace.blocks_of_requests)
    # A running maximum that starts over with each request: later requests are shifted above all earlier ones.
    shift = requests * (2 * NEVER)
    return Reuse(capacity_for_block=needed, capacity_for_prefix=np.maximum.accumulate(needed + shift) - shift)


def stack_distances(ids: Integers) -> Integers:
    """Return, for each use of an id, the number of other ids since its last use; `NEVER` for a first use.

    Let i be a use and p the last use before it of the same id. The other ids are counted by their first uses
    after p: uses j between p and i whose own last use is not after p. No use up to p has a later last use, so
    it is enough to count the uses before i whose last use is at most p, and to subtract p + 1.
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
    """Return, for each element of a permutation, the number of smaller elements before it.

    Sorts stably by one bit after another, from the highest. Two elements are separated at the highest bit in
    which they differ, and until then keep their original order.
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


def serving_tiers(reuse: Reuse, capacities: Iterable[int | None]) -> Integers:
    """Return the number of the tier, fastest first, that serves each block; -1 if its prefix is not served.

    Tiers keep the most recently used blocks. A prefix is served if every block of it is in some tier.
    """
    limits = [limit_of(capacity) for capacity in capacities]
    is_hit = reuse.capacity_for_prefix <= max(limits)
    fastest = np.select([reuse.capacity_for_block <= limit for limit in limits], range(len(limits)), -1)
    return np.where(is_hit, fastest, -1)


def simulate_tiers(reuse: Reuse, tiers: Mapping[str, int | None]) -> list[dict[str, Any]]:
    """Return the hits that each tier serves, and the blocks written to it because it lacks them.

    `tiers` maps each tier to its capacity in blocks; None means unlimited. Writes go through to every tier.
    """
    served_by = serving_tiers(reuse, tiers.values())
    return [
        {
            "tier": name,
            "capacity_blocks": capacity,
            "hit_blocks": int((served_by == number).sum()),
            "written_blocks": int((reuse.capacity_for_block > limit_of(capacity)).sum())
            if capacity != 0
            else 0,
        }
        for number, (name, capacity) in enumerate(tiers.items())
    ]


_MEDIAN_INPUT: Final = 6_909
_INPUT_SIGMA: Final = 1.053
_MOST_INPUT: Final = 126_195
_MEAN_OUTPUT: Final = 343
_OUTPUT_DEVIATION: Final = 215
_MOST_OUTPUT: Final = 2_000
_MEAN_LOOK_BACK: Final = 8.5
"""The mean distance from a request to the one it continues, in requests per user: with fewer users, fewer
requests of others lie in between.
"""
_LOOK_BACK_SHAPE: Final = 1.5
_CONTINUED: Final = 0.83
"""The share of requests that continue an earlier one; with it, an unlimited cache has a prefix hit ratio of
0.37.
"""


def generate_trace(
    *,
    requests: int = 1000,
    users: int = 100,
    think_s: float = 30.0,
    block_tokens: int = 512,
    seed: int = 42,
    most_input_tokens: int = _MOST_INPUT,
) -> BlockTrace:
    """Generate requests with the statistics of a published trace; equal seeds give equal traces.

    Lengths, outputs and reuse are fitted to the conversation trace of Mooncake (FAST'25). Inputs are
    lognormal (median 6,909 tokens, p90 27,000, p99 80,000), and a request that continues an earlier one looks
    back over a gamma-distributed time. In that trace, the mean look-back is 850 requests, or 250 s. 100 users
    who send a request every 30 s reach the trace's rate, so the mean is 8.5 requests of each user. Each of
    the `users` sends a request every `think_s` seconds on average, independently of the others.
    """
    num, tokens = requests, block_tokens
    # PCG64 by name, because the generator behind default_rng may change between versions.
    random = np.random.Generator(np.random.PCG64(seed))
    gaps_s = random.exponential(think_s / users, num)
    drawn = np.rint(random.lognormal(np.log(_MEDIAN_INPUT), _INPUT_SIGMA, num))
    inputs: Integers = np.clip(drawn, 1, most_input_tokens).astype(np.int64)
    outputs = np.clip(np.rint(random.normal(_MEAN_OUTPUT, _OUTPUT_DEVIATION, num)), 1, _MOST_OUTPUT)
    is_continued = random.random(num) < _CONTINUED
    mean_look_back = _MEAN_LOOK_BACK * users
    look_back = 1 + random.gamma(_LOOK_BACK_SHAPE, mean_look_back / _LOOK_BACK_SHAPE, num).astype(np.int64)
    counts = -(-inputs // tokens)
    blocks: list[list[int]] = []
    fresh = 1
    for request, count in enumerate(counts.tolist()):
        earlier = request - int(look_back[request])
        # Block 0, the system prompt, opens every request.
        prefix = blocks[earlier] if is_continued[request] and earlier >= 0 else [0]
        shared = min(len(prefix), max(1, count - 1))
        own = [*prefix[:shared], *range(fresh, fresh + count - shared)]
        fresh += count - shared
        blocks.append(own)
    arrivals_s = np.cumsum(gaps_s)
    return BlockTrace(
        name=f"generated-{seed}",
        block_tokens=tokens,
        arrival_s=arrivals_s - arrivals_s[:1],
        input_tokens=inputs,
        output_tokens=outputs.astype(np.int64),
        first_block=offsets(counts),
        block_ids=number_densely(np.concatenate([np.array(own, np.int64) for own in blocks])),
    )
