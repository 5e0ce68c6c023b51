"""Ranks that stop together: a supervisor for each rank, and one control server for the job.

Callers need only three functions: `launch_job` runs a launch plan to its end, `join_job` wraps the main
program of each rank, and `join_ranks` connects to the other ranks without supervision.

    launch_job: control server <-- TCP --+-- supervisor of rank 0 <-- socket pair -- rank 0
         |  starts                       +-- supervisor of rank 1 <-- socket pair -- rank 1
         +--> launcher --> relay --> supervisor --> rank                  (three processes for each rank)

The launcher starts one process for each rank, and `join_job` forks it twice (`fork_supervisor`): the first
process becomes the relay, because the launcher knows its PID and signals it; its child is the supervisor; the
program continues as the supervisor's child. In this order the supervisor is the parent of the rank, so it
reaps the rank and adopts the processes that the rank leaves behind, and the relay is the parent of the
supervisor, so that it can clean up after a supervisor that was killed. The forks come before any thread is
started, because a fork copies only the calling thread, and locks held by other threads would stay locked in
the child forever.

In a job that another launcher started, rank 0's supervisor runs the control server.
"""

from penstock.cluster.supervision.job_launch import launch_job
from penstock.cluster.supervision.rank_process import join_job, join_ranks

__all__ = ["join_job", "join_ranks", "launch_job"]
