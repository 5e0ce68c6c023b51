"""A trace of requests with the measured statistics of a published one, in any length, from a seed.

Lengths, outputs and reuse are fitted to the conversation trace of Mooncake (FAST'25): inputs are lognormal
(median 6,909 tokens, p90 27,000, p99 80,000), and a request that continues an earlier one looks back over a
gamma-distributed time. Its mean there is 850 requests or 250 s: at its rate, which is that of 100 users who
send one each 30 s, 8.5 requests of each user. Same seed, same trace, whatever the machine.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.kvcache.block_trace import BlockTrace, Integers, number_densely, offsets

_MEDIAN_INPUT: Final = 6_909
_INPUT_SIGMA: Final = 1.053
_MOST_INPUT: Final = 126_195
_MEAN_OUTPUT: Final = 343
_OUTPUT_DEVIATION: Final = 215
_MOST_OUTPUT: Final = 2_000
_MEAN_LOOK_BACK: Final = 8.5
"""In requests of each user: fewer users come back after fewer requests of others."""
_LOOK_BACK_SHAPE: Final = 1.5
_CONTINUED: Final = 0.83
"""The share of requests that continue an earlier one; with it the unlimited prefix hit ratio is 0.37."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSettings:
    """`users` send a request each `think_s` seconds on average, independently of each other."""

    requests: int = 1000
    users: int = 100
    think_s: float = 30.0
    block_tokens: int = 512
    seed: int = 42
    most_input_tokens: int = _MOST_INPUT


def generate_trace(settings: GeneratorSettings) -> BlockTrace:
    """The trace of these settings."""
    num, tokens = settings.requests, settings.block_tokens
    # PCG64 by name: what default_rng is may change between versions.
    random = np.random.Generator(np.random.PCG64(settings.seed))
    gaps_s = random.exponential(settings.think_s / settings.users, num)
    drawn = np.rint(random.lognormal(np.log(_MEDIAN_INPUT), _INPUT_SIGMA, num))
    inputs: Integers = np.clip(drawn, 1, settings.most_input_tokens).astype(np.int64)
    outputs = np.clip(np.rint(random.normal(_MEAN_OUTPUT, _OUTPUT_DEVIATION, num)), 1, _MOST_OUTPUT)
    is_continued = random.random(num) < _CONTINUED
    mean_look_back = _MEAN_LOOK_BACK * settings.users
    look_back = 1 + random.gamma(_LOOK_BACK_SHAPE, mean_look_back / _LOOK_BACK_SHAPE, num).astype(np.int64)
    counts = -(-inputs // tokens)
    blocks: list[list[int]] = []
    fresh = 1
    for request, count in enumerate(counts.tolist()):
        earlier = request - int(look_back[request])
        # Block 0 opens every request: the system's prompt.
        prefix = blocks[earlier] if is_continued[request] and earlier >= 0 else [0]
        shared = min(len(prefix), max(1, count - 1))
        own = [*prefix[:shared], *range(fresh, fresh + count - shared)]
        fresh += count - shared
        blocks.append(own)
    arrivals_s = np.cumsum(gaps_s)
    return BlockTrace(
        name=f"generated-{settings.seed}",
        block_tokens=tokens,
        arrival_s=arrivals_s - arrivals_s[:1],
        input_tokens=inputs,
        output_tokens=outputs.astype(np.int64),
        first_block=offsets(counts),
        block_ids=number_densely(np.concatenate([np.array(own, np.int64) for own in blocks])),
    )
