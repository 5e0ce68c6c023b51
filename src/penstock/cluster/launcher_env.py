"""The variables of launchers and batch systems: which rank this process is, and when the job ends.

Pure. Invariant: the innermost launcher wins: torchrun inside srun is treated as torchrun.
"""

from dataclasses import dataclass
from enum import StrEnum

from penstock.environment import HOST_LABEL, Environment, process_environment
from penstock.errors import Unavailable, UsageError


class Launcher(StrEnum):
    """Launchers of ranks. Several programs may belong to one launcher."""

    TORCHRUN = "torchrun"
    PALS = "PALS"
    OPEN_MPI = "Open MPI"
    HYDRA = "mpiexec"
    SRUN = "srun"


@dataclass(frozen=True, slots=True)
class LauncherRank:
    """The rank of one process among those that `launcher` started together."""

    launcher: Launcher
    rank: int
    size: int


_PLACES = (
    (Launcher.TORCHRUN, "RANK", "WORLD_SIZE", "MASTER_ADDR"),
    (Launcher.PALS, "PALS_RANKID", "PMI_SIZE", "PALS_RANKID"),
    (Launcher.OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    (Launcher.HYDRA, "PMI_RANK", "PMI_SIZE", "PMI_RANK"),
    (Launcher.SRUN, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
)
"""For each launcher, the variables for rank and size, and one that proves its presence; innermost first."""

_FIRST_STEP_OF_SLURM_ITSELF = 0xFFFFFFF0
"""The IDs of batch scripts and interactive shells begin here. Slurm counts them as steps, but they have no
ranks.
"""


def detect_rank(environment: Environment) -> LauncherRank | None:
    """Find the rank of this process; None if no launcher started it as one of several."""
    for launcher, rank, size, proof in _PLACES:
        if {rank, size, proof} <= environment.keys():
            ranked = LauncherRank(launcher, _number(environment, rank), _number(environment, size))
            # A single Slurm task looks like a plain shell in an allocation, so it does not count as a launch.
            if launcher is not Launcher.SRUN or (
                ranked.size > 1 and _number(environment, proof) < _FIRST_STEP_OF_SLURM_ITSELF
            ):
                return ranked
    return None


def _number(environment: Environment, name: str) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise UsageError(
            f"The launcher's variable {name} holds {text!r}, not a number",
            fix=f"Unset {name} if no launcher started this program.",
        )
    return int(text)


def require_matching_size(ranked: LauncherRank, ranks: int | None) -> None:
    """Raise an error if `--ranks` contradicts the launcher of this process. None matches any number."""
    if ranks is not None and ranks != ranked.size:
        raise UsageError(
            f"--ranks is {ranks}, but {ranked.launcher} started {ranked.size}",
            fix="Omit --ranks under a launcher, or start the program without one.",
        )


def host_label(environment: Environment, hostname: str) -> str:
    """Return this machine's name in messages: the user's label, the launcher's name, or the host name."""
    return environment.get(HOST_LABEL) or environment.get("PMI_HOSTNAME") or hostname


SLURM_END = "SLURM_JOB_END_TIME"


def read_slurm_end_s(environment: Environment | None = None) -> float:
    """Return the time at which Slurm ends this job, in seconds since 1970.

    Raises `Unavailable` if Slurm does not set it.
    """
    end_time = (process_environment() if environment is None else environment).get(SLURM_END, "")
    if not end_time.isdecimal():
        raise Unavailable(
            f"The end of this job is not known: {SLURM_END} is {end_time or 'not set'!r}",
            fix="Give the time limit in seconds, or run inside a job of Slurm 22.05 or later.",
        )
    return float(end_time)
