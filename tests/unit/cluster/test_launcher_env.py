import pytest

from penstock.cluster.launcher_env import (
    Launcher,
    LauncherRank,
    detect_rank,
    host_label,
    require_matching_size,
)
from penstock.environment import user_settings
from penstock.errors import UsageError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_HOSTNAME": "127.0.0.2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_RANK": "3"}
PALS = {"PALS_RANKID": "5", "PMI_RANK": "5", "PMI_SIZE": "6"}
SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "16"}


@pytest.mark.parametrize(
    ("environment", "ranked"),
    [
        (TORCHRUN, LauncherRank(Launcher.TORCHRUN, 1, 2)),
        (HYDRA, LauncherRank(Launcher.HYDRA, 2, 4)),
        (OPEN_MPI, LauncherRank(Launcher.OPEN_MPI, 3, 8)),
        (PALS, LauncherRank(Launcher.PALS, 5, 6)),
        (SRUN, LauncherRank(Launcher.SRUN, 0, 16)),
        ({**SRUN, **TORCHRUN}, LauncherRank(Launcher.TORCHRUN, 1, 2)),
        ({**SRUN, **HYDRA}, LauncherRank(Launcher.HYDRA, 2, 4)),
    ],
)
def test_each_launcher_is_detected_by_its_variables(
    environment: dict[str, str], ranked: LauncherRank
) -> None:
    assert detect_rank(environment) == ranked


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"PMI_RANK": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        {**SRUN, "SLURM_STEP_ID": str(0xFFFFFFFA)},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["nothing", "half of torchrun", "half of MPI", "batch script", "interactive step", "srun of one"],
)
def test_a_process_without_a_launcher_is_not_a_rank(environment: dict[str, str]) -> None:
    assert detect_rank(environment) is None


def test_a_variable_that_holds_no_number_is_named() -> None:
    with pytest.raises(UsageError, match="PMI_RANK holds 'two'") as caught:
        detect_rank({"PMI_RANK": "two", "PMI_SIZE": "4"})
    assert "Unset PMI_RANK" in caught.value.fix


def test_a_size_that_contradicts_the_launcher_is_refused() -> None:
    ranked = LauncherRank(Launcher.TORCHRUN, 1, 2)
    require_matching_size(ranked, None)
    require_matching_size(ranked, 2)
    with pytest.raises(UsageError, match="--ranks is 4, but torchrun started 2"):
        require_matching_size(ranked, 4)


def test_the_users_host_label_comes_before_the_launchers() -> None:
    assert host_label({**HYDRA, "PENSTOCK_HOST": "rack7"}, "vm") == "rack7"
    assert host_label(HYDRA, "vm") == "127.0.0.2"
    assert host_label({}, "vm") == "vm"


def test_the_token_of_a_launch_is_not_a_user_setting() -> None:
    environment = {"PENSTOCK_HOST": "a", "PENSTOCK_CONTROL_TOKEN": "hush", "PENSTOCK_CONTROL_ADDRESS": "x:1"}
    assert user_settings({**environment, "AWS_REGION": "eu", "HOME": "/"}) == {
        "PENSTOCK_HOST": "a",
        "AWS_REGION": "eu",
    }
