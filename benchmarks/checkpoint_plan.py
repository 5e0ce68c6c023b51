"""Planning a save and a load of very many ranks: what it costs rank 0 once, and the others, in one process.

    python benchmarks/checkpoint_plan.py [ranks [tensors [replicas]]]      (1024 1000 1)

Packs what each rank holds, plans on rank 0 as `JobPlanner` does, and unpacks each rank's part; then does the
same for a load of what was saved, by as many ranks. Only the messages are missing.
"""

import pickle
import resource
import statistics
import sys
import time
from typing import Any

import numpy as np

from penstock.checkpoint.plan.load_plan import LoadOptions, divide_plan, plan_load, plan_rank_load
from penstock.checkpoint.plan.save_plan import (
    HeldObject,
    Holdings,
    JobPlan,
    SaveOptions,
    pack_holdings,
    plan_shares,
    summarize,
    unpack_share,
)
from penstock.checkpoint.state.regions import Regions, StoredRegions, TensorFacts, element_sizes

ROWS, COLUMNS = 16_384, 1024


def hold(rank: int, size: int, num_tensors: int, replicas: int, tensors: tuple[TensorFacts, ...]) -> Holdings:
    """One rank's part of tensors that are sharded by rows over size / replicas ranks, and a few objects."""
    rows = ROWS * replicas // size
    regions = Regions(
        np.arange(num_tensors),
        np.tile([rank // replicas * rows, 0], (num_tensors, 1)),
        np.tile([rows, COLUMNS], (num_tensors, 1)),
    )
    objects = (
        HeldObject(name="step", size_bytes=100, digest=bytes(16)),
        HeldObject(name="rng", size_bytes=5000, digest=rank.to_bytes(16, "big")),
    )
    paths: dict[str, tuple[str | int, ...]] = {
        facts.name: ("layers", number, "weight") for number, facts in enumerate(tensors)
    }
    paths |= {each.name: (each.name,) for each in objects}
    return Holdings(tensors=tensors, regions=regions, objects=objects, paths=paths, entries=("step", "rng"))


def measure(size: int, num_tensors: int, replicas: int) -> None:
    """Plan once, and print what it cost."""
    tensors = tuple(
        TensorFacts(f"layers.{number}.weight", "float32", (ROWS, COLUMNS), 4) for number in range(num_tensors)
    )
    own_s, payloads = [], []
    for rank in range(size):
        held = hold(rank, size, num_tensors, replicas, tensors)
        start_s = time.process_time()
        payloads.append(pickle.dumps(pack_holdings(held), pickle.HIGHEST_PROTOCOL))
        own_s.append(time.process_time() - start_s)
    before_bytes, start_s = peak_bytes(), time.process_time()
    plan, parts = plan_on_rank0(payloads)
    rank0_s, grown = time.process_time() - start_s, peak_bytes() - before_bytes
    for rank in range(size):
        held = hold(rank, size, num_tensors, replicas, tensors)
        start_s = time.process_time()
        share = unpack_share(pickle.loads(parts[rank]), held, rank)
        own_s[rank] += time.process_time() - start_s
    digest = len(pickle.dumps(summarize(share, held)))
    sent, received = sum(map(len, payloads)), sum(map(len, parts))
    print(f"{size:,} ranks x {num_tensors:,} tensors, {replicas} replica(s): {len(plan.tensors):,} tensors")
    print(f"  rank 0, once: {rank0_s:.1f} CPU s, {grown / 2**20:,.0f} MiB, {sent / 2**20:,.0f} MiB received")
    print(f"  others: median {statistics.median(own_s):.4f}, most {max(own_s):.3f} CPU s; ", end="")
    print(f"{sent // size:,} bytes sent, {received // size:,} received")
    print(f"  an unchanged plan: {digest} bytes sent by a rank, and 4 received")

    measure_load(plan, [pickle.loads(part) for part in parts], size, num_tensors, replicas)


def measure_load(plan: JobPlan, parts: list[Any], size: int, num_tensors: int, replicas: int) -> None:
    """Plan a load by ranks that want what they held, from one file of each rank."""
    regions = Regions.concatenated([part.regions for part in parts])
    element_bytes = element_sizes(plan.tensors)
    num_bytes = regions.num_bytes(element_bytes)
    file = np.repeat(np.arange(size), [len(part.regions) for part in parts])
    begin = np.cumsum(num_bytes) - num_bytes
    offset = begin - begin[np.searchsorted(file, file)]
    stored = StoredRegions(regions, file, offset, num_bytes, offset, np.zeros(len(file), dtype=np.bool_))
    wanted = [hold(rank, size, num_tensors, replicas, plan.tensors).regions for rank in range(size)]
    before_bytes, start_s = peak_bytes(), time.process_time()
    shared = plan_load(stored, element_bytes, wanted, LoadOptions())
    divided = divide_plan(shared, size)
    distinct = {id(part): pickle.dumps(part, pickle.HIGHEST_PROTOCOL) for part in divided}
    rank0_s, grown = time.process_time() - start_s, peak_bytes() - before_bytes
    own_s = []
    for rank in range(0, size, max(1, size // 64)):
        start_s = time.process_time()
        part = pickle.loads(distinct[id(divided[rank])])
        plan_rank_load(part, element_bytes, rank, LoadOptions())
        own_s.append(time.process_time() - start_s)
    received = sum(map(len, distinct.values())) // len(distinct)
    print(f"  load: rank 0, once: {rank0_s:.1f} CPU s, {grown / 2**20:,.0f} MiB; ", end="")
    print(f"others: most {max(own_s):.3f} CPU s, {received:,} bytes received")


def plan_on_rank0(payloads: list[bytes]) -> tuple[JobPlan, list[bytes]]:
    """Plan for all ranks from what they sent; what each receives."""
    columns = [pickle.loads(payload) for payload in payloads]
    plan, parts = plan_shares(columns, SaveOptions(), 1)
    return plan, [pickle.dumps(part, pickle.HIGHEST_PROTOCOL) for part in parts]


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    chosen = [int(argument) for argument in sys.argv[1:]]
    measure(*(chosen + [1024, 1000, 1][len(chosen) :]))
