"""What a workload of key-value caches needs, in bytes, and what the tool that came before says it needs.

Pure. Sizes follow from tokens and the model's layout alone; the proof is the multiplication itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from penstock.kvcache.block_trace import BlockTrace
from penstock.kvcache.lru_simulation import find_reuse
from penstock.kvcache.models import KvModel

GIB: Final = 1 << 30

UPSTREAM_BYTES_PER_TOKEN: Final[Mapping[str, int]] = MappingProxyType(
    {
        "tiny-1b": 768,
        "mistral-7b": 4096,
        "llama2-7b": 8192,
        "llama3.1-8b": 4096,
        "llama3.1-70b-instruct": 16_384,
    }
)
"""What `datasize` of MLPerf Storage v3.0 multiplies with: 20 to 64 times less than its run writes."""
_TYPICAL_TOKENS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "tiny-1b": 2048,
        "mistral-7b": 4096,
        "llama2-7b": 4096,
        "llama3.1-8b": 8192,
        "llama3.1-70b-instruct": 8192,
    }
)
DEFAULT_TOKENS: Final = 8192
_HIT_SHARES: Final = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRequest:
    """Users of a model with so many tokens of context each; `tokens` None: what is typical of the model."""

    model: KvModel
    users: int
    tokens: int | None = None
    tensor: int = 1
    pipeline: int = 1

    @property
    def tokens_per_user(self) -> int:
        """The context of one user."""
        return _TYPICAL_TOKENS.get(self.model.name, DEFAULT_TOKENS) if self.tokens is None else self.tokens


def size_for_users(request: SizeRequest) -> dict[str, Any]:
    """The bytes of all users' contexts, as plain data, beside what the v3.0 tool makes of them."""
    model, tokens = request.model, request.tokens_per_user
    total = request.users * tokens * model.bytes_per_token
    document = {
        "model": model.name,
        "bytes_per_token": model.bytes_per_token,
        "rank_bytes_per_token": model.rank_bytes_per_token(tensor=request.tensor, pipeline=request.pipeline),
        "users": request.users,
        "tokens_per_user": tokens,
        "user_bytes": tokens * model.bytes_per_token,
        "total_bytes": total,
        "upstream": None,
    }
    if (theirs := UPSTREAM_BYTES_PER_TOKEN.get(model.name)) is not None:
        document["upstream"] = {
            "bytes_per_token": theirs,
            "total_bytes": request.users * tokens * theirs,
            "times_too_small": model.bytes_per_token / theirs,
        }
    return document


def size_for_trace(trace: BlockTrace, model: KvModel) -> dict[str, Any]:
    """What a trace writes and can read, and how large a cache has to be for a share of its hits."""
    reuse = find_reuse(trace)
    block_bytes = trace.block_tokens * model.bytes_per_token
    best = reuse.prefix_hit_ratio(None)
    hits = reuse.capacity_for_prefix[reuse.capacity_for_prefix < reuse.capacity_for_prefix.max(initial=1)]
    hits.sort()
    capacities = []
    for share in _HIT_SHARES:
        blocks = int(hits[max(0, -(-int(share * 1e6) * len(hits) // 10**6) - 1)]) if len(hits) else 0
        capacities.append(
            {"share_of_hits": share, "capacity_blocks": blocks, "capacity_bytes": blocks * block_bytes}
        )
    return {
        "model": model.name,
        "bytes_per_token": model.bytes_per_token,
        "block_tokens": trace.block_tokens,
        "block_bytes": block_bytes,
        "unique_bytes": trace.num_unique * block_bytes,
        "hit_bytes": round(best * trace.num_blocks) * block_bytes,
        "prefix_hit_ratio": best,
        "capacities": capacities,
    }
