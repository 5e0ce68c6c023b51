"""The end of a job, from Slurm's variables."""

import pytest

from penstock.cluster.launcher_env import read_slurm_end_s
from penstock.errors import Unavailable


def test_the_end_of_a_slurm_job_is_read() -> None:
    assert read_slurm_end_s({"SLURM_JOB_END_TIME": "1700000000"}) == 1_700_000_000.0


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_END_TIME": "soon"}])
def test_without_an_end_of_the_job_the_error_names_the_fix(environment: dict[str, str]) -> None:
    with pytest.raises(Unavailable, match="Give the time limit in seconds"):
        read_slurm_end_s(environment)
