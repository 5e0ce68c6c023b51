"""Two ranks, of which rank 1 exits normally before the other has finished."""

from __future__ import annotations

import sys

from penstock.cluster.supervision import join_job
from penstock.environment import process_environment

with join_job(process_environment()) as comm:
    comm.barrier(awaiting="all ranks to start", timeout_s=60.0)
    if comm.rank == 1:
        sys.exit(0)
    comm.barrier(awaiting="all ranks to drink", timeout_s=0.5)
