"""A rank under MPI, of two on each of four hosts: saves to caches, loses two of them, and gets them back."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tests.support.bytes_engine import BytesEngine

from penstock.checkpoint.engine import LoadChoice, SaveChoice
from penstock.checkpoint.levels.cache import CacheLevel
from penstock.checkpoint.levels.options import DoubleParity
from penstock.cluster.supervision.rank_process import join_ranks
from penstock.environment import process_environment
from penstock.storage import open_storage

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm

LOST = (1, 2)


def content(rank: int) -> bytearray:
    return bytearray(np.random.default_rng(rank).bytes(50_000 + 1000 * rank))


def lose_two_hosts_and_get_them_back(comm: Comm, folder: Path) -> None:
    host, engine = f"host-{comm.rank // 2}", BytesEngine()
    storage = open_storage(str(folder / host), {})
    level = CacheLevel(storage, comm, schemes=[DoubleParity(group=4)], domain=host, block_bytes=16_384)
    prepared = engine.prepare({"bytes": content(comm.rank)}, comm, SaveChoice())
    level.complete(level.start("step-1"), prepared, prepared.stage(), number=1, facts={"step": 1})
    if comm.rank == 0:
        for lost in LOST:
            shutil.rmtree(folder / f"host-{lost}")
    comm.barrier(awaiting="the loss of two hosts")
    found = level.assess("step-1")
    assert found.lost == (2, 3, 4, 5), found
    level.repair("step-1", found)
    found = level.assess("step-1")
    assert not found.lost, found
    state = {"bytes": bytearray(50_000 + 1000 * comm.rank)}
    engine.load(state, level.view("step-1", found), comm, LoadChoice(), None)
    assert state["bytes"] == content(comm.rank)
    level.close()
    sys.stdout.write(f"rank {comm.rank} is right\n")


if __name__ == "__main__":
    job = join_ranks(process_environment())
    lose_two_hosts_and_get_them_back(job, Path(sys.argv[1]))
    job.close()
