"""What a scheduler says of this job's end."""

from __future__ import annotations

import pytest

from penstock.cluster.launcher_env import read_slurm_end_s
from penstock.errors import Unavailable


def test_slurm_says_when_the_job_ends() -> None:
    assert read_slurm_end_s({"SLURM_JOB_END_TIME": "1700000000"}) == 1_700_000_000.0


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_END_TIME": "soon"}])
def test_where_it_does_not_the_error_says_what_to_give(environment: dict[str, str]) -> None:
    with pytest.raises(Unavailable, match="Give the time limit in seconds"):
        read_slurm_end_s(environment)
