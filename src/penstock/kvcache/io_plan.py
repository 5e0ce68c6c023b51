"""The operations of a workload, decided before any I/O: requests, hits and evictions in virtual time.

A plan depends on the workload and the tiers alone, never on threads, ranks or the speed of storage; its
digest proves that two runs did the same. Ranks divide it by entry, so all operations on an entry run in order
on one rank. Pure.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from fractions import Fraction
from hashlib import blake2b
from math import ceil
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.kvcache.block_trace import BlockTrace, Integers, find_reuse, limit_of, serving_tiers
from penstock.kvcache.models import KvModel

OPERATION: Final = np.dtype(
    [
        ("time_s", "<f8"),
        ("request", "<i8"),
        ("op", "u1"),
        ("tier", "u1"),
        ("part", "<i4"),
        ("entry", "<i8"),
        ("bytes", "<i8"),
    ]
)
Operations = NDArray[np.void]


class Op(IntEnum):
    """The kind of an operation on an entry."""

    READ = 0
    WRITE = 1
    DELETE = 2


class TierNumber(IntEnum):
    """The tier that holds an entry; only operations on storage are I/O."""

    GPU = 0
    CPU = 1
    STORAGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectLayout:
    """The division of a chunk's cache into objects: by tensor and pipeline ranks, and optionally by layer.

    Tensor ranks divide KV heads; if there are more ranks than heads, some ranks have the same heads. With
    MLA, all tensor ranks have the same latent. Data that several ranks have is stored only once. `scale`
    shrinks all objects.
    """

    tensor: int = 1
    pipeline: int = 1
    is_per_layer: bool = False
    scale: Fraction = Fraction(1)

    def part_bytes(self, model: KvModel, tokens: int) -> list[int]:
        """Return the sizes of a chunk's objects, in the order of their numbers."""
        splits = 1 if model.latent_dims else min(self.tensor, model.kv_heads)
        # Numbers of layers and of heads per part, which differ by 1 at most.
        layer_parts = model.layers if self.is_per_layer else self.pipeline
        layers = [(model.layers + part) // layer_parts for part in reversed(range(layer_parts))]
        shares = [(model.kv_heads + part) // splits for part in reversed(range(splits))]
        return [
            ceil(tokens * count * model.layer_bytes_per_token * share * self.scale / model.kv_heads)
            for count in layers
            if count
            for share in shares
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSizes:
    """The room of each tier, in chunks; None for storage means unlimited."""

    gpu: int = 0
    cpu: int = 0
    storage: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IoPlan:
    """Operations, in the order in which their effects must appear.

    `input_tokens`, `hit_tokens` (those that storage serves), `arrival_s` and, if the workload has chunks,
    `chunks` have one value for each request. `parts` is the number of objects of an entry, `capacity_bytes`
    the room in storage, `scale` the share of each object's bytes that is transferred.
    """

    name: str
    operations: Operations
    parts: int
    input_tokens: Integers
    output_tokens: Integers
    hit_tokens: Integers
    bytes_per_token: int
    capacity_bytes: int | None = None
    scale: float = 1.0
    arrival_s: NDArray[np.float64] | None = None
    chunks: Integers | None = None
    requests: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, [("level", "u1")]))
    """The facts of each request of mlperf-v3; empty for other workloads."""
    facts: dict[str, Any]

    @property
    def num_requests(self) -> int:
        """The number of requests."""
        return len(self.input_tokens)

    @property
    def digest(self) -> str:
        """The digest of the operations; equal lists have equal digests."""
        return blake2b(self.operations.tobytes(), digest_size=16).hexdigest()

    @property
    def in_storage(self) -> Operations:
        """The operations that are I/O."""
        stored: Operations = self.operations[self.operations["tier"] == TierNumber.STORAGE]
        return stored

    def share_of(self, rank: int, num_ranks: int) -> Operations:
        """Return the I/O of one rank: all operations on its entries."""
        own = self.in_storage
        # Objects are divided among ranks by a hash.
        mixed = (own["entry"] * self.parts + own["part"]).astype(np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
        share: Operations = own[(mixed >> np.uint64(33)) % np.uint64(num_ranks) == rank]
        return share

    def most_stored_bytes(self, num_ranks: int) -> int:
        """Return the most bytes stored at a time, however far ranks drift apart: the sum of their maxima."""
        most = 0
        for rank in range(num_ranks):
            share = self.share_of(rank, num_ranks)
            signs = np.select([share["op"] == Op.WRITE, share["op"] == Op.DELETE], [1, -1], 0)
            most += int(np.cumsum(signs * share["bytes"]).max(initial=0))
        return most

    def document(self) -> dict[str, Any]:
        """Return the plan in figures, as plain data."""
        storage, all_tiers = self.in_storage, self.operations
        counts = {
            op.name.lower() + "s": {
                "operations": int((storage["op"] == op).sum()),
                "bytes": int(storage["bytes"][storage["op"] == op].sum()),
            }
            for op in Op
        }
        read_bytes = all_tiers[all_tiers["op"] == Op.READ]
        return {
            "name": self.name,
            "digest": self.digest,
            "operations": len(all_tiers),
            "requests": self.num_requests,
            **counts,
            "hit_bytes_by_tier": {
                tier.name.lower(): int(read_bytes["bytes"][read_bytes["tier"] == tier].sum())
                for tier in TierNumber
            },
            "capacity_bytes": self.capacity_bytes,
            **self.facts,
        }


def plan_blocks(
    trace: BlockTrace, model: KvModel, *, tiers: TierSizes, layout: ObjectLayout | None = None
) -> IoPlan:
    """Plan the reads, writes and deletions of a cache with these tiers for the requests of a trace.

    Tiers keep the most recently used chunks, and writes go through to storage. Each request reads its prefix
    from the fastest tier that has it, then writes what storage lacks. Computing takes no virtual time, so
    each request finds what earlier ones wrote.
    """
    reuse = find_reuse(trace)
    layout = layout or ObjectLayout()
    sizes = layout.part_bytes(model, trace.block_tokens)
    requests = np.repeat(np.arange(trace.num_requests, dtype=np.int64), trace.blocks_of_requests)
    # In the order of `TierNumber`.
    served_by = serving_tiers(reuse, (tiers.gpu, tiers.cpu, tiers.storage))
    reads = np.flatnonzero(served_by >= 0)
    is_stored = reuse.capacity_for_block <= limit_of(tiers.storage)
    writes = np.flatnonzero(~is_stored) if tiers.storage != 0 else np.empty(0, np.int64)
    evicted = find_evictions(trace.block_ids, tiers.storage)
    deletes = np.flatnonzero(evicted >= 0)
    places = np.concatenate([reads, deletes, writes])
    kinds = np.repeat([Op.READ, Op.DELETE, Op.WRITE], [len(reads), len(deletes), len(writes)])
    rows = np.empty(len(places), OPERATION)
    rows["request"] = requests[places]
    rows["time_s"] = trace.arrival_s[rows["request"]]
    rows["op"] = kinds
    rows["entry"] = np.concatenate([trace.block_ids[reads], evicted[deletes], trace.block_ids[writes]])
    rows["tier"] = np.where(kinds == Op.READ, served_by[places], TierNumber.STORAGE)
    # For each request: first all reads, then each write after the eviction that makes room for it.
    order = np.lexsort((kinds != Op.DELETE, places, kinds != Op.READ, rows["request"]))
    hits = np.bincount(requests[served_by == TierNumber.STORAGE], minlength=trace.num_requests)
    return IoPlan(
        name=trace.name,
        operations=_divide(rows[order], sizes),
        parts=len(sizes),
        input_tokens=trace.input_tokens,
        output_tokens=trace.output_tokens,
        hit_tokens=np.minimum(hits * trace.block_tokens, trace.input_tokens),
        bytes_per_token=model.bytes_per_token,
        capacity_bytes=None if tiers.storage is None else tiers.storage * sum(sizes),
        scale=float(layout.scale),
        arrival_s=trace.arrival_s,
        chunks=trace.blocks_of_requests,
        facts={
            "model": model.name,
            "chunk_tokens": trace.block_tokens,
            "chunk_bytes": sum(sizes),
            "objects_per_chunk": len(sizes),
            "scale": str(layout.scale),
            "chunks": trace.num_blocks,
            "prefix_hit_ratio": float(np.mean(served_by >= 0)) if trace.num_blocks else 0.0,
        },
    )


def find_evictions(ids: Integers, capacity: int | None) -> Integers:
    """Return, for each use of a block, the block that an LRU cache of this size evicts for it, or -1."""
    evicted = np.full(len(ids), -1, np.int64)
    if not capacity:
        return evicted
    cache: OrderedDict[int, None] = OrderedDict()
    for place, block in enumerate(ids.tolist()):
        if block in cache:
            cache.move_to_end(block)
            continue
        cache[block] = None
        if len(cache) > capacity:
            evicted[place] = cache.popitem(last=False)[0]
    return evicted


def _divide(rows: Operations, sizes: Sequence[int]) -> Operations:
    """Repeat each operation for every object of its entry."""
    divided = np.repeat(rows, len(sizes))
    divided["part"] = np.tile(np.arange(len(sizes)), len(rows))
    divided["bytes"] = np.tile(np.array(sizes, np.int64), len(rows))
    return divided
