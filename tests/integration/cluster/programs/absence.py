"""A job whose rank 0 does not enter a barrier: the others print that they timed out."""

from __future__ import annotations

import os
import sys
import time

from penstock.cluster.supervision import join_ranks
from penstock.environment import process_environment
from penstock.testing.comm_contract import check_absence

LIMIT_S = 0.5

comm = join_ranks(process_environment())
comm.barrier(awaiting="all ranks to start", timeout_s=60.0)
check_absence(comm, limit_s=LIMIT_S)
if comm.rank != 0:
    sys.stdout.write("noticed\n")
    sys.stdout.flush()
# An MPI job ends with the first of its ranks that leaves unfinalised, and rank 0 serves torch's store: the
# others stay until all have noticed, and rank 0 until they are gone.
time.sleep((2 if comm.rank == 0 else 1) * 4 * LIMIT_S)
# The ranks are out of step: nothing may be finalised.
os._exit(0)
