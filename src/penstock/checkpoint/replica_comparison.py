"""Compares what several ranks hold of the same region, before each of them writes a part of it.

Ranks share the writing of regions that all of them hold, so if their values differed, the checkpoint would be
a mix of them. For every save, `add_digests` sums the tensors that nothing proves to be replicas; if they
differ, the plan saves each rank's own. `compare_replicas` also compares proven replicas, and refuses a save
if they differ: ranks first compare one digest of all that they hold; then one rank of each set with equal
digests sends rank 0 the sums of its regions. Invariant: all ranks raise the same error, or none does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel

from penstock.checkpoint.plan.save_plan import HeldObject
from penstock.checkpoint.state.tensors import flatten_bytes, has_placements
from penstock.checkpoint.state.walk import RANK_MARK, Leaf, Owner, Path, is_of_one_rank
from penstock.cluster.comm import Comm, decide_on_rank0, run_on_all_ranks
from penstock.errors import RankError, name_some
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.checkpoint.state.regions import TensorFacts
    from penstock.checkpoint.state.tensors import LocalState

NUM_WORDS: Final = 1 << 22
"""The number of 4-byte words that a device sums at a time, which takes 64 MiB of its memory."""
FEW_BYTES: Final = 64 * 1024
"""A tensor of at most this size takes less time to copy from its device than to sum there."""
NUM_NAMED: Final = 3

logger = logging.getLogger(__name__)


def add_digests(
    state: LocalState, parts: Mapping[str, Any], ranks: Collection[int], *, only_expected: bool = False
) -> LocalState:
    """Return `state` with digests of the tensors in `parts` that nothing proves to be equal on these ranks.

    With `only_expected`, add only digests of tensors that are expected to differ.
    """
    is_proven = _find_proof(parts, ranks)
    memories: dict[str, torch.Tensor] = {}
    for leaf in state.leaves:
        # Buffers that DDP copies from another rank have no shard here.
        shards = state.shards.get(leaf.name)
        if shards and not has_placements(leaf.value):
            is_compared = is_expected_to_differ(leaf) if only_expected else not is_proven(leaf)
            if is_compared:
                memories[leaf.name] = shards[0].memory
    compared = []
    for name, value in sum_tensors(memories).items():
        memory = memories[name]
        kind = xxhash.xxh3_64_intdigest(repr((memory.dtype, memory.shape)).encode())
        digest = value.to_bytes(8, "big") + kind.to_bytes(8, "big")
        compared.append(HeldObject(name=name, size_bytes=memory.nbytes, digest=digest))
    return replace(state, holdings=replace(state.holdings, compared=tuple(compared)))


def is_expected_to_differ(leaf: Leaf) -> bool:
    """Return True for tensors of data loaders and the like, and for states of random number generators."""
    value = leaf.value
    is_generator = value.dtype == torch.uint8 and value.dim() == 1 and value.nbytes <= FEW_BYTES
    return leaf.owner in (Owner.STATEFUL, Owner.EXTRA) or is_generator


def _find_proof(parts: Mapping[str, Any], ranks: Collection[int]) -> Callable[[Leaf], bool]:
    """Return a predicate: True if a leaf is known to be equal on all `ranks` and need not be compared.

    DDP keeps parameters equal, and with them optimizer states of the same shape (a shard would have a
    different shape). Scalars that an optimizer keeps for a DTensor count its steps.
    """
    synced: set[int] = set()
    names: set[str] = set()
    for key, part in parts.items():
        if isinstance(part, DistributedDataParallel):
            if not set(ranks).issubset(dist.get_process_group_ranks(part.process_group)):
                continue
            module, ignored = part.module, part.parameters_to_ignore
            synced.update(id(each) for name, each in module.named_parameters() if name not in ignored)
            named = list(module.named_parameters(remove_duplicate=False))
            names.update(f"{key}.module.{name}" for name, each in named if id(each) in synced)
            if part.broadcast_buffers:
                names.update(
                    f"{key}.module.{name}" for name, _ in module.named_buffers() if name not in ignored
                )
    parameters = {
        str(key): list(chain.from_iterable(group["params"] for group in part.param_groups))
        for key, part in parts.items()
        if isinstance(part, torch.optim.Optimizer)
    }

    def is_proven(leaf: Leaf) -> bool:
        if leaf.owner is not Owner.OPTIMIZER:
            return leaf.name in names
        key, _, number, *slot = (*leaf.path, "", "", "")
        own = parameters[str(key)]
        if not slot[0] or not str(number).isdecimal() or int(number) >= len(own):
            return False
        parameter, is_number = own[int(number)], leaf.value.dim() == 0
        if id(parameter) in synced:
            return is_number or bool(leaf.value.shape == parameter.shape)
        return is_number and has_placements(parameter)

    return is_proven


def warn_of_own_values(
    tensors: Sequence[TensorFacts],
    paths: Mapping[str, Path],
    num_ranks: int,
    state: LocalState,
    warned: set[str],
) -> None:
    """On rank 0, warn once about tensors that are saved for each rank, unless they are expected to differ."""
    held = [leaf for leaf in state.leaves if leaf.name in state.shards]
    silent = {leaf.name for leaf in held if is_expected_to_differ(leaf)} | warned
    of_ranks = [facts for facts in tensors if is_of_one_rank(facts.name, paths)]
    added = [(facts.name.rpartition(RANK_MARK)[0], facts.size_bytes) for facts in of_ranks]
    names = dict.fromkeys(name for name, _ in added if name not in silent)
    if names:
        logger.warning(
            "Ranks have different values of %s. Each rank's own are saved, %s in addition, and only %d ranks"
            " can load them. If they are shards, as in the optimizer of an FSDP1 module, save"
            " torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer), which any"
            " number of ranks can load. If they should be equal, replicas='compare' refuses to save them",
            name_some(list(names), NUM_NAMED),
            format_bytes(sum(size for name, size in added if name in names)),
            num_ranks,
        )
    warned.update(names)


def compare_replicas(state: LocalState, comm: Comm) -> float:
    """Raise the same `RankError` on all ranks if any region differs among them; return the seconds taken.

    Compares only regions with equal bounds; skips tensors that are saved separately for each rank.
    """
    start_s = time.perf_counter()
    if comm.size == 1:
        return 0.0
    regions = _regions_of(state)

    sums = run_on_all_ranks(comm, lambda: sum_tensors(regions), awaiting="all ranks to sum what they hold")
    digest = xxhash.xxh3_128_digest(repr(sorted(sums.items())).encode())
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
    """Describe which regions differ among which ranks; a rank stands for all that have its digest."""
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
    """Return the memory of each region, by a name that includes the bounds, such as `w[0:4, 0:8]`."""
    holdings = state.holdings
    apart = {held.name for held in holdings.compared}
    found: dict[str, torch.Tensor] = {}
    for facts, (offsets, sizes) in holdings.regions.with_facts(holdings.tensors):
        if facts.name in apart:
            continue
        name, memory = facts.name, state.view(facts.name, offsets, sizes)
        if sizes != facts.shape:
            ranges = (f"{begin}:{begin + extent}" for begin, extent in zip(offsets, sizes, strict=True))
            name = f"{name}[{', '.join(ranges)}]"
        # Devices compute a different kind of sum, which never equals a processor's.
        found[name if memory.is_cpu else f"{name} on devices"] = memory
    return found


def sum_tensors(memories: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the sum of each tensor's elements, by name."""
    sums: dict[str, int] = {}
    apart: dict[torch.device, list[str]] = {}
    with torch.no_grad():
        for name, memory in memories.items():
            if memory.is_cpu:
                sums[name] = sum_bytes(memory)
            else:
                apart.setdefault(memory.device, []).append(name)
        for names in apart.values():
            sums.update(zip(names, sum_on_device([memories[name] for name in names]), strict=True))
    return sums


def sum_bytes(memory: torch.Tensor) -> int:
    """Return the XXH3-64 of a tensor's elements in main memory, in row-major order."""
    return xxhash.xxh3_64_intdigest(_content_of(memory).numpy().data)


def sum_on_device(memories: Sequence[torch.Tensor]) -> list[int]:
    """Return sums of the elements of tensors on one device, computed there, with a single copy to the host.

    Blocks of `NUM_WORDS` are multiplied by weights and added up. The weights are odd, so that no change of a
    single word goes unnoticed, and differ between positions. The weighted sums, or the bytes themselves if
    there are few, go through XXH3-64.
    """
    sizes, copied = [], []
    for memory in memories:
        content = _content_of(memory)
        sizes.append(content.numel())
        copied.append(content if content.numel() <= FEW_BYTES else flatten_bytes(_weigh(content)))
    parts = torch.split(torch.cat(copied).cpu(), [part.numel() for part in copied])
    return [
        xxhash.xxh3_64_intdigest(part.numpy().tobytes() + size.to_bytes(8, "little"))
        for part, size in zip(parts, sizes, strict=True)
    ]


def _content_of(memory: torch.Tensor) -> torch.Tensor:
    return flatten_bytes(memory.detach().resolve_conj().resolve_neg().contiguous())


def _weigh(content: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums of `NUM_WORDS` words at a time."""
    words = torch.nn.functional.pad(content, (0, -content.numel() % 4)).view(torch.int32)
    places = torch.arange(min(NUM_WORDS, words.numel()), dtype=torch.int64, device=words.device)
    weights = (places * 0x9E3779B97F4A7C1 ^ (places >> 7)) * 2 + 1
    return torch.stack([(part * weights[: part.numel()]).sum() for part in torch.split(words, NUM_WORDS)])
