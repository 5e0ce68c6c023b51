"""A rank that has something in its output buffer when it joins."""

from __future__ import annotations

import sys

from penstock.cluster.supervision import join_job
from penstock.environment import process_environment

sys.stdout.write("before\n")
with join_job(process_environment()) as comm:
    comm.barrier(awaiting="all ranks to start", timeout_s=60.0)
    sys.stdout.write("after\n")
