"""Compares what several ranks hold of the same region, before each of them writes a part of it.

Ranks share the writing of what they all hold, so replicas that have drifted apart would make a checkpoint
that is a mix of them. Ranks first compare one sum of all that they hold; then one rank of each set with equal
sums sends rank 0 the sums of its regions. Invariant: all ranks raise the same error, or none does.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import xxhash

from penstock.checkpoint.file_layout import payload_of_tensor
from penstock.checkpoint.state.tensors import contiguous_bytes, flatten_bytes
from penstock.cluster.comm import Comm, decide_on_rank0, run_on_all_ranks
from penstock.errors import RankError, name_some
from penstock.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.checkpoint.state.tensors import LocalState

BLOCK_BYTES: Final = 1 << 20
"""Size of the copies by which tensors that are not contiguous are summed."""
NUM_WORDS: Final = 1 << 22
"""Words of 4 bytes that a device sums at a time, which takes 64 MiB of its memory."""
NUM_NAMED: Final = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class RegionSums:
    """The regions of one rank by the hash of name and place, ascending, and a sum of the bytes of each."""

    keys: NDArray[np.uint64]
    sums: NDArray[np.uint64]

    def digests(self) -> tuple[bytes, bytes]:
        """Digests of the regions, and of their sums."""
        return xxhash.xxh3_128_digest(self.keys.tobytes()), xxhash.xxh3_128_digest(self.sums.tobytes())


@dataclass(frozen=True, slots=True)
class _Difference:
    """A region of which ranks hold different bytes, and which ranks hold the same."""

    key: int
    groups: tuple[tuple[int, ...], ...]


def compare_replicas(state: LocalState, comm: Comm) -> float:
    """Raise the same `RankError` on all ranks if any region differs among them; else the seconds it took.

    Only regions with equal bounds are compared, and not the small tensors of which each rank's own is saved.
    """
    start_s = time.perf_counter()
    if comm.size == 1:
        return 0.0
    regions = _regions_of(state)
    summed = run_on_all_ranks(
        comm,
        lambda: _sum_regions({key: view() for key, (_, view) in regions.items()}),
        awaiting="all ranks to sum what they hold",
    )
    _require_equal(summed, {key: name for key, (name, _) in regions.items()}, comm)
    took_s = time.perf_counter() - start_s
    num_bytes = sum(view().nbytes for _, view in regions.values())
    logger.info("rank %d compared %s with other ranks in %.3f s", comm.rank, format_bytes(num_bytes), took_s)
    return took_s


def _require_equal(summed: RegionSums, names: dict[int, str], comm: Comm) -> None:
    """Raise the same error on all ranks if a region differs; `names` has this rank's regions by key."""
    digests = comm.gather(summed.digests(), awaiting="all ranks to compare what they hold")
    if len(set(digests)) == 1:
        return
    first = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
    found = decide_on_rank0(
        comm,
        lambda: summed if first[digests[comm.rank]] == comm.rank else None,
        lambda received: _find_differences(received, digests),
        awaiting="rank 0 to compare the sums of all ranks",
    )
    if found:
        known = {each.key: names[each.key] for each in found if each.key in names}
        all_names = comm.gather(known, awaiting="the names of what differs")
        raise _error({key: name for own in all_names for key, name in own.items()}, found)


def _regions_of(state: LocalState) -> dict[int, tuple[str, Callable[[], torch.Tensor]]]:
    """By key, the region as people call it, and its memory."""
    holdings = state.holdings
    apart = {held.name for held in holdings.small}
    found: dict[int, tuple[str, Callable[[], torch.Tensor]]] = {}
    for row, number in enumerate(holdings.regions.tensor.tolist()):
        facts = holdings.tensors[number]
        if facts.name in apart:
            continue
        offsets, sizes = holdings.regions.region(row, len(facts.shape))
        name = facts.name
        if sizes != facts.shape:
            ranges = (f"{begin}:{begin + extent}" for begin, extent in zip(offsets, sizes, strict=True))
            name = f"{name}[{', '.join(ranges)}]"
        view = partial(state.view, facts.name, offsets, sizes)
        # Sums on devices are of another kind, and never equal those on processors.
        key = xxhash.xxh3_64_intdigest(f"{facts.name}\0{offsets}\0{sizes}\0{view().is_cpu}".encode())
        found[key] = (name, view)
    return found


def _sum_regions(memory: dict[int, torch.Tensor]) -> RegionSums:
    keys = sorted(memory)
    with torch.no_grad():
        sums = [sum_bytes(memory[key]) if memory[key].is_cpu else sum_on_device(memory[key]) for key in keys]
    return RegionSums(np.array(keys, dtype=np.uint64), np.array(sums, dtype=np.uint64))


def sum_bytes(memory: torch.Tensor) -> int:
    """XXH3-64 of a tensor's elements in main memory, in row-major order."""
    memory = memory.detach().resolve_conj().resolve_neg()
    if memory.is_contiguous():
        return xxhash.xxh3_64_intdigest(contiguous_bytes(memory).data)
    payload = payload_of_tensor(memory)
    running, block = xxhash.xxh3_64(), memoryview(bytearray(min(BLOCK_BYTES, memory.nbytes)))
    for start in range(0, memory.nbytes, BLOCK_BYTES):
        part = block[: memory.nbytes - start]
        payload.copy_into(start, part)
        running.update(part)
    return running.intdigest()


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


def _find_differences(
    received: Sequence[RegionSums | None], digests: Sequence[tuple[bytes, bytes]]
) -> list[_Difference]:
    """Find out what differs, and among which ranks."""
    senders = [(rank, summed) for rank, summed in enumerate(received) if summed is not None]
    keys = np.concatenate([summed.keys for _, summed in senders])
    sums = np.concatenate([summed.sums for _, summed in senders])
    order = np.lexsort((sums, keys))
    keys, sums = keys[order], sums[order]
    differing = np.unique(keys[1:][(keys[1:] == keys[:-1]) & (sums[1:] != sums[:-1])])
    if not len(differing):
        return []
    ranks_with = defaultdict(list)
    for rank, digest in enumerate(digests):
        ranks_with[digest].append(rank)
    found = []
    for key in differing.tolist():
        groups: dict[int, list[int]] = defaultdict(list)
        for rank, summed in senders:
            at = int(np.searchsorted(summed.keys, np.uint64(key)))
            if at < len(summed.keys) and int(summed.keys[at]) == key:
                groups[int(summed.sums[at])] += ranks_with[digests[rank]]
        found.append(_Difference(key, tuple(sorted(tuple(sorted(ranks)) for ranks in groups.values()))))
    return found


def _error(names: dict[int, str], found: Sequence[_Difference]) -> RankError:
    described = sorted(f"{names[each.key]} differs between {_name_groups(each.groups)}" for each in found)
    return RankError(
        f"Replicas have drifted apart: {name_some(described, NUM_NAMED, separator='; ')}",
        fix="A checkpoint would be a mix of them. Look for a seed, a skipped update or a device at fault, and"
        " restore the newest step; replicas='share' saves without comparing.",
    )


def _name_groups(groups: Sequence[Sequence[int]]) -> str:
    return " and ".join(
        f"rank {group[0]}" if len(group) == 1 else f"ranks {name_some(group, 8)}" for group in groups
    )
