"""What a scheduler has told this job about itself: when its time is up. Read once, at a job's beginning."""

from __future__ import annotations

from penstock.environment import Environment, process_environment
from penstock.errors import Unavailable

SLURM_END = "SLURM_JOB_END_TIME"


def slurm_end_s(environment: Environment | None = None) -> float:
    """When Slurm ends this job, in seconds since 1970; `Unavailable` where Slurm has not said it."""
    said = (process_environment() if environment is None else environment).get(SLURM_END, "")
    if not said.isdecimal():
        raise Unavailable(
            f"Slurm has not said when this job ends: {SLURM_END} is {said or 'not set'!r}",
            fix="Give the time limit in seconds, or run inside a job of Slurm 22.05 or later.",
        )
    return float(said)
