"""A job whose rank 0 enters no barrier: each rank leaves a file if the others timed out as they must."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.support.comm_contract import check_absence

from penstock.cluster.supervision import join_ranks
from penstock.environment import process_environment

folder = Path(sys.argv[1])
comm = join_ranks(process_environment())
comm.barrier(awaiting="all ranks to start", timeout_s=60.0)
check_absence(comm)
(folder / str(comm.rank)).touch()
# A launcher of MPI kills the others when one rank leaves unfinalised, and rank 0 serves torch's store: none
# leaves before all have noticed, and rank 0 last.
until_s = time.monotonic() + 60
while len(list(folder.iterdir())) < comm.size and time.monotonic() < until_s:
    time.sleep(0.05)
if comm.rank == 0:
    time.sleep(1)
# The ranks are out of step: nothing may be finalised.
os._exit(0)
