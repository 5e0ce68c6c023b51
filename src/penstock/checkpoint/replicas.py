"""Compares what several ranks hold of the same region, before each of them writes a part of it.

Ranks share the writing of what they all hold, so replicas that have drifted apart would make a checkpoint
that is a mix of them. Ranks first compare one digest of all that they hold; then one rank of each set with
equal digests sends rank 0 the sums of its regions. Invariant: all ranks raise the same error, or none does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import xxhash

from penstock.checkpoint.state.tensors import contiguous_bytes, flatten_bytes
from penstock.cluster.comm import Comm, decide_on_rank0, run_on_all_ranks
from penstock.errors import RankError, name_some
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.checkpoint.state.tensors import LocalState

NUM_WORDS: Final = 1 << 22
"""Words of 4 bytes that a device sums at a time, which takes 64 MiB of its memory."""
NUM_NAMED: Final = 3

logger = logging.getLogger(__name__)


def compare_replicas(state: LocalState, comm: Comm) -> float:
    """Raise the same `RankError` on all ranks if any region differs among them; else the seconds it took.

    Only regions with equal bounds are compared, and not the small tensors of which each rank's own is saved.
    """
    start_s = time.perf_counter()
    if comm.size == 1:
        return 0.0
    regions = _regions_of(state)

    def sum_regions() -> dict[str, int]:
        with torch.no_grad():
            return {
                name: sum_bytes(memory) if memory.is_cpu else sum_on_device(memory)
                for name, memory in sorted(regions.items())
            }

    sums = run_on_all_ranks(comm, sum_regions, awaiting="all ranks to sum what they hold")
    digest = xxhash.xxh3_128_digest(repr(sums).encode())
    digests = comm.gather(digest, awaiting="all ranks to compare what they hold")
    differences = decide_on_rank0(
        comm,
        lambda: sums if len(set(digests)) > 1 and digests.index(digest) == comm.rank else None,
        lambda received: _find_differences(received, digests),
        awaiting="rank 0 to compare the sums of all ranks",
    )
    if differences:
        raise RankError(
            f"Replicas have drifted apart: {name_some(differences, NUM_NAMED, separator='; ')}",
            fix="A checkpoint would be a mix of them. Look for a seed, a skipped update or a device at fault,"
            " and restore the newest step; replicas='share' saves without comparing.",
        )
    took_s = time.perf_counter() - start_s
    size = format_bytes(sum(memory.nbytes for memory in regions.values()))
    logger.info("rank %d compared %s with other ranks in %.3f s", comm.rank, size, took_s)
    return took_s


def _find_differences(received: Sequence[dict[str, int] | None], digests: Sequence[bytes]) -> list[str]:
    """Describe what differs among which ranks; a rank stands for all that have its digest."""
    ranks_by_sum: dict[str, dict[int, list[int]]] = {}
    for digest, sums in zip(digests, received, strict=True):
        alike = [rank for rank, other in enumerate(digests) if other == digest]
        for name, value in (sums or {}).items():
            ranks_by_sum.setdefault(name, {}).setdefault(value, []).extend(alike)
    return [
        f"{name} differs between {_name_groups(sorted(map(sorted, by_sum.values())))}"
        for name, by_sum in sorted(ranks_by_sum.items())
        if len(by_sum) > 1
    ]


def _name_groups(groups: Sequence[Sequence[int]]) -> str:
    return " and ".join(
        f"rank {group[0]}" if len(group) == 1 else f"ranks {name_some(group, 8)}" for group in groups
    )


def _regions_of(state: LocalState) -> dict[str, torch.Tensor]:
    """The memory of each region, by a name that tells equal bounds, `w[0:4, 0:8]`."""
    holdings = state.holdings
    apart = {held.name for held in holdings.small}
    found: dict[str, torch.Tensor] = {}
    for row, number in enumerate(holdings.regions.tensor.tolist()):
        facts = holdings.tensors[number]
        if facts.name in apart:
            continue
        offsets, sizes = holdings.regions.region(row, len(facts.shape))
        name, memory = facts.name, state.view(facts.name, offsets, sizes)
        if sizes != facts.shape:
            ranges = (f"{begin}:{begin + extent}" for begin, extent in zip(offsets, sizes, strict=True))
            name = f"{name}[{', '.join(ranges)}]"
        # Sums on devices are of another kind, and never equal those on processors.
        found[name if memory.is_cpu else f"{name} on devices"] = memory
    return found


def sum_bytes(memory: torch.Tensor) -> int:
    """XXH3-64 of a tensor's elements in main memory, in row-major order."""
    memory = memory.detach().resolve_conj().resolve_neg().contiguous()
    return xxhash.xxh3_64_intdigest(contiguous_bytes(memory).data)


def sum_on_device(memory: torch.Tensor) -> int:
    """A sum of a tensor's elements, computed where they are.

    Weights of `NUM_WORDS` at a time are odd, so that no single word can change unnoticed, and differ from
    place to place; the weighted sums go through XXH3-64.
    """
    content = flatten_bytes(memory.detach().resolve_conj().resolve_neg().contiguous())
    words = torch.nn.functional.pad(content, (0, -content.numel() % 4)).view(torch.int32)
    places = torch.arange(min(NUM_WORDS, words.numel()), dtype=torch.int64, device=words.device)
    weights = (places * 0x9E3779B97F4A7C1 ^ (places >> 7)) * 2 + 1
    partial_sums = [(part * weights[: part.numel()]).sum() for part in torch.split(words, NUM_WORDS)]
    sums = torch.stack(partial_sums).cpu().numpy() if partial_sums else np.zeros(0)
    return xxhash.xxh3_64_intdigest(sums.tobytes() + content.numel().to_bytes(8, "little"))
