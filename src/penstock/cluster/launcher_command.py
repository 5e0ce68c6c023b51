"""Turn "run this on 8 ranks" into the command line of a launcher: MPICH, Open MPI, srun or PALS.

Invariant: values of environment variables never appear in a command line, which every user of a machine can
read.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.cluster.host_slots import find_hosts, is_loopback, place_ranks
from penstock.cluster.launcher_env import Launcher
from penstock.environment import (
    CONTROL_ADDRESS,
    CONTROL_TOKEN,
    HOST_LABEL,
    PROGRESS_COLUMNS,
    Environment,
    user_settings,
)
from penstock.errors import Unavailable, UsageError
from penstock.optional_libraries import install_command

_RANKS_A_CORE = 8
"""The most ranks per core. Ranks wait for storage, so they may outnumber cores."""
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "COBALT_JOBID", "PE_HOSTFILE")
"""Variables of batch systems in which a launcher without a host list spreads ranks over all machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A launch: the command `argv` with `environment` starts `ranks` ranks with `launcher`.

    All of them run on this machine if `is_local`.
    """

    argv: tuple[str, ...]
    environment: Environment
    ranks: int
    launcher: Launcher
    is_local: bool


def plan_launch(
    program_argv: Sequence[str],
    environment: Environment,
    *,
    launcher: tuple[str, Launcher],
    ranks: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    launcher_args: Sequence[str] = (),
    env_names: Sequence[str] = (),
) -> LaunchPlan:
    """Plan to run `program_argv` with the launcher that `find_launcher` found.

    `hosts` is `a:4,b:4`; `env_names` are exported in addition to AWS_* and PENSTOCK_*.
    """
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks is {ranks}", fix="Give at least 1.")
    program, kind = launcher
    counts, where = find_hosts(hosts, hostfile)
    slots = place_ranks(counts, ranks, where=where) if counts else {}
    if slots:
        ranks = ranks or sum(slots.values())
        is_local = all(map(is_loopback, slots))
    else:
        is_single = kind in {Launcher.HYDRA, Launcher.OPEN_MPI}
        is_local = is_single and not any(name in environment for name in _ALLOCATIONS)
    if not is_local:
        # With this machine's label, the ranks of all hosts would count as ranks of one host.
        environment = {
            name: value for name, value in environment.items() if name != HOST_LABEL or name in env_names
        }
    if ranks is None:
        raise UsageError("The number of ranks is not given", fix="Give --ranks N, or --hosts a:4,b:4.")
    # Without hosts, all ranks start on this machine, which one digit too many could stall for all its users.
    most = _RANKS_A_CORE * len(os.sched_getaffinity(0))
    if is_local and not slots and ranks > most:
        raise UsageError(
            f"{ranks:,} ranks are too many for this machine: {most} are {_RANKS_A_CORE} for each core",
            where="--ranks",
            fix=f"Give fewer, or insist with --hosts localhost:{ranks}.",
        )
    for name in env_names:
        if "=" in name:
            raise UsageError(
                f"--env {name.partition('=')[0]}=... holds a value",
                fix="Set the variable in your shell and give its name only: all users can see command lines.",
            )
        if name not in environment:
            raise UsageError(f"--env {name} is not set here", fix=f"Set it first: export {name}=...")
    ours = {CONTROL_ADDRESS, CONTROL_TOKEN, *({PROGRESS_COLUMNS} & environment.keys())}
    names = tuple(sorted({*user_settings(environment), *env_names, *ours}))
    options = _options(kind, hostfile, ranks, slots, names)
    return LaunchPlan(
        argv=(program, *options, *launcher_args, *program_argv),
        environment=environment,
        ranks=ranks,
        launcher=kind,
        is_local=is_local,
    )


def _options(
    launcher: Launcher,
    hostfile: str | None,
    ranks: int,
    slots: Mapping[str, int],
    names: Sequence[str],
) -> list[str]:
    counted = ",".join(f"{host}:{count}" for host, count in slots.items())
    plain = ",".join(slots)
    per_host = set(slots.values())
    if launcher in {Launcher.SRUN, Launcher.PALS} and len(per_host) > 1:
        raise UsageError(
            f"{launcher} places the same number of ranks on each host",
            where=counted.replace(",", ", "),
            fix="Give equal counts, or place ranks by --launcher-arg instead of --hosts.",
        )
    match launcher:
        case Launcher.HYDRA:
            # Hydra passes its whole environment on over its own connections. It must not clean up by itself,
            # because that would kill the supervisors but not the processes that ranks have started.
            options = ["-genvall", "-disable-auto-cleanup"]
            placement = ["-f", hostfile] if hostfile else ["-hosts", counted]
        case Launcher.OPEN_MPI:
            # Ranks may outnumber cores, and the workers of a rank must not share one core.
            options = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
            placement = ["--hostfile", hostfile] if hostfile else ["--host", counted]
        case Launcher.SRUN:
            # Slurm exports all variables over its own connections. A rank that ends must not end the others.
            options = ["--export=ALL", "--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0"]
            # srun treats a node list as a file name only if it contains a slash.
            nodes = hostfile if hostfile and "/" in hostfile else f"./{hostfile}" if hostfile else plain
            placement = [
                f"--nodes={len(slots)}",
                f"--nodelist={nodes}",
                f"--ntasks-per-node={max(per_host, default=1)}",
            ]
            return [*options, *(placement if slots else []), f"--ntasks={ranks}"]
        case _:  # PALS: torchrun's ranks are never started from here
            options = ["--envall", "--cpu-bind", "none"]
            where = ["--hostfile", hostfile] if hostfile else ["--hosts", plain]
            placement = ["--ppn", str(max(per_host, default=1)), *where]
    exports = [word for name in names for word in ("-x", name)] if launcher is Launcher.OPEN_MPI else []
    return [*options, *(placement if slots else []), *exports, "-n", str(ranks)]


def find_launcher(name: str, environment: Environment) -> tuple[str, Launcher]:
    """Find the program of this launcher.

    A program next to this Python comes first, because it belongs to the same MPI.
    """
    wanted = "mpiexec" if name in ("auto", "pals") else name
    own = Path(sys.executable).with_name(wanted)
    is_own = name != "pals" and own.is_file()
    program = str(own) if is_own else shutil.which(wanted, path=environment.get("PATH"))
    if program is None:
        advice = {
            "srun": "Run inside a Slurm allocation, or choose another --launcher.",
            "pals": "Load your site's PALS module, or choose another --launcher.",
        }
        raise Unavailable(
            f"No {wanted} was found to start ranks",
            where="next to this Python and on PATH",
            fix=advice.get(name, f"Install one with: {install_command('mpi')}"),
        )
    if name == "srun":
        return program, Launcher.SRUN
    if name == "pals":
        return program, Launcher.PALS
    command = [program, "--version"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False, env=dict(environment)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{program} --version failed: {error}", fix="Choose another --launcher.") from error
    return program, parse_version(answer.stdout + answer.stderr, program)


def parse_version(version_text: str, program: str) -> Launcher:
    """Recognize `program` by the output of its --version, and return the launcher whose options it takes."""
    marks = {
        Launcher.HYDRA: ("HYDRA", "Intel(R) MPI"),
        Launcher.OPEN_MPI: ("Open MPI", "OpenRTE", "PRRTE", "prterun"),
        Launcher.PALS: ("PALS", "pals"),
        Launcher.SRUN: ("slurm",),
    }
    for launcher, words in marks.items():
        if any(word in version_text for word in words):
            return launcher
    raise Unavailable(
        f"{program} is an unknown launcher: {version_text.strip()[:120]!r}",
        fix="Use the mpiexec of MPICH or Open MPI, or --launcher srun or pals.",
    )
