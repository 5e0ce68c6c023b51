"""Saves and loads through Megatron core's own entries, with its strategies and ours, on one and two ranks."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from functools import partial
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402 - after the filter
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402
from tests.integration.checkpoint.adapters.programs.ranks import on_forked_ranks, without_cuda  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

import penstock.checkpoint.adapters.megatron as ours  # noqa: E402
from penstock.errors import DataDamaged  # noqa: E402


def state_of(rank: int, fill: float | None = None) -> dict[str, Any]:
    """A state as trainers describe it: sharded, replicated, an object of each rank, and what is common."""
    size = dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(6, 5, generator=generator)
    bias = torch.arange(7, dtype=torch.bfloat16)
    if fill is not None:
        rows, bias = torch.full_like(rows, fill), torch.full_like(bias, fill)
    return {
        "rows": ShardedTensor.from_rank_offsets("model.rows", rows, (0, rank, size)),
        "bias": ShardedTensor.from_rank_offsets("model.bias", bias, replica_id=rank),
        "noise": ShardedObject("noise", {"seed": rank if fill is None else -1}, (size,), (rank,)),
        "iteration": 0 if fill is not None else 12,
    }


def is_loaded(rank: int, loaded: Any) -> bool:
    wanted = state_of(rank)
    tensors = all(torch.equal(loaded[name], wanted[name].data) for name in ("rows", "bias"))
    return tensors and loaded["noise"] == {"seed": rank} and loaded["iteration"] == 12


def folder_for(root: Path, name: str) -> str:
    (root / name).mkdir(exist_ok=True)
    dist.barrier()
    return str(root / name)


def round_trips(rank: int, root: Path) -> dict[str, Any]:
    # Megatron spawns a process for this queue of each rank, which would take seconds to import torch.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    seen: dict[str, Any] = {}
    mine = folder_for(root, "mine")
    dist_checkpointing.save(state_of(rank), mine, ours.PenstockSaveStrategy())
    seen["stock_loads_ours"] = is_loaded(rank, dist_checkpointing.load(state_of(rank, 0.0), mine))
    theirs = folder_for(root, "theirs")
    dist_checkpointing.save(state_of(rank), theirs)
    strategy = ours.PenstockLoadStrategy()
    seen["ours_loads_stock"] = is_loaded(rank, dist_checkpointing.load(state_of(rank, 0.0), theirs, strategy))
    seen["ours_loads_ours"] = is_loaded(rank, dist_checkpointing.load(state_of(rank, 0.0), mine, strategy))
    dist_checkpointing.save(state_of(rank), mine, ours.PenstockSaveStrategy(separation_hint="model.rows"))
    seen["files"] = sorted(each.name for each in Path(mine).iterdir())
    seen["saved_over"] = is_loaded(rank, dist_checkpointing.load(state_of(rank, 0.0), mine))
    return seen | background(rank, root) | iterations(rank, root)


def background(rank: int, root: Path) -> dict[str, Any]:
    """Through Megatron's queue, which forks; tensors are overwritten as soon as it returns."""
    folder = folder_for(root, "background")
    queue = AsyncCallsQueue(persistent=False)
    state = state_of(rank)
    request = dist_checkpointing.save(state, folder, ours.PenstockSaveStrategy(), async_sharded_save=True)
    queue.schedule_async_request(request)
    state["rows"].data.fill_(9)
    state["bias"].data.fill_(9)
    queue.maybe_finalize_async_calls(blocking=True)
    loaded = dist_checkpointing.load(state_of(rank, 0.0), folder)
    queue.close()
    return {"background_is_of_the_moment": is_loaded(rank, loaded)}


def iterations(rank: int, root: Path) -> dict[str, Any]:
    """Folders and tracker; the next save fails, and the tracker stays."""
    run = root / "run"
    run.mkdir(exist_ok=True)
    found = [ours.load_iteration(run, state_of(rank, 0.0))[0]]
    dist.barrier()
    ours.save_iteration(run, 12, state_of(rank))
    found.append(ours.load_iteration(run, state_of(rank, 0.0))[0])
    seen: dict[str, Any] = {"found": found, "tracker": (run / ours.TRACKER_NAME).read_text()}
    loaded = ours.load_iteration(run, state_of(rank, 0.0), strategy=ours.PenstockLoadStrategy())[1]
    seen["iteration_loaded"] = is_loaded(rank, loaded)
    queue = AsyncCallsQueue(persistent=False)
    folder = Path(ours.iteration_folder(run, 13))
    folder.mkdir(exist_ok=True)
    dist.barrier()
    request = dist_checkpointing.save(
        state_of(rank), str(folder), ours.PenstockSaveStrategy(), async_sharded_save=True
    )
    request.add_finalize_fn(partial(ours.commit_iteration, run, 13))
    if rank == 0:
        # What the forked writer is about to create lies there already, and is no file.
        for number in range(2):
            (folder / f"__0_{number}.distcp" / "in the way").mkdir(parents=True)
    dist.barrier()
    queue.schedule_async_request(request)
    failure = ""
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except CheckpointException as error:
        failure = type(error).__name__
    seen["failure"] = failure
    seen["tracker_after"] = (run / ours.TRACKER_NAME).read_text()
    dist.barrier()
    if rank == 0:
        (run / ours.TRACKER_NAME).write_text("")
        try:
            ours.latest_iteration(run)
        except DataDamaged as error:
            seen["empty_tracker"] = str(error)
    seen["has_metadata_after"] = (folder / ".metadata").exists()
    return seen


def main(root: Path) -> None:
    without_cuda()
    seen = {str(size): on_forked_ranks(size, round_trips, root / str(size)) for size in (1, 2)}
    print(json.dumps(seen))  # noqa: T201 - what the test reads
