"""From "run this on 8 ranks" to a launcher's command line: MPICH, Open MPI, srun and PALS.

Planning is pure; only `find_launcher` looks at this machine. Invariant: values of environment variables never
appear in a command line, where every user of a machine can read them.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, cast, get_args

from penstock.cluster.host_slots import HostSlots, count_ranks, is_loopback, parse_hostfile, parse_hosts
from penstock.environment import CONTROL_ADDRESS, CONTROL_TOKEN, PROGRESS_COLUMNS, Environment, user_settings
from penstock.errors import Unavailable, UsageError
from penstock.optional_libraries import install_command

LauncherName = Literal["auto", "mpiexec", "mpirun", "srun", "pals"]

_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "COBALT_JOBID", "PE_HOSTFILE")
"""Inside these batch systems a launcher without hosts spreads ranks over the allocation's machines."""


class LauncherFlavour(StrEnum):
    """Launchers by the options that they take, whatever their program is called."""

    HYDRA = "MPICH hydra"
    OPEN_MPI = "Open MPI"
    SRUN = "srun"
    PALS = "PALS"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The user's options: `hosts` is `a:4,b:4`; `env_names` are exported beside AWS_* and PENSTOCK_*."""

    ranks: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    launcher: LauncherName = "auto"
    launcher_args: tuple[str, ...] = ()
    env_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LauncherProgram:
    """A launcher program of this machine."""

    program: str
    flavour: LauncherFlavour


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A command: `argv` under `environment` starts `ranks` ranks, all on this machine if `is_local`."""

    argv: tuple[str, ...]
    environment: Environment
    ranks: int
    launcher: LauncherProgram
    is_local: bool


def plan_launch(request: LaunchRequest, program_argv: Sequence[str], environment: Environment) -> LaunchPlan:
    """The plan for running `program_argv`, with the launcher and the host file of this machine."""
    hostfile_text = _read_hostfile(request.hostfile)
    return build_launch_plan(
        request,
        program_argv,
        environment,
        launcher=find_launcher(request.launcher, environment),
        hostfile_text=hostfile_text,
    )


def build_launch_plan(
    request: LaunchRequest,
    program_argv: Sequence[str],
    environment: Environment,
    *,
    launcher: LauncherProgram,
    hostfile_text: str | None = None,
) -> LaunchPlan:
    """The plan, from data alone. `hostfile_text` is the content of `request.hostfile`."""
    hosts = _placement(request, hostfile_text)
    ranks = _ranks(request, hosts)
    names = _traveling_names(request, environment)
    options = {
        LauncherFlavour.HYDRA: _hydra_options,
        LauncherFlavour.OPEN_MPI: _open_mpi_options,
        LauncherFlavour.SRUN: _srun_options,
        LauncherFlavour.PALS: _pals_options,
    }[launcher.flavour](request, ranks, hosts, names)
    return LaunchPlan(
        argv=(launcher.program, *options, *request.launcher_args, *program_argv),
        environment=environment,
        ranks=ranks,
        launcher=launcher,
        is_local=_is_local(hosts, launcher, environment),
    )


def _placement(request: LaunchRequest, hostfile_text: str | None) -> tuple[HostSlots, ...]:
    if request.hosts is not None and request.hostfile is not None:
        raise UsageError("--hosts and --hostfile are mutually exclusive", fix="Give one of them.")
    if request.hosts is not None:
        return parse_hosts(request.hosts, ranks=request.ranks)
    if request.hostfile is not None:
        return parse_hostfile(hostfile_text or "", ranks=request.ranks, where=request.hostfile)
    return ()


def _ranks(request: LaunchRequest, hosts: tuple[HostSlots, ...]) -> int:
    if request.ranks is not None and request.ranks < 1:
        raise UsageError(f"--ranks is {request.ranks}", fix="Give at least 1.")
    if hosts:
        where = f"--hosts {request.hosts}" if request.hosts else f"--hostfile {request.hostfile}"
        return count_ranks(hosts, request.ranks, where=where)
    if request.ranks is None:
        raise UsageError("The number of ranks is not given", fix="Give --ranks N, or --hosts a:4,b:4.")
    return request.ranks


def _traveling_names(request: LaunchRequest, environment: Environment) -> tuple[str, ...]:
    for name in request.env_names:
        if "=" in name:
            raise UsageError(
                f"--env {name.partition('=')[0]}=... holds a value",
                fix="Set the variable in your shell and give its name only: all users can see command lines.",
            )
        if name not in environment:
            raise UsageError(f"--env {name} is not set here", fix=f"Set it first: export {name}=...")
    ours = {CONTROL_ADDRESS, CONTROL_TOKEN, *({PROGRESS_COLUMNS} & environment.keys())}
    return tuple(sorted({*user_settings(environment), *request.env_names, *ours}))


def _hydra_options(
    request: LaunchRequest, ranks: int, hosts: tuple[HostSlots, ...], _names: tuple[str, ...]
) -> list[str]:
    """MPICH passes its whole environment to all ranks, on its own connections."""
    # It must not clean up by itself: that would kill the supervisors but not what the ranks have started.
    options = ["-genvall", "-disable-auto-cleanup"]
    if request.hostfile is not None:
        options += ["-f", request.hostfile]
    elif hosts:
        options += ["-hosts", ",".join(f"{entry.host}:{entry.slots}" for entry in hosts)]
    return [*options, "-n", str(ranks)]


def _open_mpi_options(
    request: LaunchRequest, ranks: int, hosts: tuple[HostSlots, ...], names: tuple[str, ...]
) -> list[str]:
    # Ranks wait for storage, so they may outnumber cores, and their workers must not share one core.
    options = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    if request.hostfile is not None:
        options += ["--hostfile", request.hostfile]
    elif hosts:
        options += ["--host", ",".join(f"{entry.host}:{entry.slots}" for entry in hosts)]
    for name in names:
        options += ["-x", name]
    return [*options, "-n", str(ranks)]


def _srun_options(
    request: LaunchRequest, ranks: int, hosts: tuple[HostSlots, ...], _names: tuple[str, ...]
) -> list[str]:
    """Slurm exports all variables through its own connections; a rank that ends must not end the others."""
    options = ["--export=ALL", "--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0"]
    if hosts:
        nodes = request.hostfile or ",".join(entry.host for entry in hosts)
        options += [f"--nodes={len(hosts)}", f"--nodelist={_as_path(nodes, request)}"]
        options += [f"--ntasks-per-node={_equal_slots(hosts, LauncherFlavour.SRUN)}"]
    return [*options, f"--ntasks={ranks}"]


def _pals_options(
    request: LaunchRequest, ranks: int, hosts: tuple[HostSlots, ...], _names: tuple[str, ...]
) -> list[str]:
    options = ["--envall", "--cpu-bind", "none"]
    if hosts:
        options += ["--ppn", str(_equal_slots(hosts, LauncherFlavour.PALS))]
        if request.hostfile is not None:
            options += ["--hostfile", request.hostfile]
        else:
            options += ["--hosts", ",".join(entry.host for entry in hosts)]
    return [*options, "-n", str(ranks)]


def _as_path(nodes: str, request: LaunchRequest) -> str:
    # Slurm takes a node list for a file only if it contains a slash.
    return f"./{nodes}" if request.hostfile is not None and "/" not in nodes else nodes


def _equal_slots(hosts: tuple[HostSlots, ...], flavour: LauncherFlavour) -> int:
    counts = {entry.slots for entry in hosts}
    if len(counts) > 1:
        raise UsageError(
            f"{flavour} places the same number of ranks on each host",
            where=", ".join(f"{entry.host}:{entry.slots}" for entry in hosts),
            fix="Give equal counts, or place ranks by --launcher-arg instead of --hosts.",
        )
    return counts.pop()


def _is_local(hosts: tuple[HostSlots, ...], launcher: LauncherProgram, environment: Environment) -> bool:
    if hosts:
        return all(is_loopback(entry.host) for entry in hosts)
    in_allocation = any(name in environment for name in _ALLOCATIONS)
    return not in_allocation and launcher.flavour in {LauncherFlavour.HYDRA, LauncherFlavour.OPEN_MPI}


def _read_hostfile(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The host file cannot be read: {error}", fix="Name a text file with one host per line."
        ) from error


def parse_launcher_name(text: str) -> LauncherName:
    """The launcher of this name; `UsageError` if there is none."""
    for name in get_args(LauncherName):
        if name == text:
            return cast("LauncherName", name)
    raise UsageError(
        f"No launcher is named {text!r}", fix=f"Choose one of {', '.join(get_args(LauncherName))}."
    )


def find_launcher(name: LauncherName, environment: Environment) -> LauncherProgram:
    """The program for `name`: one beside this Python comes first, because it belongs to the same MPI."""
    wanted = "mpiexec" if name in ("auto", "pals") else name
    beside = Path(sys.executable).with_name(wanted)
    use_own = name != "pals" and beside.is_file()
    program = str(beside) if use_own else shutil.which(wanted, path=environment.get("PATH"))
    if program is None:
        advice = {
            "srun": "Run inside a Slurm allocation, or choose another --launcher.",
            "pals": "Load your site's PALS module, or choose another --launcher.",
        }
        raise Unavailable(
            f"No {wanted} was found to start ranks",
            where="beside this Python and on PATH",
            fix=advice.get(name, f"Install one with: {install_command('mpi')}"),
        )
    if name == "srun":
        return LauncherProgram(program, LauncherFlavour.SRUN)
    return LauncherProgram(
        program, LauncherFlavour.PALS if name == "pals" else _flavour_of(program, environment)
    )


def _flavour_of(program: str, environment: Environment) -> LauncherFlavour:
    try:
        answer = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env=dict(environment),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(
            f"{program} --version did not answer: {error}", fix="Choose another --launcher."
        ) from error
    return parse_flavour(answer.stdout + answer.stderr, program)


def parse_flavour(version_text: str, program: str) -> LauncherFlavour:
    """Whose options `program` takes, from the output of its --version."""
    marks = {
        LauncherFlavour.HYDRA: ("HYDRA", "Intel(R) MPI"),
        LauncherFlavour.OPEN_MPI: ("Open MPI", "OpenRTE", "PRRTE", "prterun"),
        LauncherFlavour.PALS: ("PALS", "pals"),
        LauncherFlavour.SRUN: ("slurm",),
    }
    for flavour, words in marks.items():
        if any(word in version_text for word in words):
            return flavour
    raise Unavailable(
        f"{program} is an unknown launcher: {version_text.strip()[:120]!r}",
        fix="Use the mpiexec of MPICH or Open MPI, or --launcher srun or pals.",
    )
