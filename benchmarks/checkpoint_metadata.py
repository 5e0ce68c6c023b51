"""Planning and describing a checkpoint of very many pieces: 32 ranks x 1,000 tensors, sharded by rows.

Ours beside what torch's own planner and pickle need for the same pieces, in one process. Figures are pieces a
second. Run as a program, it also plans for 1,024 ranks, which torch's planner takes minutes for.
"""

import pickle
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from harness import Ratio, interleave
from penstock.checkpoint.formats.description import metadata_bytes, read_metadata
from penstock.checkpoint.plan.load_plan import LoadOptions, plan_load, plan_rank_load
from penstock.checkpoint.plan.save_plan import Holdings, RankRegions, SaveOptions, plan_save
from penstock.checkpoint.state.regions import (
    CheckpointIndex,
    Regions,
    StoredRegions,
    TensorFacts,
    element_sizes,
)

NUM_TENSORS = 1000
ROWS, COLUMNS = 8192, 1024
NUM_RANKS = 32
"""Beside torch; with more, its side takes longer than all other benchmarks together."""


def measure(repetitions: int) -> list[Ratio]:
    """Ours beside torch's."""
    held = sharded(NUM_RANKS)
    plans = _torch_plans(NUM_RANKS)
    num_pieces = NUM_RANKS * NUM_TENSORS

    def side(name: str, work: Callable[[], object]) -> Callable[[], Mapping[str, float]]:
        def timed() -> Mapping[str, float]:
            start_s = time.perf_counter()
            work()
            return {name: num_pieces / (time.perf_counter() - start_s)}

        return timed

    ours = described(plan_save(held, SaveOptions()))
    pairs: tuple[tuple[str, Callable[[], object], Callable[[], object]], ...] = (
        (
            "global save plan",
            lambda: plan_save(held, SaveOptions()),
            lambda: create_default_global_save_plan(plans),
        ),
        (
            ".metadata read, by the allow-list",
            lambda: read_metadata(ours, "benchmark"),
            lambda: pickle.loads(ours),
        ),
    )
    ratios: list[Ratio] = []
    for name, mine, theirs in pairs:
        ratios += interleave(side(name, mine), side(name, theirs), repetitions=repetitions, unit="pieces/s")
    return ratios


def sharded(num_ranks: int) -> list[Holdings]:
    """What ranks hold of tensors that are sharded by rows over all of them."""
    tensors = tuple(
        TensorFacts(f"layers.{number}.weight", "float32", (ROWS, COLUMNS), 4) for number in range(NUM_TENSORS)
    )
    rows = ROWS // num_ranks
    held = []
    for rank in range(num_ranks):
        offsets = np.zeros((NUM_TENSORS, 2), dtype=np.int64)
        offsets[:, 0] = rank * rows
        sizes = np.empty((NUM_TENSORS, 2), dtype=np.int64)
        sizes[:] = rows, COLUMNS
        held.append(Holdings(tensors=tensors, regions=Regions(np.arange(NUM_TENSORS), offsets, sizes)))
    return held


def stored_as(shared: RankRegions) -> StoredRegions:
    """Where the planned pieces would lie, one file a rank."""
    size = shared.regions.num_bytes(element_sizes(shared.tensors))
    end = np.cumsum(size)
    return StoredRegions(
        shared.regions, shared.rank, end - size, size, end - size, np.zeros(len(size), dtype=np.bool_)
    )


def described(shared: RankRegions) -> bytes:
    """The `.metadata` of the planned checkpoint."""
    files = tuple(f"__{rank}_0.distcp" for rank in range(shared.num_ranks))
    return metadata_bytes(CheckpointIndex(shared.tensors, stored_as(shared), (), files))


def _torch_plans(num_ranks: int) -> list[SavePlan]:
    rows = ROWS // num_ranks
    properties, size = TensorProperties(dtype=torch.float32), torch.Size((ROWS, COLUMNS))
    plans = []
    for rank in range(num_ranks):
        offsets = torch.Size((rank * rows, 0))
        chunk = ChunkStorageMetadata(offsets, torch.Size((rows, COLUMNS)))
        items = [
            WriteItem(
                MetadataIndex(f"layers.{number}.weight", offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for number in range(NUM_TENSORS)
        ]
        plans.append(SavePlan(items))
    return plans


def main() -> None:
    """The ratios, and then ours for a thousand ranks."""
    for ratio in measure(repetitions=3):
        print(ratio.line(None))
    for num_ranks in (256, 1024):
        held = sharded(num_ranks)
        start_s = time.perf_counter()
        shared = plan_save(held, SaveOptions())
        saved_s = time.perf_counter()
        item_bytes, options = element_sizes(shared.tensors), LoadOptions()
        plan = plan_load(stored_as(shared), item_bytes, [each.regions for each in held], options)
        plan_rank_load(plan, item_bytes, 0, options)
        loaded_s = time.perf_counter()
        print(
            f"{num_ranks} ranks x {NUM_TENSORS} tensors: save planned in {saved_s - start_s:.2f} s, "
            f"load in {loaded_s - saved_s:.2f} s"
        )
        begin_s = time.process_time()
        content = described(shared)
        written_s = time.process_time()
        read_metadata(content, "benchmark")
        print(
            f"  .metadata of {len(shared.regions):,} parts: written in {written_s - begin_s:.2f} CPU s, "
            f"read in {time.process_time() - written_s:.2f}"
        )


if __name__ == "__main__":
    main()
